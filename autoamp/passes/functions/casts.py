"""Casts that one ATen op cannot do, and the other functions that keep dtypes in order.

Casts with fp32 gradient sums, scaling or saturation; uses of several weights as one
call; recurrent ops with their state in fp32; changes of layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.functions.edge import (
    gradient,
    leaving,
    multiplied_again,
    unscale_grad,
)

# -- uses of a weight ------------------------------------------------------------------


# NOTE: a node of autograd for each use of a weight.
#
# One node for a weight is not enough: its input buffer sums the gradients of all uses
# in low precision before the node runs.  One node for all weights gives every gradient
# at once, when the last is there, and DDP has nothing to overlap with its all-reduce.
# A low leaf with `grad_dtype` fp32 sums truly, but the parameter's hooks do not run,
# and `autograd.grad` of the parameter is None.  A node for each use keeps hooks, the
# order of gradients and second derivatives, and inductor traces through it.


class LowWeight(torch.autograd.Function):
    """Forward: the low-precision copy.  Backward: the gradient, in the weight's dtype.

    Each *use* of a weight has one autograd node.  A single cast shared by all uses
    would have its gradients summed in low precision: 1000 uses of a weight whose true
    gradient is 1000 give 256 in bf16.  With one node per use the sum is in fp32.

    With `inv` the gradient leaves the graph, and is unscaled: see `edge`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        copy: Tensor,
        inv: Tensor | None,
        found_inf: Tensor | None,
    ) -> Tensor:
        # Autograd sums in this dtype.  (In bf16 a sum of ones ends at 256: the next
        # number is 258, and 257 is rounded back to even digits.)
        ctx.dtype, ctx.edge = weight.dtype, (inv, found_inf)
        ctx.plain = weight.is_contiguous()
        # Returned itself, the cached copy would be marked by autograd: it would require
        # a gradient, and have a `grad_fn`, in every later call.
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _of_weight(grad, ctx, *ctx.edge), None, None, None


def _of_weight(
    grad: Tensor, kind: Any, inv: Tensor | None, found_inf: Tensor | None
) -> Tensor:
    """A gradient as its weight wants it; with `inv` unscaled and checked too.

    A convolution with the channels last gives its weight such a gradient as well.

    Args:
        kind: has the dtype of the weight, and whether it is contiguous (`plain`); a
            `_Kind`, or the context of a Function.
    """
    if not kind.plain:
        wide = grad.to(kind.dtype)
    else:
        # CPUs permute and convert in two passes sooner than in one: 1.2 instead of
        # 1.8 ms for 512 filters of 3 x 3 over 512 channels.
        near = grad.contiguous() if grad.is_cpu else grad
        wide = near.to(kind.dtype, memory_format=torch.contiguous_format)
    if inv is None or found_inf is None:
        return wide
    # `to` gives the gradient itself where the dtype is the same; hooks of the user's
    # may hold that tensor.
    kernel_takes_it = wide.layout == torch.strided and wide.dtype == torch.float32
    if wide is grad or not kernel_takes_it:
        wide = gradient(inv, found_inf, wide)
    else:
        wide = leaving(wide, inv, found_inf)
    return wide


_apply_low_weight = compat.direct_apply(LowWeight)


def low_weight(weight: Tensor, copy: Tensor) -> Tensor:
    """One use of `weight` (fp32, any shape) through `copy`, its low-precision copy.

    The result has the shape and dtype of `copy`; its gradient flows to `weight` in
    fp32, and none flows to `copy`.
    """
    if (
        weight.requires_grad
        and torch.is_grad_enabled()
        and type(weight) in _PLAIN
        # Autograd gives the gradient no other layout; that of a convolution may need
        # one, unless weight and copy have their channels last both.
        and (weight.dim() < _CONVOLUTIONS or weight.stride(1) == 1)
        and weight.stride() == copy.stride()
        and compat.casts_gradients()
    ):
        # No Function of Python's in the backward: autograd casts to the weight's dtype
        # before it sums the uses.
        return compat.seen_as(weight, copy)
    return _apply_low_weight(weight, copy, None, None)


_CONVOLUTIONS = 4
"""The least number of dimensions of a weight whose channels may be last."""


_PLAIN = (torch.nn.Parameter, Tensor)
"""Kinds of tensors whose memory may be another's: a sharded one has none of its own."""


