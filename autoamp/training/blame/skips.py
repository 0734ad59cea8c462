"""Says why a step is skipped, and proposes or applies a rule where that goes on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autoamp import compat
from autoamp.errors import LossScaleError
from autoamp.passes.graph_record import Rewritten
from autoamp.training.blame.culprit import (
    accused,
    last_bad_gradient,
    near,
)
from autoamp.training.blame.remedy import REPEATED
from autoamp.training.blame.trail import Step
from autoamp.training.ledger import GraphRun
from autoamp.training.model_scaling import ModelScaling
from autoamp_said import logger_of

logger = logger_of(__name__)

_Blamed = tuple[ModelScaling, Step] | None
"""The model and its op to blame for a skipped step, where they are known."""

_AGAIN = 100
"""After so many skipped steps in a row that is said again, and after as many more."""


def note_skip(
    runs: Sequence[GraphRun],
    params: Sequence[torch.Tensor],
    guards: Sequence[ModelScaling],
    by: int,
) -> None:
    """Logs why a step is skipped, and has the next runs watched.

    Args:
        runs: the runs that filled the gradients of the step.
        params: the tensors that the step would change.
        guards: the models for whose sake all gradients were looked at.
        by: the `id` of the optimizer.

    Raises:
        LossScaleError: skipping can no longer help.
    """
    scalings = [*dict.fromkeys(run.scaling for run in runs)]
    every = [*dict.fromkeys([*scalings, *guards])]
    blamed = _blamed(every)
    for scaling in every:
        scaling.ledger.in_a_row += 1
        if scaling not in scalings:
            _note_guarded(scaling, params, blamed, by)
        elif not _falls(scaling, runs):
            _say_standstill(scaling, "")
    for scaling in scalings:
        scale = scaling.loss_scale.overflowed_at
        why = _accused(blamed, scaling, scale) or _by_gradients(runs, params)
        why = _noted(scaling, why)
        if scaling.loss_scale.is_stuck:
            raise LossScaleError(
                f"{scaling.label}: gradients overflow even at the lowest loss scale, "
                f"{scaling.loss_scale.scale:g}, so lowering it cannot help. {why}. "
                "Nothing was written. Look for NaN or infinities in the data, the loss "
                "and the forward (autoamp.find_overflow(model, *inputs) does); keep "
                f"that op in fp32 with {scaling.advice('deny', ['OP'])}, or its module "
                f"with {scaling.advice('keep', ['PATH'])}; or train in bf16"
            )
        logger.info("autoamp: %s: skipped %s", scaling.label, why)
        graphs = [run.origin.graph() for run in runs if run.scaling is scaling]
        records = {id(g): g.rewritten for g in graphs if g is not None}.values()
        known = [record for record in records if record is not None]
        _watch(scaling, blamed, scale, known, by=by, why=why)


def _falls(scaling: ModelScaling, runs: Sequence[GraphRun]) -> bool:
    """Whether a loss scale is lower by now than in the runs that overflowed.

    For a second derivative it falls as the next run begins.
    """
    mine = [run for run in runs if run.scaling is scaling]
    scale = scaling.loss_scale.scale
    return scaling.adapts and any(r.recorded or float(r.used) > scale for r in mine)


def _note_guarded(
    scaling: ModelScaling, params: Sequence[torch.Tensor], blamed: _Blamed, by: int
) -> None:
    """Says why a step is skipped that no graph of the model has made overflow."""
    is_first = not scaling.ledger.skips
    # The loss scale of another rank may be on its way down.
    elsewhere = scaling.adapts and compat.are_several()
    why = _accused(blamed, scaling, None)
    why = _noted(scaling, why or _of_parameters(params, scaling.models))
    if is_first and not elsewhere:
        taken = f"; with {scaling.advice('guard', False)} they would be taken"
        logger.warning(
            "autoamp: %s: skipped %s. Nothing was written, and later steps are skipped "
            "likewise%s",
            scaling.label,
            why,
            "" if scaling.enabled else taken,
        )
    else:
        logger.info("autoamp: %s: skipped %s", scaling.label, why)
    records = scaling.skip_watch.records
    cured = _watch(scaling, blamed, None, records, by=by, why=why)
    if not (cured or (elsewhere and scaling.ledger.in_a_row < _AGAIN)):
        _say_standstill(scaling, f" ({why})")


def _noted(scaling: ModelScaling, why: str) -> str:
    """The reason for a skipped step, with the step's number; also kept."""
    why = f"step {scaling.ledger.steps + 1}: {why}"
    scaling.ledger.note_skip(why)
    return why


