"""Checks that no cast is written to, and that no cast is out of date when read.

Both graphs and the rewritten one's stand-ins go in; a fault raises `VerificationError`.
"""

from __future__ import annotations

import functools
import operator
from collections import defaultdict

import torch
from torch import fx

from autoamp import compat
from autoamp.check.standin import StandIns, named, where
from autoamp.errors import VerificationError
from autoamp.graph_functions import low_weight, saturating_cast


def no_stale_casts(
    original: fx.GraphModule, rewritten: fx.GraphModule, after: StandIns
) -> None:
    """Raises where a cast is written to, is read in another region, or is stale.

    A cast is stale if it is read after a later write to the storage that it copies.
    """
    known = {n.name for n in original.graph.nodes}
    returned = {n.name for n in rewritten.graph.output_node().all_input_nodes}
    version: dict[int, int] = defaultdict(int)
    region = 0
    regions: dict[str, int] = {}
    copies: dict[int, tuple[str, int, int]] = {}
    for node in rewritten.graph.nodes:
        if node.target in compat.MODE_CHANGES:
            region += 1
        for source in node.all_input_nodes:
            if node.op == "output":
                continue
            cast, storage, at = copies.get(_storage(after, source), ("", -1, 0))
            if cast and version[storage] != at:
                raise VerificationError(
                    f"{where(node)} reads {source.name}, which is or views {cast}, a "
                    "cast of a tensor that was written to since",
                    nodes=[*named(node), cast],
                )
            crosses = regions.get(source.name, region) != region
            # The gradient of a use goes to the weight, not through the cast.
            if crosses and source.name not in returned and node.target != low_weight:
                raise VerificationError(
                    f"{where(node)} reads {source.name}, a cast made in another "
                    "grad-mode or autocast region",
                    nodes=named(node),
                )
        for written in _written(node, rewritten):
            storage = _storage(after, written)
            if storage in copies:
                raise VerificationError(
                    f"{where(node)} writes to {written.name}, which is or views "
                    f"{copies[storage][0]}, a cast: the write is lost",
                    nodes=named(node),
                )
            version[storage] += 1
        if node.name not in known and is_cast(node):
            storage = _storage(after, node.all_input_nodes[0])
            regions[node.name] = region
            copies[_storage(after, node)] = (node.name, storage, version[storage])


def _storage(run: StandIns, node: fx.Node) -> int:
    """The storage id of a node's stand-in; -1 if the stand-in is no tensor."""
    value = run.values[node.name]
    return compat.storage_id(value) if isinstance(value, torch.Tensor) else -1


def _written(node: fx.Node, gm: fx.GraphModule) -> list[fx.Node]:
    if isinstance(node.target, compat.HigherOrderOperator):
        taken = [n for n in node.all_input_nodes if n.op == "get_attr"]
        bodies = [operator.attrgetter(str(n.target))(gm) for n in taken]
        if any(_may_write(b) for b in bodies if isinstance(b, fx.GraphModule)):
            # The body may write to some input, so all its inputs count as written.
            return [n for n in node.all_input_nodes if n.op != "get_attr"]
    if not isinstance(node.target, compat.OpOverload):
        return []
    order, names = _arguments(node.target)
    found: list[fx.Node] = []
    if not names:
        return found
    for name, value in [*zip(order, node.args, strict=False), *node.kwargs.items()]:
        if name in names:
            fx.map_arg(value, found.append)
    return found


@functools.cache  # torch makes a schema's arguments anew each time
def _arguments(target: compat.OpOverload) -> tuple[list[str], frozenset[str]]:
    """The names of an op's arguments, in order, and of those it writes to."""
    arguments = compat.schema(target).arguments
    written = frozenset(
        a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write
    )
    return [a.name for a in arguments], written


def _may_write(body: fx.GraphModule) -> bool:
    """Whether a sub-graph, of ATen ops or as Dynamo wrote it, may write to an input."""
    nodes = list(body.graph.nodes)
    if any(n.op == "call_method" or "val" not in n.meta for n in nodes[:-1]):
        return any(_writes_by_name(n) or _written(n, body) for n in nodes)
    run = StandIns(body, {})
    given = {_storage(run, n) for n in nodes if n.op in ("placeholder", "get_attr")}
    return any(
        _storage(run, w) in given - {-1} for n in nodes for w in _written(n, body)
    )


def _writes_by_name(node: fx.Node) -> bool:
    """Whether a Python method, function or operator writes, judged by its name."""
    name = str(getattr(node.target, "__name__", node.target))
    in_place = name.endswith("_") and not name.startswith("_")
    return node.op.startswith("call") and (in_place or name in _WRITING)


_WRITING = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ipow"})


def is_cast(node: fx.Node) -> bool:
    """Whether `node` is a cast, inserted by the rewrite or made by the model."""
    if node.target is saturating_cast:
        return True
    return (
        isinstance(node.target, compat.OpOverload)
        and compat.schema(node.target).name == "aten::_to_copy"
    )
