"""The record of one graph: what the passes are told, find out, decide and write.

`Rewritten` goes through the list of passes; `Prepared` is its end, ready to run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autoamp import compat
from autoamp.messages import printable_line
from autoamp.passes.decide.assign import Assignment
from autoamp.passes.decide.cost import Prices
from autoamp.passes.decide.devices import Device
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.options import PassOptions
from autoamp.passes.see.facts import Facts
from autoamp.passes.see.nodes import tensors_of
from autoamp.passes.see.normalise import Normalised
from autoamp.passes.write.emitted import Cast

_LATER: Any = None
"""What a field holds until its pass has run."""


@dataclass(frozen=True)
class Setting:
    """Where and how a rewritten graph is to run.

    Attributes:
        free_weights: whether the caller hands casts of weights in, at no price.
        own_kernels: whether the graph runs without a compiler, and so with kernels of
            ours where torch has none.
        device: the device that the graph is to run on; by default the one it is on.
        makes_code: whether the graph's code is made, which a graph that is only looked
            at does without.
        scaled: whether gradients are scaled at the edge of the graph.
    """

    free_weights: bool = False
    own_kernels: bool = False
    device: Device | None = None
    makes_code: bool = True
    scaled: bool = False

    @property
    def device_type(self) -> str | None:
        """The type of the device that was asked for; None for the graph's own."""
        return None if self.device is None else self.device.type


class Sums(NamedTuple):
    """Counts of a rewritten graph: low float ops, all float ops, and casts."""

    low: int
    ops: int
    casts: int


@dataclass(frozen=True)
class Edge:
    """The edge of a scaled graph, as the code that calls the graph has to know it.

    Attributes:
        devices: each device has a `loss_scale`, an `inv_loss_scale` and a `found_inf`
            among the extra inputs at the end.
        written: positions of inputs that the graph writes results to.
        exits: positions of the inputs that gradients leave through.
    """

    devices: tuple[torch.device, ...] = ()
    written: tuple[int, ...] = ()
    exits: tuple[int, ...] = ()


@dataclass(frozen=True)
class Rewritten:
    """One graph on its way through the passes, and everything that they found out.

    A pass takes a record and returns another one; the fields are filled in the order of
    the list of passes.  Reports read the record as it was once the casts were in.

    Attributes:
        options, low, setting: the options, the compute dtype, and where the graph is
            to run, which no pass changes.
        gm: the graph as it is now.
        fake_mode: the mode of the fake tensors of the pass; a graph may hold values of
            another mode beside, of attributes that Dynamo had met in an earlier trace.
        inputs: the inputs that the graph was captured with.
        bodies: the records of sub-graphs (checkpointed regions, branches, loops).
        given_up: nodes that a failed check keeps in fp32, each to the reason.
        left_as_they_are: calls of sub-graphs that stay fp32, each to the reason.
        seconds: time taken by each pass, filled as the passes run.
        left: names of nodes that the next pass is to leave as they are.
        notes: sentences for the report, about passes that retreated.
        fused: whether kernels replaced something.
        before: the ATen graph that facts and placement are about.
        facts, classified, prices, assignment: the findings and decisions.
        casts: the casts inserted, in graph order.
        rewritten: the record of all that, once the casts are in.
        weights: positions of the inputs that are weights with a copy.
        edge: the inputs that loss scaling adds to the graph.
        layouts: the memory formats of the copies; empty if all are the weights'.
        code: the graph whose code is run; None where that is `gm`'s own.
    """

    options: PassOptions
    low: torch.dtype
    setting: Setting
    gm: fx.GraphModule
    fake_mode: compat.FakeTensorMode = _LATER
    inputs: tuple[Any, ...] = ()
    bodies: tuple[Rewritten, ...] = ()
    given_up: Mapping[str, str] = field(default_factory=dict)
    left_as_they_are: Mapping[str, str] = field(default_factory=dict)
    # `replace` hands the same table on, so that all passes of a run add to one.
    seconds: dict[str, float] = field(default_factory=dict)
    left: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    fused: bool = False
    before: fx.GraphModule = _LATER
    facts: Facts = _LATER
    classified: Classified = _LATER
    prices: Prices = _LATER
    assignment: Assignment = _LATER
    casts: tuple[Cast, ...] = ()
    rewritten: Rewritten | None = None
    weights: tuple[int, ...] = ()
    edge: Edge = field(default_factory=Edge)
    layouts: tuple[torch.memory_format, ...] = ()
    code: fx.GraphModule | None = None

    @property
    def normalised(self) -> Normalised:
        """The graph with its fake mode, as tracing gives it."""
        return Normalised(self.gm, self.inputs, self.fake_mode)

    # `cached_property` writes to `__dict__`, which a frozen dataclass permits.
    @functools.cached_property  # thirty models that share a graph each ask
    def sums(self) -> Sums:
        """The counts of this graph and its bodies together."""
        every = [*self.with_bodies()]
        decisions = [d for each in every for d in each.assignment.decisions.values()]
        low = sum(decision.low for decision in decisions)
        return Sums(low, len(decisions), sum(len(each.casts) for each in every))

    @property
    def written(self) -> list[int]:
        """The positions of the inputs that the graph, or a body of it, writes to."""
        memories = set().union(*(each.facts.mutated for each in self.with_bodies()))
        return [
            at
            for at, node in enumerate(self.before.graph.find_nodes(op="placeholder"))
            for tensor in tensors_of(node.meta.get("val"))
            if compat.storage_id(tensor) in memories
        ]

    def with_bodies(self) -> Iterator[Rewritten]:
        """Yields this record, then the records of all bodies, nested ones included."""
        yield self
        for body in self.bodies:
            yield from body.with_bodies()

    def retreats(self) -> list[str]:
        """One line for each error of a check, with the ops kept fp32 because of it."""
        errors: dict[str, list[str]] = {}
        for each in self.with_bodies():
            for name, why in each.given_up.items():
                fact = each.facts.nodes.get(name)
                place = (fact.source or fact.module or name) if fact else name
                errors.setdefault(why, []).append(place)
        found = []
        for why, places in errors.items():
            where = ", ".join(dict.fromkeys(places[:4]))
            more = f" and {len(places) - 4} more" if len(places) > 4 else ""
            found.append(printable_line(f"{why} (ops at {where}{more})"))
        return found


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
