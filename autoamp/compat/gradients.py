"""Scales, checks and differentiates gradients; finds hooks, losses and optimizers."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from autoamp.compat.frames import set_frames_action
from autoamp.compat.modes import on_real_numbers
from autoamp.compat.tensors import modules_of


@contextlib.contextmanager
def saved_tensors_hooks_off() -> Iterator[None]:
    """A region that the caller's `saved_tensors_hooks` do not see.

    A checkpoint round a model's call has such hooks and counts the saved tensors, but
    tensors that tracing saves are not the model's.
    """
    hooks: Any = torch._C._autograd
    taken: list[tuple[Any, Any]] = []
    while (pair := hooks._top_saved_tensors_default_hooks(True)) is not None:
        taken.append(pair)
        hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(taken):
            hooks._push_saved_tensors_default_hooks(*pair)


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Two functions that pack and unpack the tensors that autograd saves."""


def hooks_of_caller() -> Hooks | None:
    """The innermost `saved_tensors_hooks` that the caller is in."""
    hooks: Any = torch._C._autograd
    return hooks._top_saved_tensors_default_hooks(True)  # type: ignore[no-any-return]


def takes_hooks() -> bool:
    """Whether `saved_tensors_hooks` may be set: in most transforms they may not."""
    hooks: Any = torch._C._autograd
    transforms = torch._C._are_functorch_transforms_active()
    return not transforms and bool(hooks._saved_tensors_hooks_is_enabled())


_F = TypeVar("_F", bound=Callable[..., Any])


def never_captured(function: _F) -> _F:
    """`function`, which Dynamo leaves to Python together with everything it calls.

    Where a model's forward runs a backward, for forces say, Dynamo would otherwise
    capture our functions in that backward.
    """
    set_frames_action(cast(Any, function).__code__, "SKIP", "SKIP")
    return function


def direct_apply(
    function: type[torch.autograd.Function],
) -> Callable[..., torch.Tensor]:
    """`function.apply` less the argument checks that only functorch transforms need.

    The checks take a third of the call's time; `apply` itself is used while such a
    transform is active.
    """
    never_captured(function.backward)
    apply: Callable[..., torch.Tensor] = function.apply
    checks = torch._C._are_functorch_transforms_active
    base: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]

    def direct(*args: Any) -> torch.Tensor:
        return apply(*args) if checks() else base(*args)

    return direct


@functools.cache
def casts_gradients() -> bool:
    """Whether autograd gives a node the gradient in the dtype the node was made with.

    `validate_outputs` of torch/csrc/autograd/engine.cpp does so, before gradients of
    several uses are summed.
    """
    try:
        with on_real_numbers(), torch.enable_grad():
            one = torch.ones(1, dtype=torch.float32, device="cpu", requires_grad=True)
            low = torch.ones(1, dtype=torch.bfloat16, device="cpu")
            # A sum of ones in bf16 stops at 256.
            uses = [seen_as(one, low) for _ in range(300)]
            (grad,) = torch.autograd.grad(uses, one, [low] * 300)
            return grad.dtype == torch.float32 and grad.item() == 300
    except (RuntimeError, TypeError):
        return False


