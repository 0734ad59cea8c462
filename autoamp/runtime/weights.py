"""Low-precision copies of weights: made once, refreshed when the weight changed.

The user's fp32 parameter stays the master.  A rewritten graph gets the copy as an extra
argument, looked up at run time by the parameter it is called with: deep copies of a
model share graphs, not weights.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.utils.weak import WeakTensorKeyDictionary

from autoamp import compat
from autoamp.graph_functions import low_weight
from autoamp.pipeline import Rewritten
from autoamp.rewrite.casts import CAST_KIND


def hoist_weight_casts(rewritten: Rewritten) -> tuple[fx.GraphModule, list[int]]:
    """The graph with its weight casts turned into extra inputs.

    Returns a new module and, for each extra input in order, the position of the input
    that is its fp32 weight.  Uses through which a gradient flows become `low_weight`
    nodes, one per use, so that weight gradients are summed in fp32.
    """
    graph = fx.Graph()
    output = graph.graph_copy(rewritten.gm.graph, {})
    if output is not None:
        graph.output(output)
    gm = fx.GraphModule(rewritten.gm, graph)
    for old, new in zip(rewritten.gm.graph.nodes, graph.nodes, strict=True):
        new.meta = dict(old.meta)
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    position = {n.name: i for i, n in enumerate(placeholders)}
    slots: dict[str, fx.Node] = {}
    last = placeholders[-1] if placeholders else None
    for cast in [n for n in graph.nodes if n.meta.get(CAST_KIND) == "weight"]:
        weight = cast.all_input_nodes[0]
        if weight.op == "get_attr":
            _fold_constant(gm, graph, cast, weight, rewritten)
        if weight.op != "placeholder" or last is None:
            continue
        if weight.name not in slots:
            with graph.inserting_after(last):
                last = slots[weight.name] = graph.placeholder(f"{weight.name}_copy")
            last.meta = dict(cast.meta)
        _replace_cast(graph, cast, weight, slots[weight.name], rewritten)
    gm.recompile()
    return gm, [position[name] for name in slots]


def _fold_constant(
    gm: fx.GraphModule,
    graph: fx.Graph,
    cast: fx.Node,
    source: fx.Node,
    whole: Rewritten,
) -> None:
    """Casts a tensor constant of a captured graph once, now.

    Dynamo passes everything a model owns as an input; what is an attribute of its graph
    is a literal of the program, which nothing can write unless the graph does.
    """
    if whole.facts.nodes[source.name].storage in whole.facts.mutated:
        return
    value = operator.attrgetter(str(source.target))(gm)
    gm.register_buffer(cast.name, value.detach().to(whole.low))
    with graph.inserting_before(cast):
        folded = graph.get_attr(cast.name)
    folded.meta = dict(cast.meta)
    cast.replace_all_uses_with(folded)
    graph.erase_node(cast)


def _replace_cast(
    graph: fx.Graph, cast: fx.Node, weight: fx.Node, copy: fx.Node, whole: Rewritten
) -> None:
    trained = whole.facts.nodes[weight.name].requires_grad
    for user in list(cast.users):
        reader = whole.facts.nodes.get(user.name)
        flows = trained and (reader is None or reader.requires_grad)
        if user.target is low_weight or not flows:
            user.replace_input_with(cast, copy)
            continue
        with graph.inserting_before(user):
            use = graph.call_function(low_weight, (weight, copy))
        use.meta = {k: v for k, v in cast.meta.items() if k != CAST_KIND}
        user.replace_input_with(cast, use)
    graph.erase_node(cast)


@dataclass
class _Copy:
    """One copy, and what its weight looked like when it was last refreshed."""

    low: torch.Tensor
    version: int = -1
    address: int = -1
    sentinel: torch.Tensor | None = None


_COPIES: dict[torch.dtype, WeakTensorKeyDictionary] = {
    torch.float16: WeakTensorKeyDictionary(),
    torch.bfloat16: WeakTensorKeyDictionary(),
}
"""All copies of the process: a weight shared by two models or graphs has one."""


class WeightCopies:
    """The copies one graph needs, fresh at every call."""

    def __init__(self, low: torch.dtype) -> None:
        self.store = _COPIES[low]
        self.low = low

    def fresh(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of `weights` (fp32, any shapes) in the low dtype, equal to them now.

        A weight being trained is copied anew at every call, all of them by one
        multi-tensor copy: `.data` writes leave no trace that could be trusted.  Where
        no gradient is recorded a copy-on-write clone of the weight tells any write, so
        the copy is kept until then.
        """
        recording = torch.is_grad_enabled()
        copies: list[_Copy] = []
        stale: list[tuple[_Copy, torch.Tensor]] = []
        for weight in weights:
            copy = self.store.get(weight)
            if copy is None:
                copy = self._new(weight)
            copies.append(copy)
            if recording and weight.requires_grad:
                copy.sentinel = None
                stale.append((copy, weight))
            elif copy.sentinel is None or _moved(copy, weight):
                stale.append((copy, weight))
        if stale:
            _refresh(stale, recording)
        return [copy.low for copy in copies]

    def _new(self, weight: torch.Tensor) -> _Copy:
        # A copy made under inference_mode could not be saved for a later backward.
        with torch.inference_mode(False), torch.no_grad():
            low = torch.empty_like(weight.detach(), dtype=self.low)
        copy = self.store[weight] = _Copy(low)
        return copy


def _moved(copy: _Copy, weight: torch.Tensor) -> bool:
    return (
        copy.version != _version(weight) or compat.data_address(weight) != copy.address
    )


def _version(weight: torch.Tensor) -> int:
    return -1 if weight.is_inference() else weight._version


def _refresh(stale: Sequence[tuple[_Copy, torch.Tensor]], recording: bool) -> None:
    """Copies weights into their copies, in place, and notes what they look like.

    A copy may be saved by a graph that has yet to run backward.  Its version counter
    moves only if the weight's own did: exactly when eager autograd would complain.
    """
    kept = [(c, w) for c, w in stale if c.version == _version(w)]
    moved = [(c, w) for c, w in stale if c.version != _version(w)]
    with torch.inference_mode(False), torch.no_grad():
        if kept:
            lows = [c.low for c, _ in kept]
            with compat.preserving_versions(lows):
                torch._foreach_copy_(lows, [w.detach() for _, w in kept])
        if moved:
            torch._foreach_copy_(
                [c.low for c, _ in moved], [w.detach() for _, w in moved]
            )
        for copy, weight in stale:
            watch = not (recording and weight.requires_grad)
            copy.sentinel = compat.lazy_clone(weight.detach()) if watch else None
            copy.version = _version(weight)
            copy.address = compat.data_address(weight)
