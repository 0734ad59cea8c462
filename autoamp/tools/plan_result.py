"""`Plan` and `MeshPlan`, the answers of `autoamp.plan`: their figures and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoamp.messages import bytes_text, seconds_text
from autoamp.printed import Line, Table
from autoamp.tools.results import Result

_PEAK = (
    "The peak is the most memory held at one time. It is not the sum of the lines "
    "above: activations are freed while gradients are made, and temporary values "
    "count. It leaves out temporary values of the optimizer, the libraries of the "
    "device and the allocator's reserves."
)
_ASSUMED = (
    "Assumed: tp's collectives are waited for; DDP reduces gradients beside the last "
    "backward; FSDP2 gathers and reduces beside the computation; stages run one "
    "forward and one backward in turn. Links are counted at their data sheets' "
    "speed: times are an order of magnitude."
)
_SHORT = {"torch.autocast": "autocast", "autoamp, FSDP2": "+ FSDP2"}


@dataclass(frozen=True)
class PlannedWay:
    """One way to run the model.

    Attributes:
        name: "fp32", "torch.autocast" or "autoamp".
        seconds: the predicted time of a step: forward, backward and optimizer.
        weights: bytes of weights and buffers, a tied weight once.
        gradients: bytes of all gradients.
        optimizer: bytes of the state that the optimizer keeps between steps.
        saved: bytes of activations that the forward keeps for the backward.
        copies: bytes of low copies of weights.
        peak: the most bytes held at one time in a step.  It is not the sum of the
            figures above: activations are freed while gradients are made, and
            temporary values count.
    """

    name: str
    seconds: float | None
    weights: int
    gradients: int
    optimizer: int
    saved: int
    copies: int
    peak: int


@dataclass(frozen=True, repr=False)
class _Planned(Result):
    """The facts that a plan for one device and one for a mesh both tell."""

    model: str
    device: str
    hardware: str
    memory: int | None
    precision: str
    optimizer: str
    parameters: int
    samples: int | None
    tokens: int | None

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<autoamp.{name} of {self.model}, predicted for {self.hardware}>"

    def _batch(self) -> list[str]:
        counts = {"samples": self.samples, "tokens": self.tokens}
        return [f"{count:,} {unit}" for unit, count in counts.items() if count]

    def _memory_rows(
        self, held: Sequence[PlannedWay], copies: str
    ) -> Iterator[list[str]]:
        """A row for each kind of bytes that some way holds, and for what fits."""
        sizes = {
            "weights": [each.weights for each in held],
            "gradients": [each.gradients for each in held],
            "optimizer state": [each.optimizer for each in held],
            "saved activations": [each.saved for each in held],
            copies: [each.copies for each in held],
            "peak memory": [each.peak for each in held],
        }
        for title, numbers in sizes.items():
            if any(numbers):
                yield [title, *map(bytes_text, numbers)]
        if self.memory is not None:
            fits = ["yes" if each.peak <= self.memory else "no" for each in held]
            yield [f"fits {bytes_text(self.memory)}", *fits]


@dataclass(frozen=True, repr=False)
class Plan(_Planned):
    """Predicted time and memory of a step, for a device that this machine may lack.

    `print(plan)` shows a table of 80 columns, and `plan.to_json()` writes the figures.

    Attributes:
        model: the class of the model.
        device: the device that times are predicted for, "cuda:sm_80".
        hardware: the hardware whose figures are used, "A100 SXM4 80 GB"; or the
            device's description where the table names no product.
        memory: bytes of memory of the hardware; None if unknown.
        precision: the compute dtype of `torch.autocast` and autoamp.
        trains: whether a step has a backward and an optimizer.
        optimizer: the class of the optimizer, or "no optimizer".
        parameters: the number of elements of all weights.
        samples, tokens: samples and tokens of a step; None if the call has none.
        graphs: how many graphs were captured; the predicted time covers only these.
        ways: fp32, torch.autocast and autoamp, in this order.
        notes: sentences on parts of the model that the figures leave out.
    """

    trains: bool
    graphs: int
    ways: tuple[PlannedWay, ...]
    notes: tuple[str, ...]

    def way(self, name: str) -> PlannedWay:
        """One of the ways by its name."""
        return next(each for each in self.ways if each.name == name)

    def fits(self, way: PlannedWay) -> bool | None:
        """Whether the peak of a way fits the memory; None if the memory is unknown."""
        return None if self.memory is None else way.peak <= self.memory

    def per_second(self, way: PlannedWay) -> float | None:
        """Tokens a second of a way; samples a second if a step has no tokens."""
        count = self.tokens or self.samples
        return count / way.seconds if count and way.seconds else None

    def document(self) -> dict[str, Any]:
        """The figures that `to_json` writes."""
        found = super().document()
        for way, row in zip(self.ways, found["ways"], strict=True):
            row["fits"], row["per_second"] = self.fits(way), self.per_second(way)
        return found

    def parts(self) -> Iterator[Line | Table]:
        """The sentences and tables of `print(plan)`."""
        yield Line(f"autoamp plan: {self.model}, {_large(self.parameters)} parameters")
        work = f"training with {self.optimizer}" if self.trains else "inference"
        yield Line(", ".join([work, *self._batch()]))
        yield Line(f"predicted for {self.hardware}, compute dtype {self.precision}")
        yield Table(["", *(way.name for way in self.ways)], [*self._rows()])
        yield from map(Line, (_PEAK, *self.notes))

    def _rows(self) -> Iterator[list[str]]:
        seconds = [way.seconds for way in self.ways if way.seconds is not None]
        if len(seconds) == len(self.ways):
            work = "time of a step" if self.trains else "time of a call"
            yield [work, *map(seconds_text, seconds)]
        speeds = [speed for speed in map(self.per_second, self.ways) if speed]
        if len(speeds) == len(self.ways):
            unit = "tokens" if self.tokens else "samples"
            yield [f"{unit} a second", *(f"{speed:,.0f}" for speed in speeds)]
        yield from self._memory_rows(self.ways, "low copies of weights")


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind in one step.

    Attributes:
        axis: "dp", "tp" or "pp".
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "send".
        phase: "forward" or "backward", of the step that sends.
        dtype: the dtype of what is sent.
        count: how many there are.
        wire: bytes that the device sends in all of them.
        link: the link that they are counted on.
        seconds: predicted time of all of them, one after another.
    """

    axis: str
    kind: str
    phase: str
    dtype: str
    count: int
    wire: int
    link: str
    seconds: float


