"""`nn.TransformerEncoderLayer` in inference: torch's one op becomes its parts."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import compat
from tests.small_models import BF16

MASKS = ("none", "causal", "padding", "both")


def layer(*, norm_first: bool = False, activation: str = "relu") -> nn.Module:
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(
        32, 4, 64, batch_first=True, norm_first=norm_first, activation=activation
    )
    return made.eval()


def masks(kind: str, batch: int, length: int) -> dict[str, Tensor]:
    found = {}
    if kind in ("causal", "both"):
        found["src_mask"] = torch.ones(length, length, dtype=torch.bool).triu(1)
    if kind in ("padding", "both"):
        padding = torch.zeros(batch, length, dtype=torch.bool)
        padding[:, -2:] = True
        found["src_key_padding_mask"] = padding
    return found


@pytest.mark.parametrize("kind", MASKS)
def test_the_parts_give_the_ops_numbers_to_the_bit(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = torch._transformer_encoder_layer_fwd, []

    def watched(*args: Any) -> Tensor:
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", watched)
    x = torch.randn(3, 7, 32)
    for first, activation in itertools.product((False, True), ("relu", "gelu")):
        model = layer(norm_first=first, activation=activation)
        with torch.no_grad():
            expected = model(x, **masks(kind, 3, 7))
            assert torch.equal(compat.encoder_layer(*calls[-1]), expected)
    assert len(calls) == 4


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_it_is_no_less_true_than_autocast(kind: str, norm_first: bool) -> None:
    model, x = layer(norm_first=norm_first), torch.randn(3, 7, 32)
    given = masks(kind, 3, 7)
    converted = autoamp.convert(copy.deepcopy(model), **BF16)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double(), **given)
        ours = converted(x, **given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            theirs = model(x, **given)
    assert autoamp.report(converted).rewritten[0].sums.low > 0
    errors = [float((each - exact).norm()) for each in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1]


def test_denied_it_is_the_original_to_the_bit() -> None:
    model, x = layer(), torch.randn(3, 7, 32)
    parts = ["_native_multi_head_attention", "linear", "layer_norm", "add", "relu"]
    converted = autoamp.convert(copy.deepcopy(model), deny=parts, **BF16)
    with torch.no_grad():
        assert torch.equal(converted(x), model(x))


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype")
def test_a_nested_tensor_stays_fp32() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 32), torch.ones(3, 32)])
    op = torch._transformer_encoder_layer_fwd
    assert not compat.is_encoder_layer(op, (nested,))
    assert compat.is_encoder_layer(op, (torch.ones(1, 2, 32),))
    for dtype in (torch.bfloat16, torch.float16):
        rule = autoamp.Rules.default(dtype).table[
            "aten::_transformer_encoder_layer_fwd"
        ]
        assert rule.category == "deny"
