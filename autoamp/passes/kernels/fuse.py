"""The pass `kernels`: calls that together compute a kernel become one call of it.

Each step puts one kind of kernel into the graph.  The steps run in this order:
chains first, then the masks that the model's calls of attention can do without.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import fx

from autoamp import compat
from autoamp.passes.kernels.causal_mask import ATTENTION, without_masks
from autoamp.passes.kernels.chains import put_kernels, replaceable
from autoamp.passes.kernels.match import Allowed, in_regions
from autoamp.passes.kernels.table import KERNEL_NAMES
from autoamp.passes.ops import drop_dead
from autoamp.passes.options import PassOptions
from autoamp.passes.rules import Rules
from autoamp.passes.see.normalise import Normalised

STEPS = (put_kernels, without_masks)


def fuse(
    normalised: Normalised,
    options: PassOptions,
    low: torch.dtype,
    device: str | None = None,
    left: Collection[str] = (),
) -> Normalised | None:
    """The graph with one call for the calls that together compute a kernel.

    Args:
        device: type of the device that the graph is to run on; by default the one it
            was traced on.
        left: names of nodes that stay as they are.

    Returns:
        None where no call is replaced; `normalised` is not changed.
    """
    off = options.kernels_off
    if len(off) == len(KERNEL_NAMES):
        return None
    gm, mode = normalised.gm, normalised.fake_mode
    rules = options.resolve_rules(low)
    keep = (*options.kept, *rules.keep)
    stays = in_regions(gm, gm.graph)
    allowed = Allowed(rules, Rules.default(low), keep, off, device, left, stays)
    # A graph is copied only where some step may find something.  The last step looks at
    # calls of attention, and takes its time over their masks.
    calls_attention = gm.graph.find_nodes(op="call_function", target=ATTENTION)
    if not calls_attention and not replaceable(gm.graph, mode, allowed):
        return None
    graph = fx.Graph(gm)
    compat.quick_copy(gm.graph, graph, {})
    # The nodes of the copy are other nodes.
    allowed = replace(allowed, in_regions=in_regions(gm, graph))
    put = [step(graph, mode, allowed) for step in STEPS]
    if not any(put):
        return None
    # The calls that made a mask may be dead now.
    drop_dead(graph)
    fused = compat.graph_module(gm, graph)
    fused.meta = dict(gm.meta)
    return replace(normalised, gm=fused)
