"""Bad options change nothing, and the error names the option and what to write."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from autoamp.removed import OPTIONS as REMOVED
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, WIDTH, mlp

X = torch.ones(2, WIDTH)


def other_backend(gm: Any, inputs: Any) -> Any:
    return gm.forward


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        names = ("query", "wo", "word")
        self.attention = nn.Sequential()
        for name in names:
            self.attention.add_module(name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.attention(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential()
        self.encoder.layer = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x))


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"precision": "fp8"}, ("precision='fp8'", "'fp16'", "'bf16'")),
    ({"precision": torch.float64}, ("precision=torch.float64",)),
    ({"placement": "best"}, ("placement='best'", "'optimal'")),
    ({"objective": "speed"}, ("objective='speed'", "'memory'")),
    ({"backend": "tmv"}, ("backend='tmv'", "'inductor'")),
    ({"backend": "autoamp"}, ("backend='autoamp'", "'inductor'")),
    ({"backend": other_backend, "exact_casts": True}, ("exact_casts=", "backend=")),
    ({"loss_scale": "big"}, ("loss_scale='big'", "'dynamic'")),
    *(({"loss_scale": s}, (f"loss_scale={s}", "finite")) for s in (0, -2.0, INF, NAN)),
    ({"do_no_harm": "no"}, ("do_no_harm='no'", "True or False")),
    ({"strict": 1}, ("strict=1", "True or False")),
    ({"allow": 3}, ("allow=3", "list of names")),
    ({"keep": [nn.Linear]}, ("keep", "not a name")),
    ({"deny": ["matmull"]}, ("deny=matmull", "did you mean", "matmul")),
    *(
        ({category: [op]}, ("did you mean", "aten::linear"))
        for category in ("allow", "deny", "infer", "clear")
        for op in ("linaer", "aten::lin*", "aten::linear.defualt")
    ),
    ({"allow": ["exp"], "deny": ["exp"]}, ("exp", "allow=", "deny=")),
    ({"rules": "/nowhere/my.toml"}, ("/nowhere/my.toml",)),
    ({"rules": "fp61"}, ("fp61", "built-in")),
    ({"rules": Path("/nowhere/my.toml")}, ("/nowhere/my.toml",)),
    *(
        ({"rules": wrong}, (f"rules={wrong!r}", "path", "torch-cuda", "Rules"))
        for wrong in ({}, [], 3, b"my.toml", True)
    ),
    ({"optimizer": "adam"}, ("optimizer=", "torch.optim")),
    ({"optimizer": [1]}, ("optimizer=", "torch.optim")),
    # What is given in the place of the optimizer.
    ({"optimizer": "bf16"}, ('convert(model, precision="bf16")',)),
    ({"optimizer": torch.float16}, ("convert(model, precision=torch.float16)",)),
    ({"optimizer": {"precision": "bf16"}}, ("convert(model, **options)",)),
    ({"optimizer": ("linear",)}, ('convert(model, precision="bf16")',)),
    ({"example_inputs": X}, ("example_inputs", "tuple")),
    # Patterns that fit no module name the nearest one.
    *(
        ({"keep": ["head", pattern]}, (f"keep={pattern!r}", "Net", nearest))
        for pattern, nearest in {
            "encoder.layer.0.atention": "'encoder.layer.0.attention'",
            "encodr": "'encoder'",
            "head.weight": "'head'",
            "encoder.layr.*": "'encoder.layer.*'",
            "module.encoder": "'encoder'",
        }.items()
    ),
]


@pytest.mark.parametrize(("options", "needed"), BAD, ids=lambda value: str(value)[:40])
def test_bad_options_change_nothing_and_name_the_remedy(
    options: dict[str, Any], needed: tuple[str, ...]
) -> None:
    model = Net()
    for converted in (False, True):
        contents = dict(model.__dict__)
        with pytest.raises(autoamp.AutoampError) as raised:
            autoamp.convert(model, **{**BF16, **options})
        says(raised, *needed)
        assert model.__dict__ == contents
        assert autoamp.is_converted(model) is converted
        autoamp.convert(model, deny=["gelu"], **BF16)


def test_a_refused_option_leaves_the_old_ones_in_force() -> None:
    model = autoamp.convert(Net(), keep=["head"], **BF16)
    with pytest.raises(autoamp.OptionError):
        autoamp.convert(model, keep=["haed"], **BF16)
    model(X)
    rows = [r for r in autoamp.report(model).ops if r.op == "aten::linear.default"]
    assert {r.module for r in rows if r.precision == "fp32"} == {"head"}


def test_an_option_that_does_not_exist() -> None:
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.convert(mlp(), precison="bf16")
    says(raised, "precison", "precision")


def test_a_bad_rules_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text("[deny]\nexpp = 'x'\n")
    model = mlp()
    contents = dict(model.__dict__)
    with pytest.raises(autoamp.RulesError) as raised:
        autoamp.convert(model, rules=str(path), **BF16)
    says(raised, "my.toml", "did you mean", op="expp")
    assert model.__dict__ == contents


def test_rules_without_the_built_in_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[deny]\ngelu = 'large'\n[allow]\ncos = 'small'\n")
    mine, model = autoamp.Rules.load(path), mlp()
    contents = dict(model.__dict__)
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.convert(model, rules=mine, **BF16)
    says(raised, "built-in", option="merge")
    assert model.__dict__ == contents
    laid = autoamp.Rules.default("bf16").merge(mine)
    options = {**BF16, "allow": ["linear"], "rules": mine}
    for given in ({**BF16, "rules": laid}, options):
        ops = autoamp.explain(model, X, **given).ops
        assert all(op.is_low for op in ops if op.op.startswith("aten::linear"))


# -- the other ways in -----------------------------------------------------------------


@pytest.mark.parametrize("ask", [autoamp.explain, autoamp.compare])
def test_questions_refuse_them_too(ask: Any) -> None:
    with pytest.raises(autoamp.OptionError) as raised:
        ask(Net(), X, **BF16, keep=["haed"])
    says(raised, "'head'")


def test_rewrite_knows_the_modules_of_the_graph() -> None:
    for gm in (fx.symbolic_trace(Net()), torch.export.export(Net(), (X,))):
        autoamp.rewrite(gm, (X,), keep=["encoder.layer.0.*"], precision="bf16")
        with pytest.raises(autoamp.OptionError) as raised:
            autoamp.rewrite(gm, (X,), keep=["haed"], precision="bf16")
        says(raised, "'head'")
        with pytest.raises(autoamp.OptionError) as raised:
            autoamp.rewrite(gm, (X,), exact_casts=True)
        says(raised, option="exact_casts")


@pytest.mark.usefixtures("off_again")
def test_the_automatic_mode_warns_of_what_fitted_no_model(caplog) -> None:
    autoamp.enable(keep=["head", "haed", "0"], **BF16)
    Net()(X), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))(X)
    assert not warned(caplog)
    autoamp.disable()
    (told,) = warned(caplog)
    says(told, option="keep='haed'")


class TakesAPrecision(nn.Linear):
    def forward(self, x: Tensor, precision: str = "") -> Tensor:
        assert precision == "bf16"
        return super().forward(x)


class TakesAnything(nn.Linear):
    def forward(self, x: Tensor, **given: Any) -> Tensor:
        assert given == {"precision": "bf16"}
        return super().forward(x)


def models(kind: type[nn.Linear]) -> list[nn.Linear]:
    return [kind(WIDTH, 4), autoamp.convert(kind(WIDTH, 4), **BF16)]


ASK = ["explain", "compare", "find_overflow", "bench"]
QUESTIONS = ["explain", "compare", "find_overflow", "bench", "export"]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", ["weight", "loss_scales", "options"])
def test_a_question_says_where_arguments_go(question: str, name: str) -> None:
    given = (X,) if question == "export" else X
    for model in models(nn.Linear):
        with pytest.raises(autoamp.OptionError) as raised:
            getattr(autoamp, question)(model, given, **{name: "bf16"})
        says(raised, f"{question}()", option=f"kwargs={{'{name}': ...}}")


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_takes_a_dict_of_arguments(question: str) -> None:
    given = (X,) if question == "export" else X
    with pytest.raises(autoamp.OptionError) as raised:
        getattr(autoamp, question)(nn.Linear(WIDTH, 4), given, kwargs=[X])
    says(raised, "kwargs= is a list", "not a dict")


@pytest.mark.parametrize("kind", [TakesAPrecision, TakesAnything])
def test_an_option_and_an_argument_may_share_a_name(kind: type[nn.Linear]) -> None:
    own = {"precision": "bf16"}
    for model in models(kind):
        for question in (autoamp.explain, autoamp.find_overflow, autoamp.compare):
            question(model, X, kwargs=own, precision="fp16", do_no_harm=False)
    program = autoamp.export(kind(WIDTH, 4), (X,), own, precision="bf16")
    assert program.module()(X, **own).shape == (len(X), 4)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_option_says_what_to_use(name: str) -> None:
    """In every function that takes the options, and in a dict of them for `enable`."""
    given = {name: "value"}
    calls: list[Callable[[], Any]] = [
        lambda: autoamp.convert(nn.Linear(WIDTH, 4), **given),
        lambda: autoamp.enable(**given),
        *(partial(getattr(autoamp, q), nn.Linear(WIDTH, 4), X, **given) for q in ASK),
    ]
    for call in calls:
        with pytest.raises(autoamp.OptionError) as raised:
            call()
        says(raised, f"{name}=", "removed", REMOVED[name])
