"""Every op of torch's OpInfo database

Each op is called with torch's own samples in fp32 on the CPU, forward and backward, and
rewritten in both precisions:

* between copies that run low, so that what may run low does, on inputs that the low
  dtype holds exactly, so that what is not a float must not change;
* before such copies, on any inputs, so that what reads fp32 must not be rounded first;
* with every op denied; in place; with `out=`; and through `convert`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autoamp
from autoamp.errors import CaptureError
from tests.conformance import oplaws, rounding
from tests.conformance.opinfo import (
    OPS,
    Call,
    Case,
    InPlace,
    Out,
    Wrapped,
    captured_by_dynamo,
    cases,
    run,
    runs,
    title,
    traced,
)
from tests.conformance.table import Figures

SAMPLES = 2
"""Samples of each op, spread evenly over the up to 1440 that torch makes."""

FEW = 2
"""Samples of each op in place and with `out=`."""

pytestmark = pytest.mark.usefixtures("torch_quiet")

IN_PLACE = [op for op in OPS if op.get_inplace() is not None]
WITH_OUT = [op for op in OPS if op.supports_out]


# -- rewritten -------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=title)
def test_rewritten(op: Any, figures: Figures) -> None:
    """Denied, before low copies and between low copies, in both precisions."""
    tried = 0
    low: set[str] = set()
    for case in cases(op, SAMPLES):
        model = Call(case)
        if not runs(model, case):
            continue
        tried += 1
        try:
            free = oplaws.check_denied(model, case.inputs, case.finish)
        except CaptureError:
            assert traced(model, case.inputs()) is None
            check_converted(case)
            continue
        for checked in oplaws.rewrites(model, case, oplaws.free_ops(free)):
            if checked.ran_low:
                low.add(checked.precision)
            figures.worst("error over bound", checked.error or 0.0)
    if op.name.startswith("jiterator"):
        pytest.skip("torch's jiterator makes CUDA kernels only")
    assert tried, "plain torch runs none of its samples"
    figures.count("ops")
    figures.count("samples", tried)
    for precision in low:
        figures.count(f"ops that ran low in {precision}")


# -- in place, and into a tensor given -------------------------------------------------


def check_writes(model: nn.Module, given: oplaws.Given, finish: oplaws.Finish) -> None:
    """Denied, and on inputs that the low dtype holds, in both precisions."""
    try:
        free = oplaws.check_denied(model, given, finish)
    except CaptureError:
        assert traced(model, given()) is None
        return
    inplace = isinstance(model, InPlace)
    allow = sorted({"clone", *(oplaws.free_ops(free) if inplace else ())})
    for precision, low in oplaws.LOW.items():
        for tried in (model, Wrapped(model, inputs=True)):
            asked = {"exact_inputs": True, "allow": allow}
            oplaws.check(tried, partial(given, low), finish, precision, **asked)


@pytest.mark.parametrize("op", IN_PLACE, ids=title)
def test_in_place(op: Any) -> None:
    """What is written is what is returned."""
    for case in cases(op, FEW, op.get_inplace()):
        model = InPlace(case)
        if runs(model, case):
            check_writes(model, case.inputs, case.finish)


@pytest.mark.parametrize("op", WITH_OUT, ids=title)
def test_out(op: Any) -> None:
    """`out=` is written and returned, be it an input or made in the graph."""
    for case in cases(op, FEW, grad=False):
        made = pytree.tree_leaves(run(Call(case), case.inputs()).result)

        def given(
            rounded: torch.dtype | None = None, case: Case = case, made: Any = made
        ) -> list[Tensor]:
            return case.inputs(rounded) + [torch.zeros_like(t) for t in made]

        model = Out(case, len(made), nested=len(made) > 1)
        try:
            run(model, given())
        except (RuntimeError, TypeError):
            continue  # no `out=` for this sample, or for results that are no tensors
        check_writes(model, given, lambda result: result)


# -- through convert -------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=title)
def test_converted(op: Any) -> None:
    """The first sample, between low copies, in bf16."""
    for case in cases(op, 1):
        if not runs(Call(case), case):
            assert op.name.startswith("jiterator")
            pytest.skip("torch's jiterator makes CUDA kernels only")
        check_converted(case)


def check_converted(case: Case) -> None:
    model = Wrapped(Call(case), inputs=True)
    given = partial(case.inputs, torch.bfloat16)
    expected = run(model, given(), case.finish)
    if not captured_by_dynamo(model, case):
        return
    autoamp.convert(
        model, precision="bf16", do_no_harm=False, strict=True, allow=["clone"]
    )
    ours = run(model, given(), case.finish)
    oplaws.same_kind(ours, expected)
    assert autoamp.report(model).runs


# -- the laws can fail -----------------------------------------------------------------


def first_case(name: str) -> Case:
    op = next(op for op in OPS if title(op) == name)
    return next(cases(op, 1))


def test_a_bound_can_fail(monkeypatch) -> None:
    """What fp32 rounds is no bound for what bf16 does."""
    case = first_case("matmul")
    oplaws.check(Call(case), case.inputs, case.finish, "bf16")
    finer = rounding.Noise

    def noise(_: torch.dtype, seed: int) -> rounding.Noise:
        return finer(torch.float32, seed)

    monkeypatch.setattr(rounding, "Noise", noise)
    monkeypatch.setattr(rounding, "unit_roundoff", lambda _: 2.0**-24)
    with pytest.raises(AssertionError, match="error"):
        oplaws.check(Call(case), case.inputs, case.finish, "bf16")


def test_rounding_before_a_choice_is_seen() -> None:
    """A user may ask for it: near ties then fall the other way."""
    case = first_case("topk")
    near = 1 + torch.arange(case.tensors[0].numel()) * 1e-4
    case.tensors[0] = near.reshape(case.tensors[0].shape)
    oplaws.check(Call(case), case.inputs, case.finish, "bf16")
    with pytest.raises(AssertionError, match="not of floats"):
        oplaws.check(Call(case), case.inputs, case.finish, "bf16", allow=["topk"])
