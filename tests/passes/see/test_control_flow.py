"""Branches and loops of torch: their bodies are rewritten, with fp32 edges."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import autoamp
from autoamp.errors import AutoampError
from autoamp.passes import list as passes
from tests.metrics import relative_error
from tests.says import says
from tests.small_models import BF16, converted

WIDTH, BATCH, STEPS = 16, 4, 5
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Layers(nn.Module):
    """Two layers, and whether what is built of them is torch's op or plain Python."""

    turn: Tensor
    seen: Tensor

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("turn", torch.ones((), dtype=torch.bool))
        self.register_buffer("seen", torch.zeros(()))
        self.plain = plain

    def choose(self, yes: Any, no: Any, h: Tensor) -> Tensor:
        if self.plain:
            return yes(h) if bool(self.turn) else no(h)
        return torch.cond(self.turn, yes, no, (h,))

    def repeat(self, body: Callable[[Tensor, Tensor], Tensor], h: Tensor) -> Tensor:
        """`body(t, h)` for t = 0, 1, ..."""
        if self.plain:
            for t in range(STEPS):
                h = body(torch.tensor(t), h).float()
            return h
        start = torch.zeros((), dtype=torch.long)
        return while_loop(
            lambda t, h: t < STEPS, lambda t, h: (t + 1, body(t, h)), (start, h)
        )[1]


class Recurrent(Layers):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        def step(t: Tensor, h: Tensor) -> Tensor:
            now = x.index_select(0, t.reshape(1)).squeeze(0)
            return torch.tanh(self.first(h) + self.second(now))

        return self.repeat(step, h)


class Branches(Layers):
    def forward(self, _: Tensor, h: Tensor) -> Tensor:
        yes, no = self.first, self.second
        return self.choose(lambda h: yes(h).relu_(), lambda h: no(h).tanh(), no(h))


class Nested(Layers):
    """A branch in a loop in a branch."""

    def forward(self, _: Tensor, h: Tensor) -> Tensor:
        def inner(_: Tensor, h: Tensor) -> Tensor:
            # Not tanh in both: the branches are to differ.
            return self.choose(
                lambda h: self.first(h).tanh(), lambda h: self.second(h).sigmoid(), h
            )

        return self.choose(
            lambda h: self.repeat(inner, h), lambda h: self.second(h).cos(), h
        )


