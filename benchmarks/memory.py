"""`python -m benchmarks.memory`: what is alive in a training step, and of which kind.

Each allocation on the CPU is followed from its event in the allocator (`torch.profiler`
with `profile_memory`) to the event that frees it, from before the model is built: the
counts are exact, and have the temporaries inside of kernels.

With `--device cuda` the step is that of an H100 on tensors without data, and needs no
GPU: each storage is followed from the op that makes it until nothing holds it.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.tools.bench_memory import allocations
from autoamp.training.sentinels import copies_of

from . import fake_gpu, models, processes, report
from .bytes import ways
from .metrics import ModelCase
from .models import case_of
from .processes import Row, mean, new_row, ratio, ratio_text
from .report import said
from .setting import Setting
from .ways import CPU_BF16, low_way, prepared

WARM_UP = 2
"""Steps before the counted one: the first captures, and makes the optimizer's state."""

PAIR = ("autocast", "autoamp")
KINDS = ("weights", "copies", "gradients", "state", "saved", "temporaries")
MOMENTS = ("peak", "before", "forward", "loss", "middle", "end", "step")
NOTE = """\
Memory in a training step with AdamW, whose state is there before it; 1 MB is 10^6
bytes. "forward": its end, with the output; "loss": only the loss is held; "middle":
half of the gradients' bytes are there; "end": of the backward; "step": the most in the
optimizer's step. First batches that are large beside the weights, those of the
[byte counts](bytes.md), then batches of one. At the foot of each table are geometric
means. "copies" are low copies of weights, whoever made them; what is alive after the
forward and of no other kind is "saved"."""
FAKE_NOTE = """

Counted, not run: the step of an H100 on fake CUDA tensors, which have no data, with
torch's own autograd. The memory inside of kernels (workspaces of products,
convolutions and attention) is in no column. Each tensor has whole multiples of 512
bytes, as in torch's allocator for CUDA. AdamW takes all weights at once (`foreach`),
which is torch's choice on a GPU."""

_TEXT = models.text(1, 32, models.VOCAB)
SMALL = {
    **dict.fromkeys(("gpt2", "bert", "llama", "t5"), _TEXT),
    "vit": models.images(1),
    **dict.fromkeys(("resnet50", "convnext_tiny"), models.images(1, 64)),
}
"""The batches of one."""
ONE = ", batch of one"
_T = TypeVar("_T")


