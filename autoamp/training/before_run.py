"""What a run of a scaled graph is given; optimizers are met before the first run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autoamp import compat
from autoamp.training.attach import attach
from autoamp.training.ledger.backwards import lower_where_nobody_steps
from autoamp.training.model_scaling import ModelScaling


def inputs_of_run(
    scaling: ModelScaling,
    devices: Iterable[torch.device],
    leaves: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The extra inputs of a graph that is scaled at its edge, for one run.

    For each device the inputs are the loss scale, its inverse, and a new flag for the
    overflows of the run.

    Args:
        leaves: the tensors whose gradients the run fills.
    """
    ledger = scaling.ledger
    if ledger.foreign is None:
        ledger.foreign = False
        _meet_optimizers(scaling, leaves)
    if ledger.scalers:
        ledger.a_scaler_scales()
    if not ledger.stepped:
        lower_where_nobody_steps(scaling)
    return scaling.edge_inputs(devices)


def _meet_optimizers(scaling: ModelScaling, weights: Sequence[torch.Tensor]) -> None:
    """Finds the optimizers that hold `weights`, and GradScalers, before the first run.

    A GradScaler may be about to scale this model's loss, and the first gradients of a
    loss that is scaled twice would overflow.  So the GradScalers are looked at again
    before a backward, unless the user has asked for a loss scale of ours.
    """
    optimizers, scalers = compat.optimizers_and_scalers()
    if not scaling.asked:
        scaling.ledger.note_scalers(scalers)
    ids = {id(weight) for weight in weights}
    for optimizer in optimizers:
        groups = getattr(optimizer, "param_groups", ())
        if any(id(p) in ids for group in groups for p in group["params"]):
            attach(optimizer).link(scaling)