@dataclass(frozen=True)
class Stage(PlannedWay):
    """One device of one stage of a mesh, with the bytes that it holds.

    Attributes:
        name: "first", "middle" or "last"; "only" where there is one stage.
        seconds: predicted time of the ops of one micro-batch, forward and backward.
        saved: bytes of activations of all micro-batches that are under way.
        copies: bytes of low copies of weights, or of weights gathered at one time.
        layers: how many layers the stage has.
    """

    layers: int


@dataclass(frozen=True)
class MeshWay:
    """One way to run the model on the mesh.

    Attributes:
        name: "fp32", "torch.autocast", "autoamp" or "autoamp, FSDP2".
        seconds: predicted time of a step.
        compute: the part in which the slowest stage computes.
        within_layers: the part in which tp's collectives are waited for.
        exposed: the part in which other communication is waited for.
        bubble: the part in which the slowest stage waits for other stages.
        optimizer_step: the part of the optimizer and of the refresh of low copies.
        stages: figures of the first, a middle and the last stage.
        transfers: what one device of the slowest stage sends in a step.
    """

    name: str
    seconds: float
    compute: float
    within_layers: float
    exposed: float
    bubble: float
    optimizer_step: float
    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]

    @property
    def fullest(self) -> Stage:
        """The stage with the highest peak."""
        return max(self.stages, key=lambda stage: stage.peak)


@dataclass(frozen=True)
class Scale:
    """The mesh with another number of replicas.

    Attributes:
        devices: the number of devices of the mesh.
        mesh: the mesh, as text.
        microbatches: micro-batches of a step.
        tokens: tokens that all devices train on in a step; None if there are none.
        ways: the ways on this mesh.
    """

    devices: int
    mesh: str
    microbatches: int
    tokens: int | None
    ways: tuple[MeshWay, ...]

    def rates(self) -> list[str]:
        """Tokens a second of each way, in thousands or millions where many."""
        return [_rate((self.tokens or 0) / way.seconds) for way in self.ways]


