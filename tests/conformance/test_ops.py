"""Every op of torch's OpInfo database

Each op is called with torch's own samples in fp32 on the CPU, forward and backward, and
rewritten in both precisions:

* between copies that run low, so that what may run low does, on inputs that the low
  dtype holds exactly, so that what is not a float must not change;
* before such copies, on any inputs, so that what reads fp32 must not be rounded first;
* with every op denied; in place; with `out=`; and through `convert`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    cases,
    run,
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


def runs(model: nn.Module, case: Case, **inputs: Any) -> bool:
    """Whether plain fp32 runs; torch's samples hold calls that only other modes run."""
    try:
        run(model, case.inputs(**inputs), case.finish)
    except Exception:  # noqa: BLE001 - whatever torch says, it is not ours
        return False
    return True


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
            figures.count("samples traceable only by Dynamo")
            check_converted(case, figures)
            continue
        for checked in rewrites(model, case, oplaws.free_ops(free)):
            figures.count("rewrites")
            if checked.ran_low:
                low.add(checked.precision)
            if checked.error is None:
                figures.count("rewrites with random numbers, not compared")
            else:
                figures.worst("error over bound", checked.error)
    if op.name.startswith("jiterator"):
        pytest.skip("torch's jiterator makes CUDA kernels only")
    assert tried, "plain torch runs none of its samples"
    figures.count("ops")
    figures.count("samples", tried)
    for precision in low:
        figures.count(f"ops that ran low in {precision}")


def rewrites(model: nn.Module, case: Case, free: list[str]) -> Iterator[oplaws.Checked]:
    """The wrapped rewrites of one case."""
    for precision, low in oplaws.LOW.items():
        before = Wrapped(model, inputs=False)
        yield oplaws.check(before, case.inputs, case.finish, precision, allow=["clone"])
        between = Wrapped(model, inputs=True)
        if runs(between, case, rounded=low):
            yield oplaws.check(
                between,
                partial(case.inputs, low),
                case.finish,
                precision,
                exact_inputs=True,
                allow=sorted({"clone", *free}),
            )


# -- in place, and into a tensor given -------------------------------------------------


@pytest.mark.parametrize("op", IN_PLACE, ids=title)
def test_in_place(op: Any, figures: Figures) -> None:
    """What is written is what is returned, in both precisions."""
    for case in cases(op, FEW, op.get_inplace()):
        model = InPlace(case)
        if not runs(model, case):
            continue
        try:
            free = oplaws.check_denied(model, case.inputs, case.finish)
        except CaptureError:
            assert traced(model, case.inputs()) is None
            figures.count("in-place samples that torch cannot trace")
            continue
        figures.count("in-place samples")
        allow = sorted({"clone", *oplaws.free_ops(free)})
        for precision in oplaws.LOW:
            for tried in (model, Wrapped(model, inputs=True)):
                checked = oplaws.check(
                    tried,
                    partial(case.inputs, oplaws.LOW[precision]),
                    case.finish,
                    precision,
                    exact_inputs=True,
                    allow=allow,
                )
                figures.worst("error over bound", checked.error or 0.0)


@pytest.mark.parametrize("op", WITH_OUT, ids=title)
def test_out(op: Any, figures: Figures) -> None:
    """`out=` is written and returned, be it an input or made in the graph."""
    for case in cases(op, FEW, grad=False):
        result = run(Call(case), case.inputs()).result
        made = pytree.tree_leaves(result)
        given = partial(with_outs, case, made)
        model = Out(case, len(made), nested=len(made) > 1)
        try:
            run(model, given())
        except (RuntimeError, TypeError):
            continue  # no `out=` for this sample, or for results that are no tensors
        try:
            oplaws.check_denied(model, given, unfinished)
        except CaptureError:
            assert traced(model, given()) is None
            figures.count("out= samples that torch cannot trace")
            continue
        figures.count("out= samples")
        for precision in oplaws.LOW:
            for tried in (model, Wrapped(model, inputs=True)):
                checked = oplaws.check(
                    tried,
                    partial(given, oplaws.LOW[precision]),
                    unfinished,
                    precision,
                    exact_inputs=True,
                    allow=["clone"],
                )
                figures.worst("error over bound", checked.error or 0.0)


def with_outs(
    case: Case, made: list[Tensor], rounded: torch.dtype | None = None
) -> list[Tensor]:
    """The inputs of a case, and tensors for its results."""
    return case.inputs(rounded) + [torch.zeros_like(t) for t in made]


def unfinished(result: Any) -> Any:
    """For runs of which no gradient is asked."""
    return result


# -- through convert -------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS, ids=title)
def test_converted(op: Any, figures: Figures) -> None:
    """The first sample, between low copies, in bf16."""
    for case in cases(op, 1):
        if not runs(Call(case), case):
            assert op.name.startswith("jiterator")
            pytest.skip("torch's jiterator makes CUDA kernels only")
        check_converted(case, figures)


def check_converted(case: Case, figures: Figures) -> None:
    model = Wrapped(Call(case), inputs=True)
    given = partial(case.inputs, torch.bfloat16)
    expected = run(model, given(), case.finish)
    if not captured_by_dynamo(model, case):
        figures.count("calls that Dynamo captures nothing of")
        return
    autoamp.convert(
        model, precision="bf16", do_no_harm=False, strict=True, allow=["clone"]
    )
    ours = run(model, given(), case.finish)
    oplaws.same_kind(ours, expected)
    assert autoamp.report(model).runs
    figures.count("converted calls")


def captured_by_dynamo(model: nn.Module, case: Case) -> bool:
    graphs: list[Any] = []

    def note(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    with contextlib.suppress(Exception):
        torch.compile(model, backend=note)(*case.inputs())
    torch._dynamo.reset()
    return bool(graphs)


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
