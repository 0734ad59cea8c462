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
"""The elements of a chunk, 4 MiB in fp32; a larger weight is a chunk of its own, and is
stepped in pieces of so many elements where the optimizer is elementwise.  A multiple of
16: fused kernels of CPUs round the elements after the last 16 otherwise."""

ELSEWHERE = 1 << 25
"""The same on other devices, 128 MiB in fp32: a GPU steps a million elements in less
time than it takes to start the kernels of a piece.  (By count; not measured.)"""

_IDLE = 3
"""A weight that some kernel moves, but does not write to, in so many steps in a row is
watched no more: each move copies the weight."""

_SLICE = 1 << 17
"""So many elements are added at once: of 2**15 to 2**20 the fastest here."""

_BLOCK = 1024
"""Elements of which the least is taken first, in the search for ties: a tenth of the
time of looking at each."""

_TIE = -(1 << 15)
"""The rest, in 16 bits, of an fp32 number halfway between two bf16 numbers."""


class Chunk:
    """The split masters of some bf16 parameters of one device.

    The rest of a number lies between -2**15 and 2**15, of which 16 bits hold all but
    the last: numbers halfway between two bf16 numbers that were rounded down, one in
    131 072, are listed by their positions.

    On a CPU a copy-on-write clone of each parameter shows whether other code has
    written to the parameter since, and to which elements.

    A step is `begin`, `open` and `close` of each piece, and `end`.

    Attributes:
        params: the parameters.
        pieces: where the elements that are stepped together begin and end; one piece,
            unless the chunk is one large weight.
        masters: the masters of the piece that is open; those of a weight in several
            pieces are flat.
    """

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor] = (),
        *,
        cut: bool = False,
    ) -> None:
        """The masters begin as `values`, fp32, or else as the parameters themselves.

        Args:
            cut: whether a weight of more than `CHUNK` elements is stepped in pieces.
        """
        self.params, count = [*params], len(params)
        self._forms = [*map(_form, self._parts())]
        size = sum(shape.numel() for shape, *_ in self._forms)
        sharded = any(map(compat.is_distributed, params))
        chunk = _chunk_on(params[0].device)
        most = chunk if cut and count == 1 and size > chunk and not sharded else size
        starts = range(0, size, most) if size else [0]
        self.pieces = [(at, min(at + most, size)) for at in starts]
        self._low = torch.zeros(size, dtype=torch.int16, device=params[0].device)
        self._ties = [self._low.new_empty(0, dtype=torch.int64) for _ in self.pieces]
        self._flat = torch.empty_like(self._low[:most], dtype=torch.float32)
        self._views = self._in_piece(self._flat, 0)
        self._nothing = self._flat.new_empty(0)
        self.masters = self._as_params([self._nothing] * count)
        self._clones: list[torch.Tensor | None] = [None] * count
        self._addresses: list[Hashable] = [None] * count
        self._idle = [0] * count
        self._memories: list[compat.Memory | None] = [None] * count
        if values:
            given = [
                torch.empty_like(part, dtype=torch.float32).copy_(compat.local_part(v))
                if self.is_cut and part.stride() != v.stride()
                else compat.local_part(v)
                for part, v in zip(self._parts(), values, strict=True)
            ]
            for piece in range(len(self.pieces)):
                compat.copy_all(
                    self._in_piece(self._flat, piece), self._of(given, piece)
                )
                self._keep(piece)
        self._free()
        self.end()

    @property
    def nbytes(self) -> int:
        """The memory that the masters take beside the parameters, between steps."""
        return self._low.nbytes + sum(each.nbytes for each in self._ties)

    @property
    def is_cut(self) -> bool:
        """Whether the chunk is one weight, stepped in several pieces."""
        return len(self.pieces) > 1

    def fits(self) -> bool:
        """Whether the parameters still have the memory format they had."""
        return [*map(_form, self._parts())] == self._forms

    def begin(self) -> None:
        """Sees what other code has written to the parameters since the last step."""
        parts = self._parts()
        moved = [*map(compat.data_address, parts)] != self._addresses
        if moved and any(clone is not None for clone in self._clones):
            self._resize()
            written = [False] * len(parts)
            for piece in range(len(self.pieces)):
                found = self._join(self._flat, piece, parts)
                written = [a or b for a, b in zip(written, found, strict=True)]
                self._keep(piece)
            for at, part in enumerate(parts):
                # Something asks for an address to write to, and reads.
                here = compat.data_address(part) != self._addresses[at]
                idle = here and self._lies(at) and not written[at]
                self._idle[at] = self._idle[at] + 1 if idle else 0
        del parts
        self._seen = all(clone is not None for clone in self._clones)
        self.let_go()

    def open(self, piece: int = 0) -> None:
        """Gives the masters of a piece their fp32 numbers, and memory for these."""
        self._resize()
        if self.is_cut:
            self._views = self._in_piece(self._flat, piece)
        self._show(self._views)
        self._join(self._flat, piece, None if self._seen else self._parts())

    def close(self, piece: int = 0) -> None:
        """Rounds the masters of a piece into the parameters."""
        own = [compat.own_memory(each.data) for each in self.masters]
        if [*map(compat.data_address, own)] != [*map(compat.data_address, self._views)]:
            # The step has given some `master.data` other memory.
            for view, now in zip(self._views, own, strict=True):
                view.copy_(now)
        compat.copy_all(self._of(self._parts(), piece), self._views)
        self._keep(piece)
        # Whoever keeps a master sees no freed memory.
        self._show([self._nothing] * len(self.params))
        self._free()

    def end(self) -> None:
        """Watches the parameters until the next step."""
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

    def values(self) -> list[torch.Tensor]:
        """Copies of the masters, as parameters."""
        flat = torch.empty_like(self._low, dtype=torch.float32)
        for piece, (start, stop) in enumerate(self.pieces):
            self._join(flat[start:stop], piece, self._parts())
        return self._as_params([*self._views_of(flat)])

    def let_go(self) -> None:
        """Watches the parameters' memory no more."""
        watched = [at for at, clone in enumerate(self._clones) if clone is not None]
        self._clones = [None] * len(self.params)
        for at in watched:
            compat.end_lazy_clone(compat.own_memory(self.params[at]))

    # -- numbers -------------------------------------------------------------------

    def _join(
        self, flat: torch.Tensor, piece: int, parts: Sequence[torch.Tensor] | None
    ) -> list[bool]:
        """Writes the masters of a piece into `flat`.

        Args:
            parts: the parameters, where other code may have written to them: then the
                master is what was written, element by element.

        Returns:
            Whether there was such an element, for each watched parameter.
        """
        views, (start, stop) = self._in_piece(flat, piece), self.pieces[piece]
        now = [*(parts or self._parts())]
        for at, (part, form) in enumerate(zip(now, self._forms, strict=True)):
            if parts is not None and part.shape != form[0]:  # nobody reads this master
                now[at] = part.new_zeros(form[0], dtype=torch.bfloat16)
        halves = [
            part if clone is None else clone
            for part, clone in zip(now, self._clones, strict=True)
        ]
        compat.copy_all(views, self._of(halves, piece))
        bits = flat[: stop - start].view(torch.int32)
        low = self._low[start:stop]
        # On a CPU torch converts the 16 bits in a copy first.
        size = _SLICE if low.is_cpu else ELSEWHERE
        for some, rest in zip(bits.split(size), low.split(size), strict=True):
            some.add_(rest)
        # From 2**15 below the parameter to 2**15 above it.
        bits[self._ties[piece]] += 1 << 16
        if parts is None:
            return []
        return self._follow(flat[: stop - start], piece, now)

    def _follow(
        self, flat: torch.Tensor, piece: int, parts: Sequence[torch.Tensor]
    ) -> list[bool]:
        half = torch.empty_like(flat, dtype=torch.bfloat16)
        fits = [_form(p) == form for p, form in zip(parts, self._forms, strict=True)]
        views = self._in_piece(flat, piece)
        pairs = zip(fits, self._of(parts, piece), views, strict=True)
        compat.copy_all(
            self._in_piece(half, piece), [p if fit else view for fit, p, view in pairs]
        )
        # By bits, since NaN is not equal to itself, and -0 is equal to 0.
        differs = flat.bfloat16().view(torch.int16) != half.view(torch.int16)
        torch.where(differs, half.float(), flat, out=flat)
        return [
            clone is not None and bool(differing.any())
            for differing, clone in zip(
                self._in_piece(differs, piece), self._clones, strict=True
            )
        ]

    def _keep(self, piece: int) -> None:
        """Keeps what the parameters lack of the masters."""
        start, stop = self.pieces[piece]
        flat, low = self._flat[: stop - start], self._low[start:stop]
        bits = flat.view(torch.int32)
        # The bits of a bf16 number, as an fp32 one, end in 16 zeros.  So the difference
        # of master and parameter, as bits, is the lower half of the master's bits, but
        # for a multiple of 2**16; the conversion drops the upper half.  As a number
        # with a sign that half lies between -2**15 and 2**15, and so does the
        # difference, since the parameter is the nearest bf16 number: both are one
        # number, and the sum in `_join` has every bit of the master.
        low.copy_(bits)
        # But for ties that were rounded down: 2**15 above the parameter, which 16 bits
        # show as 2**15 below it.
        at = _ties_in(low)
        rest = bits[at] - flat[at].bfloat16().float().view(torch.int32)
        self._ties[piece] = at[rest != _TIE]

    # -- memory --------------------------------------------------------------------

    def _lies(self, at: int) -> bool:
        """Whether a parameter is in the memory that is watched."""
        memory, own = self._memories[at], compat.own_memory(self.params[at])
        return memory is not None and compat.lies_in(own, memory)

    def _parts(self) -> list[torch.Tensor]:
        # `data`, since the writes to it are counted where the step is known to write.
        return [compat.own_memory(param.data) for param in self.params]

    def _resize(self) -> None:
        self._flat.untyped_storage().resize_(self._flat.numel() * 4)

    def _free(self) -> None:
        self._flat.untyped_storage().resize_(0)

    def _show(self, views: Sequence[torch.Tensor]) -> None:
        for master, view in zip(self.masters, views, strict=True):
            compat.own_memory(master).data = view

    def _as_params(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Parameters in the memory of `views`, sharded as the half parameters are."""
        # `data` counts its own writes: those to one master are not the others'.
        return [
            torch.nn.Parameter(compat.with_memory(p.detach(), view.data))
            for view, p in zip(views, self.params, strict=True)
        ]

    def _of(self, tensors: Sequence[torch.Tensor], piece: int) -> list[torch.Tensor]:
        """The elements of a piece in tensors that are laid out as the parameters."""
        if not self.is_cut:
            return [*tensors]
        start, stop = self.pieces[piece]
        return [in_order(each)[start:stop] for each in tensors]

    def _in_piece(self, flat: torch.Tensor, piece: int) -> list[torch.Tensor]:
        """The masters' parts of the memory `flat` of a piece."""
        start, stop = self.pieces[piece]
        return [flat[: stop - start]] if self.is_cut else [*self._views_of(flat)]

    def _views_of(self, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Each parameter's part of `flat`, in the memory format of the parameter."""
        begin = flat.storage_offset()
        for shape, strides, *_ in self._forms:
            yield flat.as_strided(shape, strides, begin)
            begin += shape.numel()


def _ties_in(low: torch.Tensor) -> torch.Tensor:
    """The positions at which `low` is `_TIE`."""
    whole = low.numel() // _BLOCK * _BLOCK
    blocks = low[:whole].view(-1, _BLOCK)
    hit = (blocks.amin(1) == _TIE).nonzero().flatten()
    at = (blocks[hit] == _TIE).nonzero()
    last = (low[whole:] == _TIE).nonzero().flatten() + whole
    return torch.cat([hit[at[:, 0]] * _BLOCK + at[:, 1], last])


def in_order(value: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps in the order of its memory."""
    return value.as_strided((value.numel(),), (1,))


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
    """Splits `params` into lists of one device and at most a chunk's elements.

    A parameter of more elements has a list of its own.
    """
    chunks: list[list[torch.Tensor]] = []
    of: dict[torch.device, tuple[list[torch.Tensor], int]] = {}
    for param in params:
        size = compat.local_part(param.detach()).numel()
        most = _chunk_on(param.device)
        chunk, held = of.get(param.device, ([], most))
        if held + size > most:
            chunk, held = [], 0
            chunks.append(chunk)
        chunk.append(param)
        of[param.device] = chunk, held + size
    return chunks


def _chunk_on(device: torch.device) -> int:
    return CHUNK if device.type == "cpu" else ELSEWHERE


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
