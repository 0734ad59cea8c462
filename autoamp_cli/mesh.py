"""The options of commands that plan for a mesh of devices."""

from __future__ import annotations

from collections.abc import Callable
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
