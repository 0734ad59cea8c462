"""`python -m benchmarks.gpu_tests`: the tests marked `gpu`, each once.

The outcome of a test is kept as soon as it is known, so that a run that was ended goes
on with the tests that it had not run.  A test that failed runs again.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from . import report
from .report import ROOT, commit
from .setting import Setting, add_arguments, capability, setting_of

STEM, MODULE = "tests", "benchmarks.gpu_tests"
MARKED = "gpu and not conformance"
"""What is run; the conformance tests need packages that a GPU machine may lack."""

QUICK = ("tests/training/test_steps.py",)
"""The tests of a quick run, which only tries the command."""

NOT_COLLECTED = "not collected"
FINE = ("passed", "skipped", "xfailed")


class Outcomes:
    """A plugin of pytest that leaves out what has an outcome, and keeps new ones.

    Args:
        kept: a file with a line of JSON for each outcome; lines are appended.
    """

    def __init__(self, kept: Path) -> None:
        self.kept = kept
        self.known = {
            name: one
            for name, one in read(kept).items()
            if one["outcome"] != NOT_COLLECTED  # every run reads every file
        }
        self.left_out = 0

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leaves out the tests that need not run again."""
        done = [i for i in items if self.known.get(i.nodeid, {}).get("outcome") in FINE]
        items[:] = [item for item in items if item not in done]
        self.left_out = len(done)
        config.hook.pytest_deselected(items=done)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the outcome of a test."""
        if report.when == "call" or not report.passed:
            self._keep(report.nodeid, outcome_of(report), why_of(report))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keeps that a file could not be read."""
        if report.failed:
            self._keep(report.nodeid, NOT_COLLECTED, why_of(report))

    def _keep(self, name: str, outcome: str, why: str) -> None:
        self.known[name] = {"name": name, "outcome": outcome, "why": why}
        with self.kept.open("a") as lines:
            lines.write(json.dumps(self.known[name]) + "\n")


def outcome_of(report: pytest.TestReport) -> str:
    """How a test ended: "passed", "failed", ..., or "error" outside of its body."""
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "failed"
    if report.failed and report.when != "call":
        return "error"
    return report.outcome


def why_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The last line of what pytest says of a failure or a skip."""
    if report.passed:
        return ""
    told = report.longrepr
    if isinstance(told, tuple):
        return str(told[-1])[:200]
    crash = getattr(told, "reprcrash", None)
    text = crash.message if crash is not None else str(told)
    return (text.strip().splitlines() or [""])[0][:200]


def read(kept: Path) -> dict[str, dict[str, Any]]:
    """The last outcome of each test; a line that was cut off is no outcome."""
    found = {}
    if kept.exists():
        for line in kept.read_text().splitlines():
            try:
                one = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[one["name"]] = one
    return found


def write(
    outcomes: Sequence[dict[str, Any]], stem: Path, setting: Setting, whole: bool
) -> str:
    """Writes how many tests ended how, and every one that failed; returns the text."""
    counts = Counter(one["outcome"] for one in outcomes)
    said = ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items()))
    failed = [
        f"- {one['name']}: {one['outcome']}: {one['why']}"
        for one in outcomes
        if one["outcome"] not in FINE
    ]
    state = "" if whole else " so far: the run was ended before the last test"
    machine = capability(setting.device)
    head = f"{machine}; commit {commit()}"
    note = f"The tests marked `gpu` (`{MARKED}`){state}: {said or 'none'}."
    text = "\n".join([head, "", note, "", *failed]).rstrip() + "\n"
    data = {"capability": machine, "whole": whole, "tests": list(outcomes)}
    report.write(stem, text, data)
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests that have no outcome yet; 1 if one failed."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    parser.add_argument("--only", nargs="*", default=[], help="files or tests (all)")
    parser.add_argument("--marked", default=MARKED, help="the marks to run")
    given = parser.parse_args(arguments)
    setting = setting_of(parser, given)
    stem = given.out / setting.stem(STEM, precise=False)
    kept = stem.with_suffix(".jsonl")
    stem.parent.mkdir(parents=True, exist_ok=True)
    plugin = Outcomes(kept)
    write(list(plugin.known.values()), stem, setting, whole=False)
    words = ["-q", "-m", given.marked, "--continue-on-collection-errors"]
    # The packages of a GPU machine are its own.
    words += ["-o", "minversion=8", "-p", "no:cacheprovider", f"--rootdir={ROOT}"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as by Ctrl-C
    only = given.only or QUICK * setting.quick
    status = pytest.main([*words, *only], plugins=[plugin])
    outcomes = list(plugin.known.values())
    ran = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    nothing_left = status == pytest.ExitCode.NO_TESTS_COLLECTED and plugin.left_out > 0
    whole = ran or nothing_left
    print(write(outcomes, stem, setting, whole))
    return int(not whole or any(one["outcome"] not in FINE for one in outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
