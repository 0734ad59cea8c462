from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Report:
    label: str
    rewritten: list[Any]
    graphs: list[Any]
    skipped: list[Any]
    runs: int
