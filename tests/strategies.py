"""Hypothesis strategies: small placement problems, and small programs to rewrite.

A program is an `nn.Module` that interprets a list of steps, so that an example shrinks
to the few steps that matter and prints as itself.  Its steps come in two kinds.  The
*exact* ones keep every number a small whole number and every weight a signed
permutation, which bf16 and fp16 hold exactly: their results must be bit-equal to fp32,
so a stale cast or a lost write shows whatever the tolerance.  The others round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional

from autoamp.passes.decide.mincut import Group, Problem, Share

ROWS, WIDTH = 4, 8


# -- placement problems ----------------------------------------------------------------


@st.composite
def problems(draw: st.DrawFn, most: int = 9) -> Problem:
    """A placement problem of at most `most` variables; it may be contradictory."""
    names = [f"v{i}" for i in range(draw(st.integers(1, most)))]
    some = st.sampled_from(names)
    costs = st.integers(0, 9)
    cast = st.one_of(st.integers(0, 6), st.integers(0, 6), st.none())
    groups = []
    for i in range(draw(st.integers(0, 7))):
        readers = draw(st.lists(some, min_size=1, max_size=4, unique=True))
        down, up, made = draw(cast), draw(cast), None
        if down is not None and up is not None and draw(st.booleans()):
            made = draw(st.integers(max(0, up - down), up))
        key = (f"g{i}", 0, 0)
        group = Group(key, draw(some), tuple(readers), down, up, made=made)
        groups.append(group)
    shares = [
        Share(tuple(members), draw(costs), draw(costs))
        for members in draw(st.lists(st.sets(some, min_size=1), max_size=3))
    ]
    pairs = st.lists(st.tuples(some, some), max_size=2)
    few = st.lists(some, max_size=2, unique=True)
    return Problem(
        unary={name: (draw(costs), draw(costs)) for name in names},
        at_sink={name: f"{name} is high" for name in draw(few)},
        at_source={name: f"{name} is low" for name in draw(few)},
        groups=groups,
        ties=[(a, b, "tied") for a, b in draw(pairs)],
        follows=[(a, b, "follows") for a, b in draw(pairs)],
        shares=shares,
    )


# -- programs --------------------------------------------------------------------------

Step = tuple[str, int, int]
Op = Callable[["Program", Tensor, Tensor], Tensor]


def _write_left(a: Tensor, b: Tensor) -> Tensor:
    a[:, : WIDTH // 2] = b[:, WIDTH // 2 :]
    return a


def _write_chunk(a: Tensor, b: Tensor) -> Tensor:
    a[:, : WIDTH // 2].neg_()
    a.narrow(1, 4, 2).copy_(b.chunk(4, -1)[0])
    return a


def _write_row(a: Tensor, b: Tensor) -> Tensor:
    a[1].neg_()
    a.select(0, 2).copy_(b[0])
    return a


def _write_view(a: Tensor, b: Tensor) -> Tensor:
    a.view(-1)[3:7].zero_()
    return a.view(WIDTH, ROWS).view(ROWS, WIDTH)


def _read_write_read(m: Program, a: Tensor, b: Tensor) -> Tensor:
    before = m.fc(a)
    a.neg_()
    return (before + m.fc(a) + m.fc(b)).clamp(-16, 16)


def _count(m: Program, a: Tensor, b: Tensor) -> Tensor:
    m.last.copy_(a[0].detach())
    m.seen += 1
    return (a + m.last).clamp(-16, 16)


def _look_up(m: Program, a: Tensor, b: Tensor) -> Tensor:
    return m.table(a.argmax(-1) % ROWS) + b.clamp(-4, 4)


EXACT: dict[str, Op] = {
    "linear": lambda m, a, b: m.fc(a),
    "other": lambda m, a, b: m.other(a),
    "transposed": lambda m, a, b: a @ m.fc.weight.t(),
    "twice": lambda m, a, b: m.other(m.other(a)),
    "relu": lambda m, a, b: a.relu(),
    "neg": lambda m, a, b: -a,
    "abs": lambda m, a, b: a.abs(),
    "add": lambda m, a, b: (a + b).clamp(-16, 16),
    "sub": lambda m, a, b: (a - b).clamp(-16, 16),
    "residual": lambda m, a, b: (a + m.fc(b)).clamp(-16, 16),
    "where": lambda m, a, b: torch.where(a > b, a, b),
    "mask": lambda m, a, b: a.masked_fill(b < 0, 1.0),
    "swap": lambda m, a, b: torch.cat(a.chunk(2, -1)[::-1], -1),
    "view": lambda m, a, b: a.reshape(-1).view(ROWS, WIDTH),
    "flip": lambda m, a, b: a.flip(0),
    "columns": lambda m, a, b: a.t().contiguous().t(),
    "clone": lambda m, a, b: a.clone(),
    "detach": lambda m, a, b: a.detach() + b.clamp(-4, 4),
    "user_float": lambda m, a, b: a.float(),
    "user_low": lambda m, a, b: a.to(torch.bfloat16).float(),
    "user_double": lambda m, a, b: (a.double() + 1).float().clamp(-16, 16),
    "look_up": _look_up,
    "no_grad": lambda m, a, b: m.without_grad(a) + b.clamp(-4, 4),
    "relu_": lambda m, a, b: a.contiguous().relu_(),
    "add_": lambda m, a, b: a.contiguous().add_(b).clamp_(-16, 16),
    "mul_": lambda m, a, b: a.contiguous().mul_(-1.0),
    "write_left": lambda m, a, b: _write_left(a.contiguous(), b),
    "write_chunk": lambda m, a, b: _write_chunk(a.contiguous(), b),
    "write_row": lambda m, a, b: _write_row(a.contiguous(), b),
    "write_view": lambda m, a, b: _write_view(a.contiguous(), b),
    "read_write_read": lambda m, a, b: _read_write_read(m, a.contiguous(), b),
    "count": _count,
}

ROUNDING: dict[str, Op] = {
    "exp": lambda m, a, b: a.clamp(max=2.0).exp(),
    "log": lambda m, a, b: (a.abs() + 1).log() + b,
    "softmax": lambda m, a, b: a.softmax(-1),
    "tanh": lambda m, a, b: a.tanh(),
    "gelu": lambda m, a, b: functional.gelu(a),
    "norm": lambda m, a, b: m.norm(a),
    "mean": lambda m, a, b: a - b.mean(-1, keepdim=True),
    "square": lambda m, a, b: a.tanh().pow(2),
    "divide": lambda m, a, b: a / (1 + b.abs()),
    "cumsum": lambda m, a, b: a.tanh().cumsum(-1) * 0.1,
    "scores": lambda m, a, b: (a @ b.t()).softmax(-1) @ b,
    "attention": lambda m, a, b: functional.scaled_dot_product_attention(
        a[None], b[None], a[None]
    )[0].clone(),  # some writes to a view of a tensor without a gradient are refused
    "batch_norm": lambda m, a, b: m.batch_norm(a),
    "dropout": lambda m, a, b: functional.dropout(a, 0.5, m.training),
    "noise": lambda m, a, b: a + torch.rand_like(b),
    "halve_": lambda m, a, b: a.contiguous().mul_(0.3),
    "index_put": lambda m, a, b: a.contiguous().index_add_(
        0, torch.tensor([0, 0, 1]), b[:3].tanh()
    ),
}

ALL = {**EXACT, **ROUNDING}


class Program(nn.Module):
    """Interprets steps over a growing list of (ROWS, WIDTH) values.

    Step (op, i, j) appends `op(value i, value j)`, indices modulo the length so far.
    Values 0 and 1 are a copy of the first input and the second input.
    """

    def __init__(self, steps: list[Step], outputs: list[int], loss: str = "") -> None:
        super().__init__()
        self.steps, self.outputs, self.loss = steps, outputs, loss
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.table = nn.Embedding(ROWS, WIDTH)
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(WIDTH).flip(0))
            self.fc.weight[2].neg_()
            self.fc.bias.copy_(torch.arange(WIDTH) % 3 - 1)
            self.other.weight.copy_(torch.eye(WIDTH).roll(1, 0))
            self.other.weight[1].neg_()
            self.table.weight.copy_(torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 5)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        values = [x.clone(), y]  # autograd protects a leaf from writes, not its copy
        for op, i, j in self.steps:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(ALL[op](self, a, b))
        found = [values[i % len(values)] for i in self.outputs]
        if self.loss == "cross_entropy":
            found.append(functional.cross_entropy(values[-1], torch.arange(ROWS)))
        elif self.loss == "mse":
            found.append(functional.mse_loss(values[-1], y))
        return {"values": found, "count": self.seen + 1}

    def without_grad(self, a: Tensor) -> Tensor:
        with torch.no_grad():
            return self.fc(a)

    def extra_repr(self) -> str:
        return f"steps={self.steps}, outputs={self.outputs}, loss={self.loss!r}"


@st.composite
def programs(draw: st.DrawFn, exact: bool = False, most: int = 9) -> Program:
    """A program of at most `most` steps, of exact steps only if asked for."""
    ops = list(EXACT if exact else ALL)
    index = st.integers(0, most + 1)
    step = st.tuples(st.sampled_from(ops), index, index)
    steps = draw(st.lists(step, min_size=1, max_size=most))
    outputs = [*draw(st.lists(index, max_size=2)), len(steps) + 1]
    loss = "" if exact else draw(st.sampled_from(["", "cross_entropy", "mse"]))
    return Program(steps, outputs, loss)


LISTED = ("relu", "neg", "abs", "add", "clamp", "view", "clone", "copy_", "where")


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a rewrite: random lists over common ops, so that placements vary."""
    kinds = draw(
        st.dictionaries(
            st.sampled_from(LISTED),
            st.sampled_from(["allow", "deny", "infer", "clear"]),
            max_size=4,
        )
    )
    lists: dict[str, Any] = {}
    for op, kind in sorted(kinds.items()):
        lists.setdefault(kind, []).append(op)
    precision = draw(st.sampled_from(["bf16", "bf16", "fp16"]))
    return {"precision": precision, "do_no_harm": False, **lists}


