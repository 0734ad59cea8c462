"""Finds the ops that a call comes to, in a trace or under autocast, on no real data."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._library import custom_ops
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import TorchDispatchMode

from autoamp.compat.modes.autocast import AutocastState, in_autocast


class Heard(NamedTuple):
    """The op a call comes to; `target` is None where the call returns its argument."""

    target: OpOverload | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _AnotherOpError(Exception):
    """The call comes to more than one op."""


class _Listening(ProxyTorchDispatchMode):
    """Takes the place of a trace for one call, and gives the op's known `result`."""

    def __init__(self, tracer: Any, result: Any) -> None:
        super().__init__(tracer, "real", pre_dispatch=True)
        self.result = result
        self.heard: Heard | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self.heard is not None:
            raise _AnotherOpError
        self.heard = Heard(func, args, kwargs or {})
        if isinstance(self.result, torch.Tensor):
            return self.result
        return (tuple if len(func._schema.returns) > 1 else list)(self.result)


def op_heard(call: Callable[[], Any], result: Any) -> Heard | None:
    """The one op that `call` comes to in a trace.

    The trace goes on as if `call` had not been made.  The answer is None where `call`
    comes to several ops, and where `call` does not pass on `result` as the op's result.

    Args:
        result: a fake tensor, or a list or tuple of some.
    """
    from torch._ops import _set_mode_pre_dispatch, unset_mode_pre_dispatch

    key = torch._C._TorchDispatchModeKey.PROXY
    mode: Any = unset_mode_pre_dispatch(key)
    if mode is None:  # no trace is running
        return None
    listening = _Listening(mode.tracer, result)
    try:
        _set_mode_pre_dispatch(listening)
        try:
            given = call()
        finally:
            unset_mode_pre_dispatch(key)
    except Exception:  # noqa: BLE001 (ours, or since the result is no such op's)
        return None
    finally:
        _set_mode_pre_dispatch(mode)
    if not _is_same(given, result):
        return None
    return listening.heard or Heard(None, (), {})


def _is_same(given: Any, result: Any) -> bool:
    if isinstance(result, torch.Tensor) or not isinstance(given, list | tuple):
        return given is result
    alike = len(given) == len(result)
    return alike and all(a is b for a, b in zip(given, result, strict=True))


class Passed(NamedTuple):
    """How the autocast kernel of an op calls the op again.

    Attributes:
        args: the arguments that the kernel gives to the op.
        given: the op's result inside the kernel.
        result: the kernel's result.
    """

    args: tuple[Any, ...]
    given: Any
    result: Any


def has_autocast_kernel(op: OpOverload, device: str) -> bool:
    """Whether an op has a kernel of its own for autocast on a device type."""
    key = _autocast_key(device)
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return key is not None and has(op.name(), key)


def registered_dtype(op: OpOverload, device: str) -> torch.dtype | None:
    """The dtype that `register_autocast` was given for an op; None where it was not.

    Torch keeps the dtype of a `custom_op` on its definition, and the dtype of any other
    op in the closure of a kernel written in Python.
    """
    definition = custom_ops.OPDEFS.get(op._schema.name)
    found = getattr(definition, "_autocast_dtype", {}).get(device)
    if found is None:
        key = getattr(torch._C.DispatchKey, _autocast_key(device) or "", None)
        kernel = None if key is None else op.py_kernels.get(key)
        if inspect.isfunction(kernel):
            found = inspect.getclosurevars(kernel).nonlocals.get("cast_inputs")
    return found if isinstance(found, torch.dtype) else None


def passed_under_autocast(
    op: OpOverload, args: Sequence[Any], state: AutocastState
) -> Passed | None:
    """How an op's autocast kernel calls the op, on fake tensors.

    The answer is None where the kernel does not call the op exactly once, or fails.
    """
    watch = _Watch(op)
    try:
        with contextlib.ExitStack() as stack:
            for each in (torch.no_grad(), in_autocast(state), watch):
                stack.enter_context(each)
            result = op(*args)
    except Exception:  # noqa: BLE001 (the kernel is the user's)
        return None
    if len(watch.calls) != 1:
        return None
    ((called, given),) = watch.calls
    return Passed(called, given, result)


def _autocast_key(device: str) -> str | None:
    try:
        return f"Autocast{torch._C._dispatch_key_for_device(device)}"
    except RuntimeError:  # no such device type
        return None


class _Watch(TorchDispatchMode):
    """Notes the arguments and the result of each call of one op."""

    def __init__(self, op: OpOverload) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.calls: list[tuple[tuple[Any, ...], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is self.op:
            self.calls.append((args, result))
        return result
