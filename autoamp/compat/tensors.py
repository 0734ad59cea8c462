"""Inspects and watches the memory of tensors, and writes to it behind autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies every source into its target, converting dtypes, in one op."""
    torch._foreach_copy_(list(targets), list(sources))


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor | None:
    """A copy-on-write clone, or None of memory that cannot be shared so.

    While the clone lives, any write to `tensor`, through `.data` or an older alias too,
    moves the data to a new address, which `data_address` shows.
    """
    try:
        return torch._lazy_clone(tensor)
    except RuntimeError:  # storages that cannot be shared lazily (mapped, external)
        return None


def held_number(value: object) -> int | float | None:
    """The number in a tensor of one element, None for anything else.

    Parameters give None because training moves their numbers, and subclasses of Tensor
    because they hold their numbers elsewhere, if at all.
    """
    if type(value) is not torch.Tensor or value.requires_grad or value.is_meta:
        return None
    if value.numel() != 1 or value.is_complex() or value.dtype == torch.bool:
        return None
    number: int | float = value.item()
    return number


_address: Any = getattr(torch._C, "_data_address")  # noqa: B009 (not in the stubs)
_STRIDES_UNSEEN = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
"""Whether Dynamo is too old to notice that the strides of a parameter have changed."""


def data_address(tensor: torch.Tensor) -> Hashable:
    """The address of the data, with strides if need be; makes no lazy copy real."""
    at: int = _address(tensor)
    return (at, tensor.stride()) if _STRIDES_UNSEEN else at


