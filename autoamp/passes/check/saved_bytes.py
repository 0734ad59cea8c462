"""Bytes that autograd keeps for the backward of one forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES


def storage_key(tensor: Tensor) -> tuple[str, int]:
    """A key of the storage of a living tensor; views of the storage share the key.

    The key is not the address, because a read of the address makes a copy-on-write
    storage real.
    """
    return str(tensor.device), compat.storage_id(tensor)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes of the distinct storages saved for the backward, without parameters.

    Attributes:
        total: all bytes.
        weight_copies: the part of `total` in low copies of parameters, whether autoamp,
            autocast or the model made the copies.
    """

    total: int
    weight_copies: int


def saved_bytes(
    forward: Callable[[], Any], parameters: Iterable[Tensor] = ()
) -> SavedBytes:
    """The bytes that autograd saves while `forward()` runs; see `tensors_saved`."""
    weights = list(parameters)
    kept = tensors_saved(forward, weights)
    copies = [t for t in kept if any(_is_copy(t, weight) for weight in weights)]
    return SavedBytes(*(sum(map(bytes_held, each)) for each in (kept, copies)))


def bytes_held(tensor: Tensor) -> int:
    """The bytes of the whole storage of a tensor."""
    return tensor.untyped_storage().nbytes()


def tensors_saved(
    forward: Callable[[], Any], parameters: Iterable[Tensor] = ()
) -> list[Tensor]:
    """The tensors that autograd saves while `forward()` runs, without parameters.

    A storage counts once and whole, however many nodes save views of it.  Of a
    checkpointed region only the tensors that the checkpoint keeps count.  Dynamo
    captures under `saved_tensors_hooks` as well (tests/tools/test_metrics.py).

    The hooks do not see tensors that a Function keeps as attributes of its context or
    in a closure, as Dynamo's own operator for a captured `autograd.Function` does.
    Such tensors are found by a walk over autograd's graph from the result of
    `forward()`, which must therefore hold every output.
    """
    kept: dict[tuple[str, int], Tensor] = {}  # alive, so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(storage_key(tensor), tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    for tensor in kept_by_functions(result):
        kept.setdefault(storage_key(tensor), tensor.detach())
    del result
    for weight in parameters:
        kept.pop(storage_key(weight), None)
    return list(kept.values())


def kept_by_functions(result: Any) -> list[Tensor]:
    """Tensors that Functions behind a result keep without autograd's knowledge."""
    leaves = pytree.tree_leaves(result)
    todo = [t.grad_fn for t in leaves if isinstance(t, Tensor) and t.grad_fn]
    seen: set[Node] = set()
    found: list[Tensor] = []
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)
        kept = pytree.tree_leaves(compat.kept_by_function(node))
        found.extend(t for t in kept if isinstance(t, Tensor))
    return found


def _is_copy(tensor: Tensor, weight: Tensor) -> bool:
    if tensor.dtype not in LOW_DTYPES.values() or not weight.is_floating_point():
        return False
    # Sizes first: `equal` reads both tensors.
    if bytes_held(tensor) != weight.numel() * tensor.itemsize:
        return False
    return bool(torch.equal(_flat(tensor), _flat(weight).to(tensor.dtype)))


def _flat(tensor: Tensor) -> Tensor:
    # As memory, whatever view was saved: of a linear's weight it is the transposed one.
    size = bytes_held(tensor) // tensor.itemsize
    return tensor.detach().as_strided((size,), (1,), 0)
