"""Finds the loss of the backward that is running, and who has called it.

Torch does not tell a hook which tensors are being differentiated.  The frames of
`torch.autograd.backward` and `grad` hold them in locals; where a torch names its locals
otherwise, nothing is found.
"""

from __future__ import annotations

import math
import sys
import threading
import types
from collections.abc import Iterable, Iterator, Sequence

import torch

from autoamp.compat.gradients import largest_of, numbers_of

_HOLDERS = {
    id(code): name
    for function, name in (
        (torch.autograd.backward, "tensors"),
        (torch.autograd.grad, "outputs"),
    )
    if (code := getattr(function, "__code__", None)) is not None
}
"""The code of functions that differentiate, each to the local that holds the losses.

By `id`, since the hash of a code object looks at all that is in it."""


def running_losses() -> tuple[list[torch.Tensor], types.FrameType | None]:
    """The tensors that the running backward differentiates, and the frame that called.

    A hook on a GPU's gradient runs in a thread of torch's own, so that all threads are
    looked at; where several differentiate, nothing is known.
    """
    here = _outermost(sys._getframe(1))
    if here is None:
        own = threading.get_ident()
        others = [f for i, f in sys._current_frames().items() if i != own]
        found = [each for each in map(_outermost, others) if each is not None]
        if len(found) != 1:
            return [], None
        (here,) = found
    given = here.f_locals.get(_HOLDERS[id(here.f_code)])
    listed = given if isinstance(given, list | tuple) else [given]
    return [t for t in listed if isinstance(t, torch.Tensor)], here.f_back


def _outermost(frame: types.FrameType | None) -> types.FrameType | None:
    """The outermost frame that differentiates: checkpoints do so inside of it."""
    found = None
    while frame is not None:  # runs in each backward: no generator
        if id(frame.f_code) in _HOLDERS:
            found = frame
        frame = frame.f_back
    return found


def frames_from(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    """`frame`, and the frames that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def history(tensor: torch.Tensor, most: int = 40) -> list[str]:
    """The names of the autograd nodes behind a tensor, along their first inputs."""
    found: list[str] = []
    node = tensor.grad_fn
    while node is not None and len(found) < most:
        found.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return found


@torch.no_grad()
def largest_magnitude(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The largest magnitude in float tensors of any layout, 0-dim fp32, NaN for a NaN.

    Nothing waits for a device.  None where there is no number.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for each in tensors:
        part = numbers_of(each.detach())
        if part.numel() and part.is_floating_point() and not part.is_meta:
            by_kind.setdefault((part.device, part.dtype), []).append(part)
    if not by_kind:
        return None
    if all(device.type == _ON_CPU for device, _ in by_kind):
        largest = _largest_on_cpu(by_kind.values())
        return torch.tensor(largest, dtype=torch.float32, device=_ON_CPU)
    found = [each.float() for parts in by_kind.values() for each in largest_of(parts)]
    device = found[0].device
    whole = torch.stack([each.reshape(()).to(device) for each in found])
    # `amax` alone may pass over a NaN on some devices.
    return torch.where(whole.isnan().any(), math.nan, whole.amax())


_ON_CPU = "cpu"

_SMALL = 2**16
"""So many numbers are put together: one kernel takes less time than some small ones."""


def _largest_on_cpu(kinds: Iterable[list[torch.Tensor]]) -> float:
    """The largest magnitude in tensors of a CPU, each list of one dtype.

    `aminmax` takes a twenty-fifth of the time of the largest norm there, and gives NaN
    where there is one.
    """
    largest = 0.0
    for parts in kinds:
        if len(parts) > 1 and sum(part.numel() for part in parts) <= _SMALL:
            parts = [torch.cat([part.reshape(-1) for part in parts])]  # noqa: PLW2901
        for part in parts:
            low, high = part.aminmax()
            bounds = -low.item(), high.item()
            if math.isnan(bounds[0]) or math.isnan(bounds[1]):
                return math.nan
            largest = max(largest, *bounds)
    return largest
