"""Why a weight is not finite, or very large: the optimizer, or another write."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autoamp.replay.recorded import Optimizer, Recorded, Saved

_ADAMS = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax")
_LARGE = 1e4
_RATE = 10.0
"""A learning rate above this is said to be the cause."""


def blamed_weight(name: str, recorded: Recorded, step_line: str) -> tuple[str, str]:
    """A sentence on a weight that is not finite, and the optimizer's line if guilty."""
    value = recorded.weights.get(name)
    where = f"weight {name} "
    if isinstance(value, Tensor):
        bad = ~value.isfinite()
        kind = "NaN" if bool(value.isnan().any()) else "infinite"
        where += f"is {kind} in {int(bad.sum())} of {value.numel()} numbers"
    else:
        where += "is not finite"
    where += f" before step {recorded.step}: {_history(recorded)}"
    why = _optimizers_fault(name, recorded)
    if why:
        at = f" ({step_line})" if step_line else ""
        taken = _last_taken(recorded)
        of = f"the optimizer's step {taken}" if taken else "an optimizer's step"
        return f"{where}. It was written by {of}: {why}{at}", step_line
    small = "The optimizer's state of it is finite, and its learning rate is usual"
    return f"{where}. {small}: it was written from outside of the optimizer", ""


def large_weight(recorded: Recorded) -> str:
    """One sentence where weights are finite and very large, or a rate is; else ""."""
    found = [
        (float(t.detach().abs().max()), name)
        for name, t in recorded.weights.items()
        if t.is_floating_point() and t.numel() and bool(t.isfinite().all())
    ]
    largest, name = max(found, default=(0.0, ""))
    rates = sorted({r for o in recorded.optimizers for r in map(_rate, o.of.values())})
    high = [rate for rate in rates if rate > _RATE]
    if largest < _LARGE and not high:
        return ""
    text = f"weight {name} holds numbers up to {largest:.3g}"
    if high:
        kinds = ", ".join(o.kind for o in recorded.optimizers)
        text += f"; the learning rate (lr) of {kinds} is {high[-1]:g}"
    return f"{text}; {_history(recorded)}"


def _history(recorded: Recorded) -> str:
    """What the ring knows of the steps before."""
    before = [r for r in recorded.steps if r.get("step") != recorded.step]
    good = [r for r in before if _is_finite(r.get("loss")) and r.get("taken")]
    bad = [
        r
        for r in before
        if r.get("gradient") is not None and not _is_finite(r["gradient"])
    ]
    if not before:
        return "the ring has no step before it"
    parts = []
    if good:
        last = good[-1]
        parts.append(
            f"at step {last['step']} the loss was {last['loss']:.4g} and the largest "
            f"gradient {_shown(last.get('gradient'))}"
        )
    if bad:
        parts.append(f"a gradient was not finite at step {bad[-1]['step']}")
    else:
        parts.append("no gradient was infinite in the steps of the ring")
    return ", and ".join(parts)


def _last_taken(recorded: Recorded) -> int:
    steps = [r for r in recorded.steps if r.get("taken") and r["step"] < recorded.step]
    return int(steps[-1]["step"]) if steps else 0


def _optimizers_fault(name: str, recorded: Recorded) -> str:
    """How the optimizer has made a weight infinite, or "" where it seems not to."""
    for optimizer in recorded.optimizers:
        options = optimizer.of.get(name)
        if options is None:
            continue
        rate = _rate(options)
        if not math.isfinite(rate) or rate > _RATE:
            return f"the learning rate (lr) of {optimizer.kind} is {rate:g}"
        for key, value in optimizer.state.get(name, {}).items():
            if isinstance(value, Saved) and not bool(value.tensor.isfinite().all()):
                return f"{key} in the state of {optimizer.kind} is not finite"
        return _by_formula(name, optimizer, options, rate, recorded)
    return ""


def _by_formula(
    name: str,
    optimizer: Optimizer,
    options: dict[str, Any],
    rate: float,
    recorded: Recorded,
) -> str:
    """The fault of a step of an Adam that is computed again from its state."""
    state, weight = optimizer.state.get(name, {}), recorded.weights.get(name)
    one, two = state.get("exp_avg"), state.get("exp_avg_sq")
    if not isinstance(one, Saved) or not isinstance(two, Saved):
        return ""
    if optimizer.kind not in _ADAMS or not isinstance(weight, Tensor):
        return ""
    eps = float(options.get("eps", 1e-8))
    root = two.tensor.float().sqrt() + eps
    update = rate * one.tensor.float() / root
    there = ~weight.isfinite()
    if update.shape == weight.shape and bool((there & ~update.isfinite()).any()):
        zero = " where its exp_avg_sq is 0" if bool((root == 0).any()) else ""
        since = f", since {optimizer.kind} has eps={eps:g}"
        return f"its update is {_kind(update)}{zero}{since}"
    return ""


def _kind(tensor: Tensor) -> str:
    return "NaN" if bool(torch.isnan(tensor).any()) else "infinite"


def _rate(options: dict[str, Any]) -> float:
    found = options.get("lr", 0.0)
    found = found.tensor if isinstance(found, Saved) else found
    return float(found) if isinstance(found, int | float | Tensor) else 0.0


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
