"""The example that teaches the pass is short, and each of its claims is true."""

from __future__ import annotations

import random
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph

from examples import pass_in_200_lines as example


def test_the_example_is_short_and_shares_no_code_with_the_package() -> None:
    text = Path(example.__file__).read_text()
    assert len(text.splitlines()) <= 200
    assert "import autoamp" not in text
    assert "from autoamp" not in text


class Program(nn.Module):
    """Ops of all lists on values that a seed draws; `mul` reads a whole or a row."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        draw, values = random.Random(self.seed), [x]
        for _ in range(10):
            left, right = draw.choices(values, k=2)
            made = {
                "matmul": lambda a, b: a @ b,
                "add": lambda a, b: a + b,
                "mul": lambda a, b: a * b,
                "row": lambda a, b: a * row,
                "silu": lambda a, b: nn.functional.silu(a),
                "transpose": lambda a, b: a.transpose(0, 1),
            }
            values.append(made[draw.choice(sorted(made))](left, right))
        return values[-1]


def cheapest(graph: Graph) -> int:
    """The least cost of all placements that the lists allow, tried one by one."""
    lists = {node: example.category(node) for node in graph.nodes}
    allow = {node for node in lists if lists[node] == "allow"}
    free = [node for node in lists if lists[node] in ("infer", "clear")]
    chosen = chain.from_iterable(combinations(free, n) for n in range(len(free) + 1))
    return min(example.cost(graph, allow | set(low)) for low in chosen)


@pytest.mark.parametrize("seed", range(20))
def test_the_cut_costs_what_the_cheapest_of_all_placements_costs(seed: int) -> None:
    graph = example.capture(Program(seed), torch.ones(8, 8), torch.ones(8)).graph
    low, least = example.place(graph)
    assert least == example.cost(graph, low) == cheapest(graph)


def test_the_program_prints_what_it_computed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert example.main() == 0
    said = capsys.readouterr().out.splitlines()
    torch.manual_seed(0)
    model, inputs = example.Block(32), (torch.randn(128, 32), torch.randn(128, 128))
    captured = example.capture(model, *inputs)
    graph = captured.graph
    low, least = example.place(graph)
    assert least == cheapest(graph)

    table = {line[:13].strip(): line[13:].split() for line in said if "e-" in line[25:]}
    assert int(table["fp32"][0]) == example.cost(graph, set())
    follow = example.follow(graph)
    assert int(table["rest follows"][0]) == example.cost(graph, follow) > least
    assert int(table["minimum cut"][0]) == least

    # Each value that readers on the other side read is cast once.
    cast = [v for v in graph.nodes if any((r in low) != (v in low) for r in v.users)]
    assert int(table["minimum cut"][1]) == len(cast) <= int(table["autocast"][0])
    for node in graph.nodes:
        if node.op == "call_function":
            row = next(line.split() for line in said if line.split()[:1] == [node.name])
            assert row[1:3] == [
                example.category(node),
                "low" if node in low else "fp32",
            ]
            reads = [
                f"cast({v})" if v in cast and (v in low) != (node in low) else str(v)
                for v in node.all_input_nodes
            ]
            assert row[3:] == reads

    with torch.no_grad():
        result = example.rewrite(captured, low)(*inputs)
        truth = model.double()(*(x.double() for x in inputs))
    error = float((result - truth).norm() / truth.norm())
    assert table["minimum cut"][2] == f"{error:.1e}"
    # A path of the block rounds at most 13 times, each time by half a step.
    assert example.roundings(graph, low) == 13
    assert error <= 13 * torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize(
    ("name", "wrong", "told"),
    [
        ("place", lambda graph: (example.follow(graph), 0), "the cut costs"),
        ("without_casts", lambda graph: graph, "the same graph"),
        ("roundings", lambda graph, low: 0, "error within"),
    ],
)
def test_the_program_fails_where_one_thing_is_wrong(
    name: str, wrong: object, told: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(example, name, wrong)
    assert example.main() == 1
    said = capsys.readouterr().out.splitlines()
    (line,) = [line for line in said if line.endswith("NO")]
    assert line.startswith(told)
