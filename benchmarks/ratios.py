"""The figures of one model, as the results hold them, and what is made of several."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
"""A model's name, its figures way by way, and the errors of the ways that failed."""

KINDS = ("step", "forward", "saved")
"""The figures of which the table gives the ratio of autoamp to autocast."""


def ratio(row: Row, kind: str) -> float | None:
    """Autoamp's figure over autocast's; None where one is missing or 0."""
    ours, theirs = (row["ways"].get(w, {}).get(kind) for w in ("autoamp", "autocast"))
    return ours / theirs if ours and theirs else None


def mean(rows: Sequence[Row], kind: str) -> float | None:
    """The geometric mean of the ratios that there are; None of none."""
    found = [value for row in rows if (value := ratio(row, kind)) is not None]
    return statistics.geometric_mean(found) if found else None
