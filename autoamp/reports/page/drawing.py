"""The nodes of a graph as the page draws them, each in the box of its module.

An op is drawn in the module that called the op.  No module calls a weight, a constant
or a cast; each of these is drawn in the deepest module that holds all of its readers.

If all calls of a module that is called several times (a relu that a block shares) had
one box, the box could read its own results: the drawing would have a loop where the
model has none.  In such a case each call gets a box of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile, zip_longest
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.messages import op_title, shorten
from autoamp.passes.report_rows import OpRow, Section, target_name
from autoamp.passes.see.facts import NodeFacts
from autoamp.passes.see.nodes import tensors_of
from autoamp.passes.write.emitted import is_use
from autoamp.reports.export import precision_of
from autoamp.reports.page.folding import Fold, FoldedPath, Path, folded
from autoamp.reports.why import undecided

MOST_NODES = 40
"""A module with more nodes of its own is drawn in parts of at most this many."""

_CALL = "\0"
"""Separates the name of a module from the number of the call."""

MOST_CALLS = 40
"""A module that is called more often than this has one box for all calls."""


@dataclass(frozen=True)
class Box:
    """One box of the page: a module, or a part of a module with many nodes.

    Attributes:
        path: the path of the module ("h.0.attn"); "" for the whole graph.
        label: the text of the box.
        parent: index of the box around this box; -1 for the whole graph.
        is_part: whether the box is a part of a module.
        folds: how many blocks that are alike the box folds; 0 for a plain box.
    """

    path: str
    label: str
    parent: int
    is_part: bool = False
    folds: int = 0


class Drawing:
    """The nodes of one section, in the order of the page.

    Attributes:
        index: the nodes of the rewritten graph, in order, each followed by the nodes
            that only the graph before has at that place; each to its position.
        boxes: the boxes that the nodes are drawn in, parents before children.
        box_of: node to the index of its box.
    """

    def __init__(self, section: Section, label: str) -> None:
        """Args: `label` is the text of the outermost box."""
        self._section = section
        self._ops = {row.name: row for row in section.ops}
        self._casts = {row.name: row for row in section.casts}
        self._before = section.before
        self._after = {n.name: n for n in section.rewritten.gm.graph.nodes}
        names = _merged(list(self._before), list(self._after))
        self.index = {name: place for place, name in enumerate(names)}
        self._plumbing = self._find_plumbing()
        self._kinds = {name: self._kind(name) for name in names}
        operands: dict[str, list[str]] = {name: [] for name in names}
        readers: dict[str, list[str]] = defaultdict(list)
        for nodes in (self._before, self._after):
            for node in nodes.values():
                operands[node.name] += (read.name for read in node.all_input_nodes)
        for name, read in operands.items():
            for operand in read:
                readers[operand].append(name)
        modules: dict[str, str | None] = {}
        for name in names:
            fact = self._fact(name)
            module = fact.module if fact else "" if name in self._before else None
            # The readers of a weight or of a cast decide where it is drawn.
            modules[name] = None if self._kinds[name] in _LATE else module
        calls = _by_call(modules, operands)
        homes: dict[str, Path] = {}
        place: dict[str, int] = {}
        for name in reversed(names):
            own = calls[name]
            behind = [reader for reader in readers[name] if reader in homes]
            together = zip(*(homes[reader] for reader in behind), strict=False)
            same = takewhile(lambda step: len({*step}) == 1, together)
            homes[name] = tuple(step[0] for step in same) if own is None else own
            # Weights and casts are drawn just before a reader.
            late = self._kinds[name] in _LATE and behind
            place[name] = min(place[r] for r in behind) if late else self.index[name]
        drawn = sorted(names, key=lambda name: (place[name], self.index[name]))

        def loops(inside: Sequence[str], among: Sequence[str]) -> bool:
            return _loops(inside, sorted(among, key=self.index.__getitem__), operands)

        paths = folded(homes, drawn, self._like, loops)
        self.boxes, self.box_of = _tree_of(paths, drawn, label)

    def node(self, name: str) -> dict[str, Any]:
        """What the page says of a node, but for its decision and its cast."""
        node = self._node(name)
        row, fact = self._ops.get(name), self._fact(name)
        note = ""
        if row is None and name not in self._casts:
            note = _NOTES.get(self._kinds[name], "")
            if not note and fact:
                note = undecided(self._section, name)
        return {
            "name": name,
            "kind": self._kinds[name],
            "op": row.op if row else target_name(node),
            "title": self._title(name, node, row),
            "group": self.box_of[name],
            "module": self.boxes[self.box_of[name]].path,
            "source": shorten(fact.source) if fact else "",
            "before": self._side(self._before.get(name)),
            "after": self._side(self._after.get(name)),
            "decision": None,
            "cast": None,
            "note": note,
            "body": self._body(node),
            "is_plumbing": name in self._plumbing,
        }

    def _like(self, name: str) -> Hashable:
        """Equal for nodes that the page draws alike, whatever their names."""
        sides = self._before.get(name), self._after.get(name)
        drawn = [
            (precision_of(node), len(node.all_input_nodes), *map(_described, values))
            for node in sides
            if node is not None
            for values in [tensors_of(node.meta.get("val"))]
        ]
        op = self._node(name)
        is_op = op.op not in ("placeholder", "get_attr")
        called = target_name(op) if is_op else op.op
        return self._kinds[name], called, sides[0] is None, tuple(drawn)

    def _side(self, node: fx.Node | None) -> dict[str, Any] | None:
        """A node in the graph before the pass, or in the graph after it."""
        if node is None:
            return None
        return {
            "operands": [self.index[operand.name] for operand in node.all_input_nodes],
            "values": [*map(_described, tensors_of(node.meta.get("val")))],
            "precision": precision_of(node),
        }

    def _node(self, name: str) -> fx.Node:
        return self._after.get(name) or self._before[name]

    def _fact(self, name: str) -> NodeFacts | None:
        return self._section.rewritten.facts.nodes.get(name)

    def _title(self, name: str, node: fx.Node, row: OpRow | None) -> str:
        """The short name: that of the op, or of a weight inside its module."""
        if self._kinds[name] not in ("weight", "constant", "state"):
            return op_title(row.op if row else target_name(node))
        path = self.boxes[self.box_of[name]].path.replace(".", "_")
        return name.lstrip("_").removeprefix(f"{path}_") if path else name

    def _kind(self, name: str) -> str:
        node = self._node(name)
        if name in self._casts:
            return "cast"
        if name not in self._before and is_use(node):
            return "use"
        if node.op == "get_attr":
            return "body" if _is_graph(node) else "constant"
        if node.op == "placeholder":
            if name in self._plumbing:
                return "state"
            facts = self._section.rewritten.facts
            return "weight" if name in facts.weights else "input"
        return "output" if node.op == "output" else "op"

    def _body(self, node: fx.Node) -> str:
        """The key of the section of the body that `node` names, or ""."""
        if node.op != "get_attr" or not _is_graph(node):
            return ""
        section = self._section
        child = getattr(section.rewritten.gm, str(node.target), None)
        if not any(child is body.gm for body in section.rewritten.bodies):
            return ""
        path = f"{section.body}/{node.target}" if section.body else str(node.target)
        return f"{section.graph}/{path}"

    def _find_plumbing(self) -> frozenset[str]:
        """The nodes that are plumbing in every graph that has them."""
        sides = [
            (nodes, _plumbing_of(list(nodes.values()), self._ops))
            for nodes in (self._before, self._after)
        ]
        return frozenset(
            name
            for name in self.index
            if all(name in found for nodes, found in sides if name in nodes)
        )


_LATE = frozenset({"weight", "constant", "state", "body", "cast", "use"})
"""Kinds of nodes that are drawn where the readers of the node are drawn."""

_NOTES = {
    "use": "joins the uses of a value, so that gradients are summed in fp32.",
    "output": "returns the results of the graph; floats are cast back to fp32.",
    "body": "is a sub-graph that its reader calls.",
}


def _merged(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """The names of `after`; a name of `before` alone follows its predecessor."""
    names_after = set(after)
    behind: dict[str, list[str]] = defaultdict(list)
    last = ""
    for name in before:
        if name in names_after:
            last = name
        else:
            behind[last].append(name)
    return behind[""] + [each for name in after for each in (name, *behind[name])]


def _is_graph(node: fx.Node) -> bool:
    owner = node.graph.owning_module
    return isinstance(getattr(owner, str(node.target), None), fx.GraphModule)


def _described(tensor: torch.Tensor) -> str:
    sizes = ", ".join(str(size) for size in tensor.shape)
    return f"{short_name(tensor.dtype)} [{sizes}]"


# -- nodes that the page hides at first ------------------------------------------------


def _plumbing_of(nodes: Sequence[fx.Node], ops: Container[str]) -> frozenset[str]:
    """The nodes that are plumbing: running statistics and counters.

    A batch norm in training writes its running mean and variance, and counts its calls.
    ResNet-50 has 159 such buffers, none of which has a precision to be decided.
    Plumbing is the running statistics of normalizations, and each node whose result
    reaches neither a float op (`ops`) nor the output, except float ops and unread
    inputs.
    """
    plumbing: set[str] = set()
    for node in reversed(nodes):
        readers = list(node.users)
        if node.op in ("placeholder", "get_attr"):
            hidden = bool(readers) and all(
                reader.name in plumbing or _is_statistic(node, reader)
                for reader in readers
            )
        else:
            is_own = node.op == "output" or node.name in ops
            hidden = not is_own and all(reader.name in plumbing for reader in readers)
        if hidden:
            plumbing.add(node.name)
    return frozenset(plumbing)


def _is_statistic(node: fx.Node, reader: fx.Node) -> bool:
    """Whether `reader` reads `node` as running statistics only."""
    if not isinstance(reader.target, compat.OpOverload):
        return False
    names = [argument.name for argument in compat.schema(reader.target).arguments]
    read = dict(zip_longest(names[: len(reader.args)], reader.args)) | reader.kwargs
    roles = {name for name, value in read.items() if value is node}
    return bool(roles) and roles <= {"running_mean", "running_var"}


# -- boxes -----------------------------------------------------------------------------


def _by_call(
    modules: Mapping[str, str | None], operands: Mapping[str, Sequence[str]]
) -> dict[str, Path | None]:
    """The module path of each node, with the number of the call where needed.

    `modules` has every node, in graph order, and None where no module called it.
    """
    paths = {
        name: tuple(module.split(".")) if module else ()
        for name, module in modules.items()
        if module is not None
    }
    numbered_paths: dict[str, Path | None] = {name: paths.get(name) for name in modules}
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
                    path = numbered_paths[name] or ()
                    numbered = f"{segment}{_CALL}{number}"
                    numbered_paths[name] = (*path[:depth], numbered, *path[depth + 1 :])
                waiting.append((run, depth + 1))
    return numbered_paths


def _loops(
    inside: Sequence[str], order: Sequence[str], operands: Mapping[str, Sequence[str]]
) -> bool:
    """Whether a node of `inside` reads, through other nodes, a result of `inside`."""
    members = set(inside)
    behind: set[str] = set()
    for name in order:
        read = operands[name]
        if name in members:
            if any(each in behind for each in read):
                return True
        elif any(each in behind or each in members for each in read):
            behind.add(name)
    return False


def _tree_of(
    homes: Mapping[str, FoldedPath], order: Sequence[str], label: str
) -> tuple[list[Box], dict[str, int]]:
    """The boxes, parents before children, and the index of the box of each node.

    A module whose only content is one module shares a box with that module; `label` is
    the text of the outermost box.
    """
    nodes: dict[FoldedPath, list[str]] = defaultdict(list)
    children: dict[FoldedPath, dict[FoldedPath, None]] = defaultdict(dict)
    for name in order:
        path = homes[name]
        nodes[path].append(name)
        for depth in range(len(path)):
            children[path[:depth]][path[: depth + 1]] = None
    boxes: list[Box] = []
    box_of: dict[str, int] = {}
    waiting: list[tuple[FoldedPath, FoldedPath, int]] = [((), (), -1)]
    for path, above, parent in waiting:  # grows while it is walked: breadth first
        inner = path
        while path and not nodes[inner] and len(children[inner]) == 1:
            (inner,) = children[inner]
        here = len(boxes)
        module = ".".join(name.partition(_CALL)[0] for name in _modules(inner))
        folds = inner[-1].count if inner and isinstance(inner[-1], Fold) else 0
        is_part = bool(folds) and len(inner) == len(above) + 1
        text = _label(inner[len(above) :], above) or label
        boxes.append(Box(module, text, parent, is_part, folds))
        _place(nodes[inner], here, boxes, box_of)
        waiting.extend((child, inner, here) for child in children[inner])
    return boxes, box_of


def _label(path: FoldedPath, above: FoldedPath) -> str:
    """The text of the box of `path`, a path inside the box of `above`."""
    own, named = _modules(path), _modules((*above, *path))
    if path and isinstance(path[-1], Fold):
        text = path[-1].label(named[-1] if named else "")
    elif len(own) == 1 and own[0].isdigit():
        text = ".".join(named[-2:])
    else:
        text = ".".join(own)
    return text.replace(_CALL, ", call ")


def _modules(path: FoldedPath) -> list[str]:
    """The segments of a path that are modules, and no folds."""
    return [segment for segment in path if isinstance(segment, str)]


def _place(
    names: Sequence[str], here: int, boxes: list[Box], box_of: dict[str, int]
) -> None:
    """Puts nodes in box `here`; more than `MOST_NODES` are put in parts of the box."""
    if len(names) <= MOST_NODES:
        box_of.update(dict.fromkeys(names, here))
        return
    count = -(-len(names) // MOST_NODES)
    size = -(-len(names) // count)
    for number in range(count):
        part = names[number * size : (number + 1) * size]
        box_of.update(dict.fromkeys(part, len(boxes)))
        label = f"part {number + 1} of {count}"
        boxes.append(Box(boxes[here].path, label, here, is_part=True))