@dataclass(frozen=True, repr=False)
class MeshPlan(_Planned):
    """A training step on a mesh of devices, predicted without any of them.

    `print(plan)` shows tables of 80 columns, and `plan.to_json()` writes the figures.

    Attributes:
        model: the class of the model.
        device, hardware, memory: as for `Plan`.
        precision: the compute dtype.
        optimizer: the class of the optimizer.
        parameters: the number of elements of all weights of the model.
        node, network: devices of a node, and Gb/s of a device's network.
        samples, tokens: of one micro-batch of one replica; None if the call has none.
        layers: the number of repeated layers; 0 if none were found.
        linear: whether the figures are those of small depths, extrapolated.
        rewritten: whether autoamp's graphs are rewritten; False: they run under
            `torch.autocast`.
        here: the four ways on the mesh.
        scales: the same for other numbers of devices.
        notes: sentences on what was found and assumed.
    """

    node: int
    network: int
    layers: int
    linear: bool
    rewritten: bool
    here: Scale
    scales: tuple[Scale, ...]
    notes: tuple[str, ...]

    @property
    def ways(self) -> tuple[MeshWay, ...]:
        """The four ways on the mesh."""
        return self.here.ways

    def way(self, name: str) -> MeshWay:
        """One of the ways by its name."""
        return next(each for each in self.ways if each.name == name)

    def fits(self, way: MeshWay) -> bool | None:
        """Whether a way fits the memory; None if the memory is unknown."""
        return None if self.memory is None else way.fullest.peak <= self.memory

    def parts(self) -> Iterator[Line | Table]:
        """The sentences and tables of `print(plan)`."""
        names = [_SHORT.get(way.name, way.name) for way in self.ways]
        batch = ", ".join(self._batch()) or "a call"
        size = f"{self.parameters / 1e9:.3g} billion parameters"
        yield Line(f"autoamp plan: {self.model}, {size}")
        devices = f"{self.here.devices:,} x {self.hardware} ({self.here.mesh})"
        yield Line(f"{devices}, {self.node} a node, {self.network} Gb/s each")
        work = f"training with {self.optimizer}, compute dtype {self.precision}"
        yield Line(f"{work}, {self.here.microbatches} micro-batches of {batch}")
        yield Line("")
        yield Table(["one device", *names], [*self._device_rows()])
        yield Line("")
        header = ["sent in a step", "", "link", "count", "bytes", "time"]
        yield Table(header, [*_sent_rows(self.ways, names)], numbers=3)
        yield Line("")
        yield Table(["devices", "", *names], [*self._scale_rows()], numbers=2)
        yield from map(Line, ("", _ASSUMED, *self.notes))

    def _device_rows(self) -> Iterator[list[str]]:
        ways = self.ways
        parts = {
            "  computing": [way.compute for way in ways],
            "  waiting for tp": [way.within_layers for way in ways],
            "  waiting for dp and pp": [way.exposed for way in ways],
            "  waiting for stages": [way.bubble for way in ways],
            "  optimizer": [way.optimizer_step for way in ways],
        }
        yield ["time of a step", *(seconds_text(way.seconds) for way in ways)]
        for title, seconds in parts.items():
            if any(seconds):
                yield [title, *map(seconds_text, seconds)]
        if self.tokens:
            yield ["tokens a second", *self.here.rates()]
        stages = [way.fullest for way in ways]
        yield from self._memory_rows(stages, "low or gathered weights")

    def _scale_rows(self) -> Iterator[list[str]]:
        for scale in self.scales:
            ways, devices = scale.ways, f"{scale.devices:,}"
            if scale.tokens:
                yield [devices, "tokens a second", *scale.rates()]
                devices = ""
            yield [devices, "step", *(seconds_text(way.seconds) for way in ways)]
            waits = [f"{1 - way.compute / way.seconds:.0%}" for way in ways]
            yield ["", "not computing", *waits]
            peaks = [bytes_text(way.fullest.peak) for way in ways]
            yield ["", f"peak, {scale.mesh}", *peaks]


def _sent_rows(ways: Sequence[MeshWay], names: Sequence[str]) -> Iterator[list[str]]:
    """A row for the transfers of a way that are alike but for phase and size."""
    for way, name in zip(ways, names, strict=True):
        alike: dict[tuple[str, str], list[Transfer]] = {}
        for each in way.transfers:
            key = f"{each.axis} {each.kind} {each.dtype}", each.link
            alike.setdefault(key, []).append(each)
        for number, (key, rows) in enumerate(alike.items()):
            count = f"{sum(row.count for row in rows):,}"
            size = bytes_text(sum(row.wire for row in rows))
            time = seconds_text(sum(row.seconds for row in rows))
            yield ["" if number else name, *key, count, size, time]


def _large(number: int) -> str:
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _rate(speed: float) -> str:
    if speed >= 1e9:
        return f"{speed / 1e6:,.0f} M"
    for unit, name in ((1e6, "M"), (1e3, "k")):
        if speed >= unit:
            return f"{speed / unit:,.3g} {name}"
    return f"{speed:,.0f}"
