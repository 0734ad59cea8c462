"""Layers as libraries write them, on hostile data: at least as true as autocast.

The first of those that tests/conformance/test_spelled.py tries.
"""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor

from tests.quick import each_with_one, one_in
from tests.spelled import sweep
from tests.spelled.data import Situation
from tests.spelled.layers import Layer
from tests.spelled.measure import Subject, exactly, judged, run

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLED = 60
USUAL = [name for name, spelling in sweep.SPELLINGS.items() if spelling.kernel]
RIGHT = (
    "custom/right",
    "chain/softmax_less_its_maximum",
    "chain/rms_t5",
    "attention/gpt2/prefix/min",
)


def check(case: sweep.Case) -> None:
    (result,) = sweep.swept([case])
    assert not result.verdict.fails, sweep.line(result)


@pytest.mark.parametrize("case", sweep.issue_cases(), ids=str)
def test_what_was_found_to_be_wrong_is_right(case: sweep.Case) -> None:
    check(case)


# The cases have the two precisions by turns, so that one in three has both.
@pytest.mark.parametrize("case", one_in(3, sweep.sampled(SAMPLED)), ids=str)
def test_a_spelling_is_as_true_as_under_autocast(case: sweep.Case) -> None:
    check(case)


@pytest.mark.parametrize(("name", "precision"), each_with_one(USUAL, ["bf16", "fp16"]))
def test_a_usual_spelling_is_replaced(name: str, precision: str) -> None:
    """GPT-2's GELU, Llama's and T5's norms, written softmax, and more.

    CI has each spelling in one precision, in turn.
    """
    spelling = sweep.SPELLINGS[name]
    verdict = judged(Subject(spelling, Situation(), precision))
    assert not verdict.fails, str(verdict)
    assert verdict.kernels == [spelling.kernel]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_without_replacements_the_law_holds(precision: str) -> None:
    """What fails above is a fault of a replacement, and not of the measure."""
    cases = [c for c in sweep.issue_cases([precision]) if "layout/" not in c.name]
    results = list(sweep.swept(cases, fuse=False))
    failures = [sweep.line(r) for r in results if r.verdict.fails]
    assert not failures, "\n".join(failures)


class WorseThanAutocast(Subject):
    """Errors as autocast's, and larger by a factor."""

    factor = 1.2

    def run_ours(self, model: Layer, x: Tensor, cotangent: Tensor) -> dict[str, Tensor]:
        wide = copy.deepcopy(model).double()
        true = run(wide, x.double(), cotangent.double(), exactly())
        theirs, _ = self.autocast(model, x, cotangent)
        return {n: t + self.factor * (theirs[n] - t) for n, t in true.items()}

    def kernels(self) -> list[str]:
        return []


@pytest.mark.parametrize("name", RIGHT)
def test_an_error_a_little_larger_is_found(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subject = WorseThanAutocast(sweep.SPELLINGS[name], Situation(), "bf16")
        verdict = judged(subject)
        assert "output" in verdict.broken
        assert 1.15 < verdict.worst() < 1.25
        subject.factor = 1.05
        assert not judged(subject).fails


def test_the_truth_is_wide_throughout() -> None:
    """What a spelling asks for in fp32 it gets in float64."""
    x = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    with exactly():
        found = [x.float(), x.to(torch.float32), x.softmax(0, dtype=torch.float32)]
        made = torch.ones(3)
    assert torch.equal(found[0], x)
    assert {t.dtype for t in (*found, made)} == {torch.float64}
    assert torch.ones(3).dtype is torch.float32
