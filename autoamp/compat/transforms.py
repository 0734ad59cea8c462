"""Backwards of ours under a transform of torch's, such as `vmap`.

Torch's rules of `vmap` for the backwards of norms want operands of one dtype.  A norm
that reads low data beside fp32 parameters has two, in a graph of ours as under
`torch.autocast`.  A batch of its gradients (`vmap` of `torch.autograd.grad`, `jacrev`)
would raise "expected scalar type BFloat16 but found Float".
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoamp.compat.backends import forward_mode, transforms_active
from autoamp.compat.gradients import inside_backward
from autoamp.compat.modes import any_autocast, autocast_off

_NORMS = (
    "batch_norm_backward",
    "cudnn_batch_norm_backward",
    "miopen_batch_norm_backward",
    "native_batch_norm_backward",
    "native_group_norm_backward",
    "native_layer_norm_backward",
)
_RULES = "FuncTorchBatched"
_HELD: list[torch.library.Library] = []
"""Held here: torch unregisters a library's kernels when the library is freed."""


@functools.cache
def mend_batched_norms() -> None:
    """Has the backwards of norms take batches of gradients, whatever their dtypes.

    Only calls on operands of several dtypes change, which torch refuses.
    """
    library = torch.library.Library("aten", "IMPL")
    _HELD.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a rule of torch's is replaced
        for name in _NORMS:
            op = getattr(torch.ops.aten, name).default
            try:
                rule = _in_one_dtype(op, torch.library.get_kernel(op, _RULES))
            except RuntimeError:  # torch has no such rule
                continue
            library.impl(name, rule, _RULES, with_keyset=True)


def _in_one_dtype(op: Any, torchs: Any) -> Callable[..., Any]:
    """Torch's rule of `op`, which widens operands of several dtypes to fp32 first."""
    names = [argument.name for argument in op._schema.arguments]
    data, weight = (names.index(name) for name in ("input", "weight"))

    def rule(keys: Any, *args: Any) -> Any:
        given = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        if len({each.dtype for each in given}) == 1:
            return torchs.call_boxed(keys, *args)
        wide = (a.float() if any(a is each for each in given) else a for a in args)
        found = torchs.call_boxed(keys, *wide)
        like = args[data], *(args[weight],) * (len(found) - 1)
        return tuple(
            each if each is None or one is None else each.to(one.dtype)
            for each, one in zip(found, like, strict=True)
        )

    return rule


def gradients_by_torch(
    function: Callable[..., Tensor], grad: Tensor, operands: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of a call made of torch's own ops, recorded where autograd records.

    Args:
        function: what is called, on `operands` in fp32.
        grad: the gradient of its result.
        operands: a tensor may be several of them.
    """
    recording = torch.is_grad_enabled()

    def again(*own: Tensor | None) -> Tensor:
        wide = [None if t is None else t.float() for t in own]
        return function(*wide).to(grad.dtype)

    with torch.enable_grad():
        if transforms_active():  # there no operand shows that it needs a gradient
            given = [t for t in operands if t is not None]

            def of_given(*own: Tensor) -> Tensor:
                rest = iter(own)
                return again(*(None if t is None else next(rest) for t in operands))

            found = iter(torch.func.vjp(of_given, *given)[1](grad))
            return [None if t is None else next(found) for t in operands]
        own = [None if t is None else t.view_as(t) for t in operands]
        needing = [t for t in own if t is not None and t.requires_grad]
        some = torch.autograd.grad(again(*own), needing, grad, create_graph=recording)
    found = iter(some)
    return [next(found) if t is not None and t.requires_grad else None for t in own]


def on_whole_batch(
    function: Callable[..., Tensor], grad: Tensor, *rest: Tensor | None
) -> Tensor:
    """`function(grad, *rest)`, element by element, of a batch of gradients too.

    What `is_grads_batched` gives hides the tensor that autograd records: an
    `autograd.Function` is to be called on that tensor.
    """
    if not torch._C._functorch.is_legacy_batchedtensor(grad):
        return function(grad, *rest)
    level = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    whole = torch._remove_batch_dim(grad, level, 1, 0)
    return torch._add_batch_dim(function(whole, *rest), 0, level)


def past_transforms(given: Any) -> contextlib.AbstractContextManager[Any] | None:
    """A region without transforms, for a checkpoint that is computed again inside one.

    A transform of a backward, as `vmap` of `torch.autograd.grad`, is active while the
    backward computes what a checkpoint has dropped, which no transform was told of.

    Args:
        given: all that the checkpoint computes with, nested at will.

    Returns:
        None where no transform is active, or one has wrapped something in `given`.
    """
    if not transforms_active() or not inside_backward():
        return None
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    for each in pytree.tree_leaves(given):
        if not isinstance(each, Tensor):
            continue
        if is_wrapped(each):
            return None
        if forward_mode() and forward_ad.unpack_dual(each).tangent is not None:
            return None
    return _without_transforms()


@contextlib.contextmanager
def _without_transforms() -> Iterator[None]:
    records: Any = forward_ad._set_fwd_grad_enabled
    with temporarily_clear_interpreter_stack(), records(False):
        yield


class attention_in_one_dtype(TorchFunctionMode):  # noqa: N801
    """A region in which attention under autocast has a backward in `torch.func`.

    Torch makes attention of plain products there, and forgets that autocast has cast
    their operands: the backward raises "expected scalar type BFloat16 but found Float".
    So the operands are cast here.  A whole layer, which calls attention out of reach,
    runs in fp32.
    """

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self._dtypes: dict[Any, torch.dtype] = {
            functional.scaled_dot_product_attention: low,
            functional.multi_head_attention_forward: torch.float32,
        }

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The call, under autocast unless it is one of attention."""
        kwargs, dtype = kwargs or {}, self._dtypes.get(function)
        if dtype is None or not any_autocast():
            return function(*args, **kwargs)

        def cast(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(dtype) if is_float else value

        args, kwargs = pytree.tree_map(cast, (args, kwargs))
        with autocast_off():
            return function(*args, **kwargs)
