"""The tables beside the graph.

The tables of a graph have the keys

- `ops`: per category the number of ops in `low` precision and in `fp32`, with the
  `meaning` of the category;
- `casts`: per kind and dtype the `count` and the `bytes`, and whether the casts run at
  `every_call`;
- `placements`: the predicted cost of each placement: `title`, `estimate` and `extra`
  (against the placement in force), in `unit`, and `allow_in_fp32`;
- `unit` ("0.1 ns" or "bytes"), `device`, `cost`, `optimal_cost`, `has_reward`;
- `stayed`: the reasons for fp32 in the order of `print(report)`, each with the `nodes`
  (indices) and their `cost`, a text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from autoamp.inspect.costs import Costs, bytes_text, seconds_text, titles
from autoamp.inspect.rows import CastRow, OpRow, Section
from autoamp.inspect.sections.headline import stayed_groups
from autoamp.inspect.why import MEANINGS


def tables_of(section: Section, index: Mapping[str, int]) -> dict[str, Any]:
    """The tables of one section; `index` is the place of each node on the page."""
    costs = section.costs
    return {
        "ops": _categories(section.ops),
        "casts": _casts(section.casts),
        "placements": _placements(costs),
        "unit": "bytes" if costs.in_bytes else "0.1 ns",
        "device": costs.device,
        "cost": costs.ours.cost,
        "optimal_cost": costs.optimal_cost,
        "has_reward": bool(costs.reward),
        "stayed": _stayed(section, index),
    }


def _categories(ops: Sequence[OpRow]) -> list[dict[str, Any]]:
    counts = Counter((row.category, row.is_low) for row in ops)
    return [
        {
            "category": category,
            "meaning": meaning,
            "low": counts[category, True],
            "fp32": counts[category, False],
        }
        for category, meaning in MEANINGS.items()
        if counts[category, True] or counts[category, False]
    ]


def _casts(casts: Sequence[CastRow]) -> list[dict[str, Any]]:
    sizes: dict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for row in casts:
        sizes[row.kind, row.dtype, row.every_call].append(row.bytes)
    return [
        {
            "kind": kind,
            "dtype": dtype,
            "every_call": every_call,
            "count": len(found),
            "bytes": sum(found),
        }
        for (kind, dtype, every_call), found in sorted(sizes.items())
    ]


def _placements(costs: Costs) -> list[dict[str, Any]]:
    return [
        {
            "title": title,
            "estimate": costs.placements[name].estimate,
            "extra": costs.placements[name].estimate - costs.ours.estimate,
            "allow_in_fp32": costs.placements[name].allow_in_fp32,
        }
        for name, title in titles(costs).items()
    ]


def _stayed(section: Section, index: Mapping[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "reason": group.reason,
            "nodes": [index[row.name] for row in group.rows],
            "cost": bytes_text(group.bytes)
            if group.seconds is None
            else seconds_text(group.seconds),
        }
        for group in stayed_groups([section])
    ]
