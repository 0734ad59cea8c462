"""What a tensor's memory looks like, and writing to it behind autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies every source into its target, converting dtypes, in one op."""
    torch._foreach_copy_(list(targets), list(sources))


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy-on-write clone, or None where torch has none.

    While it lives, any write to `tensor`, through `.data` or an older alias too, moves
    the data to a new address, which `data_address` shows.
    """
    make = getattr(torch, "_lazy_clone", None)
    if make is None or not hasattr(torch._C, "_data_address"):
        return None
    try:
        clone: torch.Tensor = make(tensor)
    except RuntimeError:  # storages that cannot be shared lazily (mapped, external)
        return None
    return clone


def held_number(value: object) -> int | float | None:
    """The number in a tensor of one element, None for anything else.

    A parameter's is moved by training; subclasses hold theirs elsewhere, if at all.
    """
    if type(value) is not torch.Tensor or value.requires_grad or value.is_meta:
        return None
    if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
        return None
    number: int | float = value.item()
    return number


def data_address(tensor: torch.Tensor) -> int:
    """Where the data lies, without making a lazy copy real."""
    ask = getattr(torch._C, "_data_address", None)
    return int(ask(tensor)) if ask is not None else tensor.data_ptr()


def data_addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`data_address` of each, at a tenth of a microsecond each."""
    return list(map(getattr(torch._C, "_data_address", data_address), tensors))


def held_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else that lives now can hold a pointer to the tensor's memory.

    A numpy array or DLPack capsule made of it is another owner of its storage, or (of a
    tensor that needs no gradient) of the tensor.  Writes through those go unseen, and
    a lazy clone that moves the data would leave them behind on the old memory.
    """
    count = getattr(torch._C, "_storage_Use_Count", None)
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # sparse and other storage-less layouts
        return False
    if count is None or storage.nbytes() != tensor.numel() * tensor.itemsize:
        return False
    owners_now = 2  # the tensor and the Python object just made
    if count(storage._cdata) > owners_now:
        return False
    # A graph, DDP too, may own a tensor that needs a gradient; DLPack refuses those.
    owners = getattr(tensor, "_use_count", None)
    return tensor.requires_grad or (owners is not None and owners() == 1)


def is_resizable(tensor: torch.Tensor) -> bool:
    """Whether torch itself allocated the tensor's memory."""
    storage: Any = tensor.untyped_storage()
    return bool(storage.resizable())


def end_lazy_clone(tensor: torch.Tensor) -> None:
    """Makes the storage a plain one again once its lazy clones are gone.

    Its memory stays where it is; else the next write would do so, and two threads that
    write at once would both.
    """
    tensor.data_ptr()


def storage_id(tensor: torch.Tensor) -> int:
    """A number equal for tensors that share storage; fake tensors have storage too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and other storage-less layouts
        return id(tensor)


def version_kept(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Writes to `tensor` inside do not move its version counter."""
    context: AbstractContextManager[None]
    context = torch.autograd._unsafe_preserve_version_counter(tensor)  # type: ignore[attr-defined]
    return context
