"""Names the place of a node: op, module path and source line, or a weight or input."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import source_line
from autoamp.op_names import op_name
from autoamp.rewrite.emitted import TOGETHER, is_inserted, parts_for, stands_for

OP, WEIGHT, INPUT, OUTSIDE = "op", "weight", "input", "outside"


@dataclass(frozen=True)
class Location:
    """A place in a model's code.

    Attributes:
        kind: "op", "weight", "input" or "outside" (code in no captured graph).
        op: the op's full name ("aten::exp.default"); "" for a weight or input.
        name: the name of the weight or input; "" for an op.
        module: the path of the innermost module; "" for the model itself.
        source: `model.py:12: x = self.fc(x)`, or "".
        modules: the paths of all modules around it, outermost first.
    """

    kind: str
    op: str = ""
    name: str = ""
    module: str = ""
    source: str = ""
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind in (WEIGHT, INPUT):
            return f"{self.kind} {self.name}"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}{f' ({self.source})' if self.source else ''}"


def readers(node: fx.Node) -> list[fx.Node]:
    """The ops of the model that read `node`, through casts and uses of casts."""
    found: list[fx.Node] = []
    for user in node.users:
        if user.target in TOGETHER:
            found += [op for part in parts_for(user, node) for op in readers(part)]
        elif is_inserted(user):
            found += readers(user)
        elif user.op != "output":
            found.append(user)
    return found


def location_of(node: fx.Node, here: str = "") -> Location:
    """The place of the op that made the value of `node`.

    Args:
        here: the path of the module around the code that ran, where modules that are
            alike share the graph; "" for the module that it was captured in.
    """
    node = stands_for(node)
    while node.target is operator.getitem:
        node = stands_for(node.all_input_nodes[0])
    if node.op in ("placeholder", "get_attr"):
        return given_location(node, is_weight=node.op == "get_attr", here=here)
    paths = compat.paths_where_run(node.meta.get("nn_module_stack") or {}, here)
    op = node.name
    if isinstance(node.target, compat.OpOverload):
        op = op_name(node.target)
    elif node.op == "call_function":
        op = getattr(node.target, "__name__", str(node.target))
    return Location(
        OP,
        op=op,
        module=paths[-1] if paths else "",
        source=source_line(node),
        modules=paths,
    )


def given_location(node: fx.Node, *, is_weight: bool, here: str = "") -> Location:
    """An input of a graph, by its path in the model or the name of the argument.

    The low copy of a weight has the weight's name.

    Args:
        here: as for `location_of`.
    """
    copied = node.name.removesuffix("_copy")
    known = [n for n in node.graph.nodes if n.op == node.op and n.name == copied]
    of = known[0] if known else node
    name = of.name if of.op == "placeholder" else str(of.target)
    path = compat.path_where_run(of.meta.get("autoamp_path") or name, of.graph, here)
    return Location(WEIGHT if is_weight or of is not node else INPUT, name=path)
