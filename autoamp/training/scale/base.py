"""The base class of all loss scales, and the loss scales that never move.

The state is kept in 0-dim tensors and moved by tensor arithmetic, so that a step whose
overflow is known only on the GPU need not wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoamp.errors import LossScaleError

INIT_SCALE = 2.0**15
"""2**15, half of GradScaler's 2**16, is the largest power of two below fp16's largest
number: so the gradient of a loss to itself, 1, does not overflow on the first step."""


class LossScale:
    """Base class of the loss scales that `convert(loss_scale=...)` takes.

    A scale belongs to one run of training, because its state moves.  Several models
    that are given one scale share it.
    """

    _config: tuple[str, ...] = ()

    def __init__(self, scale: float) -> None:
        self._scale = scalar(scale)
        self._skipped = scalar(0, torch.int64)
        self._given: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    # -- for a graph and an optimizer step -----------------------------------------

    def tensors(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale and its inverse, 0-dim fp32 tensors on `device`.

        The two tensors are never written to, so that a later backward finds the values
        that its forward was given.
        """
        if device not in self._given:
            scale = self._scale.to(device, non_blocking=True)
            # The reciprocal as GradScaler takes it: in fp64, then rounded.
            self._given[device] = scale, scale.double().reciprocal().float()
        return self._given[device]

    def update(self, found_inf: torch.Tensor) -> None:
        """Moves the scale after a step.

        Args:
            found_inf: one fp32 element, 0 or 1, on any device; nothing waits for it.
        """

    def correct(self, found_inf: torch.Tensor) -> None:
        """Moves the scale for an overflow found after `update` was told of none.

        Nothing happens where `found_inf` (one element) is 0.
        """
        if bool(found_inf):
            self.update(found_inf)

    def count_skipped(self, found_inf: torch.Tensor) -> None:
        """Counts a step as skipped where `found_inf` (one element) is not 0."""
        found = (found_inf.reshape(()) != 0).long()
        self._skipped = self._skipped.to(found.device) + found

    @property
    def wants_size(self) -> bool:
        """Whether `note_size` is to follow the next `update`; asked before that."""
        return False

    def note_size(
        self, largest: torch.Tensor | None, found_inf: bool | torch.Tensor
    ) -> None:
        """Moves the scale by how large gradients are.

        Args:
            largest: the largest fp16 gradient of a step, at its true value, 0-dim fp32;
                None where it is not known.
            found_inf: the flag that `update` was given; a bool where its value is known
                on the host.
        """

    def merge(self, other: LossScale) -> None:
        """Takes over the gradient sizes told to `other`, which this scale replaces."""

    @property
    def position(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale, and the steps since it last moved: 0-dim, on any device."""
        return self._scale, scalar(0, torch.int32)

    def set_agreed(self, scale: torch.Tensor, steps: torch.Tensor) -> None:
        """Takes over the position that ranks agreed on, unless it is not finite.

        Args:
            scale, steps: a `position`, 0-dim fp32; nothing waits for them.
        """

    @property
    def at_floor(self) -> bool:
        """Whether the scale is one that moves, but can go no lower."""
        return False

    # -- for a person to read ------------------------------------------------------

    @property
    def scale(self) -> float:
        """The scale in force; waits for the device."""
        return float(self._scale)

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped for an overflow so far; waits for the device."""
        return int(self._skipped)

    @property
    def growth_tracker(self) -> int:
        """Steps without overflow since the scale last moved; waits for the device."""
        return 0

    def state_dict(self) -> dict[str, Any]:
        """Every field, as plain Python numbers."""
        state: dict[str, Any] = {"kind": type(self).__name__, "scale": self.scale}
        state |= {name: getattr(self, name) for name in self._config}
        return state | {"skipped_steps": self.skipped_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over every field of a state that `state_dict` gave.

        Raises:
            LossScaleError: a field is missing, unknown or unusable; nothing is changed.
        """
        self.check(state)
        self._scale = scalar(state["scale"])
        self._skipped = scalar(state["skipped_steps"], torch.int64)
        self._given.clear()

    def __repr__(self) -> str:
        fields = ", ".join(f"{n}={getattr(self, n)!r}" for n in self._config)
        return f"{type(self).__name__}({fields})"

    def _fields(self) -> set[str]:
        """The fields that a state must have."""
        return set(self.state_dict())

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises LossScaleError where `load_state_dict(state)` would."""
        if not isinstance(state, Mapping):
            raise LossScaleError(
                f"the state of a loss scale is a dictionary, not {type(state).__name__}"
            )
        kind = type(self).__name__
        if "kind" in state and state["kind"] != kind:
            raise LossScaleError(
                f"the state was saved by {state['kind']!r}, and this run uses {kind}; "
                "convert with the same loss_scale, or drop the field from the state"
            )
        wanted, got = self._fields(), set(state)
        problems = (
            [f"missing {', '.join(sorted(wanted - got))}"] if wanted - got else []
        )
        problems += [
            f"unknown {', '.join(map(repr, sorted(got - wanted, key=str)))}"
        ] * (not got <= wanted)
        if problems:
            raise LossScaleError(
                f"the saved state of {kind} does not fit: {'; '.join(problems)}"
            )
        positive("scale", state["scale"])
        count("skipped_steps", state["skipped_steps"])


class StaticLossScale(LossScale):
    """A scale that never moves; steps with an overflow are skipped.

    Raises:
        LossScaleError: `scale` is not a positive finite number.
    """

    def __init__(self, scale: float) -> None:
        positive("loss_scale", scale)
        super().__init__(scale)

    def __repr__(self) -> str:
        return f"StaticLossScale({self.scale!r})"


class NoLossScale(LossScale):
    """No scaling and no flags in graphs, as for bf16.

    Steps are still skipped by the guard, for gradients that are not finite.
    """

    def __init__(self) -> None:
        super().__init__(1.0)


def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A 0-dim tensor that is never written to; a usual value has one shared tensor."""
    usual = _USUAL.get((value, dtype))
    if usual is not None:
        return usual
    return torch.tensor(value, dtype=dtype, device="cpu")


_USUAL = {
    (value, dtype): torch.tensor(value, dtype=dtype, device="cpu")
    for value, dtype in (
        (0.0, torch.float32),
        (1.0, torch.float32),
        (INIT_SCALE, torch.float32),
        (0, torch.int32),
        (1, torch.int32),
        (0, torch.int64),
    )
}
"""Values most scales begin with: a program with many models makes them only once."""


def positive(name: str, value: Any) -> None:
    """Raises LossScaleError unless `value` is a positive finite number of fp32.

    The value is used in fp32, and 1 / value has to be finite there too.
    """
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and _SMALLEST <= value <= _LARGEST):
        raise LossScaleError(f"{name}={value!r} is not a positive finite number")


def count(name: str, value: Any, least: int = 0) -> None:
    number = isinstance(value, int) and not isinstance(value, bool)
    if not (number and least <= value <= _LONGEST):
        raise LossScaleError(
            f"{name}={value!r} is not an integer from {least} to {_LONGEST}"
        )


_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max
_LONGEST = torch.iinfo(torch.int32).max


def free_to_read(flag: torch.Tensor) -> bool:
    """Whether `flag` is in the host's memory, so that reading it waits for nothing."""
    return flag.device.type == "cpu"
