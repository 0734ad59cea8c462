"""Magnitudes of the results of chosen ops: `AUTOAMP_RECORD_OPS=PATTERN,...`.

Graphs run node by node then, which takes longer and computes the same numbers.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.node_by_node.observer import Observer
from autoamp.op_names import base_name
from autoamp.overflow.location import location_of
from autoamp.overflow.trail import floats_in

OPS = "AUTOAMP_RECORD_OPS"
_MOST = 40
"""The most names of one record, which has to fit a slot of the ring."""


class Watch:
    """The ops that match a pattern, and their magnitudes in one step."""

    def __init__(self, patterns: tuple[str, ...]) -> None:
        self.patterns = patterns
        self._found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._names: dict[fx.Node, str] = {}
        self._on = False

    def begin(self) -> None:
        """Begins a call in which gradients are recorded."""
        self._on = True

    def end(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """The largest and the mean magnitudes since the last step, by name."""
        found, self._found, self._on = self._found, {}, False
        return found

    def observer(self) -> Observer:
        """An observer of one run of a graph."""
        return _Seen(self)

    @torch.no_grad()
    def note(self, n: fx.Node, value: Any) -> None:
        """Notes the magnitudes of the result of a node, if its name matches."""
        if not self._on or n.op != "call_function" or compat.inside_backward():
            return
        name = self._names.get(n)
        if name is None:
            name = self._names[n] = self._name(n)
        for each in floats_in(value)[:1] if name else ():
            largest = compat.largest_magnitude([each])
            if largest is None or (
                name not in self._found and len(self._found) >= _MOST
            ):
                continue
            mean = each.detach().abs().mean(dtype=torch.float32)
            before = self._found.get(name)
            if before is not None:
                largest = compat.largest_magnitude([before[0], largest]) or largest
            self._found[name] = largest, mean

    def _name(self, n: fx.Node) -> str:
        """`module.path:op` if a pattern matches the path or the op, else ""."""
        place = location_of(n)
        op = place.op
        if isinstance(n.target, compat.OpOverload):
            op = base_name(n.target)
        op = op.rpartition("::")[2]
        if not op:  # a part of a tuple
            return ""
        words = (place.module, op, place.op)
        for pattern in self.patterns:
            if any(fnmatch.fnmatchcase(word, pattern) for word in words):
                return f"{place.module}:{op}"
        return ""


class _Seen(Observer):
    """Tells a watch of each value."""

    unrolls = True

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def after(self, run: fx.Interpreter, n: fx.Node, value: Any) -> Any:  # noqa: ARG002
        self._watch.note(n, value)
        return value


def from_environment(environ: Mapping[str, str]) -> Watch | None:
    """The watch that the variable asks for, or None."""
    given = [each.strip() for each in environ.get(OPS, "").split(",")]
    patterns = tuple(each for each in given if each)
    return Watch(patterns) if patterns else None
