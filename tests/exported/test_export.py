"""`autoamp.export`: what the exported program is, beside the converted model."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoamp
from autoamp import compat
from autoamp.capture import engine
from autoamp.check import numbers
from autoamp.exported import export as exporting
from autoamp.exported.program import OP
from tests.models import BY_NAME, LARGE
from tests.small_models import BF16, mlp

X = torch.randn(8, 64)

FP16: dict[str, Any] = {"precision": "fp16", "do_no_harm": False}

EXPORTED = (
    *("gpt2", "bert", "llama", "t5", "vit", "resnet", "convnext", "unet", "lstm"),
    *("whisper", "mlp", "shared_weight", "checkpointed", "dict_in_out"),
)
# A part of bert is quick: the encoder layer and the attention below.
SLOW = {*LARGE, "bert"}


def same(some: Any, others: Any) -> bool:
    """Whether two results have one structure, one dtype each, and the same bits."""
    ours, spec = pytree.tree_flatten(some)
    theirs, other = pytree.tree_flatten(others)
    assert spec == other
    for one, two in zip(ours, theirs, strict=True):
        if isinstance(one, Tensor):
            assert one.dtype == two.dtype
            if not torch.equal(one, two):
                return False
    return True


def two(bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128, bias), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64)
    ).eval()


@pytest.mark.thorough(but=["mlp-fp16"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])
        for name in EXPORTED
        if name in BY_NAME
    ],
)
def test_a_program_gives_the_converted_models_results(
    name: str, precision: str
) -> None:
    model = BY_NAME[name].model().eval()
    args, kwargs = BY_NAME[name].inputs(0)
    options = {"precision": precision, "do_no_harm": False}
    converted = autoamp.convert(model, **options)
    with torch.no_grad():
        expected = converted(*args, **kwargs)
        program = autoamp.export(converted, args, kwargs)
        assert same(program.module()(*args, **kwargs), expected)
    assert any(t.dtype != torch.float32 for t in program.state_dict.values())
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    assert not any("autoamp" in str(node.target) for node in calls)


def test_the_graph_holds_torchs_ops_and_tells_where_they_are_from() -> None:
    program = autoamp.export(two(), (X,), **BF16)
    calls = [n for n in program.graph.nodes if n.op == "call_function"]
    names = [str(n.target) for n in calls]
    assert names[0] == "aten._to_copy.default"
    assert "aten.linear.default" in names
    theirs = (compat.OpOverload, type(operator.getitem))
    assert all(isinstance(n.target, theirs) for n in calls)
    linear = next(n for n in calls if "linear" in str(n.target))
    assert linear.meta["val"].dtype == torch.bfloat16
    assert "linear.py" in linear.meta["stack_trace"]
    assert [*linear.meta["nn_module_stack"].values()][-1][0] == "0"
    assert compat.note_of(linear, OP) == "linear"


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
    plan = compat.plan_in(program)
    assert plan["weights"]["first.weight_bf16"] == {
        "source": "first.weight",
        "dtype": "bfloat16",
    }


class Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(
        self, x: Tensor, *, scale: Any = None, more: Any = None, flag: bool = True
    ) -> Any:
        y = self.line(x) * scale + more["q"]
        return {"y": y, "z": (y.sum(), [x.shape[0]])} if flag else y


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("flag", [True, False])
def test_the_callers_signature_is_kept(flag: bool) -> None:
    model = Structured().eval()
    given = {"more": {"q": torch.randn(64)}, "flag": flag, "scale": torch.ones(1)}
    converted = autoamp.convert(model, **BF16)
    program = autoamp.export(converted, (X,), given)
    with torch.no_grad():
        expected = converted(X, **given)
        assert same(program.module()(X, **given), expected)
        turned = dict(reversed(given.items()))
        assert same(program.module()(X, **turned), expected)
    names = [n.name for n in program.graph.find_nodes(op="placeholder")]
    assert "x" in names
    assert "scale" in names


@pytest.mark.thorough
def test_options_of_a_conversion_are_those_of_its_export() -> None:
    kept = autoamp.convert(two(), keep=["0"], **BF16)
    low = {
        name
        for name, weight in autoamp.export(kept, (X,)).state_dict.items()
        if weight.dtype != torch.float32
    }
    assert low == {"3.weight", "3.bias"}
    more = autoamp.export(kept, (X,), deny=["linear"])
    assert all(t.dtype == torch.float32 for t in more.state_dict.values())


def test_a_lock_holds_the_export_too(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "precision.json"
    autoamp.explain(two(), X, options=BF16).to_json(path)
    autoamp.export(two(), (X,), lock=path, **BF16)
    assert "is not placed as the lock" not in caplog.text
    other = {**BF16, "lock": path, "deny": ["linear"]}
    autoamp.export(two(), (X,), **other)
    assert "is not placed as the lock" in caplog.text
    with pytest.raises(autoamp.LockError, match="is not placed as the lock"):
        autoamp.export(two(), (X,), strict=True, **other)


def test_a_pass_that_fails_is_an_error_and_no_fp32_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(engine, "prepare", fails)
    with pytest.raises(autoamp.ExportError, match="no such thing"):
        autoamp.export(two(), (X,), **BF16)


def test_buffers_and_generators_are_left_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Dropout(0.5))
    before = copy.deepcopy(model.state_dict())
    drawn = torch.get_rng_state()
    program = autoamp.export(model.train(), (X,), **BF16)
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        if "running" in name:
            assert torch.equal(program.state_dict[name], value)


@pytest.mark.thorough
def test_it_works_in_any_mode_of_the_callers() -> None:
    numbers.forget()
    expected = autoamp.export(two(), (X,), **BF16).module()(X)
    for region in (
        torch.inference_mode(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad(),
    ):
        numbers.forget()
        with region:
            program = autoamp.export(two(), (X,), **BF16)
        assert torch.equal(program.module()(X), expected)
    model = autoamp.convert(two(), strict=True, **BF16)  # no check was spoilt
    assert torch.equal(model(X), expected)


def test_a_model_without_data_is_refused() -> None:
    with pytest.raises(autoamp.UnsupportedModelError, match="on the meta device"):
        autoamp.export(two().to("meta"), (X.to("meta"),), **BF16)


def test_training_mode_is_said(caplog: pytest.LogCaptureFixture) -> None:
    autoamp.export(two().train(), (X,), **BF16)
    assert "is exported in training mode" in caplog.text


def test_torchs_own_export_of_a_converted_model_says_what_to_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = autoamp.convert(two(), **BF16)
    program = torch.export.export(model, (X,))
    assert {t.dtype for t in program.state_dict.values()} == {torch.float32}
    assert "autoamp.export(model, args) exports what" in caplog.text


def test_a_half_model_is_exported_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    model = two().bfloat16()
    program = autoamp.export(model, (X.bfloat16(),))
    assert "bf16 already" in caplog.text
    assert torch.equal(program.module()(X.bfloat16()), model(X.bfloat16()))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.line(x)
        return y if y.sum() > 0 else -y


def test_what_torch_cannot_export_is_refused_with_the_line(tmp_path: Any) -> None:
    out = tmp_path / "out.pt2"
    with pytest.raises(autoamp.ExportError) as told:
        autoamp.export(Branches().eval(), (X,), out=out, **BF16)
    text = str(told.value)
    assert text.startswith("Branches cannot be exported")
    assert "test_export.py" in text
    assert "return y if y.sum() > 0 else -y" in text
    assert "autoamp.convert()" in text
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"backend": "inductor"}, autoamp.OptionError, "has no option backend"),
        ({"guard": False, "heal": True}, autoamp.OptionError, "guard or heal"),
        ({"target": "tflite"}, autoamp.OptionError, "the targets are pt2, aoti"),
        ({"precision": "int8"}, autoamp.OptionError, "int8"),
    ],
)
def test_bad_options_are_refused(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        autoamp.export(two(), (X,), **given)
    with pytest.raises(autoamp.OptionError, match="a tuple"):
        autoamp.export(two(), X)  # type: ignore[arg-type]
    with pytest.raises(autoamp.UnsupportedModelError):
        autoamp.export(lambda x: x, (X,))  # type: ignore[arg-type]


@pytest.mark.thorough
def test_a_wrong_weight_or_result_is_a_bug_and_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Wrong(exporting.MixedModel):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            with torch.no_grad():
                self.module.get_parameter("0.weight").add_(1)

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "MixedModel", Wrong)
        with pytest.raises(autoamp.VerificationError, match=r"is not 0\.weight of the"):
            autoamp.export(two(), (X,), **BF16)
        patch.setattr(exporting, "check_weights", lambda *_: None)
        with pytest.raises(autoamp.VerificationError, match="output 0 of the exported"):
            autoamp.export(two(), (X,), **BF16)


@pytest.mark.thorough
def test_an_encoder_that_torch_captures_otherwise_is_as_true(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    x = torch.randn(3, 7, 32)
    exact = copy.deepcopy(model).double()(x.double())
    converted = autoamp.convert(model, **BF16)
    program = autoamp.export(converted, (x,))
    assert "model calls _native_multi_head_attention in bf16" in caplog.text
    with torch.no_grad():
        errors = [float((m(x) - exact).norm()) for m in (program.module(), converted)]
    assert errors[0] <= 1.1 * errors[1]


@pytest.mark.thorough
def test_a_lstm_trains_on_after_its_export() -> None:
    model = nn.LSTM(16, 8)
    x = torch.randn(5, 2, 16)
    before = model(x)[0]
    autoamp.export(copy.deepcopy(model).eval(), (x,), **FP16)
    autoamp.export(model.eval(), (x,), **FP16)
    model.train()
    after = model(x)[0]
    assert torch.equal(before, after)
    after.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.thorough
def test_gradients_and_masters_stay_behind() -> None:
    model = mlp().eval()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = autoamp.convert(model, optimizer, **FP16)
    x = torch.randn(8, next(model.parameters()).shape[1])
    model(x).sum().backward()
    optimizer.step()
    program = autoamp.export(model, (x,))
    assert {t.dtype for t in program.state_dict.values()} == {torch.float16}
    assert not any(t.requires_grad for t in program.state_dict.values())
    with torch.no_grad():
        assert torch.equal(program.module()(x), model(x))
