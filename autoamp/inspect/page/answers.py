"""The answers of `print(report)`, in the same words and figures, for the page.

The answers have the keys

- `runs_low`: sentences on the ops in low precision, the casts and the graphs;
- `gains`: null where nothing was converted, else `title`, `columns`, `rows` (a name and
  one text for each column), `sentence`, `footnote` ("" without rows) and `error`;
- `figures`: for "before" and "after" the pass the main figures, each with `value`,
  `title` and `note`;
- `next`: sentences on what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoamp.inspect.costs import bytes_text, seconds_text
from autoamp.inspect.document import Document
from autoamp.inspect.sections.gains import (
    ERROR,
    FOOTNOTE,
    WAYS,
    gains_of,
    runs_low_sentence,
)
from autoamp.inspect.sections.graph_facts import graph_facts
from autoamp.inspect.sections.headline import Headline


def answers_of(report: Document, advice: Sequence[str]) -> dict[str, Any]:
    """The answers of a report."""
    low = report.compute_dtype
    if low is None:
        return no_answers(advice)
    found = report.headline
    gains = gains_of(found, low)
    return {
        "runs_low": [
            runs_low_sentence(found, low),
            *graph_facts(report, low),
        ],
        "gains": {
            "title": gains.title,
            "columns": list(WAYS),
            "rows": [list(row) for row in gains.rows],
            "sentence": gains.sentence,
            "footnote": FOOTNOTE if gains.rows else "",
            "error": ERROR,
        },
        "figures": {"before": _before(found), "after": _after(found)},
        "next": list(advice),
    }


def no_answers(advice: Sequence[str]) -> dict[str, Any]:
    """The answers where nothing was converted: what to do next, and nothing else."""
    none: dict[str, list[Any]] = {"before": [], "after": []}
    return {"runs_low": [], "gains": None, "figures": none, "next": list(advice)}


def _before(found: Headline) -> list[dict[str, str]]:
    """The figures of the model in fp32."""
    figures = []
    if found.seconds_fp32 is not None:
        time = seconds_text(found.seconds_fp32)
        figures.append(_figure(time, _work(found), "in fp32, predicted"))
    if found.trains:
        kept = bytes_text(found.kept_fp32)
        figures.append(_figure(kept, "kept for the backward", "in fp32"))
    return [*figures, _figure("none", "error of rounding", "all is fp32")]


def _after(found: Headline) -> list[dict[str, str]]:
    """Speed, memory and error of the converted model, beside `torch.autocast`."""
    figures = []
    if found.speed_up is not None:
        assert found.speed_up_over_autocast is not None
        beside = f"{_times(found.speed_up_over_autocast)} torch.autocast, predicted"
        figures.append(_figure(_times(found.speed_up), "as fast as fp32", beside))
    if found.trains:
        beside = f"torch.autocast {bytes_text(found.kept_autocast)}, predicted"
        kept = bytes_text(found.kept)
        figures.append(_figure(kept, "kept for the backward", beside))
    measured = "compare() measures it"
    return [*figures, _figure("—", "error of rounding", measured)]


def _times(ratio: float) -> str:
    return f"{ratio:.2f}\N{MULTIPLICATION SIGN}"


def _work(found: Headline) -> str:
    return "forward and backward" if found.trains else "a forward"


def _figure(value: str, title: str, note: str) -> dict[str, str]:
    return {"value": value, "title": title, "note": note}
