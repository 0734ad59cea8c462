"""What a snapshot knows beside the op: the loss, and who spoiled a weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autoamp.tools.find_overflow import Overflow
from autoamp.training import snapshot_files as files
from autoamp.training.snapshot_files import Snapshot
from autoamp.training.trail import OUTSIDE, WEIGHT

_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
_LARGE = 1e4
_RATE = 10.0
"""A learning rate above this is said to be the cause."""


def notes(found: Overflow, snapshot: Snapshot) -> list[str]:
    """Sentences beside the answer of a replay."""
    facts = snapshot.facts
    loss = facts["loss"]
    told = [f"the loss was {loss['value']}" if loss else "three steps were skipped"]
    if facts.get("why"):
        told[0] += f" ({facts['why']})"
    if not found or found.harmless:
        told.append(
            "the step does not die again: the options given cure it, or what it "
            "depends on is not in the snapshot, such as the loss function (loss_fn=, "
            "--loss) or a number of the script"
        )
    if found.kind == OUTSIDE and loss and loss.get("nodes"):
        told.append(
            f"autograd nodes behind it, the last first: {', '.join(loss['nodes'])}"
        )
    weights = snapshot.beginning("model.")
    if found.kind == WEIGHT and found.name in facts["not_finite"]:
        told.append(_spoiled(found.name, weights.get(found.name), snapshot))
    elif grown := _grown(weights, facts["optimizers"]):
        told.append(grown)
    return told


def _spoiled(name: str, value: Tensor | None, snapshot: Snapshot) -> str:
    """Whether the optimizer has made a weight infinite or NaN, or another write."""
    what = f"weight {name} was not finite before step {snapshot.facts['step']}"
    if value is not None:
        kind = "NaN" if bool(value.isnan().any()) else "infinite"
        count = int((~value.isfinite()).sum())
        what += f": {kind} in {count} of {value.numel()} numbers"
    for told in snapshot.facts["optimizers"]:
        if name not in told["params"]:
            continue
        if told["state"] is None:
            return f"{what}; the optimizer's state is not in the snapshot"
        why = _optimizers_fault(name, value, told, snapshot)
        if why:
            line = f" ({told['line']})" if told["line"] else ""
            return f"{what}; it was written by the optimizer's step{line}: {why}"
    return (
        f"{what}; the optimizer's state of it is finite, and its learning rate is "
        "usual: it was written from outside of the optimizer"
    )


def _optimizers_fault(
    name: str, weight: Tensor | None, told: dict[str, Any], snapshot: Snapshot
) -> str:
    """How the optimizer has made a weight infinite, or "" where it seems not to."""
    state = files.unpacked(told["state"], snapshot.tensors, torch.device("cpu"))
    number, kind = told["params"].index(name), told["class"]
    group = next(g for g in state["param_groups"] if number in g["params"])
    rate = float(group.get("lr", 0.0))
    if not math.isfinite(rate) or rate > _RATE:
        return f"the learning rate (lr) of {kind} is {rate:g}"
    mine = state["state"].get(number, {})
    for key, value in mine.items():
        if isinstance(value, Tensor) and not bool(value.isfinite().all()):
            return f"{key} in the state of {kind} is not finite"
    one, two = mine.get("exp_avg"), mine.get("exp_avg_sq")
    if kind not in _ADAMS or not isinstance(one, Tensor) or not isinstance(two, Tensor):
        return ""
    eps = float(group.get("eps", 1e-8))
    root = two.float().sqrt() + eps
    update = rate * one.float() / root
    if weight is None or update.shape != weight.shape:
        return ""
    if not bool((~weight.isfinite() & ~update.isfinite()).any()):
        return ""
    what = "NaN" if bool(update.isnan().any()) else "infinite"
    zero = " where its exp_avg_sq is 0" if bool((root == 0).any()) else ""
    return f"its update is {what}{zero}, since {kind} has eps={eps:g}"


def _grown(weights: dict[str, Tensor], optimizers: list[dict[str, Any]]) -> str:
    """One sentence where weights are finite and very large, or a rate is; else ""."""
    sizes = [
        (float(t.abs().max()), name)
        for name, t in weights.items()
        if t.is_floating_point() and t.numel() and bool(t.isfinite().all())
    ]
    largest, name = max(sizes, default=(0.0, ""))
    rates = [
        (float(rate), told["class"])
        for told in optimizers
        if told["state"] is not None
        for group in dict(told["state"]["dict"])["param_groups"]
        for key, rate in group["dict"]
        if key == "lr" and isinstance(rate, int | float)
    ]
    rate, kind = max(rates, default=(0.0, ""))
    if largest < _LARGE and rate <= _RATE:
        return ""
    text = f"weight {name} holds numbers up to {largest:.3g}"
    return f"{text}; the learning rate (lr) of {kind} is {rate:g}" if kind else text
