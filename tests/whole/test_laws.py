"""The laws of the pass on random programs.

Where everything is denied nothing changes; dtypes and structure outside are the model's
own; a second rewrite changes nothing; writes and aliases mean what they meant.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import autoamp
from autoamp.check.verify import Verifier
from autoamp.compat import OpOverload
from autoamp.errors import VerificationError
from autoamp.graph_functions import LEAF_FUNCTIONS
from autoamp.op_names import base_name
from autoamp.rewrite import casts
from autoamp.rules import Rules
from autoamp.trace.normalise import normalise
from tests.quick import explored
from tests.small_models import Of, deny_everything
from tests.strategies import (
    ROWS,
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


def denying(model: nn.Module, *given: Any) -> Rules:
    """The rules of bf16 with every op denied, those in no list and `model` has too."""
    rules = Rules.default("bf16")
    nodes = normalise(capture(model, len(given)), given).gm.graph.nodes
    met = {base_name(n.target) for n in nodes if isinstance(n.target, OpOverload)}
    return deny_everything([*rules.table, *met])


@pytest.mark.thorough
@explored(EXAMPLES, DEEP, lambda most: (programs(most=most),))
def test_denied_programs_are_bit_identical(program: Program) -> None:
    rules = denying(twin(program), *inputs())
    ours, expected, gm = both(program, precision="bf16", do_no_harm=False, rules=rules)
    assert casts_of(gm) == []
    same_outcome(ours, expected)


def Noisy() -> Of:
    """Dropout, batch norm, noise, a residual, and a loss."""

    def forward(m, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.norm(m.conv(x)).relu_()
        h = m.drop2d(h) + m.drop(h)
        h = m.fc(h.mean((2, 3)) + 0.1 * torch.randn(x.shape[0], 4))
        return h, functional.cross_entropy(h, torch.arange(x.shape[0]) % 5)

    return Of(
        forward,
        conv=nn.Conv2d(3, 4, 3, padding=1),
        norm=nn.BatchNorm2d(4),
        drop=nn.Dropout(0.4),
        drop2d=nn.Dropout2d(0.4),
        fc=nn.Linear(4, 5),
    )


@pytest.mark.thorough(but=["cpu-False"])
@pytest.mark.parametrize("training", [True, False])
def test_denied_model_is_bit_identical_through_convert(training: bool) -> None:
    expected_model = Noisy().train(training)
    model = copy.deepcopy(expected_model)
    x = torch.randn(6, 3, 8, 8)
    rules = denying(twin(model), x)
    autoamp.convert(model, precision="bf16", rules=rules, do_no_harm=False, strict=True)
    for _ in range(2):
        expected = run(expected_model, expected_model, (x,))
        ours = run(model, model, (x,))
        same_outcome(ours, expected)
    # The second call is left to the model's own code: nothing ran low in the first.
    assert autoamp.report(model).runs == 1


def test_denying_everything_can_fail() -> None:
    ours, expected, _ = both(
        Program([("linear", 0, 0), ("exp", 2, 2)], [3]),
        precision="bf16",
        do_no_harm=False,
    )
    with pytest.raises(AssertionError):
        same_outcome(ours, expected)


# -- dtypes and structure outside ------------------------------------------------------


@pytest.mark.thorough
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


class Block(nn.Module):
    """A model with a buffer, a dropout and sub-modules, to be converted."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Any]:
        y = self.norm(x + self.drop(self.body(x)) * scale)
        return {"y": y, "parts": [y.argmax(-1), (y.sum(), None)], "scale": scale}


@pytest.mark.thorough
def test_convert_changes_nothing_but_the_call_path() -> None:
    torch.manual_seed(0)
    model = Block()
    calls: list[str] = []
    model.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.register_forward_hook(lambda *_: calls.append("after"))
    model.body[0].register_forward_hook(lambda *_: calls.append("inner"))
    original = copy.deepcopy(model)
    x = torch.randn(6, 8)
    keys, identities = list(model.state_dict()), [id(p) for p in model.parameters()]

    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    calls.clear()
    found = model(x, scale=2.0)
    seen = calls.copy()
    calls.clear()
    expected = original(x, scale=2.0)
    assert seen == calls == ["before", "inner", "after"]
    assert isinstance(model, Block)
    assert type(model) is Block
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == identities
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for a, b in zip(
        pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True
    ):
        assert getattr(a, "dtype", a) == getattr(b, "dtype", b)

    model.eval()
    first, second = model(x)["y"], model(x)["y"]
    assert torch.equal(first, second), "dropout still draws in eval"
    model.train()
    assert not torch.equal(model(x)["y"], model(x)["y"]), "dropout draws no more"

    found["y"].sum().backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_revert_restores_bit_for_bit() -> None:
    model = Block()
    original = copy.deepcopy(model)
    before = set(model.__dict__)
    autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    model.eval()(torch.randn(6, 8))
    model.train()
    autoamp.revert(model)
    assert set(model.__dict__) == before
    x = torch.randn(6, 8)
    same_outcome(run(model, model, (x,)), run(original, original, (x,)))


# -- rewriting twice (determinism is in test_same_bytes.py) ---------------------------


@pytest.mark.thorough
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
    return fx.GraphModule(
        root, Tracer(autowrap_functions=tuple(LEAF_FUNCTIONS)).trace(root)
    )


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


