"""The laws of the pass on random programs.

Where everything is denied nothing changes; dtypes and structure outside are the model's
own; a second rewrite changes nothing; writes and aliases mean what they meant.
"""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

import pytest
import torch
from hypothesis import assume
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

import autoamp
from tests.quick import explored
from tests.small_models import deny_everything
from tests.strategies import (
    WIDTH,
    Outcome,
    Program,
    capture,
    choices,
    inputs,
    programs,
    run,
    twin,
)

pytestmark = pytest.mark.usefixtures("device")

EXAMPLES, DEEP = 15, 400


def programs_and_choices(most: int) -> tuple[Any, ...]:
    return programs(most=most), choices()


# -- comparing two runs ----------------------------------------------------------------


def same_bits(a: Any, b: Any) -> None:
    """Asserts that two nests of tensors are equal in structure, dtype and every bit."""
    left, left_spec = pytree.tree_flatten(a)
    right, right_spec = pytree.tree_flatten(b)
    assert left_spec == right_spec
    for x, y in zip(left, right, strict=True):
        if not isinstance(x, Tensor):
            assert x == y
            continue
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def same_outcome(ours: Outcome, expected: Outcome) -> None:
    """Asserts bit equality of everything the call of a model did."""
    same_bits(ours.result, expected.result)
    same_bits(ours.gradients, expected.gradients)
    same_bits(ours.buffers, expected.buffers)
    same_bits(ours.given, expected.given)
    assert torch.equal(ours.rng, expected.rng)


def both(program: nn.Module, **options: Any) -> tuple[Outcome, Outcome, fx.GraphModule]:
    """What the rewritten program does, and what the program does."""
    original, model = twin(program), twin(program)
    expected = run(original, original, inputs())
    gm = autoamp.rewrite(capture(model), inputs(1), **options)
    return run(gm, model, inputs()), expected, gm


def casts_of(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if "autoamp_cast" in n.meta]


# -- deny everything and nothing changes -----------------------------------------------


def denying(model: nn.Module, *given: Any) -> autoamp.Rules:
    """The rules of bf16 with every op denied, those in no list and `model` has too."""
    gm = autoamp.rewrite(capture(model, len(given)), given, precision="bf16")
    ops = [n.target for n in gm.graph.nodes if isinstance(n.target, OpOverload)]
    met = {op._schema.name for op in ops}
    return deny_everything([*autoamp.Rules.default("bf16").table, *met])


@explored(EXAMPLES, DEEP, lambda most: (programs(most=most),))
def test_denied_programs_are_bit_identical(program: Program) -> None:
    rules = denying(twin(program), *inputs())
    ours, expected, gm = both(program, precision="bf16", do_no_harm=False, rules=rules)
    assert casts_of(gm) == []
    same_outcome(ours, expected)


def test_denying_everything_can_fail() -> None:
    ours, expected, _ = both(
        Program([("linear", 0, 0), ("exp", 2, 2)], [3]),
        precision="bf16",
        do_no_harm=False,
    )
    with pytest.raises(AssertionError):
        same_outcome(ours, expected)


# -- dtypes and structure outside ------------------------------------------------------


