"""Holds captured graphs to the placement of a saved report: `convert(model, lock=...)`.

A graph is compared once, when a model first gets it; calls cost nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from autoamp.errors import LockError
from autoamp.messages import counted, log_once, printable_line
from autoamp.passes.rows import OpRow, SavedGraph, SavedReport, saved_graph, sections_of
from autoamp.passes.saved import ALIKE, Diff, diff_graphs, likeness
from autoamp.runtime.graph import Graph
from autoamp.runtime.record import Record

logger = logging.getLogger(__name__)

_SHOWN = 3
"""The most differences that a message lists."""


def check_graph(
    lock: SavedReport, record: Record, captured: Graph, *, strict: bool
) -> None:
    """Compares a graph new to a model with the lock; called before `record.add`.

    Raises:
        LockError: the placement differs, and `strict` is set.
    """
    if captured.rewritten is None:
        return  # the pass failed on the graph, which has been said
    index = sum(graph.rewritten is not None for graph in record.graphs)
    graph, *bodies = map(saved_graph, sections_of([captured.rewritten], [captured.gm]))
    if not graph.ops:
        return
    main = [each for each in lock.graphs if not each.body]
    alike = [each for each in main if likeness(each, graph) >= ALIKE]
    # Another order of calls is another order of capture, and no other placement.
    met = record.lock_met
    alike.sort(key=lambda each: (each.graph in met, each.graph != index))
    found = [_differences(lock, each, graph, bodies) for each in alike]
    same = [
        each.graph
        for each, diffs in zip(alike, found, strict=True)
        if not any(diff.ops_differ for diff in diffs)
    ]
    expected = index < len(main)
    if same and (same[0] not in met or not expected):
        met.add(same[0])
        return
    if expected and not alike:
        _tell(record, _unlike(lock, record, index, graph), strict=strict)
        return
    if expected and alike[0].graph not in met:
        problem = _told(lock, record, index, alike[0], found[0])
        _tell(record, problem, strict=strict)
        met.add(alike[0].graph)
        return
    text = (
        f"autoamp: graph {index} of {record.label} is not in the lock {lock.path}, "
        f"which has {counted(len(main), 'graph')}: a call of other shapes or modes "
        f"captured it, and nothing holds its placement. {_renew(lock)}"
    )
    log_once(logger, logging.WARNING, text)


def check_model(lock: SavedReport | None, label: str, why_not: str = "") -> str:
    """Why the model called `label` is not as `lock` says; "" if it is.

    Args:
        why_not: why the model stays in fp32; "" where it is converted.
    """
    if lock is None:
        return ""
    if lock.model != label:
        return (
            f"the lock {lock.path} is the report of a model of class "
            f"{printable_line(lock.model, 100)}, and this model is of class {label}, "
            "so that nothing holds its placement; give the lock written for this model"
        )
    if not (why_not and lock.low_ops):
        return ""
    return (
        f"{label} is not placed as the lock {lock.path} says, which has {lock.low_ops} "
        f"ops in {lock.compute_dtype}: the model stays in fp32, because {why_not}"
    )


def tell_of_model(problem: str, *, strict: bool) -> None:
    """Raises, or warns once, that a whole model is not as its lock says.

    Raises:
        LockError: `strict` is set.
    """
    if strict:
        raise LockError(problem)
    log_once(logger, logging.WARNING, f"autoamp: {problem}")


def _differences(
    lock: SavedReport,
    locked: SavedGraph,
    graph: SavedGraph,
    bodies: Sequence[SavedGraph],
) -> list[Diff]:
    """The differences of a graph and of each of its bodies."""
    theirs = {each.body: each for each in lock.graphs if each.graph == locked.graph}
    ours = {each.body: each for each in bodies}
    empty = SavedGraph(locked.graph, "", "", ())
    names = sorted((theirs.keys() | ours.keys()) - {""})
    found = [
        diff_graphs(theirs.get(name, empty), ours.get(name, empty)) for name in names
    ]
    return [diff_graphs(locked, graph), *found]


def _told(
    lock: SavedReport,
    record: Record,
    index: int,
    locked: SavedGraph,
    diffs: Sequence[Diff],
) -> str:
    """The first differences, and the commands that show and accept all of them."""
    lines = [
        f"{_named(c.new)} is {c.new.precision} and was {c.old.precision} "
        f"({printable_line(c.new.reason, 200)})"
        for diff in diffs
        for c in diff.changed
    ]
    lines += [
        f"{_named(op)} is new, in {op.precision}" for d in diffs for op in d.appeared
    ]
    lines += [
        f"{_named(op)} is gone, which was {op.precision}"
        for d in diffs
        for op in d.vanished
    ]
    more = len(lines) - _SHOWN
    shown = "; ".join(lines[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
    return (
        f"graph {index} of {record.label} is not placed as the lock {lock.path} says "
        f"(whose prices are those of {printable_line(locked.device, 100)}): {shown}. "
        f"{_renew(lock)}"
    )


def _unlike(lock: SavedReport, record: Record, index: int, graph: SavedGraph) -> str:
    return (
        f"no graph of the lock {lock.path} is like graph {index} of {record.label} "
        f"({len(graph.ops)} float ops): fewer than half of the ops have their "
        "counterpart there. The lock is of another model of that name, or the model's "
        f"code has changed. {_renew(lock)}"
    )


def _named(op: OpRow) -> str:
    where = f"{op.module}: " if op.module else ""
    at = f" at {op.source}" if op.source else ""
    return printable_line(f"{where}{op.op} ({op.name}){at}", 300)


def _renew(lock: SavedReport) -> str:
    new = Path(lock.path).with_suffix(".new.json").name
    return (
        f'To see all: autoamp.report(model).to_json("{new}"), then '
        f"`autoamp diff {lock.path} {new}`. To accept, put that file in the lock's "
        "place"
    )


def _tell(record: Record, problem: str, *, strict: bool) -> None:
    if strict:
        raise LockError(problem)
    # A change of the code mostly moves all graphs: the first warning names the command
    # that shows the rest.
    level = logging.DEBUG if record.told_of_lock else logging.WARNING
    record.told_of_lock = True
    log_once(logger, level, f"autoamp: {problem}")
