"""A model's own code as one flat graph, captured by `torch.export`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ask.examine import twin_of
from autoamp.capture.thread import disabled
from autoamp.errors import ExportError
from autoamp.printable import class_name, printable_line


@dataclass(frozen=True)
class Captured:
    """A graph with one input for each value in the arguments of a call.

    Attributes:
        gm: takes the values in the order in which torch flattens the arguments, and
            returns a tuple of values; parameters and buffers are its attributes.
        values: the values of the call given.
        fakes: for each value its fake tensor, whose sizes are symbols where any size
            is meant.
        program: what `torch.export` made of the model.
        signature: the signature of the model's `forward`.
    """

    gm: fx.GraphModule
    values: tuple[Any, ...]
    fakes: tuple[Any, ...]
    program: torch.export.ExportedProgram
    signature: inspect.Signature


def captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dynamic_shapes: Any,
) -> Captured:
    """The graph of a call of `model` in fp32, without gradients.

    Raises:
        ExportError: `torch.export` cannot make one graph of the model.
    """
    twin = twin_of(model)
    try:
        with disabled(), torch.no_grad(), compat.autocast_off():
            program = torch.export.export(
                twin, args, dict(kwargs), dynamic_shapes=dynamic_shapes
            )
    except Exception as error:
        raise ExportError(_cannot(model, error)) from error
    gm = compat.flat_graph(program)
    values = tuple(pytree.tree_leaves((args, _in_order(program, kwargs))))
    inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    fakes = tuple(
        fake if isinstance(value, torch.Tensor) else value
        for fake, value in zip(inputs, values, strict=True)
    )
    return Captured(gm, values, fakes, program, inspect.signature(twin.forward))


def _in_order(
    program: torch.export.ExportedProgram, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The keyword arguments in the order in which the program takes them."""
    _, by_name = program.example_inputs or ((), {})
    return {name: kwargs[name] for name in by_name}


def _cannot(model: nn.Module, error: Exception) -> str:
    """Says that torch cannot export a model, where, and what to do."""
    text = printable_line(f"{type(error).__name__}: {error}", 1500)
    return (
        f"{class_name(model)} cannot be exported, because torch.export cannot make one "
        f"graph of it: {text}. autoamp.convert() takes models in parts and has no such "
        "limit; to export, change the line that the message names, or export the part "
        "of the model that torch.export takes (torch.export.draft_export lists all "
        "that is in the way)"
    )
