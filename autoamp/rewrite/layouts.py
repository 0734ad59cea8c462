"""Applies a choice of layouts to a graph that is ready to run."""

from __future__ import annotations

import torch
from torch import fx

from autoamp.graph_functions import laid_out
from autoamp.place.layouts import FORMATS, Layouts
from autoamp.rewrite.copied import copied

LAST = "autoamp_channels_last"
"""In the `meta` of a value or copy of a weight that has its channels last: True."""


def lay_out(gm: fx.GraphModule, layouts: Layouts) -> fx.GraphModule:
    """A copy of `gm` that permutes the values read in the other layout, each once.

    The copies of weights are made with their channels last (`weights/copies.py`),
    those that are constants are made anew here, and the results of the calls follow the
    layouts of their operands.
    """
    gm, copies = copied(gm)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for value, readers in layouts.changes.items():
        node = copies[value]
        last = FORMATS[node.meta["val"].dim()]
        formats = (last, torch.contiguous_format)
        if value in layouts.last:
            formats = (torch.contiguous_format, last)
        after = inputs[-1] if node.op == "placeholder" else node
        with gm.graph.inserting_after(after):
            copy = gm.graph.call_function(laid_out, (node, *formats))
        copy.meta = {k: v for k, v in node.meta.items() if k in ("val", "stack_trace")}
        for reader in readers:
            copies[reader].replace_input_with(node, copy)
    for node in (copies[each] for each in layouts.last | layouts.weights):
        node.meta[LAST] = True
        if node.op == "get_attr":
            name = str(node.target)
            constant = getattr(gm, name)
            last = FORMATS[constant.dim()]
            gm.register_buffer(name, constant.contiguous(memory_format=last))
    return gm
