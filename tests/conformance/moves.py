"""The moves random graphs are made of: ways to go on from the values so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tests.conformance.graphs import (
    ATEN,
    BATCH,
    HEADS,
    LENGTH,
    MOST,
    SIDE,
    WIDTH,
    WORDS,
    Builder,
    Move,
)

BF16, F32, F64, I32 = torch.bfloat16, torch.float32, torch.float64, torch.int32
Node = fx.Node


# -- moves of several ops --------------------------------------------------------------


def _weight(b: Builder, k: int) -> Node:
    return b.weights[f"w{k % 3}"]


def _linear(b: Builder, k: int, x: Node) -> None:
    bias = b.weights["bias"] if k % 2 else None
    b.bound(b(ATEN.linear.default, x, _weight(b, k), bias))


def _residual(b: Builder, k: int, x: Node, y: Node) -> None:
    branch = b(ATEN.linear.default, b(ATEN.relu.default, y), _weight(b, k), None)
    b.bound(b(ATEN.add.Tensor, x, branch))


def _turned_weight(b: Builder, k: int, x: Node) -> None:
    turned = b(ATEN.t.default, _weight(b, k))
    b(ATEN.matmul.default, b(ATEN.matmul.default, x, turned), turned)


def _cut_weight(b: Builder, k: int, x: Node) -> None:
    weight = _weight(b, k)
    if k % 2:
        weight = b(ATEN.t.default, weight)
    left, right = b.items(b(ATEN.chunk.default, weight, 2))
    both = [b(ATEN.linear.default, x, w, None) for w in (left, right, left)]
    b(ATEN.cat.default, both[1:], -1)


def _merge_heads(b: Builder, k: int, x: Node) -> None:
    b(ATEN.reshape.default, b(ATEN.transpose.int, x, 1, 2), [BATCH, LENGTH, WIDTH])


def _split_heads(b: Builder, k: int, x: Node) -> None:
    shape = [BATCH, LENGTH, HEADS, WIDTH // HEADS]
    b(ATEN.transpose.int, b(ATEN.reshape.default, x, shape), 1, 2)


def _write_part(b: Builder, k: int, x: Node, y: Node) -> None:
    x = b.writable(x)
    part = b(ATEN.slice.Tensor, x, -1, 0, 4)
    b(ATEN.copy_.default, part, b(ATEN.slice.Tensor, b.apart(y, x), -1, 4, 8))


def _add_(b: Builder, k: int, x: Node, y: Node) -> None:
    x = b.writable(x)
    b(ATEN.clamp_.default, b(ATEN.add_.Tensor, x, b.apart(y, x)), -MOST, MOST)


def _copy_(b: Builder, k: int, x: Node, y: Node) -> None:
    x = b.writable(x)
    b(ATEN.copy_.default, x, b.apart(y, x))


def _embedding(b: Builder, k: int, i: Node) -> None:
    words = b(ATEN.remainder.Scalar, i, WORDS)
    b(ATEN.embedding.default, b.weights["table"], words)


def _write_row(b: Builder, k: int, x: Node) -> None:
    b(ATEN.neg_.default, b(ATEN.select.int, b.writable(x), 1, k % LENGTH))


def _contiguous(b: Builder, x: Node) -> Node:
    if x.meta["val"].is_contiguous():
        return x
    return b(ATEN.clone.default, x, memory_format=torch.contiguous_format)


def _write_flat(b: Builder, k: int, x: Node) -> None:
    x = _contiguous(b, x)
    b(ATEN.zero_.default, b(ATEN.slice.Tensor, b(ATEN.view.default, x, [-1]), 0, k, 60))


def _write_piece(b: Builder, k: int, x: Node) -> None:
    pieces = b.items(b(ATEN.split.Tensor, b.writable(x), 2, -1))
    b(ATEN.neg_.default, pieces[k % len(pieces)])


def _read_write_read(b: Builder, k: int, x: Node) -> None:
    x, w = b.writable(x), _weight(b, k)
    before = b(ATEN.linear.default, x, w, None)
    b(ATEN.neg_.default, x)
    b.bound(b(ATEN.add.Tensor, before, b(ATEN.linear.default, x, w, None)))


def _remember(b: Builder, k: int, x: Node) -> None:
    last = b.weights["last"]
    b(ATEN.copy_.default, last, b.apart(x, last))
    b(ATEN.add_.Scalar, b.weights["seen"], 1)
    b.bound(b(ATEN.add.Tensor, x, b.weights["last"]))


def _halves(b: Builder, k: int, x: Node) -> None:
    left, right = b.items(b(ATEN.chunk.default, x, 2, -1))
    b(ATEN.cat.default, [right, left], -1)


def _unbind(b: Builder, k: int, x: Node) -> None:
    b(ATEN.stack.default, b.items(b(ATEN.unbind.int, x, 1))[::-1], 1)


def _conv(b: Builder, k: int, x: Node) -> None:
    bias = b.weights["shift"] if k % 2 else None
    b.bound(b(ATEN.conv2d.default, x, b.weights["kernel"], bias, [1, 1], [1, 1]))


def _conv1d(b: Builder, k: int, x: Node) -> None:
    turned = b(ATEN.transpose.int, x, 1, 2)
    b(ATEN.transpose.int, b(ATEN.conv1d.default, turned, b.weights["taps"]), 1, 2)


def _double(b: Builder, k: int, x: Node) -> None:
    wide = b(ATEN.add.Scalar, b(ATEN.to.dtype, x, F64), 1)
    b.bound(b(ATEN.to.dtype, wide, F32))


def _upsample(b: Builder, k: int, x: Node) -> None:
    quarter = b(ATEN.slice.Tensor, b(ATEN.slice.Tensor, x, 2, 0, 3), 3, 0, 3)
    b(ATEN.upsample_nearest2d.vec, quarter, [SIDE, SIDE], None)


def _index_add(b: Builder, k: int, x: Node, y: Node, i: Node) -> None:
    rows = b(ATEN.remainder.Scalar, b(ATEN.select.int, i, 0, 0), LENGTH)
    b.bound(b(ATEN.index_add.default, x, 1, rows, y))


def _index_put(b: Builder, k: int, x: Node, y: Node) -> None:
    row = b(ATEN.full.default, [1], k % LENGTH, dtype=torch.int64)
    copy = b(ATEN.clone.default, x)
    b(ATEN.index_put_.default, copy, [None, row], b(ATEN.slice.Tensor, y, 1, 0, 1))


def _gather(b: Builder, k: int, x: Node, i: Node) -> None:
    places = b(ATEN.remainder.Scalar, b(ATEN.unsqueeze.default, i, -1), LENGTH)
    shape = [BATCH, LENGTH, WIDTH]
    b(ATEN.gather.default, x, 1, b(ATEN.expand.default, places, shape))


def _causal(b: Builder, k: int, s: Node) -> None:
    mask = b(ATEN.ones_like.default, s, dtype=torch.bool)
    mask = b(ATEN.logical_not.default, b(ATEN.tril.default, mask))
    lowest = torch.finfo(F32).min
    b(ATEN.softmax.int, b(ATEN.masked_fill.Scalar, s, mask, lowest), -1)


def _batch_norm(b: Builder, k: int, x: Node) -> None:
    w = b.weights
    training = bool(k % 2)
    statistics = (w["mean"], w["variance"], training, 0.1, 1e-5, False)
    # For a permuted input torch's kernel and its stand-in give other strides, and a
    # view of the result traces that does not run (torch.compile refuses it as well).
    x = _contiguous(b, x)
    b(ATEN.batch_norm.default, x, w["shift"], w["shift"], *statistics)


def _positions(b: Builder, k: int, x: Node) -> None:
    steps = b(ATEN.arange.default, WIDTH, dtype=F32, device=torch.device("cpu"))
    b(ATEN.sin.default, b(ATEN.mul.Tensor, x, steps))


def _weight_norm(b: Builder, k: int, x: Node) -> None:
    w = _weight(b, k)
    length = b(ATEN.norm.ScalarOpt_dim, w, 2, [1], True)
    b(ATEN.linear.default, x, b(ATEN.div.Tensor, w, length), None)


def _rms(b: Builder, k: int, x: Node) -> None:
    mean = b(ATEN.mean.dim, b(ATEN.pow.Tensor_Scalar, x, 2), [-1], True)
    scale = b(ATEN.rsqrt.default, b(ATEN.add.Scalar, mean, 1e-6))
    b(ATEN.mul.Tensor, b(ATEN.mul.Tensor, x, scale), b.weights["gain"])


def _distance(b: Builder, k: int, x: Node, y: Node) -> None:
    square = b(ATEN.pow.Tensor_Scalar, b(ATEN.sub.Tensor, x, y), 2)
    b(ATEN.sqrt.default, b(ATEN.add.Scalar, b(ATEN.sum.dim_IntList, square, [1]), 1e-3))


# -- the table -------------------------------------------------------------------------

MOVES: dict[str, Move] = {}


def _add(exact: bool, table: dict[str, tuple[str, Any]]) -> None:
    for name, (kinds, make) in table.items():
        assert name not in MOVES, name
        MOVES[name] = Move(kinds, make, exact)


def _op(kinds: str, op: Any, *rest: Any) -> tuple[str, Any]:
    """A move of one op, its operands first and then literals."""
    return kinds, lambda b, k, *operands: b(op, *operands, *rest)


def _bounded(kinds: str, op: Any, *rest: Any) -> tuple[str, Any]:
    """The same, cut off at `MOST`."""
    return kinds, lambda b, k, *operands: b.bound(b(op, *operands, *rest))


_add(
    True,
    {
        # products
        "linear": ("t", _linear),
        "linear_pooled": ("p", _linear),
        "residual": ("t=", _residual),
        "residual_pooled": ("p=", _residual),
        "turned_weight": ("t", _turned_weight),
        "cut_weight": ("t", _cut_weight),
        "mm": ("p", lambda b, k, x: b(ATEN.mm.default, x, _weight(b, k))),
        "mv": ("v", lambda b, k, x: b(ATEN.mv.default, _weight(b, k), x)),
        "addmm": (
            "p",
            lambda b, k, x: b.bound(
                b(ATEN.addmm.default, b.weights["bias"], x, _weight(b, k))
            ),
        ),
        "einsum": (
            "t",
            lambda b, k, x: b(ATEN.einsum.default, "bld,de->ble", [x, _weight(b, k)]),
        ),
        "conv": ("m", _conv),
        "conv1d": ("t", _conv1d),
        # element by element
        "relu": _op("*", ATEN.relu.default),
        "neg": _op("*", ATEN.neg.default),
        "abs": _op("*", ATEN.abs.default),
        "sign": _op("*", ATEN.sign.default),
        "floor": _op("*", ATEN.floor.default),
        "zeros_like": _op("*", ATEN.zeros_like.default),
        "ones_like": _op("*", ATEN.ones_like.default),
        "maximum": _op("*=", ATEN.maximum.default),
        "minimum": _op("*=", ATEN.minimum.default),
        "hardtanh": _op("*", ATEN.hardtanh.default, -3.0, 3.0),
        "add": _bounded("*=", ATEN.add.Tensor),
        "sub": _bounded("*=", ATEN.sub.Tensor),
        "mul": _bounded("*=", ATEN.mul.Tensor),
        "square": _bounded("*", ATEN.pow.Tensor_Scalar, 2),
        "add_one": _bounded("*", ATEN.add.Scalar, 1),
        "add_alpha": _bounded("*=", ATEN.add.Tensor),
        "twice": _bounded("*", ATEN.mul.Scalar, 2),
        "add_scalar": _bounded("*0", ATEN.add.Tensor),
        "mul_scalar": _bounded("*0", ATEN.mul.Tensor),
        "add_vector": _bounded("tv", ATEN.add.Tensor),
        "addcmul": _bounded("*==", ATEN.addcmul.default),
        # reductions and scans
        "sum": _bounded("t", ATEN.sum.dim_IntList, [1]),
        "sum_all": _bounded("p", ATEN.sum.default),
        "cumsum": _bounded("p", ATEN.cumsum.default, -1),
        "amax": _op("t", ATEN.amax.default, [1]),
        "max": ("t", lambda b, k, x: b.items(b(ATEN.max.dim, x, 1))),
        "topk": ("t", lambda b, k, x: b.items(b(ATEN.topk.default, x, 3))),
        "sort": ("p", lambda b, k, x: b.items(b(ATEN.sort.default, x))),
        "argmax": (
            "t",
            lambda b, k, x: b(
                ATEN.remainder.Scalar, b(ATEN.argmax.default, x, -1), WORDS
            ),
        ),
        "max_pool": _op("m", ATEN.max_pool2d.default, [3, 3], [1, 1], [1, 1]),
        # moves and views
        "clone": _op("*", ATEN.clone.default),
        "detach": _op("*", ATEN.detach.default),
        "alias": _op("*", ATEN.alias.default),
        "contiguous": _op("*", ATEN.contiguous.default),
        "split_heads": ("t", _split_heads),
        "merge_heads": ("h", _merge_heads),
        "halves": ("t", _halves),
        "unbind": ("t", _unbind),
        "flip": _op("t", ATEN.flip.default, [0, 1]),
        "roll": _op("t", ATEN.roll.default, [2], [1]),
        "select": ("t", lambda b, k, x: b(ATEN.select.int, x, 1, k % LENGTH)),
        "element": ("v", lambda b, k, x: b(ATEN.select.int, x, 0, k % WIDTH)),
        "row": ("p", lambda b, k, x: b(ATEN.select.int, x, 0, k % BATCH)),
        "spread": (
            "p",
            lambda b, k, x: b(
                ATEN.expand.default,
                b(ATEN.unsqueeze.default, x, 1),
                [BATCH, LENGTH, WIDTH],
            ),
        ),
        "turn_image": _op("m", ATEN.permute.default, [0, 1, 3, 2]),
        "pad": (
            "m",
            lambda b, k, x: b(
                ATEN.constant_pad_nd.default,
                b(ATEN.slice.Tensor, x, 3, 1, SIDE),
                [1, 0],
            ),
        ),
        "upsample": ("m", _upsample),
        "tril": _op("s", ATEN.tril.default),
        # indices and masks
        "greater": _op("t=", ATEN.gt.Tensor),
        "not": _op("q", ATEN.logical_not.default),
        "where": _op("qt=", ATEN.where.self),
        "masked_fill": _op("tq", ATEN.masked_fill.Scalar, 1.0),
        "embedding": ("i", _embedding),
        "next_word": (
            "i",
            lambda b, k, i: b(ATEN.remainder.Scalar, b(ATEN.add.Scalar, i, 1), WORDS),
        ),
        "index_add": ("t=i", _index_add),
        "index_put": ("t=", _index_put),
        "gather": ("ti", _gather),
        # the user's own casts
        "user_float": _op("*", ATEN.to.dtype, F32),
        "user_low": (
            "*",
            lambda b, k, x: b(ATEN.to.dtype, b(ATEN.to.dtype, x, BF16), F32),
        ),
        "user_int": (
            "t",
            lambda b, k, x: b(ATEN.to.dtype, b(ATEN.to.dtype, x, I32), F32),
        ),
        "user_double": ("*", _double),
        "user_mixed": (
            "*",
            lambda b, k, x: b.bound(b(ATEN.add.Tensor, x, b(ATEN.to.dtype, x, BF16))),
        ),
        "mask_to_float": _op("q", ATEN.to.dtype, F32),
        # writes
        "relu_": ("*", lambda b, k, x: b(ATEN.relu_.default, b.writable(x))),
        "neg_": ("*", lambda b, k, x: b(ATEN.neg_.default, b.writable(x))),
        "add_": ("*=", _add_),
        "copy_": ("*=", _copy_),
        "masked_fill_": (
            "tq",
            lambda b, k, x, q: b(ATEN.masked_fill_.Scalar, b.writable(x), q, -1.0),
        ),
        "write_part": ("t=", _write_part),
        "write_row": ("t", _write_row),
        "write_flat": ("*", _write_flat),
        "write_piece": ("t", _write_piece),
        "read_write_read": ("t", _read_write_read),
        "remember": ("p", _remember),
        # regions
        "switch_grad": ("", lambda b, k: b.switch_grad()),
        "switch_autocast": ("", lambda b, k: b.switch_autocast()),
    },
)

_add(
    False,
    {
        "exp": _op("*", ATEN.exp.default),
        "log": ("*", lambda b, k, x: b(ATEN.log1p.default, b(ATEN.abs.default, x))),
        "tanh": _op("*", ATEN.tanh.default),
        "sigmoid": _op("*", ATEN.sigmoid.default),
        "gelu": _op("*", ATEN.gelu.default),
        "silu": _op("*", ATEN.silu.default),
        "sin": _op("*", ATEN.sin.default),
        "erf": _op("*", ATEN.erf.default),
        "softplus": _op("*", ATEN.softplus.default),
        "leaky_relu": _op("*", ATEN.leaky_relu.default),
        "halve": _op("*", ATEN.div.Scalar, 2),
        "divide": _op("*=", ATEN.div.Tensor),
        "lerp": _op("*=", ATEN.lerp.Scalar, 0.3),
        "cube": _op("*", ATEN.pow.Tensor_Scalar, 3),
        "rand_like": _op("*", ATEN.rand_like.default),
        "dropout": _op("*", ATEN.dropout.default, 0.3, True),
        "mul_": ("*", lambda b, k, x: b(ATEN.mul_.Scalar, b.writable(x), 0.3)),
        "softmax": _op("s", ATEN.softmax.int, -1),
        "log_softmax": _op("t", ATEN.log_softmax.int, -1),
        "causal": ("s", _causal),
        "mean": _op("t", ATEN.mean.dim, [1]),
        "mean_all": _op("*", ATEN.mean.default),
        "var": _op("t", ATEN.var.correction, [1]),
        "logsumexp": _op("t", ATEN.logsumexp.default, [1]),
        "layer_norm": (
            "t",
            lambda b, k, x: b(
                ATEN.layer_norm.default,
                x,
                [WIDTH],
                b.weights["gain"],
                b.weights["bias"],
            ),
        ),
        "native_layer_norm": (
            "t",
            lambda b, k, x: b.items(
                b(
                    ATEN.native_layer_norm.default,
                    x,
                    [WIDTH],
                    b.weights["gain"],
                    b.weights["bias"],
                    1e-5,
                )
            ),
        ),
        "group_norm": _op("m", ATEN.group_norm.default, 2),
        "batch_norm": ("m", _batch_norm),
        "rms_norm": (
            "t",
            lambda b, k, x: b(ATEN.rms_norm.default, x, [WIDTH], b.weights["gain"]),
        ),
        "rms": ("t", _rms),
        "weight_norm": ("t", _weight_norm),
        "avg_pool": _op("m", ATEN.avg_pool2d.default, [3, 3], [1, 1], [1, 1]),
        "scores": (
            "h=",
            lambda b, k, x, y: b(
                ATEN.matmul.default, x, b(ATEN.transpose.int, y, -2, -1)
            ),
        ),
        "weigh": _op("sh", ATEN.matmul.default),
        "attention": _op("h==", ATEN.scaled_dot_product_attention.default),
        "masked_attention": _op("h==s", ATEN.scaled_dot_product_attention.default),
        "positions": ("t", _positions),
        "distance": ("t=", _distance),
        "mse": _op("*=", ATEN.mse_loss.default),
        "smooth_l1": _op("*=", ATEN.smooth_l1_loss.default),
        "cross_entropy": (
            "t",
            lambda b, k, x: b(
                ATEN.cross_entropy_loss.default,
                b(ATEN.select.int, x, 1, 0),
                b(ATEN.full.default, [BATCH], k % WIDTH, dtype=torch.int64),
            ),
        ),
        "with_logits": (
            "*=",
            lambda b, k, x, y: b(
                ATEN.binary_cross_entropy_with_logits.default,
                x,
                b(ATEN.sigmoid.default, y),
            ),
        ),
    },
)

EXACT = {name: move for name, move in MOVES.items() if move.exact}


# -- for the law of accuracy: what rounding moves a little, nothing cuts off -----------

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


def _in_place(kinds: str, op: Any, *rest: Any) -> tuple[str, Any]:
    """Writes to a copy of the first operand, which autograd does not mind."""
    return kinds, lambda b, k, x, *others: b(
        op, b(ATEN.clone.default, x), *others, *rest
    )


def _number(op: Any) -> tuple[str, Any]:
    return "*", lambda b, k, x: b(op, x, NUMBERS[k % len(NUMBERS)])


def _sum_of_products(b: Builder, k: int, x: Node, y: Node) -> None:
    square = b(ATEN.bmm.default, b(ATEN.transpose.int, x, 1, 2), y)
    b(ATEN.baddbmm.default, x, y, square)


_OWN: dict[str, tuple[str, Any]] = {
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
    "add_number": _number(ATEN.add.Scalar),
    "mul_number": _number(ATEN.mul.Scalar),
    "joined": ("t=", _joined),
    "fork": ("t", _fork),
    "averaged": ("t=", _averaged),
    "gate": ("*=", lambda b, k, x, y: _times(b, x, b(ATEN.sigmoid.default, y))),
    "clamp": _op("*", ATEN.clamp.default, -2.0, 2.0),
    "elu": _op("*", ATEN.elu.default),
    "mish": _op("*", ATEN.mish.default),
    "prelu": ("m", lambda b, k, x: b(ATEN.prelu.default, x, b.weights["shift"])),
    "std": _op("t", ATEN.std.correction, [1]),
    "pool_all": _op("m", ATEN.adaptive_avg_pool2d.default, [SIDE, SIDE]),
    "resample": _op("m", ATEN.upsample_bilinear2d.vec, [SIDE, SIDE], False, None),
    "instance_norm": _op(
        *("m", ATEN.instance_norm.default, None, None, None, None, True, 0.1, 1e-5),
        False,
    ),
    "sum_of_products": ("t=", _sum_of_products),
    "cosine": _op("t=", ATEN.cosine_similarity.default, 1),
    "decay": (
        "*",
        lambda b, k, x: b(
            ATEN.exp.default, b(ATEN.neg.default, b(ATEN.abs.default, x))
        ),
    ),
    "add_": _in_place("*=", ATEN.add_.Tensor),
    "copy_": _in_place("*=", ATEN.copy_.default),
    "mul_": _in_place("*", ATEN.mul_.Scalar, 0.3),
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
"""The moves above that are continuous, and that autocast can run."""

ACCURATE = {name: MOVES[name] for name in _SHARED.split()} | {
    name: Move(kinds, make, exact=False) for name, (kinds, make) in _OWN.items()
}