# -- running them ----------------------------------------------------------------------


def inputs(seed: int = 0, grad: bool = True) -> tuple[Tensor, Tensor]:
    """Small whole numbers; the first requires grad, the second may be written to."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x, y = (
        torch.randint(-3, 4, (ROWS, WIDTH), generator=generator).float()
        for _ in range(2)
    )
    return x.requires_grad_(grad), y


def capture(model: nn.Module, arity: int = 2) -> fx.GraphModule:
    """A graph that calls `model`; the pass traces through it."""
    root = nn.Module()
    root.add_module("model", model)
    graph = fx.Graph()
    arguments = tuple(graph.placeholder(f"x{i}") for i in range(arity))
    graph.output(graph.call_module("model", arguments))
    return fx.GraphModule(root, graph)


@dataclass
class Outcome:
    """Everything that one call of a model did."""

    result: Any
    gradients: dict[str, Tensor] | None
    buffers: dict[str, Tensor]
    given: tuple[Tensor, ...]
    rng: Tensor


def run(
    call: Callable[..., Any], model: nn.Module, given: tuple[Tensor, ...]
) -> Outcome:
    """Calls forward and, where autograd allows it, backward, from one random state.

    Gradients are None where backward is refused (a value it needs was written to).
    """
    model.zero_grad()
    torch.manual_seed(3)
    result = call(*given)
    leaves = [
        t
        for t in torch.utils._pytree.tree_leaves(result)
        if isinstance(t, Tensor) and t.requires_grad
    ]
    gradients: dict[str, Tensor] | None = {}
    if leaves:
        try:
            sum(t.sum() * (i + 1) for i, t in enumerate(leaves)).backward()
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            gradients = None
    if gradients is not None:
        named = [
            *model.named_parameters(),
            *((f"in{i}", t) for i, t in enumerate(given)),
        ]
        gradients = {
            name: t.grad.clone()
            for name, t in named
            if t.is_leaf and t.grad is not None
        }
    return Outcome(
        result,
        gradients,
        {name: b.clone() for name, b in model.named_buffers()},
        given,
        torch.random.get_rng_state(),
    )


def twin(model: nn.Module) -> nn.Module:
    """A copy of `model` with weights and buffers of its own."""
    return copy.deepcopy(model)
