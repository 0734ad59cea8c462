"""Places captured graphs again under other options, without a new capture."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autoamp import compat
from autoamp.pass_options import PassOptions
from autoamp.pipeline.run import rewrite_normalised
from autoamp.pipeline.work import Setting
from autoamp.rewrite.rewritten import Rewritten
from autoamp.trace.normalise import Normalised


def replanned(rewritten: Rewritten, options: PassOptions) -> Rewritten:
    """The record of the same graph, rewritten under `options`.

    The caller must be in the grad mode of the capture.
    """
    before = before_rewrite(rewritten)
    setting = Setting(free_weights=True, own_kernels=rewritten.facts.own_kernels)
    graph = Normalised(before, (), rewritten.fake_mode)
    found = rewrite_normalised(graph, options, rewritten.low, setting, {})
    # Bodies are found in `before` by identity, and the pass has put new bodies into it.
    return replace(found, before=before)


def before_rewrite(rewritten: Rewritten) -> fx.GraphModule:
    """The graph before the rewrite, with bodies as they were before it."""
    gm = compat.graph_module(rewritten.before, rewritten.before.graph)
    gm.meta.update(rewritten.before.meta)
    for name, child in rewritten.before.named_children():
        for body in rewritten.bodies:
            if child is body.gm:
                setattr(gm, name, before_rewrite(body))
    return gm
