"""Split masters: fp32 master weights that cost 2 bytes a weight, not 4.

A bf16 number is the upper half of an fp32 number.  So a bf16 parameter is the upper
half of its own master, and 16 bits beside it are the rest: what is left of the fp32
number when the parameter, its nearest bf16 number, is taken away.  The fp32 numbers
exist while an optimizer steps them, for one chunk of parameters after the other.

(Also in the optimizers of apex and Transformer Engine, `store_param_remainders`.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Hashable, Iterator, Sequence

import torch

from autoamp import compat

CHUNK = 1 << 20
"""The elements of a chunk, 4 MiB in fp32; a larger weight is a chunk of its own."""

_IDLE = 3
"""A weight that some kernel moves, but does not write to, in so many steps in a row is
watched no more: each move copies the weight."""

_TIE = -(1 << 15)
"""The rest, in 16 bits, of an fp32 number halfway between two bf16 numbers."""


class Chunk:
    """The split masters of some bf16 parameters of one device.

    The rest of a number lies between -2**15 and 2**15, of which 16 bits hold all but
    the last: numbers halfway between two bf16 numbers that were rounded down, one in
    131 072, are listed by their positions.

    On a CPU a copy-on-write clone of each parameter shows whether other code has
    written to the parameter since, and to which elements.

    Attributes:
        params: the parameters.
        masters: the masters, which hold numbers between `open` and `close`.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], values: Sequence[torch.Tensor] = ()
    ) -> None:
        """The masters begin as `values`, fp32, or else as the parameters themselves."""
        self.params, count = [*params], len(params)
        self._forms = [*map(_form, self._parts())]
        size = sum(shape.numel() for shape, *_ in self._forms)
        self._low = torch.zeros(size, dtype=torch.int16, device=params[0].device)
        self._ties = self._low.new_empty(0, dtype=torch.int64)
        self._flat = torch.empty_like(self._low, dtype=torch.float32)
        self._views = [*self._views_of(self._flat)]
        self.masters = self._new_masters()
        self._clones: list[torch.Tensor | None] = [None] * count
        self._addresses: list[Hashable] = [None] * count
        self._idle = [0] * count
        self._memories: list[compat.Memory | None] = [None] * count
        if values:
            compat.copy_all(self._views, [*map(compat.local_part, values)])
            self._keep()
        self._free()
        self._watch()

    @property
    def nbytes(self) -> int:
        """The memory that the masters take beside the parameters, between steps."""
        return self._low.nbytes + self._ties.nbytes

    def fits(self) -> bool:
        """Whether the parameters still have the memory format they had."""
        return [*map(_form, self._parts())] == self._forms

    def open(self) -> None:
        """Gives the masters their fp32 numbers, and memory to hold these.

        Where other code has written to a parameter, the master is what was written.
        """
        self._flat.untyped_storage().resize_(self._flat.numel() * 4)
        parts = self._parts()
        all_there = all(clone is not None for clone in self._clones)
        as_left = all_there and [*map(compat.data_address, parts)] == self._addresses
        halves = [*parts]
        if not as_left:
            for at, (part, clone) in enumerate(zip(parts, self._clones, strict=True)):
                if clone is not None:
                    halves[at] = clone
                elif part.shape != self._views[at].shape:  # nobody reads this master
                    halves[at] = self._views[at]
        compat.copy_all(self._views, halves)
        bits = self._flat.view(torch.int32)
        bits += self._low
        bits[self._ties] += 1 << 16
        if not as_left:
            self._follow(parts)

    def close(self) -> None:
        """Rounds the masters into the parameters, and frees the masters' memory."""
        self.let_go()
        own = [compat.own_memory(each.data) for each in self.masters]
        if [*map(compat.data_address, own)] != [*map(compat.data_address, self._views)]:
            # The step has given some `master.data` other memory.
            for view, now in zip(self._views, own, strict=True):
                view.copy_(now)
            self.masters = self._new_masters()
        compat.copy_all(self._parts(), self._views)
        self._keep()
        self._free()
        self._watch()

    def values(self) -> list[torch.Tensor]:
        """Copies of the masters, as parameters."""
        self.open()
        flat = self._flat.clone()
        self._free()
        return self._as_params([*self._views_of(flat)])

    def let_go(self) -> None:
        """Watches the parameters' memory no more."""
        watched = [at for at, clone in enumerate(self._clones) if clone is not None]
        self._clones = [None] * len(self.params)
        for at in watched:
            compat.end_lazy_clone(compat.own_memory(self.params[at]))

    def _keep(self) -> None:
        """Keeps what the parameters lack of the masters."""
        bits = self._flat.view(torch.int32)
        self._low.copy_(bits)  # the lower 16 bits: the conversion drops the upper ones
        at = (self._low == _TIE).nonzero().flatten()
        rest = bits[at] - self._flat[at].bfloat16().float().view(torch.int32)
        self._ties = at[rest != _TIE]

    def _follow(self, parts: Sequence[torch.Tensor]) -> None:
        """Has a master be what was written to its parameter, element by element."""
        fit = [
            _form(part) == form for part, form in zip(parts, self._forms, strict=True)
        ]
        now = torch.empty_like(self._flat, dtype=torch.bfloat16)
        pairs = zip(fit, parts, self._views, strict=True)
        compat.copy_all(
            [*self._views_of(now)],
            [part if good else view for good, part, view in pairs],
        )
        rounded = self._flat.bfloat16().view(torch.int16)
        differs = rounded != now.view(torch.int16)  # bits, since NaN is not NaN
        torch.where(differs, now.float(), self._flat, out=self._flat)
        for at, differing in enumerate(self._views_of(differs)):
            if self._clones[at] is None:
                continue
            # Something asks for an address to write to, and reads.
            moved = compat.data_address(parts[at]) != self._addresses[at]
            idle = moved and self._lies(at) and not differing.any()
            self._idle[at] = self._idle[at] + 1 if idle else 0

    def _watch(self) -> None:
        # No local of a caller may share the parameters' memory: holders are counted.
        own = [*map(compat.own_memory, self.params)]
        self._addresses = [*map(compat.data_address, own)]
        # A CUDA graph of the script's may hold the addresses; and a write through
        # memory that is shared with others goes unseen.
        with torch.no_grad():
            for at, each in enumerate(own):
                rests = self._idle[at] >= _IDLE or not each.is_cpu
                if rests or not compat.held_alone(each):
                    self._clones[at] = None
                    continue
                self._clones[at] = compat.lazy_clone(each)
                if not self._lies(at):
                    key = id(self), at
                    forget = functools.partial(_forget, weakref.ref(self), at)
                    self._memories[at] = compat.watch_memory(each, key, forget)

    def _lies(self, at: int) -> bool:
        """Whether a parameter is in the memory that is watched."""
        memory, own = self._memories[at], compat.own_memory(self.params[at])
        return memory is not None and compat.lies_in(own, memory)

    def _parts(self) -> list[torch.Tensor]:
        # `data`, since the writes to it are counted where the step is known to write.
        return [compat.own_memory(param.data) for param in self.params]

    def _free(self) -> None:
        self._flat.untyped_storage().resize_(0)

    def _new_masters(self) -> list[torch.Tensor]:
        return self._as_params(self._views)

    def _as_params(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters in the memory of `views`, sharded as the half parameters are."""
        # `data` counts its own writes: those to one master are not the others'.
        return [
            torch.nn.Parameter(compat.with_memory(p.detach(), view.data))
            for view, p in zip(views, self.params, strict=True)
        ]

    def _views_of(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each parameter's part of `flat`, in the memory format of the parameter."""
        begin = 0
        for shape, strides, *_ in self._forms:
            yield flat.as_strided(shape, strides, begin)
            begin += shape.numel()


def _forget(chunk: weakref.ref[Chunk], at: int, memory: compat.Memory) -> None:
    """Copies a weight whose memory is about to be resized, which ends its clone."""
    found = chunk()
    if found is None or memory() is None:  # the memory is freed: the clone stays
        return
    clone = found._clones[at]
    found._clones[at] = None if clone is None else clone.clone()
    found._memories[at] = found._addresses[at] = None


def can_split(param: torch.Tensor) -> bool:
    """Whether 16 bits beside a parameter make it an fp32 number."""
    if param.dtype != torch.bfloat16 or param.layout != torch.strided:
        return False
    part = compat.local_part(param.detach())
    # Without gaps and overlaps, since only then are new tensors like it laid out so.
    laid_out = torch.empty_like(part, device="meta").stride() == part.stride()
    return laid_out and not part.is_meta


def chunks_of(params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Splits `params` into lists of one device and at most `CHUNK` elements.

    A parameter of more elements has a list of its own.
    """
    chunks: list[list[torch.Tensor]] = []
    of: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
    for param in params:
        size = compat.local_part(param.detach()).numel()
        chunk, held = of.get(param.device, ([], CHUNK))
        if held + size > CHUNK:
            chunk, held = [], 0
            chunks.append(chunk)
        chunk.append(param)
        of[param.device] = chunk, held + size
    return chunks


def follow(master: torch.Tensor, half: torch.Tensor) -> bool:
    """Sets `master`, in place, where its elements do not round to those in `half`.

    Returns:
        Whether there may be such elements.
    """
    if master.device != half.device:
        master.data = master.data.to(half.device)
    value, half = compat.local_part(master.detach()), compat.local_part(half)
    # Bits are compared, because NaN is not equal to itself, and -0 is equal to 0.
    rounded, now = value.to(half.dtype).view(torch.int16), half.view(torch.int16)
    # On a CPU the answer is there, and saves a write to each master; on a GPU it would
    # cost a wait.
    if half.device.type == "cpu" and torch.equal(rounded, now):
        return False
    value.copy_(torch.where(rounded == now, value, half.float()))
    return True


def _form(part: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], object, object]:
    return part.shape, part.stride(), part.dtype, part.device