def _watch(
    scaling: ModelScaling,
    blamed: _Blamed,
    scale: float | None,
    records: Sequence[Rewritten],
    *,
    by: int,
    why: str,
) -> bool:
    """Watches the next runs of a model; whether there is a remedy for the last ones."""
    mine = blamed[1] if blamed is not None and blamed[0] is scaling else None
    scaling.skip_watch.begin(mine, scale, by)
    remedy = scaling.skip_watch.remedy_for(mine, records)
    if remedy is not None:
        proposal = f"autoamp.convert(model, {remedy})"
        if scaling.by_variables:
            proposal = remedy.advice(by_variables=True)
        logger.warning(
            "autoamp: %s: %d steps in a row were skipped (%s). "
            "%s would keep that in fp32; "
            "autoamp.find_overflow(model, *inputs) tries rules until one cures it",
            scaling.label,
            REPEATED,
            why,
            proposal,
        )
    return remedy is not None


def _blamed(scalings: Sequence[ModelScaling]) -> _Blamed:
    """The model and its step to blame for gradients that are not finite.

    An infinity that one model hands to the next shows in the trails of both: the model
    that made it comes before one that was given it.
    """
    culprits = [(each, each.skip_watch.culprit()) for each in scalings]
    suspects = [(each, step) for each, step in culprits if step is not None]
    makers = (
        pair for pair in suspects if not (pair[1].entered_bad or pair[1].is_given)
    )
    return next(makers, suspects[0] if suspects else None)


def _accused(blamed: _Blamed, of: ModelScaling, scale: float | None) -> str:
    """A clause about the op to blame; empty where it is not known."""
    if blamed is None:
        return ""
    culprit, why = blamed[0], accused(blamed[1], scale)
    return why if culprit is of else f"in the model {culprit.label}, {why}"


def _by_gradients(runs: Sequence[GraphRun], params: Sequence[torch.Tensor]) -> str:
    """A clause about the last run whose gradients are not finite.

    A run that left no such gradient at these parameters comes last: its gradients were
    thrown away, or its model is gone and others have the ids of its parameters.
    """
    bad = set(map(id, _with_bad_gradients(params)))
    of_model = ""
    for run in reversed(runs):
        captured = run.origin.graph()
        # None: the graph was garbage-collected.
        if captured is None or not run.overflowed:
            continue
        graph = captured.gm.graph
        inputs = graph.find_nodes(op="placeholder")
        positions = zip(run.leaves.ids, run.origin.positions, strict=True)
        weights = [inputs[at] for leaf, at in positions if leaf in bad]
        named = last_bad_gradient(graph, weights)
        if named:
            return named
        of_model = of_model or (
            f"a gradient that leaves {run.scaling.label} is not finite"
        )
    return of_model or "the gradients are not finite"


def _of_parameters(
    params: Sequence[torch.Tensor], models: Iterable[torch.nn.Module]
) -> str:
    """A clause that names the first of `params` whose gradient is not finite.

    Args:
        models: the models that the names are looked up in.
    """
    bad = _with_bad_gradients(params)
    if not bad:
        return "a gradient of another rank is not finite"
    named = [pair for model in models for pair in model.named_parameters()]
    # Reversed, so that a tied weight keeps the first of its names.
    names = {id(parameter): name for name, parameter in reversed(named)}
    first = names.get(id(bad[0]), f"a tensor of shape {tuple(bad[0].shape)}")
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"the gradient of {first}{more} is not finite"


def _with_bad_gradients(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The members of `params` whose gradient is not finite."""
    pairs = [(p, p.grad) for p in params if p.grad is not None]
    return [p for p, g in pairs if bool(compat.any_not_finite([g]))]


def _say_standstill(scaling: ModelScaling, why: str) -> None:
    """Warns of steps skipped in a row that no move of a loss scale is going to end."""
    times = scaling.ledger.in_a_row
    if times != REPEATED and times % _AGAIN:
        return
    moves = "its loss scale never moves" if scaling.enabled else "it has no loss scale"
    if scaling.adapts:
        moves = "its loss scale has no part in that"
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


def note_step(scalings: Sequence[ModelScaling], by: int) -> None:
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


def say_foreign(scaling: ModelScaling) -> None:
    """Says that a GradScaler decides which steps are taken."""
    logger.info(
        "autoamp: %s: a GradScaler steps its optimizer; loss scaling and skipped steps "
        "are left to it",
        scaling.label,
    )
