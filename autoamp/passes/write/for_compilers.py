"""Turns a rewritten graph into one for a compiler, instead of running it as it is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE
from autoamp.passes.functions import (
    FOR_COMPILERS,
    checkpointed,
    low_weight,
    scale_grad,
    traced_scale_grad_,
    traced_scale_grad_apart,
)
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.write.emitted import CAST_KIND
from autoamp.passes.write.scale_edge import SHARED

CAST_FATE = "autoamp_cast_fate"
"""Set in the `meta` of a cast that inductor compiles: what becomes of the cast."""

EXACT_CASTS = "autoamp_exact_casts"
"""Set in the `meta` of a graph that inductor compiles: whether its kernels round at
each cast; None where torch does not tell."""

_ATEN = torch.ops.aten
_SCALED = frozenset({scale_grad, FOR_COMPILERS[scale_grad], traced_scale_grad_apart})
_CHANGED = frozenset({checkpointed, *FOR_COMPILERS})


def for_compilers(
    gm: fx.GraphModule, left: Collection[str] = (), *, inductor: bool = False
) -> fx.GraphModule:
    """`gm` in the form AOT autograd takes; `gm` itself where nothing is to be changed.

    Checkpointed regions become torch's own op, which AOT autograd partitions.  A
    rewritten graph run as it is calls `torch.utils.checkpoint`; AOT autograd would
    trace into that call and keep every activation.  The ops of the loss scale's
    boundary become plain ops.

    Args:
        left: names of casts that stay as they are.
        inductor: whether the compiler is inductor, which itself decides which values
            are kept in memory.
    """
    # Inductor writes each result to memory, and has all its readers read it from there:
    # the fp32 logits of a language model, several times.  A cast that is no result is
    # part of the kernels that read it, which read 16 bits.
    shared = [
        node
        for node in gm.graph.nodes
        if inductor
        and node.name not in left
        and node.meta.get(CAST_KIND) == "up"
        and 0 < sum(map(_leaves, node.users)) < len(node.users)
    ]
    if not inductor and not any(n.target in _CHANGED for n in gm.graph.nodes):
        return gm
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    compat.quick_copy(gm.graph, graph, values)
    for old, new in values.items():
        if inductor and old.op == "placeholder":
            # With `cpp_wrapper` inductor compiles for these values, and takes from them
            # that no input needs a gradient.
            new.meta.pop("val", None)
        if old.target in FOR_COMPILERS:
            new.target = FOR_COMPILERS[old.target]
            # AOT autograd writes a mutated input back outside the graph and does not
            # return it, so that only scaling in place is seen.
            if old.target is scale_grad and old.all_input_nodes[0].op == "placeholder":
                new.target = traced_scale_grad_
            # Results that are views of one tensor are made anew outside the graph, and
            # would lose the scaling between the tensor and its views.
            elif old.meta.get(SHARED):
                new.target = traced_scale_grad_apart
        elif old.target is checkpointed:
            # Traced into, `torch.utils.checkpoint` is inlined and every activation is
            # kept.
            new.target = compat.CHECKPOINT
            new.kwargs = {"use_reentrant": False, **new.kwargs}
    for node in shared:
        _cast_again(graph, values[node])
    return fx.GraphModule(gm, graph)


def _leaves(node: fx.Node) -> bool:
    return node.op == "output" or (
        node.target in _SCALED and any(map(_leaves, node.users))
    )


def _cast_again(graph: fx.Graph, cast: fx.Node) -> None:
    """Gives the result of a graph a cast of its own, whose gradient flows to `cast`.

    Gradients from outside and inside are added in fp32, as before.
    """
    leaving = [user for user in cast.users if _leaves(user)]
    with graph.inserting_before(cast.next):
        # Without the `unsqueeze` AOT autograd's CSE would merge the two casts again.
        wider = graph.call_function(_ATEN.unsqueeze.default, (cast.args[0], 0))
        again = graph.call_function(
            _ATEN._to_copy.default, (wider,), {"dtype": HIGH_DTYPE}
        )
        numbers = graph.call_function(_ATEN.squeeze.dim, (again, 0))
        result = graph.call_function(low_weight, (cast, numbers))
    result.meta = dict(cast.meta)
    for user in leaving:
        user.replace_input_with(cast, result)


# -- the call of the compiler ----------------------------------------------------------


def compiled(
    work: Rewritten, code: fx.GraphModule, given: Sequence[Any]
) -> Callable[..., Any]:
    """The function that a compiler makes of a graph; what inductor does is noted.

    Args:
        work: the record of the graph.
        code: the form of the graph that the compiler takes.
        given: the arguments that the graph is called with.
    """
    options = work.options
    if not compat.is_inductor(options.backend):
        return compat.compile_with(options.backend, code, given)
    reading, exact = casts_to_read(work.gm), options.exact_casts
    run = compat.compile_with(
        options.backend, code, given, exact_casts=exact, reading=reading
    )
    note_casts(work.gm, reading)
    return run


# -- what inductor makes of casts ------------------------------------------------------


def casts_to_read(gm: fx.GraphModule) -> compat.CastReading:
    """The casts of a graph by name, before inductor compiles the graph.

    A cast whose name a node of a body has as well is left out: inductor's graph holds
    the nodes of both.
    """
    inside = {
        node.name
        for name, body in gm.named_modules()
        if name and isinstance(body, fx.GraphModule)
        for node in body.graph.nodes
    }
    names = (
        n.name for n in gm.graph.nodes if n.op != "placeholder" and CAST_KIND in n.meta
    )
    return compat.CastReading(tuple(name for name in names if name not in inside))


def note_casts(gm: fx.GraphModule, reading: compat.CastReading) -> None:
    """Notes in a graph what inductor has made of its casts."""
    gm.meta[EXACT_CASTS] = reading.rounded
    for node in gm.graph.nodes:
        if node.name in reading.fates:
            node.meta[CAST_FATE] = reading.fates[node.name]
