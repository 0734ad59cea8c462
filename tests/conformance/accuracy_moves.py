"""Graphs for the accuracy law: what rounding moves a little, and nothing cuts off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from tests.conformance import graphs
from tests.conformance.graphs import (
    ATEN,
    LENGTH,
    SIDE,
    WIDTH,
    Builder,
    Built,
    Move,
    Recipe,
)
from tests.conformance.moves import F32, MOVES

Node = fx.Node


class Unbounded(Builder):
    """A builder that cuts nothing off: these graphs need not be exact."""

    def bound(self, node: Node) -> Node:
        return node


def build(recipe: Recipe) -> Built:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "Builder", Unbounded)
        return recipe.build(TABLE)


NUMBERS = (1e-6, 1e3, 1e4, 6e4, 100.0, -1e3)


def _product(b: Builder, k: int, x: Node) -> Node:
    return b(ATEN.linear.default, x, b.weights[f"w{k % 3}"], None)


def _sum(b: Builder, x: Node, y: Node) -> Node:
    return b(ATEN.add.Tensor, x, y)


def _times(b: Builder, x: Node, y: Node) -> Node:
    return b(ATEN.mul.Tensor, x, y)


def _standardise(b: Builder, k: int, x: Node) -> None:
    """By hand, over tokens or over features."""
    axes = [1 + k % 2]
    centred = b(ATEN.sub.Tensor, x, b(ATEN.mean.dim, x, axes, True))
    spread = b(ATEN.std.correction, x, axes, keepdim=True)
    b(ATEN.div.Tensor, centred, b(ATEN.add.Scalar, spread, 1e-5))


def _two_pass(b: Builder, k: int, x: Node) -> None:
    """The variance as the mean square less the square of the mean."""
    mean = b(ATEN.mean.dim, x, [-1], True)
    square = b(ATEN.mean.dim, b(ATEN.pow.Tensor_Scalar, x, 2), [-1], True)
    spread = b(ATEN.sub.Tensor, square, b(ATEN.pow.Tensor_Scalar, mean, 2))
    spread = b(ATEN.sqrt.default, b(ATEN.clamp.default, spread, 1e-3))
    b(ATEN.div.Tensor, b(ATEN.sub.Tensor, x, mean), spread)


def _differences(b: Builder, k: int, x: Node) -> None:
    """Of neighbouring tokens, or features, with zeros before the first."""
    axis = 1 + k % 2
    after = b(ATEN.slice.Tensor, x, axis, 1, 64)
    before = b(ATEN.slice.Tensor, x, axis, 0, -1)
    pad = [0, 0, 1, 0] if axis == 1 else [1, 0]
    b(ATEN.constant_pad_nd.default, b(ATEN.sub.Tensor, after, before), pad)


def _denormalise_image(b: Builder, k: int, x: Node) -> None:
    branch = b(ATEN.conv2d.default, x, b.weights["kernel"], None, [1, 1], [1, 1])
    views = [b(ATEN.view.default, b.weights[n], [-1, 1, 1]) for n in _STATISTICS]
    _sum(b, _times(b, branch, b(ATEN.sqrt.default, views[1])), views[0])


_STATISTICS = ("mean", "variance")


def _normalise_by(b: Builder, k: int, x: Node, mean: Node, std: Node) -> None:
    std = b(ATEN.add.Scalar, b(ATEN.abs.default, std), 0.1)
    _product(b, k, b(ATEN.div.Tensor, b(ATEN.sub.Tensor, x, mean), std))


def _unit_rows(b: Builder, k: int, x: Node) -> None:
    length = b(ATEN.norm.ScalarOpt_dim, x, 2, [-1], True)
    b(ATEN.div.Tensor, x, b(ATEN.clamp.default, length, 1e-6))


def _with_parameter(b: Builder, k: int, x: Node) -> None:
    parameter = b.weights[("bias", "gain")[k % 2]]
    (_sum, _times)[k // 2 % 2](b, parameter, _product(b, k, x))


def _masked_scores(b: Builder, k: int, s: Node) -> None:
    """`scores + (1 - mask) * -1e4`, and a softmax."""
    device = torch.device("cpu")
    ones = b(ATEN.ones.default, [LENGTH, LENGTH], dtype=F32, device=device)
    rest = b(ATEN.rsub.Scalar, b(ATEN.tril.default, ones), 1.0)
    added = b(ATEN.mul.Scalar, rest, -1e4)
    b(ATEN.softmax.int, _sum(b, s, added), -1)


def _raised(b: Builder, k: int, s: Node) -> None:
    _sum(b, s, b(ATEN.full.default, [LENGTH, LENGTH], NUMBERS[k % 6], dtype=F32))


def _joined(b: Builder, k: int, x: Node, y: Node) -> None:
    """Half of a branch beside half of what may be fp32."""
    both = b(ATEN.cat.default, [_product(b, k, x), y], -1)
    b(ATEN.slice.Tensor, both, -1, 4, 4 + WIDTH)


def _fork(b: Builder, k: int, x: Node) -> None:
    """One value read by three products."""
    one, two, three = (_product(b, i, x) for i in range(3))
    _sum(b, _times(b, one, b(ATEN.sigmoid.default, two)), three)


def _averaged(b: Builder, k: int, x: Node, y: Node) -> None:
    b(ATEN.lerp.Scalar, _product(b, k, x), _product(b, k + 1, y), 0.3)


def _in_place(op: Any, *rest: Any) -> Callable[..., None]:
    """Writes to a copy of the first operand, which autograd does not mind."""

    def move(b: Builder, k: int, x: Node, *operands: Node) -> None:
        b(op, b(ATEN.clone.default, x), *operands, *rest)

    return move


def _op(op: Any, *rest: Any) -> Callable[..., Node]:
    """One op, its operands first and then literals."""
    return lambda b, k, *operands: b(op, *operands, *rest)


def _number(op: Any) -> Callable[..., None]:
    return lambda b, k, x: b(op, x, NUMBERS[k % len(NUMBERS)])


def _sum_of_products(b: Builder, k: int, x: Node, y: Node) -> None:
    square = b(ATEN.bmm.default, b(ATEN.transpose.int, x, 1, 2), y)
    b(ATEN.baddbmm.default, x, y, square)


_OWN: dict[str, tuple[str, Callable[..., Any]]] = {
    "standardise": ("t", _standardise),
    "two_pass": ("t", _two_pass),
    "differences": ("t", _differences),
    "denormalise": (
        "tvv",
        lambda b, k, x, v, w: _sum(b, _times(b, _product(b, k, x), v), w),
    ),
    "denormalise_image": ("m", _denormalise_image),
    "normalise_by": ("tvv", _normalise_by),
    "unit_rows": ("t", _unit_rows),
    "with_parameter": ("t", _with_parameter),
    "hundredfold": (
        "t",
        lambda b, k, x: b(
            ATEN.sub.Tensor, b(ATEN.mul.Scalar, x, 100), _product(b, k, x)
        ),
    ),
    "masked_scores": ("s", _masked_scores),
    "raised": ("s", _raised),
    "add_number": ("*", _number(ATEN.add.Scalar)),
    "mul_number": ("*", _number(ATEN.mul.Scalar)),
    "joined": ("t=", _joined),
    "fork": ("t", _fork),
    "averaged": ("t=", _averaged),
    "gate": ("*=", lambda b, k, x, y: _times(b, x, b(ATEN.sigmoid.default, y))),
    "clamp": ("*", _op(ATEN.clamp.default, -2.0, 2.0)),
    "elu": ("*", _op(ATEN.elu.default)),
    "mish": ("*", _op(ATEN.mish.default)),
    "prelu": ("m", lambda b, k, x: b(ATEN.prelu.default, x, b.weights["shift"])),
    "std": ("t", _op(ATEN.std.correction, [1])),
    "pool_all": ("m", _op(ATEN.adaptive_avg_pool2d.default, [SIDE, SIDE])),
    "resample": ("m", _op(ATEN.upsample_bilinear2d.vec, [SIDE, SIDE], False, None)),
    "instance_norm": (
        "m",
        _op(ATEN.instance_norm.default, None, None, None, None, True, 0.1, 1e-5, False),
    ),
    "sum_of_products": ("t=", _sum_of_products),
    "cosine": ("t=", _op(ATEN.cosine_similarity.default, 1)),
    "decay": (
        "*",
        lambda b, k, x: b(
            ATEN.exp.default, b(ATEN.neg.default, b(ATEN.abs.default, x))
        ),
    ),
    "add_": ("*=", _in_place(ATEN.add_.Tensor)),
    "copy_": ("*=", _in_place(ATEN.copy_.default)),
    "mul_": ("*", _in_place(ATEN.mul_.Scalar, 0.3)),
}

_SHARED = """
linear linear_pooled residual residual_pooled turned_weight cut_weight mm mv addmm
einsum conv conv1d relu neg abs maximum minimum hardtanh add sub mul add_one twice
add_scalar mul_scalar add_vector addcmul sum cumsum amax max_pool clone alias contiguous
split_heads merge_heads halves unbind flip roll select element row spread turn_image pad
upsample tril where masked_fill embedding next_word gather user_float mask_to_float
cross_entropy with_logits
tanh sigmoid gelu silu erf softplus leaky_relu halve softmax log_softmax causal mean
mean_all var logsumexp layer_norm native_layer_norm group_norm batch_norm rms_norm rms
weight_norm avg_pool scores weigh attention masked_attention distance mse smooth_l1
remember
"""
"""Moves of `moves.py` that are continuous, and that autocast can run."""

TABLE = {name: MOVES[name] for name in _SHARED.split()} | {
    name: Move(kinds, make, exact=False) for name, (kinds, make) in _OWN.items()
}
