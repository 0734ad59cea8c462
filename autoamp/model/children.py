"""Captures modules of a converted model that are called by themselves.

A script may call `model.body(x)`, and a method that no graph can hold (one that logs,
calls `backward()`, or is private) calls modules too.  At its first call outside of the
model's captured calls such a module is given a `forward` of ours, as the model was.  It
runs under the model's engine, and so under the options, the record and the loss scale
of the model, which is the root that the paths of modules begin at.
"""

from __future__ import annotations

import threading
import weakref

from torch import nn

from autoamp import compat
from autoamp.capture.alike import STATE
from autoamp.capture.thread import THREAD, inside_a_call, inside_captured_code
from autoamp.model.candidates import caller_of, choose, is_aside
from autoamp.model.conversion import CONVERSIONS, Conversion, Watch
from autoamp.model.installed import install

_LOCK = threading.RLock()


def watch(model: nn.Module) -> None:
    """Has each module in a converted model captured once it is called by itself."""
    state: Conversion = model.__dict__[STATE]
    state.watch = _Watch(model, state)


def left_alone(model: nn.Module) -> list[nn.Module]:
    """Ends the watch over the modules in a model, or in a part of a model.

    Returns:
        Those of them that have been captured.
    """
    state: Conversion = model.__dict__[STATE]
    root = model if state.root is None else state.root
    of_root = root.__dict__.get(STATE)
    inside = {id(m) for m in compat.modules_of(model)} - {id(model)}
    if isinstance(of_root, Conversion) and of_root.watch is not None:
        compat.end_watch(of_root.watch, None if model is root else inside)
    found = [each.model for each in list(CONVERSIONS) if each.root is root]
    parts = [each for each in found if each is not None]
    return [each for each in parts if model is root or id(each) in inside]


class _Watch(Watch):
    """Hears of the calls of the modules in one converted model."""

    def __init__(self, model: nn.Module, state: Conversion) -> None:
        self._state = weakref.ref(state, lambda _: compat.end_watch(self))
        inside = set(map(id, compat.modules_of(model))) - {id(model)}
        compat.watch_calls(inside, id(model), self)

    def over(self, copied: nn.Module) -> None:
        """Has the modules in a copy of the model watched as well."""
        watch(copied)

    def __call__(self, module: nn.Module, is_off: bool) -> None:
        """Captures `module`, which is about to be called, if its call is a whole."""
        state = self._state()
        root = None if state is None else state.model
        if state is None or root is None or state.call is None:
            return
        if THREAD.off:
            state.call.engine.record.scaling.ledger.note_called()
            return
        # A region that a backward recomputes must run as in the forward.
        if inside_captured_code(is_off=is_off) or compat.inside_backward():
            return
        if state.call.engine.record.scaling.automatic and not inside_a_call():
            return  # the automatic mode sees this call itself
        if compat.hides_calls() or compat.inside_jit_trace():
            return
        if is_aside(module) or _is_called_in_another(module, root):
            return
        choice = choose(module)
        if choice.target is not None:
            _capture(choice.target, state, root)
        if choice.final:
            compat.end_calls([id(module)], self)


def _is_called_in_another(module: nn.Module, root: nn.Module) -> bool:
    """Whether a model that is not converted shares `module` with `root`, and calls it.

    A shallow copy of `root` is such a model.
    """
    caller = caller_of(module)
    if caller is None or any(each is root for each in compat.modules_of(caller)):
        return False
    return all(each is not caller for each in compat.modules_of(root))


def _capture(module: nn.Module, state: Conversion, root: nn.Module) -> None:
    """Has the calls of `module`, if it is in `root`, run under the engine of `root`."""
    named = compat.named_modules_of(root)
    path = next((path for path, each in named if each is module), "")
    with _LOCK:
        if not path or state.call is None or STATE in module.__dict__:
            return
        child = install(module)
        child.root = root
        of_class = child.previous is None
        child.call = state.call.of_child(path, type(module), of_class=of_class)
