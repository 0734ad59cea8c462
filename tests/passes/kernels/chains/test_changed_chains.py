"""Attacks on the table of spellings: spellings with something changed.

Whatever is still taken for a kernel has to be one, in float64, on rows of this file's
own and in its gradients; the code under test computes none of what is compared.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor, fx

from tests.passes.kernels.chains.test_chains import tensors, traced
from tests.passes.kernels.door import Recognised, chains_in, recognised
from tests.spelled.chains import SPELLINGS
from tests.spelled.layers import WIDTH

SAMPLES = 400
ATEN = torch.ops.aten

UNARY = [
    getattr(ATEN, name).default
    for name in (
        "exp",
        "tanh",
        "sigmoid",
        "erf",
        "sqrt",
        "rsqrt",
        "neg",
        "square",
        "reciprocal",
        "log1p",
        "softplus",
    )
]
BINARY = [ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor]
ROWS = [ATEN.mean.dim, ATEN.sum.dim_IntList, ATEN.amax.default]
LIKE = {op: group for group in (UNARY, BINARY, ROWS) for op in group}


def changed_number(value: float, rng: random.Random) -> float:
    steps = (1e-9, 1e-7, 1e-6, 1e-4, 1e-2, -1e-6)
    ways = [
        lambda: value * (1 + rng.choice(steps)),
        lambda: float(f"{value:.{rng.randint(1, 9)}g}"),
        lambda: value * 2,
        lambda: -value,
        lambda: value + 1,
        lambda: rng.choice([0.0, 1.0, 0.5, 1e-12, 1e-6, 3.0]),
    ]
    return float(rng.choice(ways)())


def change(graph: fx.Graph, rng: random.Random) -> None:
    """Changes a number, an op, an operand, or the order of two operands."""
    node = rng.choice([n for n in graph.nodes if n.op == "call_function"])
    numbers = [i for i, a in enumerate(node.args) if isinstance(a, float)]
    group = LIKE.get(node.target)
    way = rng.choice(["number", "number", "op", "swap", "operand"])
    if way == "number" and numbers:
        at = rng.choice(numbers)
        node.update_arg(at, changed_number(node.args[at], rng))
    elif way == "op" and group:
        node.target = rng.choice(group)
    elif way == "swap" and group is BINARY and isinstance(node.args[1], fx.Node):
        node.args = node.args[::-1]
    elif way == "operand" and group in (UNARY, BINARY):
        before = [n for n in graph.nodes if n < node and n.op != "output"]
        alike = [
            n for n in before if n.meta["val"].shape == node.args[0].meta["val"].shape
        ]
        node.update_arg(0, rng.choice(alike))


def whole(graph: fx.Graph) -> Recognised | None:
    end = graph.output_node().all_input_nodes[0]
    data, *_ = graph.nodes
    for chains in chains_in(graph):
        for chain in chains:
            if chain.result is end and chain.data is data:
                names = [n.name for n in graph.nodes if n.op == "placeholder"]
                if [n.name for n in (chain.data, *chain.vectors)] == names:
                    return recognised(chain)
    return None


def hostile(vectors: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    data = torch.randn(12, WIDTH, generator=generator, dtype=torch.float64)
    sizes = [1.0, 3.0, 10.0, 30.0, 1e-3, 1e-6, 1e-12, 1e-30, 1.0, 5.0, 1e2, 1.0]
    moves = [0.0, 5.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -20.0, 80.0, 3e4, -20.0]
    column = {"dtype": torch.float64}
    data = data * torch.tensor(sizes, **column)[:, None]
    data = data + torch.tensor(moves, **column)[:, None]
    return [data, *torch.randn(vectors, WIDTH, generator=generator, **column)]


def result_and_slopes(function: Any, inputs: list[Tensor]) -> list[Tensor]:
    data, *vectors = (t.clone().requires_grad_() for t in inputs)
    result = function(data, *vectors)
    generator = torch.Generator().manual_seed(9)
    way = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    (slopes,) = torch.autograd.grad(result, data, way)
    return [result.detach(), slopes]


def assert_same(graph: fx.Graph, found: Recognised) -> None:
    inputs = hostile(sum(n.op == "placeholder" for n in graph.nodes) - 1)
    chain = result_and_slopes(fx.GraphModule({}, graph), inputs)
    kernel = result_and_slopes(lambda x, *v: found(x, v), inputs)
    # slopes are sums of numbers near 1: what cancels to 0 keeps their last digits
    for ours, theirs, lost in zip(kernel, chain, (1e-30, 1e-12), strict=True):
        rows = theirs.isfinite().all(-1)
        size = theirs.abs().amax(-1, keepdim=True)
        # what a difference of neighbours in a row of 3e4 has left of 16 digits
        near = (ours - theirs).abs() <= 1e-6 * size + lost
        assert near[rows].all(), (found, graph)


def originals() -> list[fx.Graph]:
    """The spellings without casts to fp32, which would round in float64."""
    graphs = []
    for _, function in SPELLINGS.values():
        graph = traced(function, *tensors(function, 2))
        names = {getattr(n.target, "_opname", "") for n in graph.nodes}
        if not names & {"_to_copy", "to"}:
            graphs.append(graph)
    return graphs


def test_what_is_taken_for_a_kernel_is_the_kernel() -> None:
    rng, kernels, others = random.Random(0), 0, 0
    for graph in originals():
        found = whole(graph)
        assert found is not None
        assert_same(graph, found)
    graphs = originals()
    for i in range(SAMPLES):
        graph = copy.deepcopy(graphs[i % len(graphs)])
        for _ in range(rng.choice([1, 1, 2])):
            change(graph, rng)
        found = whole(graph)
        others += found is None
        if found is not None:
            kernels += 1
            assert_same(graph, found)
    print(f"{SAMPLES} samples: {kernels} kernels, {others} others")
    assert kernels > SAMPLES / 20
    assert others > SAMPLES / 4
