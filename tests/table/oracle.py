"""The oracle: what holds of a converted model that is told without looking inside.

1. *Truth.*  Of each result (outputs, what is written into inputs and buffers, gradients
   of inputs and parameters) the error's Euclidean norm, against the same model in
   float64, is at most 1.1 times that under `torch.autocast`, or that of fp32 if it is
   the larger.  `tests/spelled/measure.py` says how chance is told from a fault.
2. *Form.*  The nest of outputs, and the dtype, sizes, strides, device and need of a
   gradient of each tensor are those of the model in fp32, or under autocast (strides).
3. *Side effects.*  Buffers and inputs that fp32 leaves alone keep every bit; outputs
   that share memory with inputs, parameters or each other do so again; the random
   state afterwards is that of fp32.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoamp
from tests.spelled import measure
from tests.table import columns
from tests.table.rows import Row

GROUPS, GROUP = 3, 8
"""How often, and over how many draws, a broken law is tried again."""


@dataclass
class Outcome:
    """What one run gives: its results by name, and the form of its outputs.

    Attributes:
        untouched: inputs and buffers, by name, that the run has left as they were.
        written: those that it has written; an exported program lacks some buffers.
        shared: pairs of names whose tensors share memory.
        random: the random state afterwards.
    """

    results: dict[str, Tensor] = field(default_factory=dict)
    structure: Any = None
    others: list[Any] = field(default_factory=list)
    forms: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    untouched: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    shared: set[tuple[str, str]] = field(default_factory=set)
    random: Tensor | None = None


def run(
    model: Any, given: Sequence[Any], context: Any, scale: float, *, grad: bool = True
) -> Outcome:
    """One forward, and one backward of a fixed random projection of all outputs."""
    inputs = [_leaf(x) for x in given]
    named = {f"input {i}": x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    named |= {f"buffer {name}": x for name, x in model.named_buffers()}
    before = {name: x.detach().clone() for name, x in named.items()}
    # A leaf that takes a gradient may not be written: the model gets a copy of it.
    read = [x * 1 if _floats(x) else x for x in inputs]
    named |= {f"input {i}": x for i, x in enumerate(read) if isinstance(x, Tensor)}
    torch.manual_seed(3)
    with context, torch.set_grad_enabled(grad):
        outputs = model(*read)
    found = Outcome(random=torch.get_rng_state())
    flat, found.structure = pytree.tree_flatten(outputs)
    tensors = {f"output {i}": x for i, x in enumerate(flat) if isinstance(x, Tensor)}
    found.others = [x for x in flat if not isinstance(x, Tensor)]
    found.forms = {name: _form(x) for name, x in tensors.items()}
    found.shared = _shared({**tensors, **named, **dict(model.named_parameters())})
    written = {n: x for n, x in named.items() if not _same(x, before[n])}
    found.untouched, found.written = {*named} - {*written}, {*written}
    found.results = {n: x.detach() for n, x in {**tensors, **written}.items()}
    if not grad:
        return found
    for parameter in model.parameters():
        parameter.grad = None
    wanted = [x for x in tensors.values() if x.requires_grad]
    generator = torch.Generator().manual_seed(5)
    toward = [torch.randn(x.shape, generator=generator) * scale for x in wanted]
    toward = [t.to(x.dtype) for t, x in zip(toward, wanted, strict=True)]
    with measure.exactly() if _wide(inputs) else contextlib.nullcontext():
        torch.autograd.backward(wanted, toward)
    leaves = {f"input {i}": x for i, x in enumerate(inputs) if _floats(x)}
    for name, leaf in (*leaves.items(), *model.named_parameters()):
        if leaf.grad is not None:
            found.results[f"gradient of {name}"] = leaf.grad.detach()
            found.forms[f"gradient of {name}"] = (leaf.grad.dtype == leaf.dtype,)
    return found


def _leaf(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return copy.deepcopy(x)
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _floats(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _wide(given: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.dtype is torch.float64 for x in given)


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.device, x.requires_grad, tuple(measure.strides(x))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().nan_to_num(), b.nan_to_num())


def _shared(named: dict[str, Tensor]) -> set[tuple[str, str]]:
    """The pairs with an output in them that share memory."""
    by_storage: dict[int, list[str]] = {}
    for name, x in named.items():
        if x.numel():
            by_storage.setdefault(x.untyped_storage().data_ptr(), []).append(name)
    return {
        (a, b)
        for names in by_storage.values()
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if a.startswith("output")
    }


@dataclass
class Trial:
    """A row in a column: the model in four ways, on as many draws as are asked for.

    Attributes:
        ours: the converted model, or what is to be judged in its place.
    """

    row: Row
    column: str
    ours: nn.Module | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {**columns.options(self.column), "strict": self.row.strict}

    @property
    def low(self) -> torch.dtype:
        return measure.LOW[self.options["precision"]]

    @property
    def grad(self) -> bool:
        """Whether a backward is run; a program that was exported has none."""
        return self.column != columns.EXPORTED

    def converted(self, model: nn.Module, given: Sequence[Any]) -> Any:
        if not self.grad:
            options = {k: v for k, v in self.options.items() if k != "loss_scale"}
            return autoamp.export(model, tuple(given), **options).module()
        if self.ours is None:
            copied = copy.deepcopy(model)
            self.ours = autoamp.convert(copied, **self.options)
        self.ours.load_state_dict(model.state_dict())
        return self.ours

    def runs(self, seed: int) -> dict[str, Outcome]:
        torch.manual_seed(seed)
        model, given = self.row.model(), self.row.inputs()
        scales = measure.SCALES if self.low is torch.float16 else (1.0,)

        def of(model: Any, given: Sequence[Any], context: Any, scale: float) -> Outcome:
            return run(model, given, context, scale, grad=self.grad)

        for scale in scales:
            amp = torch.autocast("cpu", self.low)
            autocast = of(copy.deepcopy(model), given, amp, scale)
            if all(x.isfinite().all() for x in autocast.results.values()):
                break
        else:
            scale = 1.0
        nothing = contextlib.nullcontext()
        wide = [x.double() if _floats(x) else x for x in given]
        return {
            "plain": of(copy.deepcopy(model), given, nothing, scale),
            "true": of(copy.deepcopy(model).double(), wide, measure.exactly(), scale),
            "autocast": autocast,
            "ours": of(self.converted(model, given), given, nothing, scale),
        }

    def errors(self, seed: int) -> measure.Errors:
        """Of each float result: ours, and the largest that is allowed."""
        runs = self.runs(seed)
        ways = [runs[way].results for way in ("ours", "plain", "autocast")]
        found = {}
        for name, exact in runs["true"].results.items():
            if exact.is_floating_point() and all(name in way for way in ways):
                ends = [way[name].double() for way in ways]
                found[name] = measure.error(exact.double(), ends)
        return {name: pair for name, pair in found.items() if pair}


def check(row: Row, column: str, ours: nn.Module | None = None) -> None:
    """Holds a row to every law in a column.

    Args:
        ours: is judged in the place of the converted model.

    Raises:
        AssertionError: a law is broken; the message names the result.
    """
    trial = Trial(row, column, ours)
    runs = trial.runs(0)
    plain, mine = runs["plain"], runs["ours"]
    _same_form(mine, plain, runs["autocast"])
    if trial.grad:
        _same_effects(mine, plain)
    if row.exact or column in columns.EXACT:
        for name, tensor in plain.results.items():
            assert _same(mine.results[name], tensor), f"{name} is not exact"
    elif column not in columns.BY_OTHER_LISTS:
        first = measure.broken(trial.errors(0))
        worse = measure.confirmed(trial.errors, first, groups=GROUPS, size=GROUP)
        told = [f"{n}: {a:.2g} (allowed {b:.2g})" for n, (a, b) in worse.items()]
        assert not worse, "further from the truth than autocast: " + "; ".join(told)
    if ours is None and column in columns.AS_SAID:
        _as_said(row, trial)


def _same_form(ours: Outcome, plain: Outcome, autocast: Outcome) -> None:
    assert ours.structure == plain.structure, "the nest of outputs is another"
    assert ours.others == plain.others
    assert ours.forms.keys() == plain.forms.keys()
    for name, form in ours.forms.items():
        assert form[:-1] == plain.forms[name][:-1], name
        strides = plain.forms[name][-1], autocast.forms.get(name, form)[-1]
        assert form[-1] in strides, f"{name} has other strides"
    written = plain.untouched & ours.written
    assert not written, f"written, though not in fp32: {written}"


def _same_effects(ours: Outcome, plain: Outcome) -> None:
    written = plain.untouched ^ ours.untouched
    assert not written, f"written in one of fp32 and ours: {written}"
    assert ours.shared == plain.shared, "outputs share memory with others"
    assert torch.equal(_state(ours), _state(plain)), "the random state is another"


def _state(outcome: Outcome) -> Tensor:
    assert outcome.random is not None
    return outcome.random


def _as_said(row: Row, trial: Trial) -> None:
    """The kernels and precisions that the row promises."""
    ops = list(autoamp.report(trial.ours).ops)
    if row.kernels is not None and trial.options.get("fuse", True):
        assert [op.kernel for op in ops if op.kernel] == list(row.kernels)
    for names, wanted in ((row.low, trial.options["precision"]), (row.high, "fp32")):
        for name in names:
            found = {op.precision for op in ops if base_name(op.op) == name}
            assert found == {wanted}, f"{name} runs in {found or 'no op'}"


def base_name(op: str) -> str:
    """`linear` for `aten::linear.default`."""
    return op.partition("::")[2].partition(".")[0]
