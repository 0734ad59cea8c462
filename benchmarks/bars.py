"""Tables of several ways to run a model as bar plots in an SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from .processes import Row, ratio

COLOURS = {
    "fp32": "#9aa0a6",
    "autocast": "#e69f00",
    "autoamp": "#0072b2",
    "bfloat16": "#009e73",
    "float16": "#009e73",
    "autocast, inductor": "#f0c566",
    "autoamp, inductor": "#56b4e9",
}
LEFT, WIDTH, HEIGHT = 60, 760, 220
"""The left edge of the bars, their width together, and the height of a bar plot."""

TOP = 40
BELOW = 60
_STEPS, _MOST_TICKS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0), 9
"""Distances of the lines of an axis, of which the first one is taken with few lines."""


def bytes_svg(paper: Sequence[Row], zoo: Sequence[Row]) -> str:
    """The bytes of each model relative to fp32, and the zoo's ratios to autocast.

    The zoo's ratios go from the smallest to the largest.  A plot without models is left
    out.
    """
    models = [row for row in paper if row["ways"].get("fp32")]
    shares = {
        row["name"]: {
            way: figures["step"] / row["ways"]["fp32"]["step"]
            for way, figures in row["ways"].items()
        }
        for row in models
    }
    title = "Bytes moved in a training step, fp32 = 1"
    plots = [grouped(title, shares)] if models else []
    ratios = [(row["name"], r) for row in zoo if (r := ratio(row, "step")) is not None]
    if ratios:
        plots.append(_sorted(sorted(ratios, key=lambda pair: pair[1])))
    return svg(plots)


def svg(plots: Sequence[str]) -> str:
    """The plots, one below the other."""
    each = TOP + HEIGHT + BELOW
    size = f'width="{LEFT + WIDTH + 20}" height="{each * len(plots)}"'
    moved = [
        f'<g transform="translate(0 {each * i})">{plot}</g>'
        for i, plot in enumerate(plots)
    ]
    style = "<style>text{font:12px sans-serif;fill:#333}</style>"
    white = '<rect width="100%" height="100%" fill="white"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, style, white, *moved, "</svg>"]) + "\n"


def grouped(title: str, shares: Mapping[str, Mapping[str, float]]) -> str:
    """A plot with a group of bars for each model, a bar for each way."""
    ways = [way for way in COLOURS if any(way in each for each in shares.values())]
    top = max(value for each in shares.values() for value in each.values()) * 1.05
    place = WIDTH / len(shares)
    bar = place * 0.8 / len(ways)
    parts = [_text(LEFT, 16, title, anchor="start")]
    parts += _keys(ways)
    for i, (name, each) in enumerate(shares.items()):
        start = LEFT + i * place
        line = TOP + HEIGHT + 18 + 14 * (i % 2) * (len(shares) > 9)
        parts.append(_text(start + place * 0.45, line, name))
        for j, way in enumerate(ways):
            if way in each:
                said = f"{name}, {way}: {each[way]:.3f}"
                parts.append(_bar(start + j * bar, bar, each[way] / top, way, said))
    return "".join([*parts, *_axis(top)])


def _sorted(ratios: Sequence[tuple[str, float]]) -> str:
    top = max(1.0, *(value for _, value in ratios)) * 1.05
    place = WIDTH / len(ratios)
    title = "Bytes of autoamp / bytes of autocast, the models of the zoo"
    bars = [
        _bar(LEFT + i * place, place, value / top, "autoamp", f"{name}: {value:.3f}")
        for i, (name, value) in enumerate(ratios)
    ]
    return "".join([_text(LEFT, 16, title, anchor="start"), *bars, *_axis(top)])


def _bar(x: float, width: float, share: float, way: str, title: str) -> str:
    high = share * HEIGHT
    where = f'x="{x:.1f}" y="{TOP + HEIGHT - high:.1f}"'
    size = f'width="{width * 0.92:.1f}" height="{high:.1f}"'
    name = f"<title>{escape(title)}</title>"
    return f'<rect {where} {size} fill="{COLOURS[way]}">{name}</rect>\n'


def _axis(top: float) -> list[str]:
    lines = []
    step = next((each for each in _STEPS if top / each <= _MOST_TICKS), top)
    for tick in (step * number for number in range(_MOST_TICKS + 1)):
        if tick <= top:
            y = TOP + HEIGHT * (1 - tick / top)
            colour = "#333" if tick in (0, 1) else "#ccc"
            ends = f'x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"'
            lines.append(f'<line {ends} stroke="{colour}"/>\n')
            lines.append(_text(LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    return lines


def _keys(ways: Sequence[str]) -> list[str]:
    each = max(90, 24 + 7 * max(map(len, ways)))
    keys = []
    for number, way in enumerate(ways):
        x = LEFT + WIDTH - each * (len(ways) - number)
        box = f'<rect x="{x}" y="6" width="12" height="12" fill="{COLOURS[way]}"/>'
        keys.append(box + _text(x + 16, 16, way, anchor="start"))
    return keys


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text {where}>{escape(text)}</text>\n"
