"""The figures of a plan for a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from autoamp.meshes.collectives import Transfer


@dataclass(frozen=True)
class Stage:
    """One device of one stage of a mesh.

    Attributes:
        name: "first", "middle" or "last"; "only" where there is one stage.
        layers: how many layers the stage has.
        weights, gradients, optimizer: bytes that the device holds between steps.
        saved: bytes of activations of all micro-batches that are under way.
        copies: bytes of low copies of weights, or of weights gathered at one time.
        peak: the most bytes held at one time.
        seconds: predicted time of the ops of one micro-batch, forward and backward.
    """

    name: str
    layers: int
    weights: int
    gradients: int
    optimizer: int
    saved: int
    copies: int
    peak: int
    seconds: float


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


@dataclass(frozen=True)
class PlannedMesh:
    """A training step on a mesh of devices, predicted without any of them.

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

    model: str
    device: str
    hardware: str
    memory: int | None
    precision: str
    optimizer: str
    parameters: int
    node: int
    network: int
    samples: int | None
    tokens: int | None
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
