"""`python -m benchmarks.mutation`: which faults in the layers below go unnoticed.

Every mutant of these layers (or a sample of each file's) is put in place in a fork of
one pytest session, which has torch imported and the tests collected; there the tests
that reach the changed line run until one fails: those of the file's own test file
first, and fast ones before slow ones.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import math
import os
import pickle
import select
import signal
import sys
import time
import tomllib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from . import report
from .mutants import Mutant, mutants, put_in_place, watch
from .report import ROOT

PASSES = ("tests/passes", "tests/table")
LAYERS = {
    "autoamp/passes/decide": PASSES,
    "autoamp/passes/write": PASSES,
    "autoamp/passes/check": PASSES,
    "autoamp/training": ("tests/training",),
}
"""The folders of the tests whose subject each layer is."""

JUDGED = Path(__file__).parent / "survivors.toml"
"""What was found on looking at the mutants that survive."""

WANTED = 0.85
"""Share of the mutants that the tests must kill."""

OUTCOMES = ("killed", "timed out", "not covered", "survived")
SEED = "autoamp"


@dataclass(frozen=True)
class Lines:
    """Where statements start, which tests reach each, the CPU seconds of each test."""

    starts: dict[str, list[int]]
    reached: dict[tuple[str, int], list[str]]
    seconds: dict[str, float]

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that reach the statement a mutant is in."""
        starts = self.starts[mutant.path]
        start = starts[bisect_right(starts, mutant.line) - 1]
        return self.reached.get((mutant.path, start), [])


