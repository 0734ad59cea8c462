"""What `torch.autocast` hands low to the bodies of a graph, and gets low from them.

A body goes through the passes by itself, with fp32 at its edges.  Under autocast an
edge has the dtype of the value there: low between the checkpointed blocks of a
convolutional net.  The graph is run once under autocast, on tensors without data, and
such values are marked; an op that reads a marked value may be low, as under autocast.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.passes.functions import checkpointed
from autoamp.passes.ops import bodies_of
from autoamp.passes.see.regions import (
    CONTROL_FLOW,
    LOWERED_BODY,
    Regions,
    shared_inputs,
)
from autoamp_said import logger_of

LOW_OUTSIDE = "autoamp_low_outside"
"""In the `meta` of an input of a body, or of a result, that autocast has low: True."""

logger = logger_of(__name__)


def mark_low_outside(
    gm: fx.GraphModule, low: torch.dtype, device: str | None = None
) -> None:
    """Marks the edges of the bodies in ATen graph `gm` that autocast has low.

    Nothing is marked where the graph does not run without data.

    Args:
        device: the type of the device that the graph is to run on; by default its own.
    """
    run = _UnderAutocast(gm, low)
    inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
    try:
        with contextlib.ExitStack() as on:
            on.enter_context(torch.no_grad())
            on.enter_context(compat.as_traced())
            on.enter_context(compat.new_fake_mode(symbolic=False))
            given = [compat.like(value, device=device) for value in inputs]
            there = {v.device.type for v in given if isinstance(v, torch.Tensor)}
            for each in there.intersection(compat.AUTOCAST_DEVICES):
                state = compat.AutocastState(each, low, enabled=True)
                on.enter_context(compat.in_autocast(state))
            run.run(*given)
    except Exception:
        logger.debug("autoamp: bodies are rewritten with fp32 edges", exc_info=True)
        return
    for node in run.found:
        node.meta[LOW_OUTSIDE] = True


class _UnderAutocast(fx.Interpreter):
    """Runs a graph and its bodies, as under autocast.

    Attributes:
        found: the inputs of bodies, and the results, that are low.
    """

    def __init__(self, gm: fx.GraphModule, low: torch.dtype) -> None:
        super().__init__(gm)
        self._regions, self._low = Regions(gm), low
        self.found: list[fx.Node] = []

    def run_node(self, n: fx.Node) -> Any:
        if n.target in compat.MODE_CHANGES:
            return self._regions.follow(n)
        if _calls_bodies(n):
            value = self._call(n)
        else:
            with self._regions.entered():
                value = super().run_node(n)
        source = n.args[0] if n.target is operator.getitem else n
        if (
            isinstance(source, fx.Node)
            and _calls_bodies(source)
            and self._is_low(value)
        ):
            self.found.append(n)
        return value

    def _is_low(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dtype == self._low

    def _call(self, call: fx.Node) -> Any:
        """The results of a call of bodies; their inputs and own calls are looked at."""
        results = []
        known = compat.like(call.meta["val"])
        for body in bodies_of(call):
            if LOWERED_BODY not in body.meta:
                return known
            inputs = body.graph.find_nodes(op="placeholder")
            given = [compat.like(n.meta.get("val")) for n in inputs]
            for at, operand in shared_inputs(call, body):
                given[at] = self.env[operand]
                if self._is_low(given[at]):
                    self.found.append(inputs[at])
            run = _UnderAutocast(body, self._low)
            results.append(run.run(*given))
            self.found += run.found
        # A loop gives what goes round, in fp32; branches, the wider of two dtypes.
        if call.target is not checkpointed and call.target is not compat.COND:
            return known
        first, *others = map(pytree.tree_leaves, results)
        widest = [
            next((v for v in (a, *more) if not self._is_low(v)), a)
            for a, *more in zip(first, *others, strict=True)
        ]
        return pytree.tree_unflatten(widest, pytree.tree_structure(results[0]))


def _calls_bodies(node: fx.Node) -> bool:
    return node.target is checkpointed or node.target in CONTROL_FLOW
