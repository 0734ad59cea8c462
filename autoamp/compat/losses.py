"""Finds the loss of the backward that is running, and who has called it.

Torch does not tell a hook which tensors are being differentiated.  The frames of
`torch.autograd.backward` and `grad` hold them in locals; where a torch names its locals
otherwise, nothing is found.
"""

from __future__ import annotations

import sys
import threading
import types

import torch

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


def history(tensor: torch.Tensor, most: int = 40) -> list[str]:
    """The names of the autograd nodes behind a tensor, along their first inputs."""
    found: list[str] = []
    node = tensor.grad_fn
    while node is not None and len(found) < most:
        found.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    return found
