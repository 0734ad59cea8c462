"""The module that each node is drawn in, and the tree of those modules.

An op is drawn in the module that called the op.  No module calls a weight, a constant
or a cast; each of these is drawn in the deepest module that holds all of its readers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoamp.inspect.nodes.calls import Path, label_of, module_of

MOST_NODES = 40
"""A module with more nodes of its own is drawn in parts of at most this many."""


@dataclass(frozen=True)
class Group:
    """One box of the page: a module, or a part of a module with many nodes.

    Attributes:
        path: the path of the module ("h.0.attn"); "" for the whole graph.
        label: the text of the box.
        parent: index of the box around this box; -1 for the whole graph.
        is_part: whether the box is a part of a module.
    """

    path: str
    label: str
    parent: int
    is_part: bool = False


def homes_of(
    modules: Mapping[str, Path | None], readers: Mapping[str, Sequence[str]]
) -> dict[str, Path]:
    """The module path of each node, in segments.

    Args:
        modules: every node, in graph order, to the module that called the node, as
            `by_call` returns; None where the readers of the node decide.
        readers: node to the nodes that read its result.
    """
    homes: dict[str, Path] = {}
    for name in reversed(list(modules)):
        module = modules[name]
        if module is None:
            found = [homes[r] for r in readers.get(name, ()) if r in homes]
            homes[name] = _common(found)
        else:
            homes[name] = module
    return homes


def tree_of(
    homes: Mapping[str, Path], order: Sequence[str], label: str
) -> tuple[list[Group], dict[str, int]]:
    """The boxes, parents before children, and the index of the box of each node.

    A module whose only content is one module shares a box with that module.

    Args:
        homes: the module path of each node, as `homes_of` returns.
        order: the nodes in the order in which they are drawn.
        label: the text of the outermost box.
    """
    nodes: dict[Path, list[str]] = defaultdict(list)
    children: dict[Path, list[Path]] = defaultdict(list)
    seen: set[Path] = {()}
    for name in order:
        path = homes[name]
        nodes[path].append(name)
        for depth in range(1, len(path) + 1):
            inner = path[:depth]
            if inner not in seen:
                seen.add(inner)
                children[path[: depth - 1]].append(inner)
    groups: list[Group] = []
    group_of: dict[str, int] = {}
    waiting: list[tuple[Path, Path, int]] = [((), (), -1)]
    for path, above, parent in waiting:  # grows while it is walked: breadth first
        inner = path
        while path and not nodes[inner] and len(children[inner]) == 1:
            (inner,) = children[inner]
        here = len(groups)
        text = label_of(inner[len(above) :]) or label
        if text.isdigit() and above:
            text = label_of((*above[-1:], text))
        groups.append(Group(module_of(inner), text, parent))
        _place(nodes[inner], here, groups, group_of)
        waiting.extend((child, inner, here) for child in children[inner])
    return groups, group_of


def _place(
    names: list[str], here: int, groups: list[Group], group_of: dict[str, int]
) -> None:
    """Puts nodes in box `here`; more than `MOST_NODES` are put in parts of the box."""
    if len(names) <= MOST_NODES:
        group_of.update(dict.fromkeys(names, here))
        return
    count = -(-len(names) // MOST_NODES)
    size = -(-len(names) // count)
    for number in range(count):
        part = names[number * size : (number + 1) * size]
        label = f"part {number + 1} of {count}"
        group_of.update(dict.fromkeys(part, len(groups)))
        groups.append(Group(groups[here].path, label, here, is_part=True))


def _common(paths: Sequence[Path]) -> Path:
    """The longest path that all of `paths` begin with."""
    if not paths:
        return ()
    first, last = min(paths), max(paths)
    same = 0
    for a, b in zip(first, last, strict=False):
        if a != b:
            break
        same += 1
    return first[:same]
