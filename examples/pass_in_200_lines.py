"""The whole idea of autoamp in one program, which imports torch and networkx alone.

The six steps are those of docs/how-it-works.md.  The program leaves out the backward,
prices in time, and the ceiling, under which no op is lower than in `torch.autocast`.

    python examples/pass_in_200_lines.py     # exits with 1 unless all checks say "yes"
"""

from copy import deepcopy
from functools import partial

import networkx as nx
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import layer_norm, silu

FP32, LOW = torch.float32, torch.bfloat16
CAST = torch.ops.aten._to_copy.default
INFINITE = float("inf")


class Block(nn.Module):
    """A layer of a transformer: gated attention, a gated MLP, and a sum after each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.query, self.key = linear(width, width), linear(width, width)
        self.value, self.output = linear(width, width), linear(width, width)
        self.choose, self.gate = linear(width, width), linear(width, 4 * width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
        self.gain = nn.Parameter(torch.rand(4 * width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = layer_norm(x, x.shape[-1:])
        weights = (self.query(h) @ self.key(h).transpose(0, 1) + bias).softmax(-1)
        x = x + self.output(weights @ self.value(h) * silu(self.choose(h)))
        h = layer_norm(x, x.shape[-1:])
        return torch.add(x, self.down(silu(self.gate(h)) * self.up(h) * self.gain))


# 1. Capture: the call becomes a graph with one node for each op.
def capture(model: nn.Module, *inputs: Tensor) -> GraphModule:
    return make_fx(model, pre_dispatch=True)(*inputs)


# 2. Classify: lists name ops.  All else, and what the caller has in fp32, is "deny".
LISTS = {
    "allow": {"linear", "matmul"},  # low: products are what low precision is for
    "deny": {"add", "layer_norm", "softmax"},  # fp32: sums collect rounding errors
    "infer": {"mul", "silu"},  # either: whichever costs less
    "clear": {"transpose"},  # either: a view computes nothing, and follows the rest
}


def category(node: Node) -> str:
    op = str(node.target).split(".")[1] if node.op == "call_function" else ""
    return next((name for name, ops in LISTS.items() if op in ops), "deny")


# 3. Place: each op has a price in either precision, and each cast has one.
def price(node: Node) -> tuple[int, int, int]:
    """Bytes read and written by the op in fp32, in low, and by a cast of its result."""
    sizes = [v.meta["val"].numel() for v in (node, *node.all_input_nodes) if v.meta]
    moved = sum(sizes) * (node.op == "call_function" and category(node) != "clear")
    return 4 * moved, 2 * moved, (4 + 2) * sizes[0]


def cost(graph: Graph, low: set[Node]) -> int:
    """All ops of a placement, and one cast of each value with a reader unlike it."""
    total = 0
    for node in graph.nodes:
        in_fp32, in_low, cast = price(node)
        total += in_low if node in low else in_fp32
        total += cast * any((reader in low) != (node in low) for reader in node.users)
    return total


def place(graph: Graph) -> tuple[set[Node], int]:
    """The low nodes of the cheapest placement that the lists allow, and what it costs.

    A cut divides a network in the side of its source, here the low nodes, and the side
    of its sink, the fp32 nodes.  It costs the capacities of all edges from the low side
    to the fp32 side.  These edges cost what `cost` counts:

        edge             capacity          is cut where
        low  -> node     price in fp32     the node is fp32
        node -> fp32     price in low      the node is low
        down -> value    price of a cast   the value is fp32, and a reader is low
        value -> up      price of a cast   the value is low, and a reader is fp32

    Infinite edges `reader -> down` and `up -> reader`, which no minimum cut contains,
    hold `down` on the low side for a low reader, and `up` on the fp32 side for an fp32
    reader: many readers pay for one cast.  Without such a reader, `down` and `up` can
    stand beside their value for nothing.  So each placement has a cut of the same cost,
    no cut of it costs less, and the minimum cut is the cheapest of 2^n placements.
    """
    network = nx.DiGraph()
    for node in graph.nodes:
        in_fp32, in_low, cast = price(node)
        must = category(node)
        network.add_edge("low", node, capacity=INFINITE if must == "allow" else in_fp32)
        network.add_edge(node, "fp32", capacity=INFINITE if must == "deny" else in_low)
        network.add_edge(("down", node), node, capacity=cast)
        network.add_edge(node, ("up", node), capacity=cast)
        for reader in node.users:
            network.add_edge(reader, ("down", node), capacity=INFINITE)
            network.add_edge(("up", node), reader, capacity=INFINITE)
    least, (low_side, _) = nx.minimum_cut(network, "low", "fp32")
    return low_side & set(graph.nodes), least


def follow(graph: Graph) -> set[Node]:
    """The placement to beat: an infer or clear op is low if all its operands are."""
    low: set[Node] = set()
    for node in graph.nodes:
        follows = category(node) != "deny" and low.issuperset(node.all_input_nodes)
        if follows or category(node) == "allow":
            low.add(node)
    return low


# 4. Rewrite: each value is kept by dtype: the first reader that needs a cast makes it.
def rewrite(captured: GraphModule, low: set[Node]) -> GraphModule:
    graph = Graph()
    values: dict[tuple[Node, torch.dtype], Node] = {}

    def read(dtype: torch.dtype, value: Node) -> Node:
        if (value, dtype) not in values:
            other = values[value, FP32 if dtype == LOW else LOW]
            values[value, dtype] = graph.call_function(CAST, (other,), {"dtype": dtype})
        return values[value, dtype]

    for node in captured.graph.nodes:
        dtype = LOW if node in low else FP32
        values[node, dtype] = graph.node_copy(node, partial(read, dtype))
    return GraphModule(captured, graph)


# 5. Verify: without its casts, the rewritten graph is the graph before.
def without_casts(graph: Graph) -> Graph:
    graph = deepcopy(graph)
    for node in graph.find_nodes(op="call_function", target=CAST):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)
    return graph


def roundings(graph: Graph, low: set[Node]) -> int:
    """How many times a value is rounded on its way through the graph, at most."""
    depth: dict[Node, int] = {}
    for node in graph.nodes:
        read = [depth[v] + (node in low and v not in low) for v in node.all_input_nodes]
        depth[node] = max(read, default=0) + (node in low and category(node) != "clear")
    return max(depth.values())


# 6. Run: the rewritten graph is a module, which is called in the place of the model.
@torch.no_grad()
def main() -> int:
    """Prints the placement, a table and the checks; returns the exit status."""
    torch.manual_seed(0)
    model, inputs = Block(32), (torch.randn(128, 32), torch.randn(128, 128))
    captured = capture(model, *inputs)
    graph = captured.graph
    (low, least), greedy = place(graph), follow(graph)
    ours, theirs = rewrite(captured, low), rewrite(captured, greedy)
    for node in (node for node in graph.nodes if node.op == "call_function"):
        casts = [v for v in node.all_input_nodes if (v in low) != (node in low)]
        reads = [f"cast({v})" if v in casts else str(v) for v in node.all_input_nodes]
        side = "low " if node in low else "fp32"
        print(f"{node.name:13}", category(node), side, *reads)
    with torch.autocast("cpu", LOW):
        by_autocast, trace = model(*inputs), make_fx(model)(*inputs).graph
    results = [model(*inputs), by_autocast, theirs(*inputs), ours(*inputs)]
    truth = model.double()(*(x.double() for x in inputs))
    errors = [float((result - truth).norm() / truth.norm()) for result in results]
    graphs = [graph, trace, theirs.graph, ours.graph]
    counts = [len(g.find_nodes(op="call_function", target=CAST)) for g in graphs]
    costs = [cost(graph, set()), "", cost(graph, greedy), cost(graph, low)]
    names = ["fp32", "autocast", "rest follows", "minimum cut"]
    print(f"\n{'':13}{'bytes':>8}{'casts':>7}{'error':>9}")
    for row in zip(names, costs, counts, errors, strict=True):
        print("{:13}{:>8}{:>7}{:>9.1e}".format(*row))
    bound = roundings(graph, low) * torch.finfo(LOW).eps / 2  # of each rounding
    checks = {
        "the cut costs what its placement costs": least == costs[-1],
        "no more casts than autocast": counts[-1] <= counts[1],
        "the same graph but for casts": str(without_casts(ours.graph)) == str(graph),
        f"error within {bound:.1e}": errors[-1] <= bound,
    }
    for said, holds in checks.items():
        print(f"{said}: {'yes' if holds else 'NO'}")
    return int(not all(checks.values()))


if __name__ == "__main__":
    raise SystemExit(main())
