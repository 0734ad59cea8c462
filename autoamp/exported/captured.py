"""A model's own code as one flat graph, captured by `torch.export`."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ask.examine import twin_of
from autoamp.capture.thread import disabled
from autoamp.errors import ExportError
from autoamp.model.kept import left_as_it_is
from autoamp.printable import class_name, printable_line


@dataclass(frozen=True)
class Call:
    """A call of a model, for which the model is exported.

    Attributes:
        args, kwargs: the arguments.
        dynamic_shapes: the sizes that may change, as for `torch.export.export`.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dynamic_shapes: Any = None

    def export(self, model: nn.Module) -> torch.export.ExportedProgram:
        """The program of `model` in fp32 or as written, without gradients."""
        with torch.no_grad(), compat.autocast_off(), warnings.catch_warnings():
            # Recurrent layers of torch's own set a list of their weights anew.
            warnings.filterwarnings("ignore", r"The tensor attributes .*_flat_weights")
            return torch.export.export(
                model,
                self.args,
                dict(self.kwargs),
                dynamic_shapes=self.dynamic_shapes,
            )

    def results(self, model: nn.Module) -> list[Any]:
        """The flat results of the call, which changes neither model nor arguments."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.clone, (self.args, dict(self.kwargs))
        )
        with left_as_it_is(model), torch.no_grad(), compat.autocast_off():
            return list(pytree.tree_leaves(model(*args, **kwargs)))


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


def captured(model: nn.Module, call: Call) -> Captured:
    """The graph of a call of `model` in fp32, without gradients.

    Raises:
        ExportError: `torch.export` cannot make one graph of the model.
    """
    twin = twin_of(model)
    try:
        with disabled():
            program = call.export(twin)
    except Exception as error:
        raise ExportError(_cannot(model, error)) from error
    gm = compat.flat_graph(program)
    kwargs = _in_order(program, call.kwargs)
    values = tuple(pytree.tree_leaves((call.args, kwargs)))
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
    told = str(error).strip().partition("\n\n")[0].partition("\nCaused by")[0]
    text = printable_line(f"{type(error).__name__}: {told}", 800).rstrip(".")
    line = _users_line(error)
    return (
        f"{class_name(model)} cannot be exported, because torch.export cannot make one "
        f"graph of it: {text}{f' (at {line})' if line else ''}. autoamp.convert() "
        "takes models in parts and has no such limit; to export, change that line, or "
        "export the part of the model that torch.export takes "
        "(torch.export.draft_export lists all that is in the way)"
    )


def _users_line(error: Exception) -> str:
    """The innermost line on the way to an error that is neither torch's nor ours."""
    apart = (
        *(str(Path(torch.__file__).parent), str(Path(__file__).parents[1])),
        sysconfig.get_path("stdlib") + "/",
    )
    frames = traceback.extract_tb(error.__traceback__)
    for frame in reversed(frames):
        if not frame.filename.startswith((*apart, "<")):
            where = f"{frame.filename}:{frame.lineno}: {frame.line}"
            return printable_line(where, 300)
    return ""
