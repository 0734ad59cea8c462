"""Calls whose operands are not kept for the backward, which makes them again.

`again = noted(y, "rms_norm", x, [8])` notes how `y` was made, and
`made_again(aten.linear.default, (again,), y, w)` is the linear of `y`, of which
autograd keeps the note in place of the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.functions.attention import attention
from autoamp.passes.functions.casts import saturating_cast
from autoamp.passes.functions.depthwise import depthwise
from autoamp.passes.functions.index_add import index_add
from autoamp.passes.functions.norms import layer_norm, rms_norm, softmax
from autoamp.passes.functions.products import product
from autoamp.passes.functions.rotary import rotary

OWN: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        *(attention, depthwise, index_add, layer_norm, product, rms_norm, rotary),
        *(saturating_cast, softmax),
    )
}
"""Functions of ours that a printed graph can name as an argument."""


def function_of(called: Any) -> Any:
    """The op, or the function of ours, that an argument of a call names."""
    return OWN[called] if isinstance(called, str) else called


class _Versioned:
    """A tensor that is kept, and how often it had been written to."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, compat.version(tensor)

    def read(self) -> Tensor:
        """The tensor, if its numbers are still those that the forward read.

        Torch checks no tensor that a hook has packed.
        """
        now = compat.version(self.tensor)
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been "
                f"modified by an inplace operation: [{self.tensor.type()} "
                f"{[*self.tensor.shape]}] is at version {now}; expected version "
                f"{self.version} instead."
            )
        return self.tensor


class _Packed:
    """A tensor as the hooks of the caller keep it, such as those of a checkpoint."""

    __slots__ = ("packed", "tensor", "unpack")

    def __init__(self, tensor: Tensor, outer: compat.Hooks) -> None:
        pack, self.unpack = outer
        self.packed = pack(tensor)
        self.tensor: Tensor | None = None

    def read(self) -> Tensor:
        """The tensor, as the hooks give it for one read by autograd."""
        return self.unpack(self.packed)

    def held(self) -> Tensor:
        """The tensor, for any number of reads: a checkpoint gives it once."""
        if self.tensor is None:
            self.tensor = self.read()
        return self.tensor


class _Note:
    """How a value is made; holds the operands, which are in memory anyway."""

    __slots__ = ("given", "left", "made", "maker", "readers", "structure")

    def __init__(self, maker: Any, leaves: list[Any], structure: Any) -> None:
        self.maker, self.structure = function_of(maker), structure
        # Detached, an operand has the memory and the version that it has, and holds no
        # part of autograd's graph.
        self.given: list[Any] = [
            _Versioned(leaf.detach())
            if isinstance(leaf, Tensor)
            else (leaf.note if isinstance(leaf, Noted) else leaf)
            for leaf in leaves
        ]
        self.readers, self.left = 0, 0
        self.made: Tensor | None = None

    def keep(self, outer: compat.Hooks | None) -> None:
        """Is told of one more reader; the hooks of the caller keep the operands."""
        self.readers += 1
        if self.readers > 1:
            return
        for at, each in enumerate(self.given):
            if isinstance(each, _Note):
                each.keep(outer)
            elif isinstance(each, _Versioned) and outer is not None:
                self.given[at] = _Packed(each.read(), outer)

    def read(self) -> Tensor:
        """The value, which is held until each of its readers has had it."""
        made = self.made
        if made is None:
            made = self._make()
            self.left = self.readers
        self.left -= 1
        self.made = made if self.left > 0 else None
        return made

    def _make(self) -> Tensor:
        given = [
            each.held()
            if isinstance(each, _Packed)
            else each.read()
            if isinstance(each, _Versioned | _Note)
            else each
            for each in self.given
        ]
        args, kwargs = pytree.tree_unflatten(given, self.structure)
        # The modes of the backward are not those of the forward.
        with (
            torch.no_grad(),
            compat.autocast_off(),
            compat.past_transforms(given) or nullcontext(),
        ):
            return self.maker(*args, **kwargs)  # type: ignore[no-any-return]


class Noted:
    """A value and its note, while the forward still reads the value.

    The value is held: the address of its storage, by which autograd's views of the
    value are known, must be no other's.
    """

    __slots__ = ("note", "value")

    def __init__(self, value: Tensor, note: _Note) -> None:
        self.value, self.note = value, note


class _View:
    """A view of a value that is made again."""

    __slots__ = ("lies", "note")

    def __init__(self, note: _Note, view: Tensor) -> None:
        self.note = note
        self.lies = view.shape, view.stride(), view.storage_offset()

    def read(self) -> Tensor:
        """The view, of the value made again."""
        return self.note.read().as_strided(*self.lies)


class Nothing:
    """Stands for the note of a value that has none."""


NOTHING = Nothing()


def noted(value: Tensor, maker: Any, /, *args: Any, **kwargs: Any) -> Noted | Nothing:
    """A note that `maker(*args, **kwargs)` made `value`.

    Args:
        value: a tensor with memory of its own, of any shape and dtype.
        maker: an op, or the name of a function in `OWN`.
        *args, **kwargs: its operands; a note in the place of one that is made again.

    Returns:
        `NOTHING` where autograd records nothing, where hooks may not be set, or where
        the maker runs under autocast, and for values made of such values.
    """
    if not (_may_note() and not compat.any_autocast()):
        return NOTHING
    leaves, structure = pytree.tree_flatten((args, kwargs))
    # An operand that was made in another mode of autograd.
    if any(leaf is NOTHING for leaf in leaves):
        return NOTHING
    return Noted(value, _Note(maker, leaves, structure))


def _may_note() -> bool:
    return torch.is_grad_enabled() and compat.takes_hooks()


def made_again(
    called: Any, notes: Sequence[Noted | Nothing], /, *args: Any, **kwargs: Any
) -> Any:
    """`called(*args, **kwargs)`, of which autograd keeps no value that is noted.

    Args:
        called: an op, or the name of a function in `OWN`.
        notes: the notes of values that the call reads, or reads views of.

    Raises:
        RuntimeError: in the backward, where a tensor that is kept was written to.

    Example:
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> y = torch.sin(x)
        >>> again = noted(y, torch.ops.aten.sin.default, x)
        >>> made_again(torch.ops.aten.square.default, (again,), y).backward()
        >>> x.grad  # 2 sin(2) cos(2)
        tensor([-0.7568])
    """
    function = function_of(called)
    known = [each for each in notes if isinstance(each, Noted)]
    if not (known and _may_note()):
        return function(*args, **kwargs)
    outer = compat.hooks_of_caller()
    # No two values have one storage: none of them is a view.
    by_storage = {compat.storage_id(each.value): each for each in known}

    def pack(tensor: Tensor) -> _View | _Versioned | _Packed:
        found = by_storage.get(compat.storage_id(tensor))
        if found is not None and found.value.dtype == tensor.dtype:
            found.note.keep(outer)
            return _View(found.note, tensor)
        return _Versioned(tensor) if outer is None else _Packed(tensor, outer)

    with torch.autograd.graph.saved_tensors_hooks(pack, _read):
        return function(*args, **kwargs)


def _read(packed: Any) -> Tensor:
    return packed.read()  # type: ignore[no-any-return]
