"""Finds the op of torch that a call comes to, without running any op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode


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