@dataclass
class Ledger:
    """The allocations so far, each with its kind, and those alive by their address."""

    kinds: list[str] = field(default_factory=list)
    alive: dict[int, tuple[int, int]] = field(default_factory=dict)
    moves: list[tuple[int, int]] = field(default_factory=list)

    def run(self, call: Callable[[], _T]) -> _T:
        """Follows the allocations of `call()`, which are temporaries until marked."""
        results: list[_T] = []
        for address, size in allocations(lambda: results.append(call())):
            if address in self.alive:  # at a new allocation: it was freed unseen
                block, bytes_ = self.alive.pop(address)
                self.moves.append((block, -bytes_))
            if size > 0:
                self.alive[address] = len(self.kinds), size
                self.moves.append(self.alive[address])
                self.kinds.append("temporaries")
        return results.pop()

    def place(self, tensor: Tensor) -> int:
        """The key in `alive` of a tensor's memory."""
        return compat.storage_span(tensor)[0]

    def mark(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Gives the memory of `tensors` its kind, as far as it is followed."""
        for tensor in tensors:
            if (found := self.alive.get(self.place(tensor))) is not None:
                self.kinds[found[0]] = kind

    def mark_saved(
        self, first: int, weights: Sequence[Tensor], low: torch.dtype
    ) -> None:
        """Marks what lives of the allocations from `first` on: copies, or saved."""
        for place, (block, size) in self.alive.items():
            if block >= first:
                copies = any(self._is_copy(place, size, w, low) for w in weights)
                self.kinds[block] = "copies" if copies else "saved"

    def _is_copy(self, place: int, size: int, weight: Tensor, low: torch.dtype) -> bool:
        if weight.dtype == low or weight.numel() * low.itemsize != size:
            return False
        memory = (ctypes.c_char * size).from_address(place)
        flat = weight.detach().as_strided((weight.numel(),), (1,))
        return torch.equal(torch.frombuffer(memory, dtype=low), flat.to(low))

    def states(self) -> list[Counter[str]]:
        """The bytes alive after each event, by kind."""
        now: Counter[str] = Counter()
        states = []
        for block, size in self.moves:
            now[self.kinds[block]] += size
            states.append(now.copy())
        return states


@dataclass
class FakeLedger(Ledger):
    """The storages that ops make of fake tensors, each until nothing holds it.

    Attributes:
        device: the type of the device whose memory is followed.
        watched: each storage alive, with a call for its end.
        casts: the blocks that weights were written to in another dtype.
    """

    device: str = "cuda"
    watched: dict[int, weakref.ref[Any]] = field(default_factory=dict)
    casts: set[int] = field(default_factory=set)

    def run(self, call: Callable[[], _T]) -> _T:
        with fake_gpu.Made(self._see):
            return call()

    def place(self, tensor: Tensor) -> int:
        return compat.storage_id(tensor)

    def _see(self, func: Any, args: Any, result: Any) -> None:
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and each.device.type == self.device:
                self._begin(each)
        pairs = _COPIES.get(func.overloadpacket.__name__, lambda *_: ())
        for target, source in pairs(args, result):
            found = self.alive.get(self.place(source))
            is_weight = found is not None and self.kinds[found[0]] == "weights"
            if is_weight and target.dtype != source.dtype:
                self.casts.add(self.alive[self.place(target)][0])

    def _begin(self, tensor: Tensor) -> None:
        place = self.place(tensor)
        if place not in self.alive:
            storage = tensor.untyped_storage()
            grain = fake_gpu.GRAIN if self.device == "cuda" else 1
            size = -(-storage.nbytes() // grain) * grain
            self.watched[place] = weakref.ref(storage, partial(self._end, place))
            self.alive[place] = len(self.kinds), size
            self.moves.append(self.alive[place])
            self.kinds.append("temporaries")

    def _is_copy(self, place: int, *_: Any) -> bool:
        return self.alive[place][0] in self.casts

    def _end(self, place: int, _: Any) -> None:
        del self.watched[place]
        block, size = self.alive.pop(place)
        self.moves.append((block, -size))


_COPIES: dict[str, Callable[[Any, Any], Iterable[Sequence[Tensor]]]] = {
    "_to_copy": lambda args, result: [(result, args[0])],
    "copy_": lambda args, _: [args[:2]],
    "_foreach_copy_": lambda args, _: zip(*args[:2], strict=True),
}
"""Ops that copy, by name: the pairs of a target and its source."""


def count_step(
    case: ModelCase, way: str, setting: Setting = CPU_BF16
) -> dict[str, Counter[str]]:
    """The bytes alive at each of the `MOMENTS`, by kind."""
    if not setting.fake:
        return _count_step(Ledger(), case, way, setting)
    dtype = setting.low if way == low_way(setting) else torch.float32
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    fake = fake_gpu.on_fakes(case, setting.device, dtype, mode)
    with fake_gpu.region(mode):
        return _count_step(FakeLedger(device=setting.device), fake, way, setting)


def _count_step(
    ledger: Ledger, case: ModelCase, way: str, setting: Setting
) -> dict[str, Counter[str]]:
    held: list[Any] = []
    ready = ledger.run(partial(prepared, case, way, setting))
    weights = [*ready.model.parameters()]
    # On a GPU that is torch's own choice, for other tensors than fake ones.
    foreach = setting.device == "cuda" or None
    optimizer = torch.optim.AdamW(weights, lr=1e-6, foreach=foreach)
    parts: tuple[Callable[[], Any], ...] = (
        lambda: held.append(ready.forward()),
        lambda: held.append(case.loss(held.pop())),
        lambda: held.pop().backward(),
        optimizer.step,
        optimizer.zero_grad,
    )
    for _ in range(WARM_UP + 1):
        ledger.mark("weights", [*weights, *ready.model.buffers()])
        ledger.mark("state", pytree.tree_leaves([*optimizer.state.values()]))
        ledger.mark(
            "copies",
            [c.kept for w in weights for c in copies_of(w) if c.kept is not None],
        )
        gc.collect()  # a capture leaves cycles
        first, ends = len(ledger.kinds), [len(ledger.moves)]
        for part in parts:
            ledger.run(part)
            ends.append(len(ledger.moves))
            if part is parts[1]:
                ledger.mark_saved(first, weights, setting.low)
            if part is parts[2]:
                ledger.mark(
                    "gradients", [w.grad for w in weights if w.grad is not None]
                )
    states = ledger.states()
    before, forward, loss, end, stepped, _ = ends
    half = states[end - 1]["gradients"] / 2
    return {
        "peak": max(states[before:], key=Counter.total),
        "before": states[before - 1],
        "forward": states[forward - 1],
        "loss": states[loss - 1],
        "middle": next(each for each in states[loss:] if each["gradients"] >= half),
        "end": states[end - 1],
        "step": max(states[end:stepped], key=Counter.total),
    }


def measured(name: str, setting: Setting = CPU_BF16) -> Row:
    """The moments of one model, way by way; a way that fails has its error instead."""
    row, model = new_row(name), name.removesuffix(ONE)
    case = case_of(model)
    if name != model:
        case = replace(case, inputs=SMALL[model])
    for way in ways(setting):
        torch._dynamo.reset()
        try:
            kinds = count_step(case, way, setting)
        except Exception as error:  # noqa: BLE001 - the other ways are still counted
            row["failures"][way] = said(error)
        else:
            totals = {moment: kinds[moment].total() for moment in MOMENTS}
            row["ways"][way] = totals | {"kinds": kinds}
    return row


def text(rows: Sequence[Row], setting: Setting, machine: str) -> str:
    """The page: for each size of batch the ratios, then the kinds at the peak."""
    tables = []
    for is_one in (False, True):
        found = [row for row in rows if row["name"].endswith(ONE) == is_one]
        if found:
            tables += [_ratios(found, ways(setting)), _kinds(found)]
    note = NOTE + FAKE_NOTE if setting.fake else NOTE
    return processes.page(rows, machine, note, *tables)


def _ratios(rows: Sequence[Row], ways: Sequence[str]) -> str:
    header = ["model", *(f"{way}, peak, MB" for way in ways)]
    header += [f"autoamp / autocast, {MOMENTS[0]}", *MOMENTS[1:]]
    cells = [
        [row["name"]]
        + [_megabytes(row["ways"].get(way, {}).get("peak")) for way in ways]
        + [ratio_text(ratio(row, moment)) for moment in MOMENTS]
        for row in rows
    ]
    means = [ratio_text(mean(rows, moment)) for moment in MOMENTS]
    foot = ["geometric mean", *("" for _ in ways), *means]
    return report.markdown(header, [*cells, foot])


def _kinds(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        found = [row["ways"].get(way, {}).get("kinds") for way in PAIR]
        peaks = [each["peak"] if each else {} for each in found]
        pairs = (" / ".join(_megabytes(p.get(k, 0)) for p in peaks) for k in KINDS)
        cells.append([row["name"], *pairs])
    return report.markdown([f"at the peak, {' / '.join(PAIR)}, MB", *KINDS], cells)


def _megabytes(value: int | None) -> str:
    return "failed" if value is None else f"{value / 1e6:.1f}"


def _brief(row: Row) -> str:
    return (
        f"autoamp / autocast {ratio_text(ratio(row, 'peak'))} {row['failures'] or ''}"
    )


def names(_: Setting) -> list[str]:
    """Each model with its batch of the byte counts, and with one of a single item."""
    return [*SMALL, *(name + ONE for name in SMALL)]


TABLE = processes.ModelTable("memory", names, measured, text, _brief, fake=True)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
