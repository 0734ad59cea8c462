"""Decides which of the modules that a script calls are converted."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autoamp import compat, foreign
from autoamp.model.conversion import conversion_of, inside_wrappers
from autoamp.model.eligible import parameters_of
from autoamp.model.methods import computing_methods
from autoamp_heat import is_no_model


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
    # A lone layer is not searched for: a script may call thousands of them.
    alone = _is_lone_layer(target)
    engine = foreign.left_to(target) or (not alone and foreign.left_to_outer(target))
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
        held: Any = inside_wrappers(module)
        if compat.is_compiled_module(held):
            held = compat.uncompiled(held)
        elif fsdp is not None and isinstance(held, fsdp.FullyShardedDataParallel):
            held = held.module
        if held is module or not isinstance(held, nn.Module):
            return module
        module = held


_DEEPEST = 16
"""How many frames are searched for the model whose method calls a module."""


def caller_of(module: nn.Module) -> nn.Module | None:
    """The model whose `forward`, or other method that computes, calls its `module`.

    A script that calls `model.encode(x)` or `model.forward(x)` does not call the model
    itself; the script called the outermost such model on Python's stack.
    """
    found = None
    for frame, owner in _callers():
        if isinstance(owner, nn.Module) and owner is not module:
            name = frame.f_code.co_name
            computes = name == "forward" or name in computing_methods(owner)
            if computes and any(each is module for each in compat.modules_of(owner)):
                found = owner
    return found


def is_aside(module: nn.Module) -> bool:
    """Whether a metric calls its `module`, or a model that is still being made does.

    What is measured is measured in fp32, and so is a table that a model's `__init__`
    stores in a buffer, or the shape that it asks a part of its own for.
    """
    for frame, owner in _callers():
        if owner is module:
            continue
        if is_no_model(owner):
            return True
        making = frame.f_code.co_name == "__init__" and isinstance(owner, nn.Module)
        if making and any(each is module for each in compat.modules_of(owner)):
            return True
    return False


def _callers() -> Iterator[tuple[types.FrameType, Any]]:
    """The frames on Python's stack, each with the first argument of its function."""
    frame: types.FrameType | None = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame is None:
            return
        code = frame.f_code
        if code.co_argcount:
            yield frame, frame.f_locals.get(code.co_varnames[0])
        frame = frame.f_back


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
    held = [cell.cell_contents for cell in forward.__closure__ if _is_full(cell)]
    return any(each is module for each in held) and any(
        each.opname == "STORE_ATTR" and each.argval == "forward"
        for each in dis.get_instructions(forward)
    )


def _is_full(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # the variable has no value yet
        return False
    return True


def _is_lone_layer(module: nn.Module) -> bool:
    """Whether `module` is one of torch's own layers.

    A plain function or method calls such a layer, so that the layer has a graph of its
    own, with fp32 inputs and outputs: its conversion seldom pays.
    """
    alone = len(compat.modules_of(module)) == 1
    return alone and type(module).__module__.startswith("torch.nn.")
