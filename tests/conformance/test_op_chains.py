"""Random chains of ops of torch's OpInfo database

A chain starts from a matrix; each step is an op one of whose samples runs with its
first tensor replaced by the last result.  Some results are copied low on the way, and
some ops moved to the allow list.  The laws are those of one op, in both precisions.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.rewrite.rewritten import Rewritten
from autoamp.rules import Rules
from tests.conformance import oplaws
from tests.conformance.opinfo import OPS, Case, cases, copied, seeded, title, traced
from tests.conformance.table import Figures

CHAINS = 60
LENGTHS = (3, 6)
LARGEST = 512
"""Elements of the largest value in a chain, so that one takes well under a second."""

MODEST = 1e4
"""The largest number in a chain: rounded, one next to a range's end may leave it."""

TRIES = 400
"""Draws of an op for one chain; most ops' samples do not fit most shapes."""


class Chain(nn.Module):
    """Calls ops one after another, each on the last one's first fp32 result."""

    def __init__(self, steps: Sequence[tuple[str, Case, bool]]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, value: Tensor, *others: Tensor) -> list[Tensor]:
        rest = list(others)
        values = [value]
        for _, case, copies in self.steps:
            count = len(case.tensors) - 1
            given, rest = rest[:count], rest[count:]
            value = copied(value) if copies else value
            args, kwargs = case.with_tensors([value, *given])
            value = first_float(case.call(*args, **kwargs))
            values.append(value)
        return values[-2:]

    def extra_repr(self) -> str:
        return " -> ".join(name for name, *_ in self.steps)

    def given(self) -> list[Tensor]:
        """Fresh inputs: the matrix, and what each step takes beside the last result."""
        torch.manual_seed(0)
        others = [t for _, case, _ in self.steps for t in case.inputs()[1:]]
        return [torch.randn(4, 6, requires_grad=True), *others]


def first_float(result: Any) -> Tensor:
    """The first fp32 tensor of a result; raises where there is none."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.dtype == torch.float32:
            return leaf
    raise TypeError("no fp32 result")


def chain(seed: int) -> Chain:
    """The chain of that number."""
    draw = random.Random(seed)
    length = draw.randint(*LENGTHS)
    steps: list[tuple[str, Case, bool]] = []
    for _ in range(TRIES):
        op = draw.choice(OPS)
        found = list(cases(op, 3))
        case = draw.choice(found) if found else None
        if case is None or next(iter(case.tensors), None) != 0:
            continue
        longer = Chain([*steps, (title(op), case, draw.random() < 0.5)])
        if goes_on(longer, case):
            steps = longer.steps
            if len(steps) == length:
                break
    return Chain(steps)


def goes_on(model: Chain, last: Case) -> bool:
    """Whether plain fp32 runs it, to a value in range and of a size to go on with."""
    seeded()
    try:
        value = model(*model.given())[-1]
        fits = value.layout is torch.strided and 0 < value.numel() <= LARGEST
        in_range = bool((value.abs() <= MODEST).all())
        graph = traced(model, model.given()) if fits and in_range else None
    except Exception:  # noqa: BLE001 - torch's refusals are of every kind
        return False
    # The database seeds each random op by itself; a graph draws from one state.
    return graph is not None and not oplaws.draws(graph)


def smooth(found: Rewritten) -> bool:
    """Whether no op reads what may have been rounded and picks or cuts by it."""
    rules = Rules.default(found.low)
    for node in found.before.graph.nodes:
        fact = found.facts.nodes.get(node.name)
        rule = rules.lookup(node.target)
        chooses = fact is not None and (fact.makes_others or not fact.makes_floats)
        if fact is not None and fact.operands and (chooses or (rule and rule.jumps)):
            return False
    return True


@pytest.mark.parametrize("seed", range(CHAINS))
def test_chain(seed: int, figures: Figures, torch_quiet: None) -> None:
    model = chain(seed)
    finish = lambda result: result  # noqa: E731
    free = oplaws.check_denied(model, model.given, finish)
    draw = random.Random(seed)
    allow = {op for op in oplaws.free_ops(free) if draw.random() < 0.5}
    for precision in oplaws.LOW:
        checked = oplaws.check(
            model,
            model.given,
            finish,
            precision,
            numbers=smooth,
            allow=sorted({"clone", *allow}),
        )
        figures.count("rewrites")
        figures.count(f"ran low in {precision}", bool(checked.ran_low))
        if checked.error is not None:
            figures.count("rewrites whose numbers were compared")
            figures.worst("error over bound", checked.error)
    figures.count("chains")
    figures.count("ops", len(model.steps))