class Scanned(Layers):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        def step(h: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(self.first(h) + self.second(now)).float()
            return h, h.clone()

        if self.plain:
            for now in x:
                h, _ = step(h, now)
            return h
        return scan(step, h, x)[0]


class Mapped(Layers):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        def each(now: Tensor, h: Tensor) -> Tensor:
            return self.first(now + h).tanh()

        if self.plain:
            return torch.stack([each(now, h) for now in x])
        return map_over(each, x, h)


class Twice(Layers):
    """What goes round is read by two products."""

    def forward(self, _: Tensor, h: Tensor) -> Tensor:
        return self.repeat(lambda _, h: self.first(h) * self.second(h), h)


class Writes(Layers):
    """One branch writes to a buffer, by itself or as a batch norm that trains."""

    by_norm = True

    def forward(self, _: Tensor, h: Tensor) -> Tensor:
        def writes(h: Tensor) -> Tensor:
            if self.by_norm:
                return self.norm(self.first(h))
            self.seen.add_(1)
            return self.first(h) + self.seen

        return self.choose(writes, lambda h: self.second(h).tanh(), h)


def given(batch: int = BATCH) -> tuple[Tensor, Tensor]:
    h = torch.randn(batch, WIDTH, requires_grad=True)
    return torch.randn(STEPS, batch, WIDTH), h


def results(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """What it gives, and every gradient: zeros where a branch was not taken."""
    model.zero_grad()
    inputs[1].grad = None
    y = model(*inputs)
    (y.float().square().sum() * 1e-3).backward()
    held = [inputs[1], *model.parameters()]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in held]
    return [y.detach().float(), *grads]


def twins(kind: type[Layers], turn: bool = True) -> tuple[Layers, Layers]:
    """A model that uses torch's ops, and the same in plain Python."""
    torch.manual_seed(0)
    model, plain = kind(), kind(plain=True)
    model.turn.fill_(turn)
    plain.load_state_dict(model.state_dict())
    return model, plain


def low_ops(model: nn.Module) -> list[str]:
    """Where each low op stands, and its name."""
    rows = autoamp.report(model).ops
    return [f"{r.body} {r.op.split('::')[-1]}" for r in rows if r.is_low]


def reason(model: nn.Module, op: str) -> str:
    (why,) = {r.reason for r in autoamp.report(model).ops if r.op == op}
    return why


# What feeds the branches is low too: `relu_` writes to nothing it was handed.
OF_BRANCHES = [
    *(" linear.default", "body_0 linear.default", "body_0 relu_.default"),
    *("body_1 linear.default", "body_1 tanh.default"),
]
INSIDE = ("body_0/body_1/body_0", "body_0/body_1/body_1", "body_1")
CASES: dict[str, tuple[type[Layers], dict[str, Any], list[str]]] = {
    "a loop": (Recurrent, {}, ["body_1 linear.default"] * 2 + ["body_1 tanh.default"]),
    "a loop in fp16": (Recurrent, {"precision": "fp16"}, ["body_1 linear.default"]),
    "the first branch": (Branches, {}, OF_BRANCHES),
    "the second branch": (Branches, {"turn": False}, OF_BRANCHES),
    "branches in fp16": (Branches, {"precision": "fp16"}, OF_BRANCHES),
    "compiled branches": (Branches, {"backend": aot_eager}, OF_BRANCHES),
    "nested": (Nested, {}, [f"{body} linear.default" for body in INSIDE]),
    "scanned": (Scanned, {}, ["body_0 linear.default"]),
    "mapped": (Mapped, {}, ["body_0 linear.default"]),
}
"""A model, options, and ops that are low in its bodies."""


@pytest.mark.parametrize("name", CASES)
def test_no_worse_than_autocast(name: str) -> None:
    kind, options, low = CASES[name]
    options = {"precision": "bf16", **options}
    model, plain = twins(kind, options.pop("turn", True))
    inputs = given()
    expected = results(plain, inputs)
    with torch.autocast("cpu", LOW[options["precision"]]):
        allowed = 1.5 * relative_error(results(plain, inputs), expected)
    converted(model, **options)
    found = results(model, inputs)
    assert found[0].dtype == torch.float32
    assert 0 < relative_error(found, expected) < allowed
    ran = low_ops(model)
    assert set(low) <= set(ran)
    assert autoamp.report(model).skipped == []
    with torch.no_grad():
        inferred = [model(*inputs)]
    assert 0 < relative_error(inferred, expected[:1]) < allowed
    if kind is Recurrent:
        says(autoamp.report(model).full(), "body_1 (while_loop)")


def test_gradients_of_a_weight_are_summed_in_fp32_round_a_loop() -> None:
    """600 iterations that add 1 each: a sum in bf16 ends at 256."""
    times = 600

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(1, 1, bias=False)

        def forward(self, h: Tensor) -> Tensor:
            start = torch.zeros((), dtype=torch.long)
            return while_loop(
                lambda t, h: t < times,
                lambda t, h: (t + 1, h + self.fc(torch.ones(1, 1))),
                (start, h),
            )[1]

    model = converted(Sum())
    model(torch.zeros(1, 1, requires_grad=True)).sum().backward()
    assert "body_1 linear.default" in low_ops(model)
    assert model.fc.weight.grad.item() == times


@pytest.mark.parametrize("trains", [True, False])
def test_what_goes_round_takes_a_gradient_where_the_loop_does(trains: bool) -> None:
    """Then two reads of its low copy sum their gradients in fp32."""
    model = converted(Twice())
    with torch.set_grad_enabled(trains):
        model(*given())
    (graph,) = autoamp.report(model).graphs
    code = str(graph.get_submodule("body_1").code)
    assert code.count("_to_copy") == 2
    assert ("low_uses" in code) == trains


def test_weights_are_cast_outside_a_loop_and_follow_the_optimizer() -> None:
    model, plain = twins(Recurrent)
    inputs = given()
    converted(model)
    model(*inputs)
    with torch.no_grad():
        for each in (*model.parameters(), *plain.parameters()):
            each.mul_(0.5)
    assert relative_error([model(*inputs)], [plain(*inputs)]) < 0.02
    (graph,) = autoamp.report(model).graphs
    cast = torch.ops.aten._to_copy.default
    casts = [str(n.args[0]) for n in graph.body_1.graph.nodes if n.target is cast]
    assert len(casts) == 3, casts  # what goes round and one step in, the result out
    assert not [name for name in casts if "weight" in name or "bias" in name]


def test_the_condition_of_a_loop_stays_fp32() -> None:
    class Until(Layers):
        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return while_loop(
                lambda h: self.second(h).sum() > -1e9,
                lambda h: (self.first(h) - 1e9,),
                (h,),
            )[0]

    model = converted(Until())
    with torch.no_grad():
        model(*given())
    assert "body_1 linear.default" in low_ops(model)
    (graph,) = autoamp.report(model).graphs
    assert "_to_copy" not in graph.body_0.code
    assert not [row for row in autoamp.report(model).ops if row.body == "body_0"]


def test_sizes_stay_symbolic() -> None:
    model, plain = twins(Recurrent)
    converted(model)
    for batch in (3, 5, 8):
        inputs = given(batch)
        with torch.no_grad():
            assert relative_error([model(*inputs)], [plain(*inputs)]) < 0.02
    assert len(autoamp.report(model).graphs) == 2


# -- what stays as it is ---------------------------------------------------------------


@pytest.mark.parametrize("by_norm", [True, False])
def test_a_branch_that_writes_to_a_buffer_stays_fp32(by_norm: bool) -> None:
    model, plain = twins(Writes)
    model.by_norm = plain.by_norm = by_norm
    converted(model)
    inputs = given()
    with torch.no_grad():  # torch captures no such branch where a gradient is recorded
        try:
            assert torch.equal(model(*inputs), plain(*inputs))
        except torch._dynamo.exc.UncapturedHigherOrderOpError:  # torch 2.11's
            pytest.skip("this torch captures no branch that writes")
        model.turn.fill_(False)
        model(*inputs)
    for name, value in plain.named_buffers():
        if name != "turn":
            assert torch.equal(value, model.get_buffer(name)), name
    assert low_ops(model) == ["body_1 linear.default", "body_1 tanh.default"]
    says(reason(model, "cond"), "writes to its input")


def test_a_norm_that_does_not_train_writes_nothing() -> None:
    model, plain = (each.eval() for each in twins(Writes))
    converted(model)
    inputs = given()
    assert relative_error([model(*inputs)], [plain(*inputs)]) < 0.02
    assert "body_0 linear.default" in low_ops(model)


@pytest.mark.parametrize("strict", [False, True])
def test_a_body_that_the_pass_fails_on_stays_fp32(strict: bool, monkeypatch) -> None:
    through = passes.collect_facts

    def fail(gm: fx.GraphModule, *given: Any) -> Any:
        if "autoamp_lowered_body" in gm.meta:
            raise RuntimeError("planted")
        return through(gm, *given)

    monkeypatch.setattr(passes, "collect_facts", fail)
    model, plain = twins(Branches)
    inputs = given()
    converted(model, strict=strict)
    if strict:
        with pytest.raises(AutoampError) as raised:
            model(*inputs)
        says(raised, "planted")
        return
    # One low product is left: the one that feeds the branches.
    assert relative_error(results(model, inputs), results(plain, inputs)) < 0.02
    assert low_ops(model) == [" linear.default"]
    says(reason(model, "cond"), "planted")


# -- the graph -------------------------------------------------------------------------


def captured(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> Any:
    """The graph Dynamo makes of `model`, and what it was called with."""
    found: list[Any] = []

    def keep(gm: fx.GraphModule, values: list[Any]) -> Callable[..., Any]:
        found[:] = gm, [v.detach() if torch.is_tensor(v) else v for v in values]
        return gm.forward

    torch.compile(model, backend=keep)(*inputs)
    return found


def text_of(gm: fx.GraphModule) -> list[str]:
    """The graph and its bodies as text, with local names numbered in order."""
    found: list[str] = []
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        names: dict[fx.Node, str] = {}
        for node in module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                names[node] = str(node.target)
                continue
            names[node] = f"%{len(found)}"
            args = fx.map_arg((node.args, node.kwargs), names.__getitem__)
            found.append(f"{node.target} {args}")
    return found


@pytest.mark.parametrize("kind", [Nested, Branches, Scanned])
def test_rewriting_twice_changes_nothing(kind: type[Layers]) -> None:
    torch.manual_seed(0)
    graph, inputs = captured(kind(), given())
    before = text_of(graph)
    once = autoamp.rewrite(graph, inputs, **BF16)
    assert text_of(graph) == before
    assert sum("bfloat16" in code for code in text_of(once)) >= 1
    twice = autoamp.rewrite(copy.deepcopy(once), inputs, **BF16)
    assert text_of(twice) == text_of(once)
    expected, found = graph(*inputs), once(*inputs)
    assert [v.dtype for v in found] == [v.dtype for v in expected]
    assert 0 < relative_error(list(found), list(expected)) < 0.05


def test_exported_branches_are_rewritten() -> None:
    model, plain = twins(Branches)
    inputs = given()[0], torch.randn(BATCH, WIDTH)
    with torch.no_grad():
        program = torch.export.export(model, inputs)
    low = autoamp.rewrite(program, inputs, **BF16)
    assert 0 < relative_error([low(*inputs)], [plain(*inputs)]) < 0.02
    bodies = [low.get_submodule(f"body_{i}") for i in range(2)]
    assert all("bfloat16" in str(body.code) for body in bodies)
