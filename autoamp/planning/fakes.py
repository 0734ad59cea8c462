"""Lets a model and its call run on fake tensors, which take no memory.

Fake tensors of the CPU stand in for weights, buffers and arguments.  Tensors of the
meta device cannot be used: `torch.autocast` does not cast them, and attention on them
keeps the matrix of scores, which torch's kernels for CPUs and GPUs do not keep.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ask.stand_in import Call


@contextlib.contextmanager
def without_memory(model: nn.Module, call: Call) -> Iterator[Call]:
    """A region where `model` has fake weights and buffers; yields `call`, fake too.

    A tensor that stands in several places, such as a tied weight, is one fake tensor.
    """
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    # Real tensors are kept as well, so that no `id` is given to another tensor.
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(real: Tensor) -> Tensor:
        if id(real) not in made:
            made[id(real)] = real, _like(real, mode)
        return made[id(real)][1]

    modules = compat.modules_of(model)
    places = [
        place
        for each in modules
        for place in (compat.parameters_here(each), compat.buffers_here(each))
    ]
    before = [dict(place) for place in places]
    try:
        for place in places:
            for name, tensor in place.items():
                if tensor is not None:
                    place[name] = fake(tensor)
        given: Call = pytree.tree_map_only(Tensor, fake, call)
        yield given
    finally:
        for place, held in zip(places, before, strict=True):
            place.clear()
            place.update(held)


def _like(real: Tensor, mode: compat.FakeTensorMode) -> Tensor:
    with torch.no_grad():
        part = compat.local_part(real)
    with mode:
        made: Tensor = compat.like(part, device="cpu", symbolic=True)
    if part is not real:
        made = compat.with_memory(real, made).detach()
    if isinstance(real, nn.Parameter):
        return nn.Parameter(made, requires_grad=real.requires_grad)
    return made.requires_grad_(real.requires_grad)


def bytes_of(tensors: Any) -> int:
    """Bytes of the distinct storages of tensors, which may be nested.

    Of a DTensor the part of this rank counts.
    """
    with torch.no_grad():
        leaves = pytree.tree_leaves(tensors)
        parts = [compat.local_part(each) for each in leaves if isinstance(each, Tensor)]
    sizes = {compat.storage_id(each): each.untyped_storage().nbytes() for each in parts}
    return sum(sizes.values())
