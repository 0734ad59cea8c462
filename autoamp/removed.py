"""What was removed from the package, and what to use instead of it."""

from __future__ import annotations

_PLAN = "autoamp.explain(model, x, device=...) predicts the time of a step"

NAMES = {
    "MeshPlan": _PLAN,
    "Plan": _PLAN,
    "plan": _PLAN,
}
"""Names of the package."""
