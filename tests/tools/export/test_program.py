"""`autoamp.export`: what is in the program, what is left alone, what is refused."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, mlp
from tests.tools.export.programs import FP16, X, dtypes_in, plan_of, two


def test_the_graph_holds_torchs_ops_and_tells_where_they_are_from() -> None:
    program = autoamp.export(two(), (X,), **BF16)
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    names = [str(n.target) for n in calls]
    assert names[0] == "aten._to_copy.default"
    ops = {n.target for n in calls} - {operator.getitem}
    assert {op.namespace for op in ops} == {"aten"}
    linear = next(n for n in calls if "aten.linear.default" in str(n.target))
    assert linear.meta["val"].dtype == torch.bfloat16
    says(linear.meta["stack_trace"], line="linear.py")
    assert [*linear.meta["nn_module_stack"].values()][-1][0] == "0"


class Both(nn.Module):
    """Reads one weight low and fp32, and another under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.unread = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + self.first.weight.sum()


def test_each_weight_is_held_once_in_each_precision_that_is_read() -> None:
    program = autoamp.export(Both().eval(), (X,), **BF16)
    held = {name: t.dtype for name, t in program.state_dict.items()}
    assert held == {
        "first.weight": torch.float32,
        "first.weight_bf16": torch.bfloat16,
        "first.bias": torch.bfloat16,
        "second.bias": torch.bfloat16,
    }
    of = plan_of(program)["weights"]["first.weight_bf16"]
    assert of == {"source": "first.weight", "dtype": "bfloat16"}


def test_options_of_a_conversion_are_those_of_its_export() -> None:
    kept = autoamp.convert(two(), keep=["0"], **BF16)
    held = autoamp.export(kept, (X,)).state_dict
    low = {name for name, weight in held.items() if weight.dtype != torch.float32}
    assert low == {"3.weight", "3.bias"}
    more = autoamp.export(kept, (X,), deny=["linear"])
    assert dtypes_in(more) == {torch.float32}


def test_buffers_and_generators_are_left_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    program = autoamp.export(model.train(), (X,), **BF16)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        if "running" in name:
            assert torch.equal(program.state_dict[name], value)


@pytest.mark.parametrize(
    ("width", "region"),
    [
        (40, torch.inference_mode),
        (48, lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
        (56, torch.no_grad),
    ],
)
def test_it_works_in_any_mode_of_the_callers(width: int, region: Any) -> None:
    """Each width is new: checks of sizes that are known are not run again."""
    model, x = nn.Sequential(nn.Linear(width, 8), nn.GELU()), torch.randn(4, width)
    with region():
        program = autoamp.export(model.eval(), (x,), **BF16)
    model = autoamp.convert(model, strict=True, **BF16)  # no check was spoilt
    assert torch.equal(program.module()(x), model(x))


def test_an_lstm_trains_on_after_its_export() -> None:
    model, x = nn.LSTM(16, 8), torch.randn(5, 2, 16)
    before = model(x)[0]
    autoamp.export(copy.deepcopy(model).eval(), (x,), **FP16)
    autoamp.export(model.eval(), (x,), **FP16)
    after = model.train()(x)[0]
    assert torch.equal(before, after)
    after.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_gradients_and_masters_stay_behind() -> None:
    model = mlp().eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = autoamp.convert(model, optimizer, **FP16)
    x = torch.randn(8, next(model.parameters()).shape[1])
    model(x).sum().backward()
    optimizer.step()
    program = autoamp.export(model, (x,))
    assert dtypes_in(program) == {torch.float16}
    assert not any(t.requires_grad for t in program.state_dict.values())
    with torch.no_grad():
        assert torch.equal(program.module()(x), model(x))


# -- what is said -------------------------------------------------------------------


def test_training_mode_is_said(caplog: pytest.LogCaptureFixture) -> None:
    autoamp.export(two().train(), (X,), **BF16)
    says(warned(caplog), "training mode")


def test_torchs_own_export_of_a_converted_model_says_what_to_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    program = torch.export.export(autoamp.convert(two(), **BF16), (X,))
    assert dtypes_in(program) == {torch.float32}
    says(warned(caplog), option="autoamp.export(model, args)")


def test_a_half_model_is_exported_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = two().bfloat16()
    program = autoamp.export(model, (X.bfloat16(),))
    says(warned(caplog), "bf16 already")
    assert torch.equal(program.module()(X.bfloat16()), model(X.bfloat16()))


ENCODER = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()


@pytest.mark.parametrize("target", [None, "pt2", "aoti"])
def test_every_bit_is_compared_for_each_target_of_torchs(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """torch.export captures this layer otherwise than Dynamo does."""
    x = torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0))
    model = autoamp.convert(copy.deepcopy(ENCODER), **BF16)
    program = autoamp.export(model, (x,), target=target)
    with torch.no_grad():
        differs = not torch.equal(program.module()(x), model(x))
    lines = [each for each in warned(caplog) if "converted model" in each]
    assert bool(lines) == differs
    autoamp.export(model, (x,), target=target, deny=["linear"])
    (line,) = [each for each in warned(caplog) if each not in lines]
    says(line, "TransformerEncoderLayer", "output 0", "differs by up to")
    strict = autoamp.convert(copy.deepcopy(ENCODER), strict=True, **BF16)
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(strict, (x,), target=target, deny=["linear"])
    says(raised, "output 0", "converted model")


