"""The state of one graph between two passes: the graph, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.analyse.classified import Classified
from autoamp.analyse.facts import Facts
from autoamp.calibrate.speeds import device_for
from autoamp.pass_options import PassOptions
from autoamp.place.assign import Assignment
from autoamp.place.cost import PriceModel, Prices
from autoamp.place.devices import Device, device_with, main_device
from autoamp.rewrite.edge.scale_edge import Edge
from autoamp.rewrite.emitted import Cast
from autoamp.rewrite.rewritten import Rewritten
from autoamp.trace.normalise import Normalised


@dataclass(frozen=True)
class Setting:
    """Where and how a rewritten graph is to run.

    Attributes:
        free_weights: whether the caller hands casts of weights in, at no price.
        own_kernels: whether the graph runs without a compiler, and so with kernels of
            ours where torch has none.
        own_ops: whether the graph may call ops of autoamp's (`autoamp::attention`).
        price: gives the prices; by default the roofline of the device.
        device: the device that the graph is to run on; by default the one it is on.
        recorded: the figures of devices, as a report has them that placements must
            match; a device of these is taken in the place of the one here.
        makes_code: whether the graph's code is made, which a graph that is only looked
            at does without.
    """

    free_weights: bool = False
    own_kernels: bool = False
    own_ops: bool = False
    price: PriceModel | None = None
    device: Device | None = None
    recorded: Sequence[Mapping[str, Any]] = ()
    makes_code: bool = True


@dataclass(frozen=True)
class Plan:
    """The options and the setting of one run of the passes, which no pass changes.

    Attributes:
        options: the options of the conversion.
        low: the compute dtype.
        setting: where and how the graph is to run.
        scaled: whether gradients are scaled at the edge of the graph.
    """

    options: PassOptions
    low: torch.dtype
    setting: Setting
    scaled: bool = False


@dataclass(frozen=True)
class Work:
    """A graph on its way through the list of passes.

    A pass takes a `Work` and returns another one; the fields below are filled in the
    order of the list.

    Attributes:
        plan: the options and the setting, which no pass changes.
        gm: the graph as it is now.
        fake_mode: the mode of the fake tensors in the graph's metadata.
        before: the ATen graph that facts and placement are about.
        left: names of nodes that the next pass is to leave as they are.
        given_up: nodes that stay fp32 after a failed check, each to the reason.
        left_as_they_are: calls of sub-graphs that stay fp32, each to the reason.
        bodies: the records of sub-graphs (checkpointed regions, branches, loops).
        fused: whether kernels replaced something.
        facts, classified, prices, assignment: the findings and decisions so far.
        casts: the casts inserted, in graph order.
        rewritten: the record of all that, once the casts are in.
        weights: positions of the inputs that are weights with a copy.
        edge: the inputs that loss scaling adds to the graph.
        layouts: the memory formats of the copies; empty if all are the weights'.
        code: the graph whose code is run; None where that is `gm`'s own.
        notes: sentences for the report, about passes that retreated.
        seconds: time taken by each pass, filled as the passes run.
    """

    plan: Plan
    gm: fx.GraphModule
    fake_mode: compat.FakeTensorMode | None = None
    inputs: tuple[Any, ...] = ()
    before: fx.GraphModule | None = None
    left: frozenset[str] = frozenset()
    given_up: Mapping[str, str] = field(default_factory=dict)
    left_as_they_are: Mapping[str, str] = field(default_factory=dict)
    bodies: tuple[Rewritten, ...] = ()
    fused: bool = False
    facts: Facts | None = None
    classified: Classified | None = None
    prices: Prices | None = None
    assignment: Assignment | None = None
    casts: tuple[Cast, ...] = ()
    rewritten: Rewritten | None = None
    weights: tuple[int, ...] = ()
    edge: Edge = field(default_factory=Edge)
    layouts: tuple[torch.memory_format, ...] = ()
    code: fx.GraphModule | None = None
    notes: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def options(self) -> PassOptions:
        return self.plan.options

    @property
    def device(self) -> Device:
        """The device that the graph is to run on."""
        setting, low, here = self.plan.setting, self.plan.low, main_device(self.gm)
        return (
            setting.device
            or device_with(setting.recorded, here.type, low)
            or device_for(here, low, calibrate=self.options.calibrate)
        )

    @property
    def device_type(self) -> str | None:
        """The type of the device that was asked for; None for the graph's own."""
        device = self.plan.setting.device
        return None if device is None else device.type

    @property
    def normalised(self) -> Normalised:
        """The ATen graph with its fake mode."""
        assert self.fake_mode is not None
        return Normalised(self.gm, self.inputs, self.fake_mode)
