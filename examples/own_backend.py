"""Use autoamp as a compiler pass: on an exported program, and in your own backend.

`autoamp.rewrite` takes a graph and gives a new mixed-precision graph.  It changes
neither the graph nor the model that it is given, and leaves compiling, training and
serving to whoever calls it.

1. `torch.export` gives a graph; the rewritten graph takes and returns fp32, and its
   matrix products run in bf16.
2. `torch.compile` calls your backend with each graph that it captures; the backend
   rewrites the graph, looks at it, and runs it or hands it on.  The model trains.

    python examples/own_backend.py

The exit status is 1 unless all matrix products are bf16 in both, the answers are within
the rounding of bf16, and the weights get fp32 gradients.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

import autoamp

OPTIONS: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
"""`do_no_harm=False` converts on any machine, even where bf16 cannot pay."""


def make_model(width: int) -> nn.Module:
    """Three linear layers with a norm."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def products(graph: fx.GraphModule) -> list[torch.dtype]:
    """The dtype of the result of each linear layer of a rewritten graph."""
    linear = torch.ops.aten.linear.default
    return [n.meta["val"].dtype for n in graph.graph.nodes if n.target is linear]


def error(ours: Tensor, exact: Tensor) -> float:
    """The relative error: ||ours - exact|| / ||exact||."""
    return float((ours.detach() - exact).norm() / exact.norm())


class Backend:
    """A backend for `torch.compile` that rewrites each graph before running it."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(
        self, graph: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        low = autoamp.rewrite(graph, inputs, **OPTIONS)
        self.graphs.append(low)
        return low  # or hand it on: lookup_backend("inductor")(low, inputs)


def main(argv: list[str] | None = None) -> int:
    """Rewrites both ways; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--width", type=int, default=256, help="features of a layer")
    model = make_model(parser.parse_args(argv).width)
    x = torch.randn(32, 64)
    exact = model(x).detach()
    bound = 6 * torch.finfo(torch.bfloat16).eps  # one rounding for each of six layers

    print("1. an exported program")
    exported = torch.export.export(model, (x,))
    low = autoamp.rewrite(exported, (x,), **OPTIONS)
    for node in low.graph.nodes:
        if node.op == "call_function" and node.meta["val"] is not None:
            print(f"   {node.name:<22} {str(node.meta['val'].dtype)[6:]}")
    dtypes = products(low)
    errors = [error(low(x), exact)]
    print(f"   error of the output {errors[0]:.1e}\n")

    print("2. a backend of your own")
    backend = Backend()
    compiled = torch.compile(model, backend=backend)
    output = compiled(x)
    output.square().mean().backward()
    for graph in backend.graphs:
        dtypes += products(graph)
    errors.append(error(output, exact))
    gradients = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
    print(f"   graphs: {len(backend.graphs)}; error of the output {errors[1]:.1e}")
    print(f"   gradients of the weights are {', '.join(gradients)}")

    right = (
        dtypes == [torch.bfloat16] * 6
        and all(0 < e < bound for e in errors)
        and gradients == {"torch.float32"}
    )
    print(f"All six products in bf16, errors below {bound:.1e}: {right}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
