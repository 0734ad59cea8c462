"""Which calls no kernel may replace, whichever the kernel.

The user's rules and patterns may be about a call, the call may lie in an autocast
region of the model's own, or a check that failed may have named it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autoamp import compat
from autoamp.analyse.nodes import module_paths, tensors_of, written_values
from autoamp.analyse.pins import kept_by
from autoamp.kernels.shared.calls import is_cast
from autoamp.rules import Category, Rules
from autoamp.trace.regions import Regions


@dataclass(frozen=True)
class Allowed:
    """Tells whether calls may become a kernel.

    Attributes:
        rules, built_in: the rules in force, and those that nobody changed.
        keep: the user's patterns of modules that stay fp32.
        off: names of kernels that are switched off, or slower than the calls.
        device: type of the device that the graph is to run on, if not where it is.
        left: names of nodes that a failed check leaves as they are.
        in_regions: the calls in autocast regions of the model's own.
    """

    rules: Rules
    built_in: Rules
    keep: Sequence[str]
    off: Sequence[str]
    device: str | None
    left: Collection[str] = ()
    in_regions: Collection[fx.Node] = ()

    def takes(self, calls: Sequence[fx.Node]) -> bool:
        """Whether a kernel may take the place of `calls`.

        A rule of the user's about `tanh` is about each `tanh`, so that none may vanish
        in a kernel; a module that stays fp32 stays as it is.
        """
        return not any(
            self.rules.lookup(node.target) != self.built_in.lookup(node.target)
            or kept_by(self.keep, module_paths(node))
            or node.name in self.left
            or node in self.in_regions
            for node in calls
        )

    def widens(self, node: fx.Node) -> bool:
        """Whether type promotion may leave a call's result fp32 whatever it reads."""
        rule = self.rules.lookup(node.target)
        if rule is None or is_cast(node):
            return True
        device = self.device or node.meta["val"].device.type
        return rule.category is Category.DENY or any(
            case.category is Category.DENY
            and (case.test != "device_is" or case.value == device)
            for case in rule.when
        )


def in_regions(gm: fx.GraphModule, graph: fx.Graph) -> set[fx.Node]:
    """The calls in autocast regions of the model's own, which run as they are.

    Args:
        gm: says in which regions its graph is called.
        graph: a copy of the graph of `gm`.
    """
    regions = Regions(gm)
    found: set[fx.Node] = set()
    for node in graph.nodes:
        regions.follow(node)
        if regions.is_on is not None:
            found.add(node)
    return found


def exposed_storages(graph: fx.Graph) -> set[int]:
    """The storages that are written to in the graph, or could be after it."""
    written = [v for node in graph.nodes for v in written_values(node)]
    seen = [*written, *graph.output_node().all_input_nodes]
    return {compat.storage_id(t) for n in seen for t in tensors_of(n.meta.get("val"))}
