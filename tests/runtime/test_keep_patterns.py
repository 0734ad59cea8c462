"""Modules that `keep=` names, or that the model itself lists, stay in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from tests.runtime.test_bad_options import Layer, Net, X
from tests.says import says
from tests.small_models import BF16, Of, converted


def fp32_in(model: nn.Module) -> set[str]:
    """The modules that have a linear layer in fp32."""
    return wide(autoamp.report(model))


def wide(report: Any) -> set[str]:
    rows = [row for row in report.ops if row.op == "aten::linear.default"]
    assert rows
    return {row.module for row in rows if row.precision == "fp32"}


WO = {f"encoder.layer.{i}.attention.wo" for i in (0, 1)}
FIRST = {f"encoder.layer.0.attention.{name}" for name in ("query", "wo", "word")}


@pytest.mark.parametrize(
    ("pattern", "kept"),
    [("", set()), ("h?ad", {"head"}), ("encoder.layer.0.*", FIRST), ("*.wo", WO)],
)
def test_patterns_keep_what_they_fit(pattern: str, kept: set[str]) -> None:
    model = converted(Net(), keep=pattern)
    model(X)
    assert fp32_in(model) == kept


def test_modules_in_a_plain_list_may_be_named() -> None:
    """`named_modules()` does not look there."""
    model = Of(lambda m, x: m.head(m.layers[1](m.layers[0](x))), head=nn.Linear(8, 8))
    model.layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    converted(model, keep=["layers.0"])(X)
    assert "layers.0" in fp32_in(model)
    assert "head" not in fp32_in(model)


ATTRIBUTES = ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("names", [["wo"], {"wo"}, ("wo.weight",), ["w*o"]], ids=str)
def test_a_models_own_list_is_kept(attribute: str, precision: str, names: Any) -> None:
    model = Net()
    setattr(model, attribute, names)
    converted(model, precision=precision)(X)
    kept = fp32_in(model)
    if precision == "bf16" and not attribute.endswith("_strict"):
        assert kept == set()  # transformers reads this list in fp16 alone
        return
    assert kept == WO
    (row, *_) = [r for r in autoamp.report(model).ops if r.module in WO]
    (name,) = names
    says(row.reason, attribute, repr(name))


def test_a_class_attribute_counts_and_a_submodules_too() -> None:
    class Kept(Layer):
        _keep_in_fp32_modules_strict = ("query",)

    model = Net()
    model.encoder.layer[1] = Kept()
    kept = wide(autoamp.explain(model, X, **{**BF16, "keep": ["head"]}))
    assert kept == {"head", "encoder.layer.1.attention.query"}
    converted(model, keep=["head"])(X)
    assert fp32_in(model) == kept


@pytest.mark.parametrize("given", [None, [], AttributeError(), 3, [None]], ids=str)
def test_what_is_no_list_of_names_means_nothing(given: Any) -> None:
    model = Net()
    model._keep_in_fp32_modules_strict = given
    assert wide(autoamp.explain(model, X, **BF16)) == set()


@pytest.mark.usefixtures("automatic")
def test_the_automatic_mode_keeps_them_too() -> None:
    model = Net()
    model._keep_in_fp32_modules_strict = ["wo"]  # type: ignore[assignment]
    model(X)
    assert fp32_in(model) == WO


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_t5_keeps_its_wo_in_fp16_as_transformers_does(precision: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    model = transformers.T5EncoderModel(config).eval()
    converted(model, precision=precision)
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    wo = {"encoder.block.0.layer.1.DenseReluDense.wo"}
    assert fp32_in(model) == (wo if precision == "fp16" else set())
