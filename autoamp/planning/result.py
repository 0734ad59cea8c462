"""`Plan`, the answer of `autoamp.plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from autoamp.planning import shown
from autoamp.planning.record import Planned

SCHEMA = 1


@dataclass(frozen=True)
class Plan(Planned):
    """Predicted time and memory of a step, as `autoamp.plan` returns them.

    `print(plan)` shows a table of 80 columns, and `plan.to_json()` writes the figures.
    """

    def to_json(self) -> str:
        """All figures as JSON; `schema` is the version of its fields."""
        document = {"schema": SCHEMA, **asdict(self)}
        for way, row in zip(self.ways, document["ways"], strict=True):
            row["fits"], row["per_second"] = self.fits(way), self.per_second(way)
        return json.dumps(document, indent=2, allow_nan=False) + "\n"

    def __str__(self) -> str:
        return shown.text(self)
