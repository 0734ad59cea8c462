"""`MeshPlan`, the answer of `autoamp.plan` for a mesh."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from autoamp.meshes import shown
from autoamp.meshes.record import PlannedMesh

SCHEMA = 1


@dataclass(frozen=True)
class MeshPlan(PlannedMesh):
    """A training step on a mesh of devices, predicted without any of them.

    `print(plan)` shows tables of 80 columns, and `plan.to_json()` writes the figures.
    """

    def to_json(self) -> str:
        """All figures as JSON; `schema` is the version of its fields."""
        document = {"schema": SCHEMA, **asdict(self)}
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return shown.text(self)
