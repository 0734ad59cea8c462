"""What was removed from the package, and what to use instead of it."""

from __future__ import annotations

_PLAN = "autoamp.explain(model, x, device=...) predicts the time of a step"

_TUNE = "autoamp.bench(model, x) times the ways to run a model"

NAMES = {
    "MeshPlan": _PLAN,
    "Monitor": "autoamp.report(model).loss_scale has the figures of each step",
    "Plan": _PLAN,
    "Tuning": _TUNE,
    "plan": _PLAN,
    "tune": _TUNE,
}
"""Names of the package."""

_RECORD = "autoamp.find_overflow(model, x) finds the op on the live model"

OPTIONS = {"record": _RECORD, "snapshot": _RECORD}
"""Options of `convert`, and of what takes its options."""

VARIABLES = {"AUTOAMP_RECORD_DIR": _RECORD}
