"""`python -m benchmarks.page`: the page of a report, in a headless Chromium.

The size of the page, the time to write the page, the first paint, and the time from a
key to the frame that shows a module open, on graphs of about 3 000 nodes: one of many
nested modules (GPT-2), and one without any module.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import autoamp
from autoamp.report.report import Report

from . import models, report
from .browser import Browser, browsing, executable
from .models import Chain
from .report import Data, option

MOST_BYTES = 5_000_000
MOST_FIRST_PAINT = 2.0
MOST_OPENING = 0.3
"""The limits: bytes of the page, seconds to first paint, seconds to open a module."""

_PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
_DRAWN = "performance.getEntriesByName('drawn')[0]?.startTime"

_OPEN_ALL = """
(async () => {
  // The second frame begins when the first, which shows the change, has been painted.
  const frame = () => new Promise((go) => {
    requestAnimationFrame(() => requestAnimationFrame(go));
  });
  const pressed = async (id, key = "Enter") => {
    const element = document.getElementById(id);
    element.focus({ preventScroll: true });
    await frame();
    const start = performance.now();
    element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    await frame();
    return performance.now() - start;
  };
  const closed = () =>
    [...document.querySelectorAll(".item.group:not(.open)")].map((e) => e.id);
  // Of each module the median of three, because other programs run on the machine too.
  const opened = async (id) => {
    const found = [];
    for (let i = 0; i < 3; i++) {
      if (i) await pressed(id);
      found.push(await pressed(id));
    }
    return found.sort((a, b) => a - b)[1];
  };
  const times = [];
  for (const id of closed()) {
    const outer = new Set(closed());
    times.push(await opened(id));
    for (const inner of closed().filter((each) => !outer.has(each)).slice(0, 4)) {
      times.push(await opened(inner));
    }
    await pressed(id);
  }
  const start = performance.now();
  document.getElementById("expand-all").click();
  await frame();
  const all = performance.now() - start;
  return { times, all, items: document.querySelectorAll(".item").length };
})()
"""


@dataclass(frozen=True)
class Measured:
    """The figures of one page.

    Attributes:
        name, nodes: the model, and the nodes of its largest graph after the casts.
        bytes: the size of the page.
        writing: seconds of `to_html`.
        first_paint, drawn: median seconds from navigation to the first contentful
            paint, and to the end of the script that draws the graph.
        opened: the number of modules that were opened, one after another.
        opening, longest: the median and the longest, over the modules, of the seconds
            from a key to the frame that shows the module open (a median of three).
        all_open, items: seconds until every module is open, and the items then shown.
    """

    name: str
    nodes: int
    bytes: int
    writing: float
    first_paint: float
    drawn: float
    opened: int
    opening: float
    longest: float
    all_open: float
    items: int


def gpt2_report(layers: int) -> Report:
    """The report of a narrow GPT-2, whose graph has about 61 nodes per layer."""
    size = {"n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    model = models.gpt2(dropout=True, n_layer=layers, use_cache=True, **size)
    return _reported(model, torch.randint(0, 512, (2, 16)))


def flat_report(ops: int) -> Report:
    """The report of a graph without modules."""
    return _reported(Chain(ops), torch.randn(4, 8))


def _reported(model: nn.Module, given: torch.Tensor) -> Report:
    options = {"precision": "bf16", "do_no_harm": False}
    return autoamp.explain(model, given, **options)


def measure(name: str, made: Report, path: Path, repeats: int) -> Measured:
    """Writes the page of a report to `path`, and measures the page in Chromium."""
    start = time.perf_counter()
    text = made.to_html(path)
    writing = time.perf_counter() - start
    paints, draws = [], []
    for _ in range(repeats):
        with browsing() as browser:
            paint, drawn = _first_view(browser, path)
        paints.append(paint)
        draws.append(drawn)
    with browsing() as browser:
        browser.load(path)
        browser.wait(_DRAWN)
        opened: dict[str, Any] = browser.run(_OPEN_ALL)
    times = [ms / 1e3 for ms in opened["times"]]
    return Measured(
        name=name,
        nodes=max(len(each.gm.graph.nodes) for each in made.rewritten),
        bytes=len(text.encode()),
        writing=writing,
        first_paint=statistics.median(paints),
        drawn=statistics.median(draws),
        opened=len(times),
        opening=statistics.median(times),
        longest=max(times),
        all_open=opened["all"] / 1e3,
        items=opened["items"],
    )


def _first_view(browser: Browser, path: Path) -> tuple[float, float]:
    browser.load(path)
    browser.wait(f"{_PAINT} && {_DRAWN}")
    return browser.run(_PAINT) / 1e3, browser.run(_DRAWN) / 1e3


HEADER = (
    *("graph", "nodes", "page MB", "to_html s", "first paint s", "drawn s"),
    *("open a module s", "longest s", "modules opened", "expand all s", "items then"),
)


def _row(page: Data) -> tuple[str, ...]:
    return (
        page["name"],
        f"{page['nodes']:,}",
        f"{page['bytes'] / 1e6:.2f}",
        f"{page['writing']:.1f}",
        *(f"{page[key]:.2f}" for key in ("first_paint", "drawn")),
        *(f"{page[key]:.3f}" for key in ("opening", "longest")),
        str(page["opened"]),
        f"{page['all_open']:.2f}",
        f"{page['items']:,}",
    )


def measure_all(given: argparse.Namespace) -> Data:
    """The figures of both pages."""
    layers, ops = (2, 200) if given.quick else (49, 3000)
    made = {
        f"gpt2, {layers} layers": partial(gpt2_report, layers),
        "no modules": partial(flat_report, ops),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "page.html"
        found = [
            asdict(measure(name, make(), path, given.repeats))
            for name, make in made.items()
        ]
    busy = f"Load average of the {os.cpu_count()} cores then: {os.getloadavg()[0]:.1f}."
    note = f"{_version()}, headless, 1440 x 900"
    return {"note": note, "repeats": given.repeats, "busy": busy, "pages": found}


def is_within(data: Data) -> bool:
    """Whether every figure is within its limit."""
    return all(
        page["bytes"] < MOST_BYTES
        and page["first_paint"] < MOST_FIRST_PAINT
        and page["longest"] < MOST_OPENING
        for page in data["pages"]
    )


def text(data: Data) -> str:
    """The page of results."""
    verdict = (
        f"Limits: {MOST_BYTES / 1e6:.0f} MB, first paint {MOST_FIRST_PAINT} s, opening "
        f"a module {MOST_OPENING} s (the longest). "
        f"{'Held' if is_within(data) else 'NOT held'}.\n"
        f"First paint and drawn: medians of {data['repeats']} fresh browsers, from the "
        "start of the navigation. Opening: for each module the median of three.\n"
        f"{data['busy']}"
    )
    table = report.markdown(HEADER, [_row(each) for each in data["pages"]])
    return report.page(data, table, verdict)


def _version() -> str:
    program = executable()
    if program is None:
        return f"no Chromium on {platform.node()}"
    done = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


TABLE = report.Table(
    "page",
    measure_all,
    text,
    options=(report.QUICK, option("--repeats", 5, "fresh browsers")),
    good=is_within,
)

if __name__ == "__main__":
    raise SystemExit(TABLE.main())
