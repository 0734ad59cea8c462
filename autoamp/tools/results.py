"""`Result`: what `bench` answers, as text, JSON, markdown and HTML."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

from autoamp.printed import Printed

SCHEMA = 1
"""The version of the JSON; raised when a field changes its meaning or is removed."""


@dataclass(frozen=True, repr=False)
class Result(Printed):
    """Figures that can be printed, and written as JSON or markdown."""

    def document(self) -> dict[str, Any]:
        """The figures that `to_json` writes."""
        return asdict(self)

    def to_json(self) -> str:
        """All figures as JSON; `schema` is the version of its fields."""
        document = {"schema": SCHEMA, **self.document()}
        return json.dumps(_plain(document), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """The value with null for each number that JSON lacks: NaN and infinity."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
