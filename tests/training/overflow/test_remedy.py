"""A remedy's options, and which remedies are tried."""

from __future__ import annotations

import pytest
import torch

from autoamp.training.blame.remedy import Fault, Remedy, cure
from autoamp.training.blame.trail import OUTSIDE, Location, Step
from autoamp.training.options import Options

DENY, KEEP = Remedy(deny=("exp",)), Remedy(keep=("head",))


def test_a_remedy_adds_to_the_options() -> None:
    options = Options(deny=("mul",), keep=("tail",), allow=("exp", "mm"))
    mended = (DENY + KEEP).on(options)
    assert (mended.deny, mended.keep) == (("mul", "exp"), ("tail", "head"))
    assert mended.allow == ("mm",)


@pytest.mark.parametrize("moves", [False, True])
def test_remedies_are_put_together_where_the_fault_moves(
    moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A remedy that leaves the fault where it was is no part of another."""
    monkeypatch.setattr(
        "autoamp.training.blame.remedy.candidates", lambda *_: [DENY, KEEP]
    )
    here, there = (
        Step(None, torch.inf, torch.float16, place=Location(OUTSIDE, op=op))
        for op in ("exp", "mul")
    )
    tried: list[Remedy] = []

    def attempt(remedy: Remedy) -> Fault:
        tried.append(remedy)
        return Fault(there if moves else here, [])

    assert cure(Fault(here, []), attempt, range(9)) is None
    assert tried == [DENY, KEEP, *([DENY + KEEP] if moves else [])]
