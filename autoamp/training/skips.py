"""Says why a step is skipped, and proposes or applies a rule where that goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from autoamp.errors import LossScaleError
from autoamp.overflow.culprit import (
    accused,
    blame_gradients,
    last_bad_gradient,
    names_of,
    near,
    with_bad_gradients,
)
from autoamp.overflow.remedy import REPEATED, Remedy
from autoamp.overflow.trail import Step
from autoamp.rewrite.rewritten import Rewritten
from autoamp.training.ledger.graph_run import GraphRun
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.scale.base import free_to_read
from autoamp.training.step.read import Evidence

logger = logging.getLogger(__name__)


_AGAIN = 100
"""After so many skipped steps in a row that is said again, and after as many more."""


def note_skip(
    evidence: Evidence,
    params: Sequence[torch.Tensor],
    guards: Sequence[ModelScaling] = (),
    by: int = 0,
) -> None:
    """Logs why a step is skipped, and has the next runs watched.

    Args:
        params: the tensors that the step would change.
        guards: the models for whose sake all gradients were looked at.
        by: the `id` of the optimizer.

    Raises:
        LossScaleError: skipping can no longer help.
    """
    scalings = evidence.scalings
    every = list(dict.fromkeys([*scalings, *guards]))
    found = _blamed(every)
    for scaling in every:
        scaling.ledger.in_a_row += 1
        if scaling not in scalings:
            _note_guarded(scaling, params, found, by)
        elif not scaling.adapts:
            _say_standstill(scaling, "")
    for scaling in scalings:
        scale = scaling.loss_scale.scale
        if found is None:
            why = _by_gradients(evidence.runs, params)
        else:
            why = _accused(found, scaling, scale)
        why = f"step {scaling.ledger.steps + 1}: {why}"
        scaling.ledger.note_skip(why)
        if scaling.loss_scale.at_floor and _is_new(evidence, scaling):
            raise _floor_error(scaling, why)
        logger.info("autoamp: %s: skipped %s", scaling.label, why)
        skip_watch = scaling.skip_watch
        mine = _own(found, scaling)
        skip_watch.begin(mine, scale, by)
        remedy = skip_watch.remedy_for(mine, _records(evidence.runs, scaling))
        if remedy is not None:
            _remedy(scaling, remedy, why)


def _blamed(scalings: Sequence[ModelScaling]) -> tuple[ModelScaling, Step] | None:
    """The model and its step to blame for gradients that are not finite.

    An infinity that one model hands to the next shows in the trails of both: the model
    that made it comes before one that was given it.
    """
    culprits = [(each, each.skip_watch.culprit()) for each in scalings]
    found = [(each, step) for each, step in culprits if step is not None]
    made = (pair for pair in found if not (pair[1].entered_bad or pair[1].is_given))
    return next(made, found[0] if found else None)


def _own(found: tuple[ModelScaling, Step] | None, of: ModelScaling) -> Step | None:
    return found[1] if found is not None and found[0] is of else None


def _accused(
    found: tuple[ModelScaling, Step], of: ModelScaling, scale: float | None
) -> str:
    culprit, why = found[0], accused(found[1], scale)
    return why if culprit is of else f"in the model {culprit.label}, {why}"


def _remedy(scaling: ModelScaling, remedy: Remedy, why: str) -> None:
    """Applies a remedy where the user asked to heal, else proposes it."""
    if scaling.on_remedy:
        for listener in scaling.on_remedy:
            listener(scaling, remedy)
        logger.warning(
            "autoamp: %s: %d steps in a row were skipped (%s): the model is "
            "captured again with %s, because of %s",
            scaling.label,
            REPEATED,
            why,
            remedy.advice(by_variables=scaling.by_variables),
            scaling.advice("heal", True),
        )
        return
    logger.warning(
        "autoamp: %s: %d steps in a row were skipped (%s). "
        "%s would keep that in fp32, and so would %s; "
        "autoamp.find_overflow(model, *inputs) tries rules until one cures it",
        scaling.label,
        REPEATED,
        why,
        _proposal(scaling, remedy),
        scaling.advice("heal", True),
    )


def _by_gradients(runs: Sequence[GraphRun], params: Sequence[torch.Tensor]) -> str:
    """A clause about the last run whose gradients are not finite."""
    bad = set(map(id, with_bad_gradients(params)))
    for run in reversed(runs):
        captured = run.origin.graph()
        # None: the graph was garbage-collected.
        if captured is None or not any(bool(flag) for flag in run.found_inf):
            continue
        graph = captured.gm.graph
        inputs = graph.find_nodes(op="placeholder")
        positions = zip(run.leaves.ids, run.origin.positions, strict=True)
        weights = [inputs[at] for leaf, at in positions if leaf in bad]
        return last_bad_gradient(graph, weights) or (
            f"a gradient that leaves {run.scaling.label} is not finite"
        )
    return "the gradients are not finite"


def _proposal(scaling: ModelScaling, remedy: Remedy) -> str:
    if scaling.by_variables:
        return remedy.advice(by_variables=True)
    return f"autoamp.convert(model, {remedy})"


def note_step(scalings: Sequence[ModelScaling], by: int = 0) -> None:
    """Ends the watch of models after a step that the optimizer of id `by` takes."""
    for scaling in dict.fromkeys(scalings):
        scaling.ledger.in_a_row = 0
        if not scaling.skip_watch.watching:
            continue
        scale = scaling.loss_scale.scale
        found = scaling.skip_watch.end(scale, by)
        if found is not None:
            text = near(*found, scale)
            logger.info("autoamp: %s: %s", scaling.label, text)
            scaling.ledger.add_to_skip(text)


def count_skips(scalings: Sequence[ModelScaling], flag: torch.Tensor) -> None:
    """Counts a step as skipped for each of `scalings` that has no loss scale."""
    counts = {id(s.domain): s.domain.loss_scale for s in scalings if not s.enabled}
    if not counts or (free_to_read(flag) and not bool(flag)):
        return
    for count in counts.values():
        count.count_skipped(flag)


def say_foreign(scaling: ModelScaling) -> None:
    """Says that a GradScaler decides which steps are taken."""
    logger.info(
        "autoamp: %s: a GradScaler steps its optimizer; loss scaling and skipped steps "
        "are left to it",
        scaling.label,
    )


def _note_guarded(
    scaling: ModelScaling,
    params: Sequence[torch.Tensor],
    found: tuple[ModelScaling, Step] | None,
    by: int,
) -> None:
    """Says why a step is skipped for a model whose graphs have no flags.

    Args:
        found: the result of `_blamed`.
        by: the `id` of the optimizer.
    """
    if found is None:
        why = blame_gradients(params, names_of(scaling.models))
    else:
        why = _accused(found, scaling, None)
    why = f"step {scaling.ledger.steps + 1}: {why}"
    if not scaling.ledger.skips:
        logger.warning(
            "autoamp: %s: skipped %s. Nothing was written, and later steps are skipped "
            "likewise; with %s they would be taken",
            scaling.label,
            why,
            scaling.advice("guard", False),
        )
    else:
        logger.info("autoamp: %s: skipped %s", scaling.label, why)
    scaling.ledger.note_skip(why)
    mine, skip_watch = _own(found, scaling), scaling.skip_watch
    skip_watch.begin(mine, None, by)
    remedy = skip_watch.remedy_for(mine, skip_watch.records)
    if remedy is not None:
        _remedy(scaling, remedy, why)
    elif not scaling.adapts:
        _say_standstill(scaling, f" ({why})")


def _say_standstill(scaling: ModelScaling, why: str) -> None:
    """Warns of steps skipped in a row that no move of a loss scale is going to end."""
    times = scaling.ledger.in_a_row
    if times != REPEATED and times % _AGAIN:
        return
    moves = "its loss scale never moves" if scaling.enabled else "it has no loss scale"
    logger.warning(
        "autoamp: %s: %d steps in a row were skipped%s, and %s, so that nothing is "
        "trained until gradients are finite again. Look for NaN or infinities in the "
        "data, the loss and the weights; autoamp.find_overflow(model, *inputs) looks "
        "for the op where they begin",
        scaling.label,
        times,
        why,
        moves,
    )


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
        f"{scaling.advice('deny', ['OP'])}, or its module with "
        f"{scaling.advice('keep', ['PATH'])}; or train in bf16"
    )


def _records(runs: Sequence[GraphRun], scaling: ModelScaling) -> list[Rewritten]:
    """The records of the graphs of one model that were run."""
    graphs = [run.origin.graph() for run in runs if run.scaling is scaling]
    found = {id(g): g.rewritten for g in graphs if g is not None}
    return [record for record in found.values() if record is not None]