def data_addresses(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """`data_address` of each tensor, at a tenth of a microsecond each."""
    ask = data_address if _STRIDES_UNSEEN else _address
    return list(map(ask, tensors))


def held_alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else that lives now can hold a pointer to the tensor's memory.

    A numpy array or DLPack capsule made of `tensor` is another owner of its storage, or
    (where it needs no gradient) of `tensor`.  Writes through such an owner go unseen,
    and a lazy clone that moves the data would leave the owner on the old memory.
    """
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:  # sparse and other storage-less layouts
        return False
    if storage.nbytes() != tensor.numel() * tensor.itemsize:
        return False
    owners_now = 2  # the tensor and the Python object just made
    if torch._C._storage_Use_Count(storage._cdata) > owners_now:
        return False
    # A tensor that needs a gradient may be owned by a graph or DDP; DLPack refuses it.
    return tensor.requires_grad or tensor._use_count() == 1  # type: ignore[attr-defined]


Memory = weakref.ref[Any]
"""A weak reference to the memory that data lies in, whichever tensor shows the data.

The reference is not to the tensor, because `torch.utils.swap_tensors`, hence
`Module.to` where that swaps, refuses a tensor with a weak reference, Python's or C++'s.
"""


def memory_of(tensor: torch.Tensor) -> Memory:
    """The memory of `tensor` now; it changes once the tensor's content is swapped."""
    return weakref.ref(_memory_object(tensor))


def lies_in(tensor: torch.Tensor, memory: Memory) -> bool:
    """Whether the data of `tensor` is in `memory`."""
    return memory() is _memory_object(tensor)


def region_of(tensor: torch.Tensor) -> Hashable:
    """A key of the memory that `tensor` shows, equal for tensors that show the same.

    It is another's once the memory is freed.  Tensors without a storage have their id.
    """
    try:
        memory = tensor.untyped_storage()._cdata
    except NotImplementedError:  # sparse and other storage-less layouts
        return id(tensor)
    where = tensor.device, memory, tensor.storage_offset()
    return where, tensor.shape, tensor.stride()


def watch_memory(
    tensor: torch.Tensor, key: Hashable, gone: Callable[[Memory], None]
) -> Memory:
    """The memory of `tensor`; `gone` is called with the memory once it is freed.

    `gone` is called before the memory is resized too, because a storage with a lazy
    clone does not survive a resize: torch 2.13 fails at the next write, "ctx !=
    nullptr".  Programs that keep weights elsewhere between calls resize,
    `p.untyped_storage().resize_(0)`.

    Args:
        key: stands for the watcher, which has one `gone` for each memory: its latest.
    """
    held = _memory_object(tensor)
    memory = weakref.ref(held, gone)
    if isinstance(held, torch.UntypedStorage):
        resize = vars(held).get("resize_")
        if not isinstance(resize, _Resize):
            resize = _Resize(held)
            held.resize_ = resize  # type: ignore[method-assign]
        resize.watches[key] = memory, gone
    return memory


def _memory_object(tensor: torch.Tensor) -> Any:
    """The storage: one Python object for as long as the memory lives."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # sparse and other storage-less layouts
        return tensor


class _Resize:
    """Stands in for `resize_` on one storage object, and tells the watchers first."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = weakref.ref(storage)
        self.watches: dict[Hashable, tuple[Memory, Callable[[Memory], None]]] = {}

    def __call__(self, size: int) -> Any:
        storage: Any = self._storage()
        watches, self.watches = self.watches, {}
        for memory, gone in watches.values():
            gone(memory)
        storage.data_ptr()  # plain again, as `end_lazy_clone` makes it
        return torch.UntypedStorage.resize_(storage, size)


def end_lazy_clone(tensor: torch.Tensor) -> None:
    """Makes the storage a plain one again once its lazy clones are gone.

    The memory stays where it is.  Without this call the next write would make the
    storage plain, and two threads that write at once would both do so.
    """
    tensor.data_ptr()


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the version counter of `tensor`, a plain one."""
    counter = tensor.detach()
    # Not one for all: a tensor made among fake tensors is fake.
    counter.data = tensor.new_empty(0)
    return counter


def storage_span(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of a strided tensor's memory, and its bytes; copies stay lazy."""
    try:
        size = tensor.untyped_storage().nbytes()
        first = int(tensor.storage_offset()) * tensor.itemsize
        return int(_address(tensor)) - first, size
    except (NotImplementedError, RuntimeError):  # a subclass that holds other tensors
        return 0, 0


def storage_id(tensor: torch.Tensor) -> int:
    """A number equal for tensors that share storage; fake tensors have storage too."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:  # sparse and other storage-less layouts
        return id(tensor)


version_kept = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
"""A region in which writes to a tensor do not move its version counter."""


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; -1 where torch does not count."""
    try:
        return tensor._version
    except RuntimeError:  # made under inference_mode
        return -1


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that `tensor` is a view of, to autograd, or `tensor` itself.

    A view's own history does not last: a write to the whole tensor, or to another view
    of that tensor, replaces the view's history by one made from the whole tensor's.
    """
    return tensor._base if tensor._is_view() and tensor._base is not None else tensor


def is_functional(module: torch.nn.Module) -> bool:
    """Whether functorch made `module` of another, to be called with its weights.

    Its own parameters are on the meta device and hold no data.
    """
    return type(module).__module__ == "torch._functorch.make_functional"


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """`model` and every module inside it, each once, in the order of `modules()`.

    `modules()` makes every path, with a generator for each module of it: three times
    the work.
    """
    found: dict[int, torch.nn.Module] = {}
    left: list[Any] = [model]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            left += reversed(_held(module, "_modules").values())
    return [*found.values()]


def named_modules_of(
    model: torch.nn.Module, path: str = ""
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every module in `model`, by every path, whatever methods its class redefines."""
    yield path, model
    for name, child in children_here(model).items():
        if child is not None:
            yield from named_modules_of(child, f"{path}.{name}" if path else name)


def parameters_here(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own parameters by name, some None, without those of its children."""
    return _held(module, "_parameters")


def buffers_here(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own buffers by name, some None, without those of its children."""
    return _held(module, "_buffers")


def children_here(module: torch.nn.Module) -> dict[str, Any]:
    """A module's own children by name, some None."""
    return _held(module, "_modules")


def _held(module: torch.nn.Module, name: str) -> dict[str, Any]:
    """A dict of `module`; an empty one before `nn.Module.__init__` has made it."""
    # By `vars`, because a `__getattr__` of the class may need the very dict.
    found: Any = vars(module).get(name)
    if found is None and isinstance(module, torch.jit.ScriptModule):
        found = getattr(module, name, None)  # made anew by a property
    return {} if found is None else found


_NO_CODE = [torch.Tensor.__torch_function__, torch._C._disabled_torch_function_impl]
"""The functions `__torch_function__` of classes that change no call of torch."""


def wrappers_in(given: Any) -> tuple[type, ...]:
    """The classes of tensors in a call with a `__torch_function__` of their own."""
    kinds = {type(each) for each in pytree.tree_leaves(given)}
    # Each look at a class method makes another object, of one function.
    plain = [getattr(known, "__func__", known) for known in _NO_CODE]
    wrappers = [
        kind
        for kind in kinds
        if issubclass(kind, torch.Tensor)
        and getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
        not in plain
    ]
    return tuple(
        sorted(wrappers, key=lambda kind: (kind.__module__, kind.__qualname__))
    )


def failure_on(wrappers: tuple[type, ...]) -> str:
    """Says that Dynamo fails on tensors of these classes, and what to do."""
    names = ", ".join(f"{each.__module__}.{each.__name__}" for each in wrappers)
    return (
        f"Dynamo fails on tensors of {names}, whose class has a __torch_function__ of "
        "its own. A call with plain tensors, x.as_subclass(torch.Tensor), is captured"
    )
