"""The laws that a rewritten call of an op keeps, whatever the op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from autoamp.passes.graph_record import Rewritten
from autoamp.passes.ops import base_name
from autoamp.passes.rules import Rules
from tests.conformance.opinfo import Case, Outcome, Wrapped, dense, plain, run, runs
from tests.conformance.rounding import error_over_bound, exact_and_drawn
from tests.small_models import deny_everything, rewritten

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}

Given = Callable[[], Sequence[Tensor]]
Finish = Callable[..., Any]


@dataclass(frozen=True)
class Checked:
    """What one rewritten module was found to do.

    `error` is its largest error over its bound; None where random numbers are drawn.
    """

    precision: str
    found: Rewritten
    error: float | None

    @property
    def ran_low(self) -> set[str]:
        """The ops that ran low, the copies around them aside."""
        low = self.found.assignment.low
        return ops_of(self.found.before, low.__contains__) - {"aten::clone"}


def check(
    model: nn.Module,
    given: Given,
    finish: Finish,
    precision: str,
    *,
    exact_inputs: bool = False,
    **lists: Any,
) -> Checked:
    """Rewrites `model`; asserts structure, dtypes, aliases, integers and numbers.

    Args:
        given: makes the inputs anew.
        finish: what turns the result into something a gradient is defined of.
        exact_inputs: whether the low dtype holds the inputs exactly.
        **lists: options of the rewrite.
    """
    expected = run_as_graph(model, given(), finish)
    found = rewritten(model, given(), precision, strict=True, **lists)
    ours = run(found.gm, given(), finish)
    same_kind(ours, expected)
    if not found.assignment.low:
        same_bits(ours, expected)
        return Checked(precision, found, 0.0)
    if expected.drew:
        return Checked(precision, found, None)
    same_integers(ours, expected)
    exact, drawn = exact_and_drawn(found, given(), finish, exact_inputs)
    error, where = error_over_bound(ours, expected, exact, drawn, LOW[precision])
    assert error <= 1, f"{precision}: {where}; ran low: {sorted(found.assignment.low)}"
    return Checked(precision, found, error)


def check_denied(model: nn.Module, given: Given, finish: Finish) -> Rewritten:
    """Every op denied: asserts that nothing is cast and every bit is the same."""
    expected = run_as_graph(model, given(), finish)
    free = rewritten(model, given(), "bf16", strict=True)
    met = ops_of(free.before, lambda _: True)
    rules = deny_everything([*Rules.default("bf16").table, *met])
    found = rewritten(model, given(), "bf16", strict=True, rules=rules)
    assert not found.casts
    ours = run(found.gm, given(), finish)
    same_kind(ours, expected)
    same_bits(ours, expected)
    return free


def run_as_graph(
    model: nn.Module, given: Sequence[Tensor], finish: Finish = lambda r: r
) -> Outcome:
    """Runs `model` itself, with the structure of results that an FX graph can give."""
    return run(lambda *tensors: plain(model(*tensors)), given, finish)


def ops_of(gm: fx.GraphModule, wanted: Callable[[str], bool]) -> set[str]:
    """The ops of the nodes whose names are `wanted`."""
    return {
        base_name(node.target)
        for node in gm.graph.nodes
        if isinstance(node.target, OpOverload) and wanted(node.name)
    }


def free_ops(found: Rewritten) -> list[str]:
    """The ops of a graph that the rules let run low."""
    verdicts = found.classified.verdicts
    free = {name for name, verdict in verdicts.items() if not verdict.pinned}
    return sorted(ops_of(found.before, free.__contains__))


def rewrites(model: nn.Module, case: Case, free: list[str]) -> Iterator[Checked]:
    """Before copies that run low, and between them where the ops in `free` do too."""
    for precision, low in LOW.items():
        before = Wrapped(model, inputs=False)
        yield check(before, case.inputs, case.finish, precision, allow=["clone"])
        between = Wrapped(model, inputs=True)
        if runs(between, case, rounded=low):
            yield check(
                between,
                partial(case.inputs, low),
                case.finish,
                precision,
                exact_inputs=True,
                allow=sorted({"clone", *free}),
            )


# -- comparing two runs ----------------------------------------------------------------


def same_kind(ours: Outcome, expected: Outcome) -> None:
    """Asserts equal structure, types, dtypes, shapes, layouts and aliases.

    Gradients are there where they were, none of them in a low dtype.
    """
    spec = pytree.tree_structure(expected.result)
    assert pytree.tree_structure(ours.result) == spec
    assert (ours.gradients is None) == (expected.gradients is None), ours.refused
    for (what, a), (_, b) in zip(ours.tensors(), expected.tensors(), strict=True):
        assert type(a) is type(b), what
        if not isinstance(b, Tensor):
            continue
        assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), what
        assert a.requires_grad == b.requires_grad, what
    assert shared(ours) == shared(expected)
    for gradient in ours.gradients or ():
        assert gradient is None or gradient.dtype not in LOW.values()


def shared(outcome: Outcome) -> list[list[bool]]:
    """Which results and inputs share storage with which."""
    found = [
        t.untyped_storage().data_ptr()
        for what, t in outcome.tensors()
        if what != "gradient" and isinstance(t, Tensor) and t.layout is torch.strided
    ]
    return [[bool(a) and a == b for b in found] for a in found]


def same_bits(ours: Outcome, expected: Outcome) -> None:
    """Asserts that every number is the same."""
    for (what, a), (_, b) in zip(ours.tensors(), expected.tensors(), strict=True):
        assert _equal(a, b), what


def same_integers(ours: Outcome, expected: Outcome) -> None:
    """Asserts that every number that is not a float is the same."""
    for (what, a), (_, b) in zip(ours.tensors(), expected.tensors(), strict=True):
        if not (isinstance(a, Tensor) and a.is_floating_point()):
            assert _equal(a, b), f"{what}, which is not of floats, changed"


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return bool(a == b) or repr(a) == repr(b) == "nan"
    a, b = dense(a.detach()), dense(b.detach())
    return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
