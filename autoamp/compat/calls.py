"""Notices that a module is called, at no cost to modules of which nobody wants to know.

Each call of a module reads its attribute `_compiled_call_impl`, in which
`Module.compile()` puts compiled code.  While modules are watched, a descriptor of ours
stands there in the class: it gives what the class gave, which is None.  Nothing is
written on a module, so that copies, pickles and guards of Dynamo stay as they are.  A
torch that does not read the attribute notices no calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from autoamp.compat.dynamo.frames import never_a_graph_by_itself
from autoamp.compat.gradients import never_captured

_NAME = "_compiled_call_impl"

_WATCHED: dict[int, Callable[[nn.Module], None]] = {}
"""For the `id` of a module, the listener that is told of a call before it is made."""


class _Read:
    """Reads as None; it does not hide the code that an instance holds itself."""

    def __get__(self, module: nn.Module | None, owner: object = None) -> None:
        # A constant for Dynamo, which then reads no more of this function.
        if torch.compiler.is_dynamo_compiling():
            return
        told = _WATCHED.get(id(module))
        if told is not None and module is not None:
            _tell(told, module)


@never_captured
def _tell(told: Callable[[nn.Module], None], module: nn.Module) -> None:
    told(module)


never_a_graph_by_itself(_Read.__get__)
_READ = _Read()


def watch_calls(ids: Iterable[int], told: Callable[[nn.Module], None]) -> None:
    """Has `told` hear of each call of the modules with these `id`s, but not in a trace.

    A module has one listener, the last.
    """
    _WATCHED.update(dict.fromkeys(ids, told))
    if _WATCHED and vars(nn.Module).get(_NAME, _READ) is None:
        setattr(nn.Module, _NAME, _READ)


def end_watch(ids: Iterable[int], told: Callable[[nn.Module], None]) -> None:
    """Has `told` hear no more of the calls of these modules."""
    for key in ids:
        if _WATCHED.get(key) is told:
            _WATCHED.pop(key, None)
    if not _WATCHED and vars(nn.Module).get(_NAME) is _READ:
        setattr(nn.Module, _NAME, None)
