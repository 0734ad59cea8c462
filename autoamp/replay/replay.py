"""Replays a death: the step as it was, in fp32, and under one rule after another."""

from __future__ import annotations

import os
from collections.abc import Callable

from autoamp.ask.progress import told
from autoamp.dtypes import LOW_DTYPES
from autoamp.overflow.remedy import EVERYTHING, Fault, Remedy, cure
from autoamp.overflow.trail import Step
from autoamp.replay import recorded as recording
from autoamp.replay.recorded import Recorded
from autoamp.replay.rerun import rerun
from autoamp.replay.session import Outcome
from autoamp.replay.verdict import Verdict, blamed, judged

Run = Callable[[Recorded, Remedy], Outcome]

_MOST_TRIES = 12
"""The most runs of the script that look for a rule."""


def replay(
    root: str | os.PathLike[str],
    *,
    rank: int | None = None,
    step: int | None = None,
    run: Run = rerun,
) -> Verdict:
    """Runs the deadly step in the folder `root` again, and judges it.

    Args:
        rank: whose death; by default that of the rank that died first.
        step: the number of the step; by default that of the first death.
        run: runs the step; by default the recorded script.

    Raises:
        OptionError: the folder or the script cannot be used.
    """
    death, records = recording.chosen(root, rank, step)
    found = recording.read(death, records)
    outcome = run(found, Remedy())
    verdict = judged(found, outcome)
    verdict.notes += [
        f"the recorded option {name} could not be read, and is the default here"
        for name in found.unread_options
        if found.facts.get("automatic")
    ]
    culprit = blamed(outcome)
    if not verdict.reproduced or verdict.in_fp32:
        return verdict
    everything = Remedy(keep=(EVERYTHING,))
    verdict.in_fp32 = run(found, everything).died
    if not verdict.in_fp32:
        verdict.rule = everything
        if culprit is not None and culprit.dtype in LOW_DTYPES.values():
            verdict.rule = _cure(found, outcome, culprit, run) or everything
    return verdict


def _cure(
    recorded: Recorded, outcome: Outcome, culprit: Step, run: Run
) -> Remedy | None:
    """The smallest remedy under which the step lives, or None."""

    def attempt(remedy: Remedy) -> Fault | None:
        left = run(recorded, remedy)
        return Fault(blamed(left), left.records) if left.died else None

    tries = told(range(_MOST_TRIES), "trying rules")
    return cure(Fault(culprit, outcome.records), attempt, tries)
