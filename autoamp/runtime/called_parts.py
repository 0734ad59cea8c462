"""Modules that a script calls by themselves: whether and how they are captured.

A script may call `model.body(x)`, and a method such as `model.encode(x)` calls modules
too.  At its first call outside of the model's captured calls such a module is given a
`forward` of ours, as the model was.  The module runs under the model's engine, and so
under the options, the record and the loss scale of the model, which is the root that
the paths of modules begin at.
"""

from __future__ import annotations

import dis
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoamp import compat
from autoamp.messages import class_name
from autoamp.runtime.compile_backend import is_ours, traced_for_us
from autoamp.runtime.conversion import (
    CONVERSIONS,
    REPLACED,
    Conversion,
    conversion_of,
    install,
    uninstall,
)
from autoamp.runtime.eligible import parameters_of
from autoamp.runtime.entry import Entry
from autoamp.runtime.no_model import is_no_model
from autoamp.runtime.program import STATE, THREAD, inside_a_call, inside_captured_code
from autoamp.training import foreign_engines


class Choice(NamedTuple):
    """The decision on a module that was called from outside all other modules.

    Attributes:
        target: the module to convert, which is the called module or, for a wrapper, the
            module inside; or None.
        only_if_it_pays: whether the target is converted under do-no-harm even if the
            options switch that off.
        transparent: whether the module has no weights to convert, so that a decision is
            made on each module that it calls.
        final: whether the decision holds for later calls.
        left_to: why the module is left to another library's engine, or "".
        no_model: whether the module, and what it calls, runs in fp32 as it is no model.
    """

    target: nn.Module | None = None
    only_if_it_pays: bool = False
    transparent: bool = False
    final: bool = True
    left_to: str = ""
    no_model: bool = False


def choose(module: nn.Module) -> Choice:
    """The decision on the outermost module that is being called."""
    target = inside(module)
    if is_no_model(target):
        return Choice(no_model=True)
    if isinstance(target, torch.jit.ScriptModule):
        return Choice()
    # One of torch's own layers, called alone, has a graph of its own with fp32 inputs
    # and outputs: its conversion seldom pays.  No engine is searched for around it,
    # because a script may call thousands of them.
    is_torchs = type(target).__module__.startswith("torch.nn.")
    alone = is_torchs and len(compat.modules_of(target)) == 1
    engine = foreign_engines.engine_of(target, around=not alone)
    if engine:
        return Choice(left_to=engine)
    if _replaces_itself(target):
        return Choice(transparent=True, final=False)
    parameters = parameters_of(target)
    if any(is_lazy(p) for p in parameters):
        return Choice(final=False)  # its first call makes its weights
    if _is_asynchronous(target) or not any(p.is_floating_point() for p in parameters):
        return Choice(transparent=True)  # a loss, a metric, a transform
    if conversion_of(target) is not None:
        return Choice()  # the model was converted, or declined, before
    return Choice(target, only_if_it_pays=alone)


def inside(module: nn.Module) -> nn.Module:
    """The module inside all wrappers of `module`."""
    # FSDP is looked up and not imported: without an import no model is sharded.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    while True:
        held: Any = compat.uncompiled(compat.inside_wrappers(module))
        if fsdp is not None and isinstance(held, fsdp.FullyShardedDataParallel):
            held = held.module
        if held is module or not isinstance(held, nn.Module):
            return module
        module = held


_DEEPEST = 16
"""How many frames are searched for the model whose method calls a module."""


def caller_of(module: nn.Module) -> nn.Module | None:
    """The model whose `forward`, or other method, calls its `module`.

    A script that calls `model.encode(x)` or `model.forward(x)` does not call the model
    itself; the script called the outermost such model on Python's stack.
    """
    owners = [owner for _, owner in _methods_around(module)]
    return owners[-1] if owners else None


