"""Says why a step is skipped, and proposes or applies a rule where that goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from autoamp.errors import LossScaleError
from autoamp.pipeline import Rewritten
from autoamp.scaling.blame import accused, blame, near
from autoamp.scaling.domain import ModelScaling
from autoamp.scaling.graph_run import GraphRun
from autoamp.scaling.overflow import Evidence
from autoamp.scaling.suspicion import REPEATED

logger = logging.getLogger(__name__)


def note_skip(evidence: Evidence, params: Sequence[torch.Tensor], number: int) -> None:
    """Logs why step `number` is skipped, and has the next runs watched.

    Args:
        params: the tensors that the step would change.

    Raises:
        LossScaleError: skipping can no longer help.
    """
    scalings = evidence.scalings
    culprits = [scaling.suspicion.culprit() for scaling in scalings]
    culprit = next((each for each in culprits if each is not None), None)
    for scaling in scalings:
        scale = scaling.loss_scale.scale
        why = blame(evidence.runs, params)
        if culprit is not None:
            why = accused(culprit, scale)
        why = f"step {number}: {why}"
        scaling.note_skip(why)
        if scaling.loss_scale.at_floor and _is_new(evidence, scaling):
            raise _floor_error(scaling, why)
        logger.info("autoamp: %s: skipped %s", scaling.label, why)
        suspicion = scaling.suspicion
        suspicion.begin(culprit, scale)
        rule = suspicion.rule_for(culprit, _records(evidence.runs, scaling))
        if rule is None:
            continue
        if scaling.heal is not None:
            scaling.heal(scaling, rule)
            logger.warning(
                "autoamp: %s: %d steps in a row were skipped (%s): the model is "
                "captured again with %s, because heal=True",
                scaling.label,
                REPEATED,
                why,
                rule,
            )
            continue
        logger.warning(
            "autoamp: %s: %d steps in a row were skipped (%s). "
            "autoamp.convert(model, %s) would keep that in fp32, and so would "
            "heal=True; autoamp.find_overflow(model, *inputs) tries rules until one "
            "cures it",
            scaling.label,
            REPEATED,
            why,
            rule,
        )


def note_step(scalings: Sequence[ModelScaling]) -> None:
    """Ends the watch of models after a step that is taken."""
    for scaling in scalings:
        if not scaling.suspicion.watching:
            continue
        scale = scaling.loss_scale.scale
        found = scaling.suspicion.end(scale)
        if found is not None:
            text = near(*found, scale)
            logger.info("autoamp: %s: %s", scaling.label, text)
            scaling.add_to_skip(text)


def _is_new(evidence: Evidence, scaling: ModelScaling) -> bool:
    """Whether the overflow is one by which no step has lowered the scale before.

    A backward that has lowered the scale already, in another optimizer's step, does not
    count: the scale may have come to the floor by that move.
    """
    new = [
        run
        for run in evidence.runs
        if run.scaling.domain.root is scaling.domain.root
        and not run.backward_pass.overflowed
    ]
    return bool(new) or not evidence.runs


def _floor_error(scaling: ModelScaling, why: str) -> LossScaleError:
    return LossScaleError(
        f"{scaling.label}: gradients overflow even at the lowest loss scale, "
        f"{scaling.loss_scale.scale:g}, so lowering it cannot help. {why}. Nothing was "
        "written. Look for NaN or infinities in the data, the loss and the forward "
        "(autoamp.find_overflow(model, *inputs) does); keep that op in fp32 with "
        "deny=[...], or its module with keep=[...]; or train in bf16"
    )


def _records(runs: Sequence[GraphRun], scaling: ModelScaling) -> list[Rewritten]:
    """The records of the graphs of one model that were run."""
    graphs = [run.origin.graph() for run in runs if run.scaling is scaling]
    found = {id(g): g.rewritten for g in graphs if g is not None}
    return [record for record in found.values() if record is not None]