@explored(EXAMPLES, DEEP, programs_and_choices)
def test_outputs_and_gradients_keep_dtype_and_structure(
    program: Program, options: dict[str, Any]
) -> None:
    ours, expected, _ = both(program, **options)
    left, left_spec = pytree.tree_flatten(ours.result)
    right, right_spec = pytree.tree_flatten(expected.result)
    assert left_spec == right_spec
    for a, b in zip(left, right, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.requires_grad == b.requires_grad
    assert ours.buffers.keys() == expected.buffers.keys()
    for name, buffer in ours.buffers.items():
        assert buffer.dtype == expected.buffers[name].dtype
    if expected.gradients is not None:
        assert ours.gradients is not None, "backward is refused, in fp32 it was not"
        assert ours.gradients.keys() == expected.gradients.keys()
        assert {g.dtype for g in ours.gradients.values()} <= {torch.float32}


# -- rewriting twice (determinism is in test_same_bytes.py) ---------------------------


@explored(EXAMPLES, DEEP, programs_and_choices)
def test_rewriting_twice_changes_nothing(
    program: Program, options: dict[str, Any]
) -> None:
    # The pass writes a clone before an op that copies by layout. A user's rule about
    # clones speaks of that clone too when the graph is given again.
    assume("clone" not in options.get("allow", ()))
    once = autoamp.rewrite(capture(twin(program)), inputs(), **options)
    twice = autoamp.rewrite(once, inputs(), **options)
    assert text_of(twice) == text_of(once)
    stripped = copy.deepcopy(once)
    for node in stripped.graph.nodes:
        node.meta.clear()
    again = autoamp.rewrite(stripped, inputs(), **options)
    assert text_of(again) == text_of(once)
    rebuilt = from_printed_code(once)
    again = autoamp.rewrite(rebuilt, inputs(), **options)
    assert text_of(again) == text_of(rebuilt)


def from_printed_code(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph made by running the printed code of `gm`, with nothing else kept."""
    names = dict(gm.graph.python_code("self").globals)
    exec(gm.code, names)

    class Printed(nn.Module):
        forward = names["forward"]

    class Tracer(fx.Tracer):
        proxy_buffer_attributes = True

    root = Printed()
    for name, child in gm.named_children():
        root.add_module(name, child)
    for name, buffer in gm.named_buffers(recurse=False):
        root.register_buffer(name, buffer)
    called = {n.target for n in gm.graph.nodes if n.op == "call_function"}
    ours = tuple(f for f in called if isinstance(f, FunctionType))
    return fx.GraphModule(root, Tracer(autowrap_functions=ours).trace(root))


def text_of(gm: fx.GraphModule) -> list[str]:
    """The program of a graph with its local names numbered in order."""
    names: dict[fx.Node, str] = {}
    lines = []
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            names[node] = str(node.target)
            continue
        names[node] = f"%{len(lines)}"
        args = fx.map_arg((node.args, node.kwargs), names.__getitem__)
        lines.append(f"{names[node]} = {node.target} {args}")
    return lines


def test_a_residual_stream_is_known_the_second_time() -> None:
    """At sizes where lowering the sums would pay, were they not told for a stream."""

    class Stream(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(512, 512)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = x + self.fc(x.relu())
            return x * 2

    x = torch.randn(2048, 512, requires_grad=True)
    for lists in ({}, {"allow": "add"}):
        options = {"precision": "bf16", "do_no_harm": False, **lists}
        once = autoamp.rewrite(capture(Stream(), 1), (x,), **options)
        assert casts_of(once)
        twice = autoamp.rewrite(once, (x,), **options)
        assert text_of(twice) == text_of(once)


def test_a_dtype_given_to_noise_stands_where_a_tracer_writes_it() -> None:
    program = Program([("noise", 0, 0)], [2], "")
    once = autoamp.rewrite(capture(program), inputs(), precision="bf16")
    assert text_of(autoamp.rewrite(once, inputs(), precision="bf16")) == text_of(once)


# -- writes and aliases mean what they meant -------------------------------------------


def alias_relations(values: Any, given: tuple[Tensor, ...]) -> list[tuple[bool, ...]]:
    """Which outputs share storage with which inputs and other outputs."""
    tensors = [t for t in pytree.tree_leaves(values) if isinstance(t, Tensor)]
    tensors += list(given)
    # Not by addresses: all storages without bytes have the address 0.
    storages = [t.untyped_storage()._cdata for t in tensors]
    return [tuple(a == b for b in storages) for a in storages]


def check_meaning(program: nn.Module, options: dict[str, Any]) -> None:
    ours, expected, _ = both(program, **options)
    same_bits(ours.result, expected.result)
    same_bits(ours.buffers, expected.buffers)
    same_bits(ours.given, expected.given)
    assert alias_relations(ours.result, ours.given) == alias_relations(
        expected.result, expected.given
    )
    if expected.gradients is None:
        return
    assert ours.gradients is not None, "backward is refused, in fp32 it was not"
    assert ours.gradients.keys() == expected.gradients.keys()
    for name, gradient in ours.gradients.items():
        # Each of at most 3 uses a step is rounded to bf16 once per step on the way.
        scale = expected.gradients[name].abs().max().clamp(min=1)
        error = (gradient - expected.gradients[name]).abs().max()
        assert error <= 3 * len(program.steps) * 2**-8 * scale, name


test_writes_and_aliases_mean_what_they_meant = explored(
    2 * EXAMPLES, DEEP, lambda most: (programs(exact=True, most=most), choices())
)(check_meaning)


def test_a_write_to_a_copy_reaches_no_product() -> None:
    """In bf16 the product is low already, and `to` would be no copy of it."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
            h = self.fc(x)
            early = self.last(h)
            copy = h.to(torch.bfloat16)
            copy.neg_()
            return early, self.last(h), copy

    original = Copies()
    expected = run(original, original, inputs())
    model = twin(original)
    gm = autoamp.rewrite(capture(model), inputs(), precision="bf16", do_no_harm=False)
    ours = run(gm, model, inputs())
    assert torch.equal(ours.result[0], ours.result[1])
    for a, b in zip(ours.result, expected.result, strict=True):
        assert (a - b).abs().max() <= 8 * 2**-8 * b.abs().max().clamp(min=1)


def test_writes_and_aliases_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph whose write comes to nothing would be seen."""
    steps = [("linear", 1, 1), ("write_view", 1, 1), ("linear", 1, 1)]
    program = Program(steps, [2, 3, 4])
    options = {"precision": "bf16", "do_no_harm": False, "strict": True}
    check_meaning(program, options)
    rewrite = autoamp.rewrite

    def without_writes(*args: Any, **kwargs: Any) -> fx.GraphModule:
        gm = rewrite(*args, **kwargs)
        for node in reversed(gm.graph.nodes):
            if "_(" in f"{node.target}(" or "_." in str(node.target):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        gm.recompile()
        return gm

    monkeypatch.setattr(autoamp, "rewrite", without_writes)
    with pytest.raises(AssertionError):
        check_meaning(program, options)
