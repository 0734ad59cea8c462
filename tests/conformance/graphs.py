"""Random ATen graphs of tens to hundreds of nodes, as `normalise` would give them.

A recipe is a list of steps; a step names a move of `moves.py` and numbers that choose
its operands among the values so far and a variant of it.  Every recipe builds, so
hypothesis can drop and simplify steps at will, and an example that fails shrinks to the
few steps that matter.  Graphs are built node by node, without the tracing that would
take most of the time, and on each node is a small real tensor, for its size and dtype:
so what a graph gives in fp32 is known as soon as it is built.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from autoamp import compat
from autoamp.passes.ops import drop_dead
from autoamp.passes.see.normalise import Normalised

ATEN = torch.ops.aten
BATCH, LENGTH, WIDTH, HEADS, CHANNELS, SIDE, WORDS = 2, 5, 8, 2, 4, 6, 7

MOST = 16
"""The largest whole number that exact moves leave; a product of two stays exact in
bf16, which holds whole numbers to 256."""

KINDS: dict[tuple[tuple[int, ...], torch.dtype], str] = {
    ((BATCH, LENGTH, WIDTH), torch.float32): "t",  # tokens
    ((BATCH, HEADS, LENGTH, WIDTH // HEADS), torch.float32): "h",  # heads
    ((BATCH, HEADS, LENGTH, LENGTH), torch.float32): "s",  # scores
    ((BATCH, CHANNELS, SIDE, SIDE), torch.float32): "m",  # images
    ((BATCH, WIDTH), torch.float32): "p",  # pooled
    ((WIDTH,), torch.float32): "v",  # a vector
    ((), torch.float32): "0",  # a scalar
    ((BATCH, LENGTH), torch.int64): "i",  # indices
    ((BATCH, LENGTH, WIDTH), torch.bool): "q",  # a mask
}
FLOATS = "thsmpv0"

TRAINED = frozenset({"w0", "w1", "w2", "bias", "gain", "kernel", "taps", "table"})
"""The attributes that are parameters; the others are buffers."""


def attributes() -> dict[str, Tensor]:
    """Weights that keep whole numbers small (signed permutations), and buffers."""
    identity = torch.eye(WIDTH)
    sign = torch.ones(WIDTH, 1)
    sign[2] = -1
    center = torch.zeros(CHANNELS, CHANNELS, 3, 3)
    center[:, :, 1, 1] = torch.eye(CHANNELS).flip(0)
    return {
        "w0": identity.flip(0) * sign,
        "w1": identity.roll(1, 0),
        "w2": identity.roll(3, 1) * sign,
        "bias": torch.arange(WIDTH).float() % 3 - 1,
        "gain": torch.ones(WIDTH),
        "kernel": center,
        "taps": identity.roll(2, 0).unsqueeze(-1),
        "shift": torch.arange(CHANNELS).float() % 2,
        "table": torch.arange(WORDS * WIDTH).view(WORDS, WIDTH).float() % 5 - 2,
        "mean": torch.zeros(CHANNELS),
        "variance": torch.ones(CHANNELS),
        "last": torch.zeros(BATCH, WIDTH),
        "seen": torch.zeros((), dtype=torch.long),
    }


def inputs(seed: int = 0) -> list[Tensor]:
    """Small whole numbers, one input of each kind."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for shape, dtype in KINDS:
        value = torch.randint(-3, 4, shape, generator=generator)
        found.append(value % WORDS if dtype == torch.int64 else value.to(dtype))
    return found


