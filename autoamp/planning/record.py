"""The figures of a plan."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class Planned:
    """Predicted time and memory of a step, for a device that this machine may lack.

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

    model: str
    device: str
    hardware: str
    memory: int | None
    precision: str
    trains: bool
    optimizer: str
    parameters: int
    samples: int | None
    tokens: int | None
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
        if not count or not way.seconds:
            return None
        return count / way.seconds
