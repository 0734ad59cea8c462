"""Patterns of `keep=` that fit nothing, and modules that a model itself keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from autoamp.errors import OptionError, RulesError
from tests.logs import warned
from tests.small_models import BF16 as LOW
from tests.small_models import Of

BF16: dict[str, Any] = {**LOW, "strict": True}
X = torch.ones(4, 8)


class Attention(nn.Sequential):
    def __init__(self) -> None:
        super().__init__()
        for name in ("query", "wo", "word"):
            self.add_module(name, nn.Linear(8, 8))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Any:
        return self.attention(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential()
        self.encoder.layer = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.encoder(x))


WRONG = {
    "encoder.layer.0.atention": "'encoder.layer.0.attention'",
    "encodr": "'encoder'",
    "head.weight": "'head'",
    "encoder.layr.*": "'encoder.layer.*'",
    "module.encoder": "'encoder'",
}


@pytest.mark.parametrize("pattern", WRONG)
def test_convert_names_the_nearest_module(pattern: str) -> None:
    model = Net()
    with pytest.raises(OptionError) as error:
        autoamp.convert(model, keep=["head", pattern], **BF16)
    assert f"keep={pattern!r} fits no module of Net" in str(error.value)
    assert f"did you mean {WRONG[pattern]}?" in str(error.value)
    assert not autoamp.is_converted(model)
    assert "forward" not in vars(model)
    autoamp.convert(model, keep=["head"], **BF16)
    with pytest.raises(OptionError):
        autoamp.convert(model, keep=[pattern], **BF16)
    model(X)
    assert fp32_in(model) == {"head"}, "it keeps its conversion"


@pytest.mark.parametrize("ask", [autoamp.explain, autoamp.compare])
def test_questions_raise_too(ask: Any) -> None:
    with pytest.raises(OptionError, match=r"did you mean 'head'\?"):
        ask(Net(), X, options={**BF16, "keep": ["haed"]})


def test_rewrite_knows_the_modules_of_the_graph() -> None:
    options = {"precision": "bf16"}
    for gm in (fx.symbolic_trace(Net()), torch.export.export(Net(), (X,))):
        autoamp.rewrite(gm, (X,), keep=["encoder.layer.0.*"], **options)
        with pytest.raises(OptionError, match=r"of the graph; did you mean 'head'\?"):
            autoamp.rewrite(gm, (X,), keep=["haed"], **options)


@pytest.mark.thorough(but=["*", "*.wo"])
@pytest.mark.parametrize("pattern", ["*", "", "h?ad", "encoder.layer.*", "*.wo"])
def test_patterns_that_fit(pattern: str) -> None:
    autoamp.convert(Net(), keep=pattern, **BF16)(X)


def test_modules_in_a_plain_list_may_be_named() -> None:
    """`named_modules()` does not look there."""
    model = Of(lambda m, x: m.head(m.layers[1](m.layers[0](x))), head=nn.Linear(8, 8))
    model.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    autoamp.convert(model, keep=["layers.0"], **BF16)
    model(X)
    assert "layers.0" in fp32_in(model)
    assert "head" not in fp32_in(model)


@pytest.mark.parametrize("category", ["allow", "deny", "infer", "clear"])
def test_an_op_that_is_none_raises_with_the_nearest_name(category: str) -> None:
    model = Net()
    for op in ("linaer", "aten::lin*", "aten::linear.defualt"):
        given: Any = {category: [op]}
        with pytest.raises(RulesError, match=r"did you mean .*aten::linear"):
            autoamp.convert(model, **given, **BF16)
    assert not autoamp.is_converted(model)


@pytest.mark.thorough
@pytest.mark.usefixtures("off_again")
def test_the_automatic_mode_warns_of_what_fitted_no_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    autoamp.enable(keep=["head", "haed", "0"], **BF16)
    net, other = Net(), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net(X), other(X)
    assert fp32_in(net) == {"head"}
    assert fp32_in(other) == {"0"}
    assert not warned(caplog)
    autoamp.disable()
    assert warned(caplog) == [
        "autoamp: keep='haed' fitted no module of any model that was converted"
    ]


def fp32_in(model: nn.Module) -> set[str]:
    """The modules that have a linear layer in fp32."""
    rows = autoamp.report(model).ops
    linear = [row for row in rows if row.op == "aten::linear.default"]
    assert linear
    return {row.module for row in linear if row.precision == "fp32"}


ATTRIBUTES = ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"]
ALL_WO = {f"encoder.layer.{i}.attention.wo" for i in (0, 1)}


@pytest.mark.thorough(
    but=[
        "['wo']-bf16-_keep_in_fp32_modules",
        "['w*o']-fp16-_keep_in_fp32_modules_strict",
    ]
)
@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("names", [["wo"], {"wo"}, ("wo.weight",), ["w*o"]], ids=str)
def test_a_models_own_list_is_kept(attribute: str, precision: str, names: Any) -> None:
    model = Net()
    setattr(model, attribute, names)
    autoamp.convert(model, **{**BF16, "precision": precision})(X)
    kept = fp32_in(model)
    if precision == "bf16" and not attribute.endswith("_strict"):
        assert kept == set()  # transformers reads this list in fp16 alone
        return
    assert kept == ALL_WO
    (row, *_) = [r for r in autoamp.report(model).ops if r.module in ALL_WO]
    (name,) = names
    assert row.reason == f"kept in fp32 by the model: {attribute} names {name!r}"


def test_a_class_attribute_counts_and_a_submodules_too() -> None:
    class Kept(Layer):
        _keep_in_fp32_modules_strict = ("query",)

    model = Net()
    model.encoder.layer[1] = Kept()
    options = {**BF16, "keep": ["head"]}
    report = autoamp.explain(model, X, options=options)
    rows = [row for row in report.ops if row.op == "aten::linear.default"]
    kept = {row.module for row in rows if row.precision == "fp32"}
    assert kept == {"head", "encoder.layer.1.attention.query"}
    autoamp.convert(model, **options)(X)
    assert fp32_in(model) == kept


@pytest.mark.thorough(but=["None", "[None]"])
@pytest.mark.parametrize("given", [None, [], AttributeError(), 3, [None]], ids=str)
def test_what_is_no_list_of_names_means_nothing(given: Any) -> None:
    model = Net()
    model._keep_in_fp32_modules_strict = given
    autoamp.convert(model, **BF16)(X)
    assert fp32_in(model) == set()


@pytest.mark.usefixtures("automatic")
def test_the_automatic_mode_keeps_them_too() -> None:
    model = Net()
    model._keep_in_fp32_modules_strict = ["wo"]  # type: ignore[assignment]
    model(X)
    assert fp32_in(model) == ALL_WO


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_t5_keeps_its_wo_in_fp16_as_transformers_does(precision: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    model = transformers.T5EncoderModel(config).eval()
    autoamp.convert(model, **{**BF16, "precision": precision})
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    wo = {"encoder.block.0.layer.1.DenseReluDense.wo"}
    assert fp32_in(model) == (wo if precision == "fp16" else set())
