"""A `Bench` as a bar plot in SVG: the time of each way over fp32's time."""

from __future__ import annotations

from html import escape

from autoamp.benchmark.record import Measured, Row

_COLOURS = {
    "fp32": "#9aa0a6",
    "tf32": "#5f6368",
    "autocast": "#e69f00",
    "autoamp": "#0072b2",
    "tuned": "#56b4e9",
    "half": "#009e73",
}
_LEFT, _BARS, _RIGHT = 210, 420, 130
_LINE, _TOP = 26, 46
_STYLE = "<style>text{font:13px sans-serif;fill:#333}</style>"


def svg(bench: Measured) -> str:
    """The plot: a bar for each way that ran, as long as its time, with fp32 = 1."""
    rows = [row for row in bench.rows if row.ratio is not None]
    longest = max((_end(row) for row in rows), default=1.0)
    scale = _BARS / max(longest, 1.0)
    height = _TOP + _LINE * len(rows) + 16
    size = f'width="{_LEFT + _BARS + _RIGHT}" height="{height}"'
    title = f"Time of a step, fp32 = 1: {bench.label}, {bench.work}, {bench.precision}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        _STYLE,
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 20, title),
        _text(10, 36, bench.device),
    ]
    several = len(bench.batches) > 1
    for place, row in enumerate(rows):
        parts.append(_bar(row, _TOP + _LINE * place, scale, several=several))
    one = _LEFT + scale
    ends = f'x1="{one:.1f}" x2="{one:.1f}" y1="{_TOP}" y2="{height - 10}"'
    parts.append(f'<line {ends} stroke="#333" stroke-dasharray="3 3"/>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _end(row: Row) -> float:
    return (row.ratio or 0.0) + (row.ratio_sigma or 0.0)


def _bar(row: Row, top: float, scale: float, *, several: bool) -> str:
    """A row's name, its bar, its spread and its figures."""
    assert row.ratio is not None
    name = f"{row.way}, batch {row.batch}" if several else row.way
    width, spread = row.ratio * scale, (row.ratio_sigma or 0.0) * scale
    colour = _COLOURS.get(row.kind, "#999")
    middle = top + _LINE / 2
    box = f'x="{_LEFT}" y="{top + 4}" width="{width:.1f}" height="{_LINE - 8}"'
    from_, to = _LEFT + max(0.0, width - spread), _LEFT + width + spread
    ends = f'x1="{from_:.1f}" x2="{to:.1f}" y1="{middle}" y2="{middle}"'
    said = f"{row.ratio:.2f}"
    if row.seconds is not None:
        said += f" ({row.seconds * 1e3:.3g} ms)"
    return "\n".join(
        [
            _text(_LEFT - 8, middle + 4, name, anchor="end"),
            f'<rect {box} fill="{colour}"/>',
            f'<line {ends} stroke="#333"/>',
            _text(to + 6, middle + 4, said),
        ]
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(text)}</text>"