def _methods_around(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The methods of models that hold `module` and are calling it, innermost first."""
    for code, owner in compat.callers(_DEEPEST):
        if isinstance(owner, nn.Module) and owner is not module:
            name = code.co_name
            # A function that is given the model, such as `train(model)`, is no method.
            is_own = hasattr(type(owner), name) and not hasattr(nn.Module, name)
            holds = (each is module for each in compat.modules_of(owner))
            if (name == "forward" or is_own) and any(holds):
                yield name, owner


def is_aside(module: nn.Module) -> bool:
    """Whether a metric calls its `module`, or a model that is still being made does.

    What is measured is measured in fp32, and so is a table that a model's `__init__`
    stores in a buffer, or the shape that it asks a part of its own for.
    """
    for code, owner in compat.callers(_DEEPEST):
        if owner is module:
            continue
        if is_no_model(owner):
            return True
        making = code.co_name == "__init__" and isinstance(owner, nn.Module)
        if making and any(each is module for each in compat.modules_of(owner)):
            return True
    return False


def _is_asynchronous(module: nn.Module) -> bool:
    """Whether a call of `module` only starts its work (a coroutine or generator).

    A decision is made on each module that the work calls later.
    """
    forward = getattr(type(module), "forward", None)  # TorchScript has none
    return (
        inspect.iscoroutinefunction(forward)
        or inspect.isgeneratorfunction(forward)
        or inspect.isasyncgenfunction(forward)
    )


def _replaces_itself(module: nn.Module) -> bool:
    """Whether the instance's `forward` puts another `forward` there when it runs.

    Lightning sends `training_step` through DDP by such a `forward`.  A conversion would
    be undone by the call itself, and the model's own `forward` is called inside.
    """
    forward = vars(module).get("forward")
    if not isinstance(forward, types.FunctionType) or not forward.__closure__:
        return False
    # A look at the held values comes first, because few such functions hold a module.
    contents = [cell.cell_contents for cell in forward.__closure__ if _is_full(cell)]
    return any(each is module for each in contents) and any(
        each.opname == "STORE_ATTR" and each.argval == "forward"
        for each in dis.get_instructions(forward)
    )


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the variable has no value yet
        return False
    return True


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


class _Watch:
    """Hears of the calls of the modules in one converted model."""

    def __init__(self, model: nn.Module, state: Conversion) -> None:
        self._state = weakref.ref(state, lambda _: compat.end_watch(self))
        inside = set(map(id, compat.modules_of(model))) - {id(model)}
        compat.watch_calls(inside, id(model), self)

    def over(self, copied: nn.Module) -> None:
        """Has the modules in a copy of the model watched as well."""
        watch(copied)

    def again(self, module: nn.Module) -> None:
        """Hears once more of the calls of a module whose `forward` was ours."""
        compat.watch_calls([id(module)], id(module), self)

    def __call__(self, module: nn.Module, is_off: bool) -> None:
        """Captures `module`, which is about to be called, if its call is a whole.

        A part is captured anew after another `forward` has taken the place of ours; of
        the model itself it is said that the call runs past us.

        Args:
            is_off: whether Dynamo is switched off there.
        """
        state = self._state()
        if state is None or state.call is None:
            return
        record, root = state.call.engine.record, state.model
        # What Dynamo traces in a region of `disabled()` may run again outside of it.
        if THREAD.off and not compat.is_traced():
            record.scaling.ledger.note_called()
            return
        if root is None:
            record.note(REPLACED)
            return
        # A region that a backward recomputes must run as in the forward.
        if inside_captured_code(is_off=is_off) or compat.inside_backward():
            return
        if compat.is_traced() and _is_traced_whole():
            return
        if record.scaling.automatic and not inside_a_call():
            return  # the automatic mode sees this call itself
        if compat.hides_calls() or compat.inside_jit_trace():
            return
        if is_aside(module) or _is_called_in_another(module, root):
            return
        of_part = module.__dict__.get(STATE)
        if isinstance(of_part, Conversion) and of_part.root and not of_part.bound:
            uninstall(module)
        choice = choose(module)
        if choice.target is not None:
            capture_part(choice.target, root)
        if choice.final:
            compat.end_calls([id(module)], self)


def _is_traced_whole() -> bool:
    """Whether the call that Dynamo traces is a part of what is rewritten, or is to be.

    Our backends rewrite the graph that the call is traced into, and where a compilation
    must stay one graph, the converted module around the call has decided for its parts.
    """
    backend, _ = compat.tracing_backend()
    if traced_for_us() or is_ours(compat.unwrapped_backend(backend)):
        return True
    return any(isinstance(owner, Entry) for _, owner in compat.traced_callers())


def _is_called_in_another(module: nn.Module, root: nn.Module) -> bool:
    """Whether a model that is not converted shares `module` with `root`, and calls it.

    A shallow copy of `root` is such a model.
    """
    caller = caller_of(module)
    if caller is None or any(each is root for each in compat.modules_of(caller)):
        return False
    return all(each is not caller for each in compat.modules_of(root))


def capture_part(module: nn.Module, root: nn.Module) -> bool:
    """Has the calls of `module` run under the engine of the converted model `root`.

    Returns:
        Whether `module` is in `root`, and had not been captured.
    """
    state: Conversion = root.__dict__[STATE]
    named = compat.named_modules_of(root)
    path = next((path for path, each in named if each is module), "")
    with _LOCK:
        if not path or state.call is None or STATE in module.__dict__:
            return False
        # In a call of the model a graph break was the cause, and has been told of.
        if not inside_a_call():
            for name, owner in _methods_around(module):
                state.call.engine.record.left_in_method(f"{class_name(owner)}.{name}")
        child = install(module)
        # The paths of modules, and so `keep=` and the report, begin at the root.
        child.root = root
        of_class = child.previous is None
        child.call = state.call.of_child(path, type(module), of_class=of_class)
    return True
