"""Modules that are called several times, such as a relu that a block shares.

If all calls shared one box, the box could read its own results: the drawing would have
a loop where the model has none.  In such a case each call gets a box of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

CALL = "\0"
"""Separates the name of a module from the number of the call."""

MOST_CALLS = 40
"""A module that is called more often than this has one box for all calls."""

Path = tuple[str, ...]


def by_call(
    modules: Mapping[str, str | None], operands: Mapping[str, Sequence[str]]
) -> dict[str, Path | None]:
    """The module path of each node, with the number of the call where needed.

    Args:
        modules: every node, in graph order, to the module that called the node, or
            None.
        operands: node to the nodes that it reads.
    """
    paths = {
        name: tuple(module.split(".")) if module else ()
        for name, module in modules.items()
        if module is not None
    }
    found: dict[str, Path | None] = {name: paths.get(name) for name in modules}
    order = list(modules)
    waiting = [(list(paths), 0)]
    for names, depth in waiting:  # grows while it is walked
        calls: dict[str, list[list[str]]] = defaultdict(list)
        steps = [("".join(paths[name][depth : depth + 1]), name) for name in names]
        for segment, pairs in groupby(steps, itemgetter(0)):
            if segment:  # else the parent's own nodes
                calls[segment].append([name for _, name in pairs])
        for segment, runs in calls.items():
            together = [name for run in runs for name in run]
            if not 1 < len(runs) <= MOST_CALLS or not _loops(together, order, operands):
                waiting.append((together, depth + 1))
                continue
            for number, run in enumerate(runs, 1):
                for name in run:
                    path = found[name] or ()
                    numbered = f"{segment}{CALL}{number}"
                    found[name] = (*path[:depth], numbered, *path[depth + 1 :])
                waiting.append((run, depth + 1))
    return found


def module_of(path: Path) -> str:
    """The path of the module, without numbers of calls."""
    return ".".join(segment.partition(CALL)[0] for segment in path)


def label_of(path: Path) -> str:
    """The path as it is shown: `relu, call 2`."""
    return ".".join(path).replace(CALL, ", call ")


def _loops(
    inside: Sequence[str], order: Sequence[str], operands: Mapping[str, Sequence[str]]
) -> bool:
    """Whether a node of `inside` reads, through other nodes, a result of `inside`."""
    members = set(inside)
    behind: set[str] = set()
    for name in order:
        read = operands.get(name, ())
        if name in members:
            if any(each in behind for each in read):
                return True
        elif any(each in behind or each in members for each in read):
            behind.add(name)
    return False
