"""Which chains no kernel may replace, because of the user's rules and patterns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import fx

from autoamp.analyse.nodes import module_paths
from autoamp.analyse.pins import kept_by
from autoamp.kernels.chains import is_cast
from autoamp.rules import Category, Rules


@dataclass(frozen=True)
class Wishes:
    """The rules in force, and the user's options on modules and kernels.

    Attributes:
        rules, built_in: the rules in force, and those that nobody changed.
        keep: the user's patterns of modules that stay fp32.
        leave: names of kernels that are switched off.
        device: type of the device that the graph is to run on, if not where it is.
        left: names of nodes that a failed check leaves as they are.
    """

    rules: Rules
    built_in: Rules
    keep: Sequence[str]
    leave: Sequence[str]
    device: str | None
    left: Collection[str] = ()

    def allow(self, calls: Sequence[fx.Node]) -> bool:
        """Whether no rule or pattern of the user's is about any of the calls.

        A rule of the user's about `tanh` is about each `tanh`, so that none may vanish
        in a kernel; a module that stays fp32 stays as it is.
        """
        return not any(
            self.rules.lookup(node.target) != self.built_in.lookup(node.target)
            or kept_by(self.keep, module_paths(node))
            or node.name in self.left
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