def low_weight_unscaled(
    weight: Tensor,
    copy: Tensor,
    inv_loss_scale: Tensor,
    found_inf: Tensor,
) -> Tensor:
    """`low_weight` whose gradient is also unscaled and checked, in fp32, in one kernel.

    Args:
        weight, copy: as for `low_weight`; `copy` is in another dtype than `weight`.
        inv_loss_scale: 1/S, 0-dim fp32.
        found_inf: one fp32 element, set to 1 where the gradient is not finite.
    """
    return _apply_low_weight(weight, copy, inv_loss_scale, found_inf)


class _HalfLeafUnscaled(torch.autograd.Function):
    """Forward: an alias.  Backward: the gradient in fp32, unscaled and checked.

    A tensor hook has to keep the gradient's half dtype, in which the unscaled gradient
    underflows.  This Function may return fp32: autograd takes the fp32 gradient if the
    leaf's `grad_dtype` is fp32, and otherwise casts the gradient itself.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, inv: Tensor, found_inf: Tensor) -> Tensor:
        # Kept as attributes, since `save_for_backward` would pin the version of
        # `found_inf`, which other backwards write to.
        ctx.inv, ctx.found_inf = inv, found_inf
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return leaving(grad.float(), ctx.inv, ctx.found_inf), None, None


_apply_half_leaf_unscaled = compat.direct_apply(_HalfLeafUnscaled)


def unscale_half(value: Tensor, inv_loss_scale: Tensor, found_inf: Tensor) -> Tensor:
    """One use of `value` (fp16 or bf16); its gradient is unscaled, in fp32 for a leaf.

    Args:
        value: any shape; for a leaf, one node per use makes the gradient sum fp32.
        inv_loss_scale: 1/S, 0-dim fp32.
        found_inf: one fp32 element, set to 1 where the gradient is not finite.
    """
    if not value.is_leaf:
        return unscale_grad(value, inv_loss_scale, found_inf)
    return _apply_half_leaf_unscaled(value, inv_loss_scale, found_inf)


# -- uses of several weights -----------------------------------------------------------


class _Kind(NamedTuple):
    """The dtype and layout that the gradient of a weight must have."""

    dtype: torch.dtype
    plain: bool

    @classmethod
    def of(cls, weight: Tensor) -> _Kind:
        return cls(weight.dtype, weight.is_contiguous())


class _Together(torch.autograd.Function):
    """As a call of one weight for each of several weights, with all gradients at once.

    Each weight of a layer costs a GPU one kernel for the cast of its gradient, in fp16
    a second one that unscales and checks, and a call of Python's.  A hundred small
    kernels take longer to start than to run; one kernel takes a list of tensors.

    The results are the copies, or the weights themselves where there are none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        count: int,
        inv: Tensor | None,
        found_inf: Tensor | None,
        *given: Tensor,
    ) -> tuple[Tensor, ...]:
        # A weight that no loss reaches then has None, and not a gradient of zeros,
        # which an optimizer with weight decay would step by.
        ctx.set_materialize_grads(False)
        weights = given[:count]
        ctx.edge, ctx.given = (inv, found_inf), len(given)
        # Asked at every call: quicker than the kind of each weight.
        contiguous = all(map(Tensor.is_contiguous, weights))
        usual = contiguous and {*map(_DTYPE, weights)} == {_USUAL.dtype}
        ctx.kinds = None if usual else tuple(map(_Kind.of, weights))
        return tuple(map(Tensor.detach, given[-count:]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        rest = (None,) * (ctx.given - len(grads))
        there = [grad for grad in grads if grad is not None]
        # The foreach kernels are not differentiable, and take neither sparse gradients
        # nor batches of them.
        if ctx.kinds is None and not torch.is_grad_enabled() and _are_ordinary(there):
            wide: list[Tensor | None] = [*_all_wide(there, *ctx.edge)]
            if len(wide) < len(grads):
                left = iter(wide)
                wide = [None if grad is None else next(left) for grad in grads]
        else:
            kinds = ctx.kinds or (_USUAL,) * len(grads)
            wide = [
                None if grad is None else _of_weight(grad, kind, *ctx.edge)
                for grad, kind in zip(grads, kinds, strict=True)
            ]
        return (None, None, None, *wide, *rest)


_apply_together: Any = compat.direct_apply(_Together)

_USUAL = _Kind(torch.float32, plain=True)


def _are_ordinary(grads: Sequence[Tensor]) -> bool:
    """Whether all of `grads` are plain tensors, with memory of their own."""
    return (
        {*map(type, grads)} == {Tensor}
        and {*map(_LAYOUT, grads)} == {torch.strided}
        and not (compat.any_batch(grads) or compat.forward_mode())
    )


_DTYPE, _LAYOUT = map(operator.attrgetter, ("dtype", "layout"))


def _all_wide(
    grads: Sequence[Tensor], inv: Tensor | None, found_inf: Tensor | None
) -> list[Tensor]:
    """Gradients in fp32; with `inv` unscaled and checked too.  One op for all."""
    # As the weights lie; a convolution with the channels last gives another layout.
    plain = torch.contiguous_format
    wide = [
        torch.empty_like(grad, dtype=_USUAL.dtype, memory_format=plain)
        for grad in grads
    ]
    compat.copy_all(wide, grads)
    if inv is not None and found_inf is not None:
        compat.unscale_and_check(wide, found_inf, inv)
        if not found_inf.is_cpu or found_inf:
            compat.infinities_to_nan_(wide)
    return wide


def _grouped(
    one: Callable[..., Tensor], count: int, edge: Sequence[Tensor], given: Any
) -> tuple[Tensor, ...]:
    """A use of each of `count` weights, by `one` where gradients arrive one by one."""
    # One node for all delays the first gradient until the last: DDP sends buckets while
    # later gradients are computed, and FSDP takes a module's gradients as its backward
    # ends. Functorch's transforms know each use by itself.
    if compat.has_ranks() or compat.transforms_active():
        columns = [given[at : at + count] for at in range(0, len(given), count)]
        return tuple(one(*row, *edge) for row in zip(*columns, strict=True))
    result: tuple[Tensor, ...] = _apply_together(count, *(edge or _NO_EDGE), *given)
    return result


_NO_EDGE = (None, None)


def low_weights(*given: Tensor) -> tuple[Tensor, ...]:
    """`low_weight` of several weights, with one autograd node.

    Args:
        given: the weights, each as for `low_weight`, and then their copies in the same
            order.  The weights and copies are on one device.

    Returns:
        A use of each weight.
    """
    return _grouped(low_weight, len(given) // 2, (), given)


def low_weights_unscaled(
    inv_loss_scale: Tensor, found_inf: Tensor, *given: Tensor
) -> tuple[Tensor, ...]:
    """`low_weight_unscaled` of several weights, with one autograd node.

    Args:
        inv_loss_scale, found_inf: as for `low_weight_unscaled`.
        given: as for `low_weights`.
    """
    edge = inv_loss_scale, found_inf
    return _grouped(low_weight_unscaled, len(given) // 2, edge, given)


def unscaled_weights(
    inv_loss_scale: Tensor, found_inf: Tensor, *weights: Tensor
) -> tuple[Tensor, ...]:
    """`unscale_grad` of several weights that ops read in fp32, with one autograd node.

    Args:
        inv_loss_scale, found_inf: as for `unscale_grad`.
        weights: fp32 tensors on one device, to which the graph does not write.
    """
    edge = inv_loss_scale, found_inf
    return _grouped(unscale_grad, len(weights), edge, weights)


# -- uses of other values --------------------------------------------------------------


class _LowUses(torch.autograd.Function):
    """Forward: a low copy, several times.  Backward: one fp32 sum of the gradients.

    Autograd would sum the gradients in the copy's own dtype.  For a value that eight
    products read, the sum would have more than 1.5 times the error of torch.autocast,
    which casts for each product (tests/passes/decide/test_ceiling.py).
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, copy: Tensor, uses: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = value.dtype
        return tuple(copy.detach() for _ in range(uses))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        total: Tensor | None = None
        for grad in grads:
            if grad is not None:
                # In place: `to` has made `total`, which nobody else holds.
                total = grad.to(ctx.dtype) if total is None else total.add_(grad)
        return total, None, None


_apply_low_uses: Any = compat.direct_apply(_LowUses)


def low_uses(value: Tensor, copy: Tensor, uses: int) -> tuple[Tensor, ...]:
    """Several uses of `value` (fp32, any shape) through `copy`, its low-precision copy.

    Each of the `uses` results has the shape and dtype of `copy`.  The gradients of the
    results are summed in fp32 and flow to `value`, none to `copy`.  All gradients are
    kept until the last one arrives: for a weight, or many uses, `low_weight` is better.
    """
    result: tuple[Tensor, ...] = _apply_low_uses(value, copy, uses)
    return result


class _ScaledResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, loss_scale: Tensor) -> Any:
        ctx.dtype, ctx.loss_scale = value.dtype, loss_scale
        return value.to(torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
        # `out=` of the other way is not differentiable.
        if torch.is_grad_enabled():  # create_graph=True
            return multiplied_again(grad, ctx.loss_scale).to(ctx.dtype), None
        return scaled_and_rounded(grad, ctx.loss_scale, ctx.dtype), None


_PIECE = 2**18
"""The number of elements of an fp32 product that fits in a core's cache."""


def scaled_and_rounded(grad: Tensor, loss_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad` (fp32) times `loss_scale` in `dtype`, computed in fp32 and rounded once.

    The fp32 product is never in memory as a whole, because the gradient of the logits
    is the largest tensor of many training steps.
    """
    if compat.needs_plain_ops(grad):
        return (grad * loss_scale).to(dtype)
    if compat.is_distributed(grad):
        part = scaled_and_rounded(compat.own_memory(grad), loss_scale, dtype)
        return compat.with_memory(grad, part)
    low = torch.empty_like(grad, dtype=dtype)
    if grad.device.type != "cpu" or grad.numel() <= _PIECE:
        # Type promotion computes in fp32; a GPU kernel rounds as it writes to `low`.
        return torch.mul(grad, loss_scale, out=low)
    if not (grad.is_contiguous() and low.is_contiguous()):
        return low.copy_(grad * loss_scale)
    # A CPU kernel makes the fp32 product first, far slower than the cast alone unless
    # the product stays in a core's cache.
    pieces = zip(low.view(-1).split(_PIECE), grad.view(-1).split(_PIECE), strict=True)
    for piece, wide in pieces:
        piece.copy_(wide * loss_scale)
    return low


_apply_scaled_result = compat.direct_apply(_ScaledResult)


def scaled_result(value: Tensor, loss_scale: Tensor) -> Tensor:
    """`value` (low precision, any shape) in fp32, to be returned from the graph.

    The gradient is multiplied by `loss_scale` (0-dim fp32) as it enters the graph, and
    only then rounded: the backward of `scale_grad` of a cast, in one kernel.
    """
    return _apply_scaled_result(value, loss_scale)


def saturating_cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in `dtype`, with finite numbers clamped to the range of `dtype`.

    A mask filled with `torch.finfo(torch.float32).min` would become -inf in fp16 *and*
    in bf16 (whose largest number is a little below fp32's), and a row that is all -inf
    makes softmax NaN.  NaN and infinities that `value` already holds stay.
    """
    # A clamp before the cast: after it, infinities of the model's own could not be told
    # from numbers that the cast made infinite.
    limit = torch.finfo(dtype).max
    clamped = value.clamp(-limit, limit)
    return torch.where(value.isinf(), value, clamped).to(dtype)


# -- dtypes and layouts of whole calls -------------------------------------------------


Dtypes = tuple[torch.dtype | None, ...]
"""One dtype for each leaf of a result; None for a leaf that is no tensor."""


def dtypes_in(value: Any) -> Dtypes:
    """The dtype of `value`, or of each of its parts in order."""
    if isinstance(value, torch.Tensor):
        return (value.dtype,)
    return tuple(getattr(each, "dtype", None) for each in pytree.tree_leaves(value))


def with_dtypes(value: Any, dtypes: Sequence[torch.dtype | None]) -> Any:
    """`value`, each tensor in it cast to its dtype of `dtypes`; gradients flow back.

    Args:
        dtypes: as `dtypes_in` gives them, for a value with as many parts.
    """
    parts, structure = pytree.tree_flatten(value)
    cast = [
        part if dtype is None or not isinstance(part, torch.Tensor) else part.to(dtype)
        for part, dtype in zip(parts, dtypes, strict=True)
    ]
    return pytree.tree_unflatten(cast, structure)


class _LaidOut(torch.autograd.Function):
    """A copy in another memory format; the gradient is permuted back."""

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, to: torch.memory_format, back: torch.memory_format
    ) -> Tensor:
        ctx.back = back
        # `contiguous` would give `data` itself where one layout is the other, and a
        # Function that returns its input makes a view.
        return data.clone(memory_format=to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.contiguous(memory_format=ctx.back), None, None


_apply_laid_out = compat.direct_apply(_LaidOut)


def laid_out(
    data: Tensor, to: torch.memory_format, back: torch.memory_format
) -> Tensor:
    """A copy of `data` in memory format `to`, whose gradient comes in `back`.

    Args:
        data: four or five dimensions, any dtype.
        to, back: `torch.contiguous_format` and a format with the channels last, or the
            other way round.

    Example:
        >>> image = torch.zeros(1, 3, 2, 2)
        >>> laid_out(image, torch.channels_last, torch.contiguous_format).stride()
        (12, 1, 6, 3)
    """
    return _apply_laid_out(data, to, back)


# -- recurrent ops with their state in fp32 --------------------------------------------

_ATEN = torch.ops.aten
_LAYERS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
_CELLS = ("gru_cell", "lstm_cell")


def _with_fp32_state(op: compat.OpOverload) -> Callable[..., Any]:
    """A function for `op`, of a low input and low weights, `hx` and results fp32.

    `torch.autocast` has no rule for these ops on CPUs: under autocast their composite
    kernels run op by op, with low products and a sum, for the next state, that is as
    wide as the state.  Without autocast the kernels want all operands in one dtype, and
    would round the state at every step.

    An LSTM that one kernel of oneDNN's runs has a low state under autocast too.
    Autocast casts the input for each direction by itself, so that the gradients of both
    directions are summed in fp32: a bidirectional layer reads its input as wide as the
    input is.
    """
    names = compat.argument_names(op)
    at = names.index("params" if "params" in names else "w_ih")

    def run(*args: Any) -> Any:
        low = args[at] if isinstance(args[at], Tensor) else args[at][0]
        # With the cache on, the reads of one fp32 operand share a cast, and their
        # gradients are summed in low precision.
        with torch.autocast(low.device.type, low.dtype, cache_enabled=False):
            results = op(*args)
        # What autocast gives is not one dtype: a projection (`proj_size`) is a product,
        # and kernels for sequences of equal lengths give low results.  All code after
        # the op was captured for fp32 results.
        if isinstance(results, Tensor):
            return _as_fp32(results)
        return tuple(map(_as_fp32, results))

    name = compat.schema(op).name.removeprefix("aten::")
    name += "_data" if "batch_sizes" in names else ""
    run.__name__ = run.__qualname__ = f"{name}_fp32_state"
    return run


def _as_fp32(result: Tensor) -> Tensor:
    """A result in fp32; in an export by a cast whatever dtype the fake result has.

    Which kernel runs, and so the dtype of its results, is known when it runs.
    """
    if torch.compiler.is_exporting():
        return _ATEN._to_copy.default(result, dtype=torch.float32)  # type: ignore[no-any-return]
    return result.float()


WITH_FP32_STATE: Mapping[compat.OpOverload, Callable[..., Any]] = {
    op: _with_fp32_state(op)
    for op in (
        *(getattr(_ATEN, name).input for name in _LAYERS),
        *(getattr(_ATEN, name).data for name in _LAYERS),
        *(getattr(_ATEN, name).default for name in _CELLS),
    )
}
"""ATen op to the function that runs the op on a CPU with its state in fp32.

CUDA kernels take all operands in one dtype, under autocast too."""

STATE, BOTH_WAYS = "hx", "bidirectional"
"""The arguments that hold the state, in each of the ops, and whether a layer reads its
input, the first argument, for two directions."""

globals().update({run.__name__: run for run in WITH_FP32_STATE.values()})
"""Graphs, printed or pickled, call each function by its name in this file."""

_OPS = {function: op for op, function in WITH_FP32_STATE.items()}


def op_with_its_state(target: Any) -> Any:
    """The op that `target` runs with its state in fp32, or else `target` itself."""
    return _OPS.get(target, target)