def seen_as(tensor: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """`copy`, whose gradient flows to `tensor` in the dtype of `tensor`.

    A view of `tensor` gets the memory of `copy`: no function of Python's runs in the
    backward.  Only where `casts_gradients()`.

    Args:
        copy: of the shape and strides of `tensor`, in another dtype.
    """
    # The node of the view has noted the dtype of `tensor`; its memory is the copy's.
    use = tensor.view_as(tensor)
    use.data = copy
    return use


unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiplies a list of fp32 gradients by a 0-dim factor in place, and checks them.

It takes the list, one fp32 element and the factor, all on one device, and sets the
element to 1 where a gradient is not finite.  `torch.amp.GradScaler` uses it too."""


def infinities_to_nan_(grads: Sequence[torch.Tensor]) -> None:
    """Makes the infinities in fp32 `grads`, of one device, NaN, without a wait."""
    # x + 0 (x - x), in one op for all: x itself where x is finite, and NaN where it is
    # infinite, since an infinity less itself is NaN.
    torch._foreach_lerp_([*grads], [*grads], 0.0)


def clear_flag(device: torch.device | str = "cpu") -> torch.Tensor:
    """A flag for an overflow, one fp32 element, that is not set."""
    return torch.zeros(1, dtype=torch.float32, device=device)


def check_finite(grad: torch.Tensor, found_inf: torch.Tensor) -> None:
    """Sets `found_inf` (one fp32 element) to 1 where `grad` is not finite.

    `grad` is as in `any_not_finite`.
    """
    found_inf.masked_fill_(~torch.isfinite(numbers_of(grad)).all(), 1.0)


def numbers_of(grad: torch.Tensor) -> torch.Tensor:
    """The numbers of a gradient, which may be sparse, as a dense tensor.

    For a DTensor only this rank's own part is given.
    """
    if type(grad) is not torch.Tensor and hasattr(grad, "to_local"):
        grad = grad.to_local()
    if grad.layout == torch.strided:
        return grad
    if grad.layout == torch.sparse_coo:
        # Duplicates are summed, as an optimizer will: their sum may overflow too.
        return grad.coalesce().values()
    return grad.values()


@torch.no_grad()
def any_not_finite(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """One fp32 element, 1 where any of `grads`, all on one device, is not finite.

    The gradients may have any dtype and any layout, and nothing is written to them.
    Nothing waits for a device.
    """
    device = grads[0].device
    plain = all(map(_is_plain, grads))
    parts = [
        part for part in (grads if plain else map(numbers_of, grads)) if part.numel()
    ]
    if not parts:
        return clear_flag(device)
    if device.type != "cpu":
        # Largest magnitudes cannot overflow, as sums can; `item()` would wait.
        magnitudes = torch._foreach_norm(parts, math.inf)
        largest = torch.stack([each.float() for each in magnitudes])
        return (~largest.isfinite()).any().float().reshape(1)
    for part in _summed_at_once(parts):
        # A sum takes a fifteenth of the time of `isfinite` on a CPU; finite terms may
        # overflow in it, so that one that is not finite has its terms looked at.
        if not math.isfinite(abs(part.sum().item())):
            found = clear_flag(device)
            check_finite(part, found)
            if found.item():
                return found
    return clear_flag(device)


def _is_plain(grad: torch.Tensor) -> bool:
    return type(grad) is torch.Tensor and grad.layout is torch.strided


def _summed_at_once(parts: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The numbers of `parts`: each large tensor, and all small ones of a dtype as one.

    Sixty vectors of 768 numbers take 0.01 ms together, and 0.07 ms one by one.
    """
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in parts:
        if part.numel() > _SMALL:
            yield part
        else:
            small.setdefault(part.dtype, []).append(part.flatten())
    for each in small.values():
        yield torch.cat(each)


_SMALL = 2**14
"""Tensors of no more numbers than these are summed together."""


update_scale = torch._amp_update_scale_
"""Moves a dynamic loss scale once, in place on the device, as GradScaler does.

The tensors are the scale (fp32), the count of clean steps (int32) and `found_inf`
(fp32), all 0-dim.  The scale never grows to infinity.
"""


def take_any_gradient(param: torch.Tensor) -> None:
    """Has leaf `param` take gradients of any dtype."""
    param.grad_dtype = None


def widen_gradients(param: torch.Tensor) -> RemovableHandle:
    """Has backwards sum the gradients of half-precision leaf `param` up in fp32.

    A `param.grad` that is there is cast.  The handle takes the hook away that casts the
    first gradient of a sum.
    """
    _widen(param)
    _Ours.count += 1
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(_widen)
    # Optimizers that collect gradients in hooks are to compute with fp32 ones.  (Torch
    # goes through the order of insertion, which `move_to_end` leaves as it is.)
    hooks: Any = param._post_accumulate_grad_hooks
    others = [(key, hook) for key, hook in hooks.items() if key != handle.id]
    hooks.clear()
    hooks.update([(handle.id, _widen), *others])
    return handle


def _widen(param: torch.Tensor) -> None:
    grad = param.grad
    if grad is not None and grad.dtype in (torch.float16, torch.bfloat16):
        param.grad = grad.float()


def keep_gradients_narrow(param: torch.Tensor) -> None:
    """Has leaf `param` hold gradients of its own dtype; one that is there is cast."""
    # Torch refuses a `grad_dtype` other than that of a gradient which is there.
    grad, param.grad = param.grad, None
    param.grad_dtype = param.dtype
    param.grad = None if grad is None else grad.to(param.dtype)


backward_id = torch._C._current_graph_task_id
"""A number that tells the backward pass that is running from all others."""


def at_backward_end(callback: Callable[[], None]) -> None:
    """Has `callback` be called when the running backward has ended without an error."""
    # FSDP2 ends its reductions by the same queue.
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def receives_gradient(leaf: torch.Tensor) -> bool:
    """Whether the running backward computes the gradient of `leaf`, or may do so."""
    if not leaf.requires_grad:
        return False
    with torch.enable_grad():  # `get_gradient_edge` takes twice as long
        use = leaf.view_as(leaf).grad_fn
    return use is None or _is_reached(use.next_functions[0][0])


def leaves_that_receive(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The leaves behind `nodes` of autograd's graph that get gradients in this pass."""
    seen: dict[int, Any] = {}
    left = [node for node in nodes if node is not None]
    while left:
        node = left.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node  # kept, since ids are of use only while objects live
        leaf = getattr(node, "variable", None)
        if leaf is None:
            left += [each for each, _ in node.next_functions if each is not None]
        elif _is_reached(node):
            yield leaf


def _is_reached(node: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # Of a leaf that `autograd.grad` was asked for torch gives no answer: "A leaf
        # node was passed to _will_engine_execute_node".
        return True


def largest_magnitude(grad: torch.Tensor) -> torch.Tensor | None:
    """The largest magnitude in `grad`, 0-dim fp32, without a wait; NaN if one is NaN.

    None for a batch of gradients, and for other layouts than dense.
    """
    part: Any = grad.detach() if grad.requires_grad else grad
    if type(part) is not torch.Tensor and hasattr(part, "to_local"):
        part = part.to_local()
    if type(part) is not torch.Tensor or part.layout != torch.strided:
        return None
    functorch = torch._C._functorch
    if functorch.is_batchedtensor(part) or functorch.is_legacy_batchedtensor(part):
        return None
    count = part.numel()
    if not count:
        return None
    if count <= _SMALL:  # one op
        largest: torch.Tensor = torch.linalg.vector_norm(part, math.inf)
        return largest.float()
    # On a CPU an infinity norm of many numbers takes six times as long.
    low, high = torch.aminmax(torch.view_as_real(part) if part.is_complex() else part)
    return torch.maximum(-low, high).float()


def written_in(node: Any) -> list[str]:
    """The stack of calls, outermost first, that made node `node` of autograd's graph.

    Each entry is `File "model.py", line 12, in forward`, a line end, and the line.  The
    list is empty unless `torch.autograd.set_detect_anomaly` was on.
    """
    metadata = getattr(node, "metadata", None)
    return list(metadata.get("traceback_", ())) if isinstance(metadata, dict) else []


def optimizers_and_scalers() -> tuple[
    list[torch.optim.Optimizer], list[torch.amp.GradScaler]
]:
    """Every optimizer there is, and every GradScaler that is switched on.

    The search looks at all objects of the process, which takes tens of milliseconds.
    """
    optimizers, scalers = [], []
    # By type: `isinstance` raises ReferenceError on a dead weak proxy.
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer):
            optimizers.append(each)
        elif issubclass(type(each), torch.amp.GradScaler) and each.is_enabled():
            scalers.append(each)
    return optimizers, scalers


def models_of_weights(params: Iterable[torch.Tensor]) -> list[nn.Module]:
    """The modules that hold any of `params` and are inside no other module.

    The search looks at all objects of the process, as `optimizers_and_scalers` does.
    """
    ids = {id(p) for p in params}
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    # By `__dict__`: an object met before `nn.Module.__init__` has run has none.
    inside = {
        id(part)
        for each in modules
        for part in each.__dict__.get("_modules", {}).values()
    }
    outermost = [m for m in modules if id(m) not in inside and "_modules" in m.__dict__]
    return [m for m in outermost if any(id(p) in ids for p in m.parameters())]


def scaler_uses(scaler: torch.amp.GradScaler) -> int:
    """A number that grows with the first `scaler.scale` and every `scaler.update`.

    The first `scale` makes the tensor with the loss scale, and each `update` writes to
    that tensor.
    """
    scale: torch.Tensor | None = scaler._scale
    return 0 if scale is None else 1 + int(scale._version)


_SCALER_STEPS = frozenset(
    f.__code__
    for f in (torch.amp.GradScaler.step, torch.amp.GradScaler._maybe_opt_step)
)


def stepped_by_grad_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an enabled GradScaler is calling `optimizer.step` right now.

    A fused optimizer is handed `found_inf`.  For any other, GradScaler is among the
    callers' frames, after the wrappers of a scheduler, a profiler and ourselves.
    """
    if getattr(optimizer, "found_inf", None) is not None:
        return True
    frame = sys._getframe(1)
    for _ in range(10):
        if frame.f_code in _SCALER_STEPS:
            scaler = frame.f_locals.get("self")
            return scaler is None or bool(scaler.is_enabled())
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def inside_backward() -> bool:
    """Whether this thread runs a backward pass (a region is being recomputed)."""
    return backward_id() != -1


HOOKS = tuple(
    name for name in vars(nn.Module()) if name.endswith("_hooks") and "dict" not in name
)
"""Names of the attributes of a module that hold hooks of its calls and gradients."""

_EVERYWHERE: list[Any] = [getattr(nn.modules.module, f"_global{n}") for n in HOOKS]
"""The dictionaries in which torch keeps hooks on all modules."""


class _Ours:
    count = 0  # hooks of ours; a count lost between threads costs another search


def hook_gradient(tensor: torch.Tensor, hook: Callable[..., Any]) -> None:
    """Registers a hook of ours, called with the gradient of `tensor`."""
    _Ours.count += 1
    tensor.register_hook(hook)


def hook_node(node: Any, hook: Callable[..., Any]) -> None:
    """Registers a hook of ours, called before node `node` of autograd's graph."""
    _Ours.count += 1
    node.register_prehook(hook)


def hook_after_node(node: Any, hook: Callable[..., Any]) -> None:
    """Registers a hook of ours, called after node `node` of autograd's graph.

    The hook is given the gradients that the node gave, and those that it was given.
    """
    _Ours.count += 1
    node.register_hook(hook)


def hooks_of_others() -> int:
    """How many hooks others have registered so far."""
    return RemovableHandle.next_id - _Ours.count


def hooks_everywhere() -> bool:
    """Whether there is a hook on all modules."""
    return any(_EVERYWHERE)


def has_hooks(model: nn.Module) -> bool:
    """Whether `model` or any module inside it has a hook."""
    return any(any(map(vars(module).get, HOOKS)) for module in modules_of(model))


def step_hooks(optimizer: Any) -> tuple[OrderedDict[int, Any], OrderedDict[int, Any]]:
    """The hooks before and after an optimizer's steps, as the optimizer finds them."""
    return optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks


def set_hooks_after_step(optimizer: Any, hooks: OrderedDict[int, Any]) -> None:
    """Has an optimizer look up `hooks` after its step."""
    optimizer._optimizer_step_post_hooks = hooks


def mark_stepped(optimizer: Any) -> None:
    """Sets the mark without which `LRScheduler` warns of a step it has not seen."""
    optimizer._opt_called = True