class Builder:
    """Grows an ATen graph; each call runs an op and adds a node for it."""

    def __init__(self, bounded: bool) -> None:
        self.bounded = bounded
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.pools: dict[str, list[fx.Node]] = defaultdict(list)
        self.made: list[fx.Node] = []
        self.grad_on = True
        self.autocast: fx.Node | None = None
        self.weights: dict[str, fx.Node] = {}
        for name, value in attributes().items():
            self.root.register_buffer(name, value.clone())
            trained = name in TRAINED
            self.weights[name] = self._constant("get_attr", name, value, trained)
        for i, value in enumerate(inputs()):
            self._keep(self._constant("placeholder", f"x{i}", value, i == 0))

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One call of ATen op `op` on nodes and literals."""
        with torch.no_grad():
            values, options = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            value = op(*values, **options)
        return self._node(op, args, kwargs, value)

    def items(self, node: fx.Node) -> list[fx.Node]:
        """The elements of a node that gives several tensors."""
        return [
            self._node(operator.getitem, (node, i), {}, value)
            for i, value in enumerate(node.meta["val"])
        ]

    def pick(self, kind: str, index: int) -> fx.Node:
        """The value of a kind that `index` stands for; 0 is the latest."""
        pool = self.pools[kind]
        return pool[-1 - index % len(pool)]

    def bound(self, node: fx.Node) -> fx.Node:
        """`node` cut off, so that whole numbers stay exact in any dtype.

        No other step reads `node` itself, and no graph returns it.  A graph that need
        not be exact has it as it is.
        """
        if not self.bounded:
            return node
        self.made.remove(node)
        for pool in self.pools.values():
            if node in pool:
                pool.remove(node)
        return self(ATEN.clamp.default, node, -MOST, MOST)

    def writable(self, node: fx.Node) -> fx.Node:
        """`node`, or a copy of it where one element stands for several."""
        value = node.meta["val"]
        spread = [
            s == 0 and n > 1 for s, n in zip(value.stride(), value.shape, strict=True)
        ]
        return self(ATEN.clone.default, node) if any(spread) else node

    def apart(self, node: fx.Node, written: fx.Node) -> fx.Node:
        """`node`, or a copy of it where it shares memory with what is to be written."""
        storages = [n.meta["val"].untyped_storage()._cdata for n in (node, written)]
        same = storages[0] == storages[1] and node is not written
        return self(ATEN.clone.default, node) if same else node

    def switch_grad(self) -> None:
        """Turns gradients off, or on again."""
        self.grad_on = not self.grad_on
        self._node(compat.SET_GRAD, (self.grad_on,), {}, None)

    def switch_autocast(self) -> None:
        """Enters a region of disabled autocast, or leaves the one that is open."""
        if self.autocast is None:
            region = ("cpu", torch.bfloat16, False, False)
            self.autocast = self._node(compat.ENTER_AUTOCAST, region, {}, None)
        else:
            self._node(compat.EXIT_AUTOCAST, (self.autocast,), {}, None)
            self.autocast = None

    def finish(self, outputs: tuple[int, ...], everything: bool) -> Built:
        """The graph, which returns the values that `outputs` stand for.

        Without what leads to none of them, as `normalise` leaves it; or, asked for
        `everything`, with all that nobody reads returned as well.
        """
        if self.autocast is not None:
            self.switch_autocast()
        if not self.grad_on:
            self.switch_grad()
        found = [self.made[-1 - i % len(self.made)] for i in outputs]
        if everything:
            found += [n for n in self.made if n.op == "call_function" and not n.users]
        self.graph.output(tuple(found))
        drop_dead(self.graph)
        given = [n.meta["val"] for n in self.graph.nodes if n.op == "placeholder"]
        return Built(
            fx.GraphModule(self.root, self.graph),
            tuple(n.meta["val"] for n in found),
            tuple(given),
            {name: node.meta["val"] for name, node in self.weights.items()},
        )

    def _node(self, target: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        packet = getattr(target, "overloadpacket", target)
        name = packet.__name__  # as the tracer names them
        node = self.graph.create_node("call_function", target, args, kwargs, name)
        node.meta["val"] = value
        self._keep(node)
        return node

    def _constant(self, op: str, name: str, value: Tensor, trained: bool) -> fx.Node:
        node = self.graph.create_node(op, name, name=name)
        node.meta["val"] = value
        node.meta["autoamp_requires_grad"] = trained
        return node

    def _keep(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if not isinstance(value, Tensor):
            return
        self.made.append(node)
        kind = KINDS.get((tuple(value.shape), value.dtype))
        if kind is not None:
            self.pools[kind].append(node)


@dataclass(frozen=True)
class Built:
    """A graph, and what was there after it had run in fp32.

    Attributes:
        gm: the graph; its attributes are as they were before it ran.
        results, given, attributes: outputs, inputs and attributes afterwards.
    """

    gm: fx.GraphModule
    results: tuple[Tensor, ...]
    given: tuple[Tensor, ...]
    attributes: dict[str, Tensor]

    def normalised(self) -> Normalised:
        """The same as `normalise` would give it."""
        return Normalised(self.gm, self.given, compat.new_fake_mode())


@dataclass(frozen=True)
class Move:
    """What a step may do.

    Attributes:
        kinds: a letter of `KINDS` for each operand; "*" for any float, "=" for the
            kind of the operand before.
        make: adds nodes to the builder, given a variant and the operands.
        exact: whether it keeps whole numbers whole and at most `MOST`.
    """

    kinds: str
    make: Callable[..., Any]
    exact: bool


Step = tuple[str, int, tuple[int, ...]]
"""A move, its variant, and its operands."""


@dataclass(frozen=True)
class Recipe:
    """A graph as a person can read it; `note` its code beside it."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    everything: bool

    def build(self, moves: dict[str, Move], bounded: bool = True) -> Built:
        builder = Builder(bounded)
        for name, variant, choices in self.steps:
            move = moves[name]
            operands: list[fx.Node] = []
            kind = FLOATS[variant % len(FLOATS)]
            for letter, choice in zip(move.kinds, choices, strict=True):
                kind = {"*": kind, "=": kind}.get(letter, letter)
                operands.append(builder.pick(kind, choice))
            move.make(builder, variant, *operands)
        return builder.finish(self.outputs, self.everything)


NOTHING = "nothing"

CHOICE = st.one_of(st.integers(0, 3), st.integers(0, 400))
"""Which value: one of the latest, so that chains are deep, or any."""


@st.composite
def recipes(draw: st.DrawFn, moves: dict[str, Move], most: int) -> Recipe:
    """A recipe of at most `most` steps, long ones as likely as short ones."""

    def step(name: str) -> st.SearchStrategy[Step]:
        if name == NOTHING:
            return st.just((NOTHING, 0, ()))
        choices = st.tuples(*(CHOICE for _ in moves[name].kinds))
        return st.tuples(st.just(name), st.integers(0, 41), choices)

    # Not a list of any length, which would be short; a step shrinks to "nothing".
    some = st.sampled_from([NOTHING, *moves]).flatmap(step)
    steps = draw(st.tuples(*(some for _ in range(draw(st.integers(1, most))))))
    outputs = draw(st.lists(CHOICE, min_size=1, max_size=4))
    everything = draw(st.sampled_from([True, True, True, False]))
    steps = tuple(s for s in steps if s[0] != NOTHING)
    return Recipe(steps, tuple(outputs), everything)