@pytest.mark.parametrize("target", ["onnx", "tensorrt"])
def test_another_runtime_may_be_truer_than_the_model_and_not_less(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = autoamp.convert(two(), **FP16)
    autoamp.export(model, (X,), target=target, deny=["linear"])
    assert not [each for each in warned(caplog) if "converted model" in each]
    autoamp.export(model, (X,), target=target, precision="bf16")
    (line,) = [each for each in warned(caplog) if "converted model" in each]
    says(line, "output 0", "differs by up to")


# -- what is refused ----------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        return y if y.sum() > 0 else -y


def test_what_torch_cannot_export_is_refused_with_the_line(tmp_path: Any) -> None:
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(Branches().eval(), (X,), out=tmp_path / "out.pt2", **BF16)
    says(raised, "Branches", option="autoamp.convert()")
    says(raised, line=["test_program.py", "return y if y.sum() > 0 else -y"])
    assert [*tmp_path.iterdir()] == []


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"backend": "inductor"}, autoamp.OptionError, "backend"),
    ({"guard": False}, autoamp.OptionError, "guard"),
    ({"target": "tflite"}, autoamp.OptionError, "pt2, aoti"),
    ({"precision": "int8"}, autoamp.OptionError, "int8"),
    ({"args": X}, autoamp.OptionError, "tuple"),
    ({"model": lambda x: x}, autoamp.UnsupportedModelError, "function"),
    ({"model": two().to("meta")}, autoamp.UnsupportedModelError, "meta"),
]


@pytest.mark.parametrize(("given", "error", "named"), REFUSED)
def test_bad_questions_are_refused(
    given: dict[str, Any], error: type[Exception], named: str
) -> None:
    asked = {"model": two(), "args": (X,), **given}
    with pytest.raises(error) as raised:
        autoamp.export(asked.pop("model"), asked.pop("args"), **asked)
    says(raised, named)


def test_a_pass_that_fails_is_an_error_and_no_fp32_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr("autoamp.runtime.engine.prepare", fails)
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(two(), (X,), **BF16)
    says(raised, "no such thing")


def change_a_weight(program: Any) -> None:
    with torch.no_grad():
        program.state_dict["0.weight"].add_(1)


def change_an_op(program: Any) -> None:
    (node,) = program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.gelu.default
    )
    node.target, node.kwargs = torch.ops.aten.relu.default, {}
    program.graph_module.recompile()


@pytest.mark.parametrize(
    ("change", "named"), [(change_a_weight, "0.weight"), (change_an_op, "output 0")]
)
def test_a_program_that_torch_changes_is_a_bug_and_raises(
    change: Any, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.export.export

    def changing(*args: Any, **given: Any) -> Any:
        program = real(*args, **given)
        if any(t.dtype == torch.bfloat16 for t in program.state_dict.values()):
            change(program)
        return program

    monkeypatch.setattr(torch.export, "export", changing)
    with pytest.raises(autoamp.VerificationError) as raised:
        autoamp.export(two(), (X,), **BF16)
    says(raised, named)
