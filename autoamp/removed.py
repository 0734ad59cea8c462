"""What was removed from the package, and what to use instead of it."""

from __future__ import annotations

_PLAN = "autoamp.explain(model, x, device=...) predicts the time of a step"

_TUNE = "autoamp.bench(model, x) times the ways to run a model"

_BUDGET = "autoamp.compare(model, x, tolerance=...).options go into convert()"

_LOCK = "`autoamp diff OLD NEW --exit-code` compares two reports, in CI"

NAMES = {
    "Budget": _BUDGET,
    "BudgetError": _BUDGET,
    "Frontier": _BUDGET,
    "LockError": _LOCK,
    "MeshPlan": _PLAN,
    "Monitor": "autoamp.report(model).loss_scale has the figures of each step",
    "Plan": _PLAN,
    "Tuning": _TUNE,
    "plan": _PLAN,
    "tune": _TUNE,
}
"""Names of the package."""

_RECORD = "autoamp.find_overflow(model, x) finds the op on the live model"

_BENCH = "bench(model, x) measures the batch of x, once a call"

_HEAL = "the warning of skipped steps names the rule to convert with"

OPTIONS = {
    "budget": _BUDGET,
    "calibrate_on": _BUDGET,
    "grams_per_kwh": "examples/power.py measures energy and CO2",
    "heal": _HEAL,
    "lock": _LOCK,
    "memory": _BENCH,
    "record": _RECORD,
    "snapshot": _RECORD,
    "sweep": _BENCH,
}
"""Options of `convert`, and of what takes its options."""

VARIABLES = {
    "AUTOAMP_HEAL": _HEAL,
    "AUTOAMP_LOCK": _LOCK,
    "AUTOAMP_RECORD_DIR": _RECORD,
}

TARGETS = {
    "executorch": "executorch.exir.to_edge_transform_and_lower takes the program",
}
"""Values of `target=` of `export`."""
