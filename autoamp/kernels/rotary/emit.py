"""Puts one call in the place of each rotary position embedding that is written out.

A graph goes in that has its casts and is ready to run.  The chain

    slice_1 = x[..., :8];  slice_2 = x[..., 8:]
    add = x * cos + cat(-slice_2, slice_1) * sin;  add_bf16 = _to_copy(add, bf16)

becomes `add = rotary(x, cos, sin, bf16, -1, False)`, which computes in fp32 inside.
Compilers get the chain: they make one kernel of it by themselves.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from autoamp.analyse.nodes import KERNEL, ForChain
from autoamp.kernels.rotary.function import rotary
from autoamp.kernels.rotary.recognise import Embedding, embeddings
from autoamp.kernels.table import ROTARY
from autoamp.rewrite.copied import edited


def with_rotary(gm: fx.GraphModule, left: Collection[str] = ()) -> fx.GraphModule:
    """`gm` with one call for each rotary embedding; `gm` itself where there is none.

    Args:
        left: names of nodes; an embedding that has one of them stays as it is.
    """

    def found(graph: fx.Graph) -> list[Embedding]:
        return [
            each
            for each in embeddings(graph)
            if not any(n.name in left for n in (each.result, *each.inside))
        ]

    def edit(graph: fx.Graph) -> None:
        for embedding in found(graph):
            _replace(embedding)

    return edited(gm, edit, finds=found)


def _replace(found: Embedding) -> None:
    node = found.result
    dtype = found.made.dtype
    if found.cast is not None:
        found.cast.replace_all_uses_with(node)
        node.meta = {**node.meta, "val": found.cast.meta["val"]}
        node.graph.erase_node(found.cast)
    node.target, node.kwargs = rotary, {}
    given = found.data, found.cosine, found.sine
    node.args = *given, dtype, found.sign, found.pairs, found.contiguous
    node.meta[KERNEL] = ForChain(ROTARY, 1 + len(found.inside), widens=False)
    for each in reversed(found.inside):
        node.graph.erase_node(each)
