"""Checks that a function of torch's calls the op in whose place it is called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.analyse.nodes import tensors_of
from autoamp.check.standin import where
from autoamp.errors import VerificationError

_KNOWN: dict[Any, bool] = {}
"""Whether a function calls the same ops, by the op, the function and the operands."""


def check_same_calls(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises where two graphs that differ in their targets alone run other ops.

    Args:
        after: `before` with functions of torch's in the place of ops.

    Raises:
        VerificationError: a function calls other ops than the op does, or the graphs
            differ otherwise.
    """
    pairs = zip(before.graph.nodes, after.graph.nodes, strict=True)
    for old, new in pairs:
        if _shown(old) != _shown(new):
            raise VerificationError(
                f"{where(new)} reads other operands", nodes=[old.name]
            )
        if old.target is new.target or old.op != "call_function":
            continue
        operands = [n.meta.get("val") for n in old.all_input_nodes]
        key = (old.target, new.target, *_shown(old)[1:2], *map(_kind, operands))
        if key not in _KNOWN:
            _KNOWN[key] = _calls(old) == (made := _calls(new)) and made is not None
        if not _KNOWN[key]:
            raise VerificationError(
                f"{where(new)} does not call {old.target}", nodes=[old.name]
            )


def forget() -> None:
    """Forgets which calls were made, as in a new process."""
    _KNOWN.clear()


def _shown(node: fx.Node) -> tuple[Any, ...]:
    """The literals of a call, with the operands in the places where they stand."""
    names: list[str] = []

    def placed(operand: fx.Node) -> str:
        names.append(operand.name)
        return "%"

    shown = repr(fx.map_arg((node.args, node.kwargs), placed))
    return node.name, shown, tuple(names)


def _kind(value: Any) -> Any:
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else type(value)


class _Heard(compat.CountingDispatch):
    """Notes each op that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.ops.append((func, repr([a for a in args if not isinstance(a, Tensor)])))
        return func(*args, **(kwargs or {}))


def _calls(node: fx.Node) -> list[Any] | None:
    """The ops that a call comes to on meta tensors; None where it cannot be made."""

    def empty(operand: fx.Node) -> Any:
        value = operand.meta.get("val")
        if not isinstance(value, Tensor):
            return compat.hint(value) if isinstance(value, torch.SymInt) else value
        sizes, strides = (
            [compat.hint(each) for each in found]
            for found in (value.shape, value.stride())
        )
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")

    try:
        # In inference mode and under autocast a function calls other ops.
        with (
            compat.on_real_numbers(),
            torch.inference_mode(False),
            compat.autocast_off(),
        ):
            args, kwargs = fx.map_arg((node.args, node.kwargs), empty)
            heard = _Heard()
            with heard:
                made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    kinds = [(t.dtype, t.shape, t.stride()) for t in tensors_of(made)]
    return [*heard.ops, kinds]