def in_fork(job: Callable[[], Any], limit: float) -> Any:
    """What `job` gives, run in a fork of this process; None after `limit` seconds."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(job(), pipe)
            pipe.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if select.select([pipe], [], [], limit)[0]:
            sent = pipe.read()
        else:
            os.kill(child, signal.SIGKILL)
            sent = pickle.dumps(None)
    os.waitpid(child, 0)
    return pickle.loads(sent) if sent else "crashed"


class Session:
    """A pytest plugin: collects as usual, then runs mutants instead of tests."""

    def __init__(
        self, chosen: Sequence[Mutant], budget: float, done: Callable[..., None]
    ) -> None:
        self.chosen = chosen
        self.budget = budget
        self.done = done
        self.failure = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps what went wrong in a test."""
        if report.failed:
            self.failure = f"{report.nodeid}\n{report.longreprtext}"

    def run_tests(self, items: Sequence[pytest.Item]) -> str:
        """What went wrong in the first of `items` that fails."""
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failure:
                break
        return self.failure

    def find_lines(self, items: Sequence[pytest.Item], files: Sequence[str]) -> Lines:
        """Runs every test once and watches which statements it reaches.

        A test that fails is named, and is left out.
        """
        seen: set[tuple[str, int]] = set()
        reached: dict[tuple[str, int], list[str]] = {}

        def see(file: str) -> list[int]:
            # What a compiler records is reached as it is recorded.
            hit = torch.compiler.assume_constant_result(lambda n: seen.add((file, n)))
            return watch(ROOT / file, ROOT, hit)

        starts = {file: see(file) for file in files}
        seconds: dict[str, float] = {}
        for item, following in zip(items, [*items[1:], None], strict=True):
            seen.clear()
            began = time.process_time()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            seconds[item.nodeid] = time.process_time() - began
            if self.failure:
                print(f"left out: {self.failure}", file=sys.stderr, flush=True)
                seconds[item.nodeid], self.failure = math.inf, ""
                continue
            for place in seen:
                reached.setdefault(place, []).append(item.nodeid)
        return Lines(starts, reached, seconds)

    def _within_budget(
        self, items: Sequence[pytest.Item], seconds: dict[str, float], path: str = "/"
    ) -> list[pytest.Item]:
        """Those of `items` to run: the file's own first, fast before slow."""
        own = f"test_{Path(path).stem}"
        ordered = sorted(items, key=lambda i: (own not in i.nodeid, seconds[i.nodeid]))
        spent = accumulate(seconds[i.nodeid] for i in ordered)
        return [i for i, s in zip(ordered, spent, strict=True) if s <= self.budget]

    def pytest_configure(self) -> None:
        """One order of examples, and no search for the smallest that fails."""
        import hypothesis  # not before pytest has: it rewrites the plugin's asserts

        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile(
            "mutation",
            hypothesis.settings.get_profile("ci"),
            phases=phases,
            report_multiple_bugs=False,
        )
        hypothesis.settings.load_profile("mutation")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Finds the tests for each line, then goes through the mutants."""
        items = {i.nodeid: i for i in session.items}
        torch.set_num_threads(1)
        _warm_up()
        gc.collect()
        gc.freeze()
        files = sorted({m.path for m in self.chosen})
        lines = in_fork(lambda: self.find_lines(session.items, files), 3600)
        if not isinstance(lines, Lines):
            raise pytest.UsageError(f"no test ends without a mutant: {lines}")
        every = self._within_budget(session.items, lines.seconds)
        if failure := in_fork(lambda: self.run_tests(every), 3600):
            raise pytest.UsageError(f"fails without a mutant: {failure}")
        for mutant in self.chosen:
            known = [items[i] for i in lines.tests(mutant)]
            known = self._within_budget(known, lines.seconds, mutant.path)
            start = time.perf_counter()
            limit = 60 + 5 * sum(lines.seconds[i.nodeid] for i in known)
            outcome, by = self.outcome(mutant, known, limit)
            seconds = time.perf_counter() - start
            self.done(mutant, outcome, by, seconds)
        return True

    def outcome(
        self, mutant: Mutant, items: Sequence[pytest.Item], limit: float
    ) -> tuple[str, str]:
        """What became of a mutant, and the test that killed it."""
        if not items:
            return "not covered", ""

        def job() -> str:
            put_in_place(mutant.path, mutant.make())
            return self.run_tests(items)

        failure = in_fork(job, limit)
        if failure is None:
            return "timed out", ""
        return ("killed", failure.splitlines()[0]) if failure else ("survived", "")


def _warm_up() -> None:
    """Sends a graph through the pass, so that no fork pays for first imports.

    No backward: autograd's threads do not live through a fork.
    """
    from autoamp.passes.run import rewrite_graph
    from autoamp.training.options import Options

    model = torch.fx.symbolic_trace(torch.nn.Linear(8, 8).requires_grad_(False))
    options = Options(precision="bf16", do_no_harm=False)
    rewrite_graph(model, [torch.randn(8, 8)], options, torch.bfloat16)
    importlib.import_module("torch._dynamo")


def choose(share: float, paths: Sequence[Path]) -> tuple[list[Mutant], Counter[str]]:
    """A `share` of the mutants of each file, and how many mutants each file has.

    One of each file is chosen at least.  It is always the same ones while they exist,
    and of a larger share a part.
    """

    def place(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{SEED} {mutant.key}".encode()).digest()

    chosen: list[Mutant] = []
    numbers: Counter[str] = Counter()
    for path in paths:
        every = sorted(mutants(path, ROOT), key=place)
        numbers.update(m.path for m in every)
        number = min(len(every), max(1, round(share * len(every))))
        chosen += sorted(every[:number], key=lambda m: m.line)
    return chosen, numbers


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutants and writes the table; 1 if too many survive."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutation")
    parser.add_argument("--share", type=float, default=1.0, help="of each file")
    parser.add_argument(
        "--budget",
        type=float,
        default=60.0,
        help="CPU seconds of tests a mutant",
    )
    parser.add_argument("--only", default="", help="files with this in their path")
    parser.add_argument("--again", action="store_true", help="only the unkilled ones")
    parser.add_argument("--quick", action="store_true", help="only by quick tests")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "mutation")
    options = parser.parse_args(arguments)
    paths = [p for layer in LAYERS for p in sorted((ROOT / layer).rglob("*.py"))]
    chosen, numbers = choose(options.share, paths)
    digests = {str(p.relative_to(ROOT)): _digest(p) for p in paths}
    known = {}
    kept = options.out.with_suffix(".json")
    if (options.again or options.only) and kept.exists():
        known = {e.pop("key"): e for e in json.loads(kept.read_text())["mutants"]}
    found = {
        m.key: known[m.key]
        for m in chosen
        if m.key in known and known[m.key]["file"] == digests[m.path]
    }
    quick = " and not thorough" if options.quick else ""
    made = f"{options.share:g} of the mutants of mutmut in each file, drawn by a seed, "
    made += f"each with {options.budget:g} CPU seconds of {'quick ' if quick else ''}"
    made += f"tests, on {date.today()} at commit {report.commit()}"

    def write() -> float:
        """Keeps what is known so far, so that a run that is broken off can go on."""
        run = [m for m in chosen if m.key in found]
        data = {"mutants": [{"key": m.key} | found[m.key] for m in run]}
        kept.write_text(json.dumps(data, indent=1) + "\n")
        text, killed = table(made, run, numbers, found)
        options.out.with_suffix(".md").write_text(text)
        return killed

    def done(mutant: Mutant, outcome: str, by: str, seconds: float) -> None:
        file = digests[mutant.path]
        found[mutant.key] = {"outcome": outcome, "by": by, "file": file}
        where = f"{mutant.path}:{mutant.line}"
        print(f"{where} {outcome} {seconds:.1f} s {by}", file=sys.stderr, flush=True)
        if outcome not in ("killed", "timed out"):
            print(mutant.change, file=sys.stderr, flush=True)
        write()

    os.environ["CI"] = "1"
    todo = [
        m
        for m in chosen
        if options.only in m.path
        and found.get(m.key, {}).get("outcome") not in ("killed", "timed out")
    ]
    todo.sort(key=lambda m: m.key not in found)  # those that survived before
    silent = ("-p", "no:cacheprovider", "-p", "no:terminal", "-o", "timeout=0", "-s")
    wanted = ("-m", f"not slow and not gpu{quick}", "-k", "not process")
    layers = [x for x in LAYERS if any(m.path.startswith(x) for m in todo)]
    tests = sorted({folder for layer in layers for folder in LAYERS[layer]})
    session = Session(todo, options.budget, done)
    if todo and (code := pytest.main([*silent, *wanted, *tests], plugins=[session])):
        return int(code)
    killed = write()
    print(options.out.with_suffix(".md").read_text())
    return 1 if killed < WANTED else 0


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def table(
    made: str, run: Sequence[Mutant], numbers: Counter[str], found: dict[str, Any]
) -> tuple[str, float]:
    """The table in Markdown of the mutants that were run, and the share killed."""
    rows = []
    for path in [*numbers, ""]:
        here = [found[m.key]["outcome"] for m in run if path in ("", m.path)]
        if path and not here:
            continue
        counts = [here.count(o) for o in OUTCOMES]
        killed = (counts[0] + counts[1]) / max(len(here), 1)
        total = numbers[path] if path else numbers.total()
        cells = map(str, (total, len(here), *counts))
        rows.append((path or "all", *cells, f"{100 * killed:.1f} %"))
    header = ("file", "mutants", "run", *OUTCOMES, "share killed")
    intro = (
        f"A share of {made}; the column `run` says how many were run.  A mutant that "
        "never ends is killed too, and what an earlier run killed stays killed while "
        "its file is unchanged.  Other words in a message are no mutant."
    )
    text = "\n\n".join(
        [
            intro,
            report.markdown(header, rows),
            "## What was not killed, and why",
            "\n".join(_survivors(run, found)),
        ]
    )
    return text + "\n", killed


def _survivors(run: Sequence[Mutant], found: dict[str, Any]) -> list[str]:
    """A line on each mutant that no test kills, with what looking at it gave."""
    judged = {
        f"{s['in']}\n{s['change']}": s["verdict"]
        for s in tomllib.loads(JUDGED.read_text()).get("survivor", [])
    }
    lines = []
    for mutant in run:
        if found[mutant.key]["outcome"] in OUTCOMES[2:]:
            change = " → ".join(f"`{x[2:]}`" for x in mutant.change.splitlines())
            verdict = judged.get(mutant.key, "not looked at")
            lines.append(f"- {mutant.path}, `{mutant.function}`: {change}: {verdict}")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
