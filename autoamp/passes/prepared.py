"""One captured graph made ready to run, for every model that runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoamp.passes.record import Edge, Rewritten


@dataclass(eq=False)
class Prepared:
    """One graph Dynamo captured, made ready to run for every model that runs it.

    Attributes:
        rewritten: the pass's result, or None where it failed.
        gm: the graph that is run, with weight copies as extra inputs.
        run: the function that runs the graph, compiled by the backend; of a graph that
            no compiler gets, the first run is another's (`first_run`).
        problem: why the graph runs unconverted; "" where it is converted.
        notes: further sentences about the graph for the report.
        weights: positions of the inputs that are weights with a copy.
        read_wide: positions of the inputs that are read otherwise than by a copy.
        layouts: the memory formats of the copies; empty if all are the weights'.
        edge: the inputs that loss scaling adds to the graph.
        sizes: positions of the inputs that are symbolic sizes.
        own_autocast: whether the graph was captured in a `torch.autocast` of the
            script's own, which is on whenever the graph runs.
    """

    rewritten: Rewritten | None
    gm: fx.GraphModule
    run: Callable[..., Any]
    problem: str = ""
    notes: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    read_wide: tuple[int, ...] = ()
    layouts: tuple[torch.memory_format, ...] = ()
    edge: Edge = field(default_factory=Edge)
    sizes: tuple[int, ...] = ()
    own_autocast: bool = False
