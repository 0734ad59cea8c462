"""Notices calls of watched modules, at no cost to all other modules.

Each call of a module reads its attribute `_compiled_call_impl`, in which
`Module.compile()` puts compiled code.  While modules are watched, a descriptor of ours
stands there in the class: it gives what the class gave, which is None.  Nothing is
written on a module, so that copies, pickles and guards of Dynamo stay as they are.  A
torch that does not read the attribute notices no calls.

Of a module whose calls are to be surrounded the descriptor gives a function, which
torch then calls in the place of the module's own code.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as module_code

from autoamp.compat.backends import uncompiled
from autoamp.compat.frames import never_a_graph_by_itself
from autoamp.compat.gradients import never_captured
from autoamp.compat.modes import frame_callback
from autoamp.compat.tensors import modules_of
from autoamp.compat.traced_calls import end_traced, hear_traced

_NAME = "_compiled_call_impl"

Listener = Callable[[nn.Module, bool], None]
"""Hears of a module, and whether Dynamo is switched off where it is called."""

_WATCHED: dict[int, Listener] = {}
"""For the `id` of a module, the listener that is told of a call before it is made."""

_GROWING: dict[int, Listener] = {}
"""For the `id` of a module, the listener for modules that it is given from now on."""


class Around(Protocol):
    """Surrounds the calls of modules; a compiler that records a call leaves it out."""

    def begin(self, module: nn.Module) -> Any:
        """Is called before a call from outside; None asks that its end be not told."""

    def end(self, begun: Any) -> None:
        """Is called with what `begin` gave, also after a call that raises."""


_AROUND: dict[int, Around] = {}
"""For the `id` of a module, what surrounds its calls."""


class _Thread(threading.local):
    """What surrounds the innermost surrounded call that this thread is in."""

    around: Around | None = None


_THREAD = _Thread()

_HOOK: list[Any] = []
"""Torch's handle of the hook that hears of new modules, while there are listeners."""


class _Read:
    """Reads as None, or as the code that surrounds a call.

    It does not hide the code that an instance holds itself.
    """

    def __get__(
        self, module: nn.Module | None, owner: object = None
    ) -> Callable[..., Any] | None:
        # A constant for Dynamo, which then reads no more of this function.
        if torch.compiler.is_dynamo_compiling():
            return None
        # By `id`: nothing is written on the module, and nothing keeps it alive.
        told = _WATCHED.get(id(module))
        if told is not None and module is not None:
            _tell(told, module, frame_callback() is None)
        if _AROUND and module is not None:
            around = _AROUND.get(id(module)) or _AROUND.get(id(uncompiled(module)))
            # Torch reads the attribute twice for a call, with one answer in a thread.
            if around is not None and around is not _THREAD.around:
                return functools.partial(_surrounded, around, module)
        return None


def _surrounded(around: Around, module: Any, /, *args: Any, **kwargs: Any) -> Any:
    begun, outer = around.begin(uncompiled(module)), _THREAD.around
    _THREAD.around = around
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        _THREAD.around = outer
        if begun is not None:
            around.end(begun)


@never_captured
def _tell(told: Listener, module: nn.Module, is_off: bool) -> None:
    told(module, is_off)


def _tell_of_traced(module: nn.Module) -> None:
    told = _WATCHED.get(id(module))
    if told is not None:
        told(module, False)


never_a_graph_by_itself(_Read.__get__)
never_a_graph_by_itself(_surrounded)
_READ = _Read()


def watch_calls(inside: Iterable[int], around: int, told: Listener) -> None:
    """Has `told` hear of each call of the modules in a model, made or traced by Dynamo.

    Modules that the model is given later are heard of too.  A module has one listener,
    the last.

    Args:
        inside: the `id`s of the modules in the model.
        around: the `id` of the model, of whose own calls `told` does not hear.
    """
    known = dict.fromkeys(inside, told)
    _WATCHED.update(known)
    _GROWING.update(known | {around: told})
    _begin_reading()
    hear_traced(_tell_of_traced)
    if not _HOOK:
        _HOOK.append(module_code.register_module_module_registration_hook(_given))


def surround_calls(ids: Iterable[int], around: Around) -> None:
    """Has `around` surround each call of the modules with these `id`s."""
    _AROUND.update(dict.fromkeys(ids, around))
    _begin_reading()


def end_surround(around: Around) -> None:
    """Has `around` surround no calls any more."""
    # Not `list(_AROUND.items())`: it makes tuples one by one, so that a collection may
    # free a model in between, whose end changes the table.
    for key in [key for key, each in _AROUND.copy().items() if each is around]:
        _AROUND.pop(key, None)
    _end_reading()


def _begin_reading() -> None:
    # Where another tool has put something there, or torch has no such attribute, the
    # class is left alone.
    if vars(nn.Module).get(_NAME, _READ) is None:
        setattr(nn.Module, _NAME, _READ)


def _end_reading() -> None:
    if not (_WATCHED or _AROUND) and vars(nn.Module).get(_NAME) is _READ:
        setattr(nn.Module, _NAME, None)


def _given(module: nn.Module, _: str, new: nn.Module | None) -> None:
    """Hears that `module` is given a module `new`, before it holds it."""
    told = _GROWING.get(id(module))
    if told is not None and isinstance(new, nn.Module):
        found = dict.fromkeys(map(id, modules_of(new)), told)
        _WATCHED.update(found)
        _GROWING.update(found)


def end_calls(ids: Iterable[int], told: Listener) -> None:
    """Has `told` hear no more of the calls of these modules."""
    for key in ids:
        if _WATCHED.get(key) is told:
            _WATCHED.pop(key, None)
    _end_reading()


def end_watch(told: Listener, ids: Iterable[int] | None = None) -> None:
    """Has `told` hear of nothing more.

    Args:
        ids: the `id`s of the modules it hears no more of; None for all.
    """
    if ids is None:
        ids = [key for key, each in _GROWING.copy().items() if each is told]
    ids = [*ids]
    for key in ids:
        if _GROWING.get(key) is told:
            _GROWING.pop(key, None)
    if not _GROWING and _HOOK:
        _HOOK.pop().remove()
        end_traced()
    end_calls(ids, told)
