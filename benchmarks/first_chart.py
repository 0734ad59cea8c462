"""`python -m benchmarks.first_chart`: the README's chart, out of a committed table.

Nothing is measured here: times are those of the H100 in bf16.  The chart follows the
reader's light or dark colours, and its letters can be read on a phone.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape

from . import report, step_times
from .models import CONVOLVE
from .processes import Row
from .step_times import BASELINE
from .ways import CHANNELS_LAST

FP16, BF16 = (f"training-{each}-nvidia-h100-80gb-hbm3" for each in ("fp16", "bf16"))
LEFT_OUT = "resnet50"
"""The model that means leave out: autocast was not given its images channels last."""
CHART = report.ROOT / "docs" / "images" / "h100.svg"
TITLES = {
    "gpt2": "GPT-2",
    "bert": "BERT",
    "llama": "Llama",
    "t5": "T5",
    "vit": "ViT",
    "resnet50": "ResNet-50",
    "convnext_tiny": "ConvNeXt",
}
WAYS = {"autoamp": "autoamp", "bfloat16": ".bfloat16()"}
"""The ways that are drawn, and their names."""
COLOURS = {"autoamp": "#0072b2", "bfloat16": "#009e73"}

WIDTH, LEFT, RIGHT, TOP = 480, 104, 44, 66
BAR, GAP = 13, 12
MOST = 1.1
STYLE = """\
text{font:14px system-ui,sans-serif;fill:#24292f}
.title{font-weight:600}.small{font-size:12px}
.one{stroke:#24292f;stroke-dasharray:4 3}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.one{stroke:#e6edf3}}"""


def rows_of(table: str) -> list[Row]:
    """The rows of one of the two tables that chart and table of the README are of."""
    found = json.loads((report.RESULTS / f"{table}.json").read_text())
    return list(found["models"])


def chart() -> str:
    """The SVG."""
    found = {row["name"]: step_times.shares(row) for row in rows_of(BF16)}
    group = len(WAYS) * BAR + GAP
    bottom = TOP + group * len(TITLES)
    parts = [
        _text(0, 16, "H100, bf16: time of a training step, autocast = 1", "title"),
        *_keys([each for name, each in found.items() if name != LEFT_OUT]),
    ]
    unfair = []
    for number, (name, title) in enumerate(TITLES.items()):
        y = TOP + group * number
        last = f"{BASELINE}{CHANNELS_LAST}" in found[name]
        # Convolutions: autoamp runs them channels last, and autocast as they are given.
        mark = "" if last or name not in CONVOLVE else "*"
        unfair += [mark] * bool(mark)
        parts.append(_text(LEFT - 8, y + BAR + 5, title + mark, end=True))
        for row, way in enumerate(WAYS):
            parts.append(_bar(y + row * BAR, found[name][way], way))
    one = _x(1.0)
    ends = f'x1="{one:.1f}" x2="{one:.1f}" y1="{TOP - 6}" y2="{bottom - GAP + 4}"'
    parts.append(f'<line class="one" {ends}/>')
    if unfair:
        said = "* autocast was not given channels last; means leave out ResNet-50"
        parts.append(_text(0, bottom + 10, said, "small"))
    size = f'viewBox="0 0 {WIDTH} {bottom + 18}" width="{WIDTH}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


def _keys(shares: Sequence[Mapping[str, float]]) -> list[str]:
    """The colour of each way, and the geometric mean of its shares."""
    parts = []
    for number, (way, title) in enumerate(WAYS.items()):
        x, mean = number * 190, statistics.geometric_mean(each[way] for each in shares)
        box = f'<rect x="{x}" y="30" width="12" height="12" fill="{COLOURS[way]}"/>'
        parts += [box, _text(x + 18, 41, f"{title}, mean {mean:.2f}")]
    return parts


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * share / MOST


def _bar(y: float, share: float, way: str) -> str:
    size = f'y="{y}" width="{_x(share) - LEFT:.1f}" height="{BAR - 1}"'
    bar = f'<rect x="{LEFT}" {size} fill="{COLOURS[way]}"/>'
    return bar + _text(max(_x(share), _x(1.0)) + 6, y + 10, f"{share:.2f}", "small")


def _text(x: float, y: float, text: str, kind: str = "", *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    style = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{anchor}{style}>{escape(text)}</text>'


def main() -> int:
    """Writes the chart."""
    CHART.write_text(chart())
    print(CHART)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
