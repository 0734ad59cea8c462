"""The mesh of devices that a plan is for, as text: "dp=512,tp=8,pp=4"."""

from __future__ import annotations

from dataclasses import dataclass

from autoamp.errors import OptionError

AXES = ("dp", "tp", "pp")
MOST = 10**6
"""The most devices of a mesh."""

_FORM = 'write axes as "dp=512,tp=8,pp=4"'


@dataclass(frozen=True)
class Mesh:
    """A mesh of devices.

    Attributes:
        dp: devices that each train on other samples.
        tp: devices that share each layer.
        pp: stages that share the layers.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)


def parsed_mesh(text: str) -> Mesh:
    """The mesh of a text such as "dp=512,tp=8,pp=4"; an axis left out has size 1.

    Raises:
        OptionError: the text names no mesh, or one of more than a million devices.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        axis, equals, size = (each.strip() for each in part.partition("="))
        if axis not in AXES or not equals:
            raise OptionError(f"mesh={text!r}: {part.strip()!r} is no axis; {_FORM}")
        if axis in found:
            raise OptionError(f"mesh={text!r} gives {axis} twice; give it once")
        if not (size.isascii() and size.isdigit() and int(size[:8]) >= 1):
            raise OptionError(
                f"mesh={text!r}: {axis}={size} must be a whole number above 0"
            )
        found[axis] = int(size[:8])
    mesh = Mesh(**found)
    if mesh.devices > MOST:
        raise OptionError(
            f"mesh={text!r} has {mesh.devices:,} devices; at most {MOST:,} are planned"
        )
    return mesh


def scaled(mesh: Mesh, devices: int) -> Mesh:
    """The mesh with as many replicas as `devices` hold, tp and pp kept where they fit.

    Where one replica needs more devices there are fewer stages, and then fewer devices
    to a layer.
    """
    tp = _fitting(mesh.tp, devices)
    pp = _fitting(mesh.pp, devices // tp)
    return Mesh(devices // (tp * pp), tp, pp)


def _fitting(size: int, room: int) -> int:
    """The largest divisor of `size` that is at most `room`."""
    return max(d for d in range(1, min(size, room) + 1) if size % d == 0)
