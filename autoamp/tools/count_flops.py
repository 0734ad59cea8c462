"""Flops of matmul, convolution, attention and fused recurrent layers.

The formulas are torch's own, plus formulas for operators of CPUs that torch leaves out.
Products of a vector with a vector or a matrix do not count: they read each number once,
so that reading takes all their time in any precision.
"""

# ruff: noqa: ARG001 - a formula takes all arguments of its operator

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import flop_counter

Formula = Callable[..., int]


def _addmm(_: Any, a: torch.Size, b: torch.Size, *others: Any, **more: Any) -> int:
    return int(flop_counter.mm_flop(a, b))


def _bmm(a: torch.Size, b: torch.Size, *others: Any, **more: Any) -> int:
    return 0 if a[1] == b[2] == 1 else flop_counter.bmm_flop(a, b)


def _attention(
    q: torch.Size, k: torch.Size, v: torch.Size, *others: Any, **more: Any
) -> int:
    k, v = _with_heads_of(q, k), _with_heads_of(q, v)
    return int(flop_counter.sdpa_flop_count(q, k, v))


def _attention_backward(
    grad: torch.Size,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    *others: Any,
    **more: Any,
) -> int:
    k, v = _with_heads_of(q, k), _with_heads_of(q, v)
    return int(flop_counter.sdpa_backward_flop_count(grad, q, k, v))


def _with_heads_of(q: torch.Size, kv: torch.Size) -> torch.Size:
    """Keys or values with as many heads as `q`; torch 2.11 counts no shared heads."""
    return torch.Size([kv[0], q[1], *kv[2:]])


def _rnn(x: torch.Size, w: torch.Size, u: torch.Size, *others: Any, **more: Any) -> int:
    # One layer, one direction: each step multiplies its input and its state.
    return 2 * x[0] * x[1] * (w.numel() + u.numel())


def _rnn_backward(*args: Any, **more: Any) -> int:
    return 2 * _rnn(*args, **more)


_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)

_MISSING: dict[str, Formula] = {
    "_addmm_activation": _addmm,
    "bmm": _bmm,
    **dict.fromkeys(_FUSED_ATTENTION, _attention),
    **dict.fromkeys([f"{n}_backward" for n in _FUSED_ATTENTION], _attention_backward),
    "mkldnn_rnn_layer": _rnn,
    "mkldnn_rnn_layer_backward": _rnn_backward,
}

_FORMULAS: dict[Any, Formula] = flop_counter.flop_registry | {
    getattr(torch.ops.aten, name): flop_counter.shape_wrapper(formula)
    for name, formula in _MISSING.items()
}

_OWN = {"autoamp::attention_backward": flop_counter.shape_wrapper(_attention_backward)}
"""Formulas of autoamp's ops, by name, since the ops exist only after an import."""


def flops_of(op: torch._ops.OpOverload) -> Formula | None:
    """The formula of `op`, called as the operator with `out_val=result`, or None."""
    return _FORMULAS.get(op.overloadpacket) or _OWN.get(op.name())