test_writes_and_aliases_mean_what_they_meant = pytest.mark.thorough(
    explored(
        2 * EXAMPLES, DEEP, lambda most: (programs(exact=True, most=most), choices())
    )(check_meaning)
)


class Writes(nn.Module):
    """The ways a real model writes: each line is a write through something else."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(2, ROWS, WIDTH))
        with torch.no_grad():
            self.fc.weight.copy_(torch.eye(WIDTH).flip(0))
            self.fc.bias.fill_(1.0)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        before = self.fc(x)  # a cast of x, read before the write ...
        x.mul_(2)
        after = self.fc(x)  # ... and after it
        left, right = before.split(WIDTH // 2, -1)
        total = left + right
        rows = after.unbind(0)
        y[1:3] = rows[0]
        y[:, 0] += 1
        self.cache[0] = after
        self.cache.view(-1)[:WIDTH].copy_(rows[1])
        kept = self.cache.sum(0)
        return total, after, after[1:], y, y.t(), x, self.cache, kept


def test_a_model_full_of_writes() -> None:
    original, model = Writes(), Writes()
    given = [inputs(grad=False), inputs(grad=False)]
    expected = run(original, original, given[0])
    gm = autoamp.rewrite(
        capture(model), inputs(1, grad=False), precision="bf16", do_no_harm=False
    )
    ours = run(gm, model, given[1])
    assert casts_of(gm)
    same_bits(ours.result, expected.result)
    same_bits(ours.buffers, expected.buffers)
    same_bits(ours.given, expected.given)
    total, after, tail, y, y_t, x, cache, _ = ours.result
    assert y is given[1][1]
    assert x is given[1][0]
    assert cache is model.cache
    assert tail.data_ptr() == after.data_ptr() + 4 * WIDTH
    assert y_t.data_ptr() == y.data_ptr()
    assert total.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()


@pytest.mark.thorough(but=["cpu-True-reshape", "cpu-True-to", "cpu-False-to"])
@pytest.mark.parametrize(
    "copied",
    [
        lambda h: h[:, :4].reshape(-1),
        lambda h: h[:, :4].contiguous(),
        lambda h: h[:, :4].float().flatten(),
        lambda h: h[:1].expand(4, WIDTH).contiguous()[:, :4],
        lambda h: h[:, :4].to(torch.bfloat16),
    ],
    ids=["reshape", "contiguous", "flatten", "expand", "to"],
)
@pytest.mark.parametrize("low", [True, False])
def test_a_write_to_a_copy_reaches_nothing_else(
    copied: Callable[[Tensor], Tensor], low: bool
) -> None:
    """These ops copy by the layout of what they read, and a cast lays it out anew."""

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)
            self.narrow = nn.Linear(WIDTH // 2, WIDTH)

        def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
            h = self.fc(x) if low else x.clone()
            early = self.narrow(h[:, :4])
            copy = copied(h)
            copy.neg_()
            late = self.narrow(h[:, :4]) + h[:, :4].sum()
            return early, self.narrow(copy.float().view(4, 4)), late, copy

    original = Copies()
    expected = run(original, original, inputs())
    model = twin(original)
    gm = autoamp.rewrite(capture(model), inputs(), precision="bf16", do_no_harm=False)
    ours = run(gm, model, inputs())
    for a, b in zip(ours.result, expected.result, strict=True):
        assert (a - b).abs().max() <= 8 * 2**-8 * b.abs().max().clamp(min=1)
    assert alias_relations(ours.result, ()) == alias_relations(expected.result, ())


class ReturnsViews(nn.Module):
    """Returns views of an input and of one activation, which it reads low as well."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> tuple[Tensor, ...]:
        rows = x.view(2, 2, WIDTH).unbind(0)
        h = self.fc(rows[0])
        turned = h.t()
        product = self.fc(rows[1]) @ turned
        with torch.no_grad():
            first = h[0]
        return rows[1][0], product, turned[:4], first


def test_returned_views_share_memory_as_they_did() -> None:
    """Of a view that is low they would be views of a cast, and rounded."""
    model, given = ReturnsViews(), inputs(grad=False)
    gm = autoamp.rewrite(capture(model), given, precision="bf16", do_no_harm=False)
    assert casts_of(gm)
    expected = alias_relations(model(*given), given)
    assert alias_relations(gm(*given), given) == expected
    assert expected[0] == (True, False, False, False, True, False)
    assert expected[2] == (False, False, True, True, False, False)


def test_writes_and_aliases_can_fail(monkeypatch) -> None:
    """A pass that took a write for no event would read the stale cast."""
    steps = [("linear", 1, 1), ("write_view", 1, 1), ("linear", 1, 1)]
    program = Program(steps, [2, 3, 4])
    options = {"precision": "bf16", "do_no_harm": False, "strict": True}
    check_meaning(program, options)
    real = casts._Emitter._in_dtype

    def timeless(
        self: Any, value: str, dtype: torch.dtype, reader: Any, epoch: int
    ) -> fx.Node:
        return real(self, value, dtype, reader, 0)

    monkeypatch.setattr(casts._Emitter, "_in_dtype", timeless)
    with pytest.raises(VerificationError):
        check_meaning(program, options)
    # With the verifier blinded as well, the numbers themselves tell.
    monkeypatch.setattr(Verifier, "verify", lambda *_: None)
    monkeypatch.setattr(Verifier, "recount", lambda *_: _Anything())
    with pytest.raises(AssertionError):
        check_meaning(program, options)


class _Anything(int):
    """A recount that agrees with every promise."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__
