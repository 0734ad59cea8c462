"""The options of commands that plan for a mesh of devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from autoamp_cli.problem import Problem

OPTIONS = (
    click.option("--mesh", metavar="AXES", help="Plan many devices: dp=64,tp=8,pp=4."),
    click.option("--node", type=int, metavar="N", help="Devices of a node; default 8."),
    click.option("--network", type=int, metavar="GBIT", help="Gb/s each; default 400."),
    click.option("--microbatches", type=int, metavar="N", help="Default four a stage."),
)


def with_mesh_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of a mesh to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def mesh_options(given: dict[str, Any]) -> dict[str, Any]:
    """Takes the options of a mesh out of `given`; those that were not given are left.

    Raises:
        Problem: options of a mesh are given without a mesh.
    """
    names = ("mesh", "node", "network", "microbatches")
    found = {name: given.pop(name) for name in names}
    found = {name: value for name, value in found.items() if value is not None}
    if found and "mesh" not in found:
        raise Problem(f"--{next(iter(found))} needs --mesh, as --mesh dp=64,tp=8,pp=4")
    return found


def planned_for(
    model: str, *, batch: int | None = None, sequence: int | None = None, **wanted: Any
) -> Any:
    """The plan of a model by its name or its MODULE:FACTORY, on one device or many."""
    from autoamp.tools.plan import Asked, plan_of
    from autoamp.tools.plan_named import named_model, names_a_model

    asked = Asked(**wanted)
    if names_a_model(model):
        make: Any = partial(
            named_model,
            model,
            batch=batch or 1,
            sequence=sequence,
            trains=not asked.infer,
        )
    elif batch or sequence:
        raise Problem(
            f"{model} makes its own arguments: --batch and --sequence are for models "
            "of transformers"
        )
    else:
        make = _maker_of_factory(model)
    return plan_of(make, asked)


def _maker_of_factory(factory: str) -> Any:
    import torch

    from autoamp_cli.factory import made_by

    def make() -> Any:
        with torch.device("meta"):
            made = made_by(factory)
        return made.model, (made.args, made.kwargs)

    return make
