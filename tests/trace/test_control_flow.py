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
from autoamp.pipeline import passes
from tests.metrics import relative_error
from tests.small_models import converted

WIDTH, BATCH, STEPS = 16, 4, 5
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Layers(nn.Module):
    """Two layers, and whether what is built of them is torch's op or plain Python."""

    turn: Tensor
    seen: Tensor

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("turn", torch.ones((), dtype=torch.bool))
        self.register_buffer("seen", torch.zeros(()))
        self.plain = plain

    def choose(
        self, yes: Callable[[Tensor], Tensor], no: Callable[[Tensor], Tensor], h: Tensor
    ) -> Tensor:
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


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(STEPS, BATCH, WIDTH), torch.randn(
        BATCH, WIDTH, requires_grad=True
    )


def results(model: nn.Module, inputs: tuple[Tensor, Tensor]) -> list[Tensor]:
    """What it gives, and every gradient: zeros where a branch was not taken."""
    model.zero_grad()
    inputs[1].grad = None
    y = model(*inputs)
    (y.float().square().sum() * 1e-3).backward()
    held = [inputs[1], *model.parameters()]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in held]
    return [y.detach().float(), *grads]


def twins(kind: type[Layers]) -> tuple[Layers, Layers]:
    """A model that uses torch's ops, and the same in plain Python."""
    torch.manual_seed(0)
    model, plain = kind(), kind(plain=True)
    plain.load_state_dict(model.state_dict())
    return model, plain


def low_ops(model: nn.Module) -> list[tuple[str, str]]:
    """Where each low op stands, and its name."""
    rows = autoamp.report(model).ops
    return [(r.body, r.op.split("::")[-1]) for r in rows if r.precision != "fp32"]


def reason(model: nn.Module, op: str) -> str:
    (why,) = {r.reason for r in autoamp.report(model).ops if r.op == op}
    return why


def no_worse_than_autocast(kind: type[Layers], precision: str, **options: Any) -> Any:
    """The converted model, whose results and gradients were looked at."""
    model, plain = twins(kind)
    inputs = given()
    expected = results(plain, inputs)
    with torch.autocast("cpu", LOW[precision]):
        allowed = relative_error(results(plain, inputs), expected)
    converted(model, precision=precision, **options)
    found = results(model, inputs)
    assert found[0].dtype == torch.float32
    assert 0 < relative_error(found, expected) < 1.5 * allowed
    return model


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_loop_trains(precision: str) -> None:
    model = no_worse_than_autocast(Recurrent, precision)
    names = ["linear.default", "linear.default", "add.Tensor", "tanh.default"]
    assert low_ops(model) == [("body_1", name) for name in names]
    assert reason(model, "while_loop").startswith("while_loop: rewritten inside")
    assert autoamp.report(model).skipped == []
    assert "body_1 (while_loop)" in autoamp.report(model).full()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("precision", "turn"), [("bf16", True), ("bf16", False), ("fp16", True)]
)
def test_branches_train_and_infer(precision: str, turn: bool) -> None:
    model, plain = twins(Branches)
    for each in (model, plain):
        each.turn.fill_(turn)
    inputs = given()
    expected = results(plain, inputs)
    with torch.autocast("cpu", LOW[precision]):
        allowed = relative_error(results(plain, inputs), expected)
    converted(model, precision=precision)
    assert 0 < relative_error(results(model, inputs), expected) < 1.5 * allowed
    # What feeds the branches is low too: `relu_` writes to nothing it was handed.
    assert low_ops(model) == [
        ("", "linear.default"),
        ("body_0", "linear.default"),
        ("body_0", "relu_.default"),
        ("body_1", "linear.default"),
        ("body_1", "tanh.default"),
    ]
    with torch.no_grad():
        found = [model(*inputs)]
    assert 0 < relative_error(found, expected[:1]) < 1.5 * allowed


@pytest.mark.thorough
def test_bodies_in_bodies() -> None:
    model = no_worse_than_autocast(Nested, "bf16")
    found = low_ops(model)
    for body in ("body_0/body_1/body_0", "body_0/body_1/body_1", "body_1"):
        assert (body, "linear.default") in found


@pytest.mark.thorough(but=["Mapped"])
@pytest.mark.parametrize("kind", [Scanned, Mapped])
def test_scan_and_map(kind: type[Layers]) -> None:
    model = no_worse_than_autocast(kind, "bf16")
    assert ("body_0", "linear.default") in low_ops(model)


@pytest.mark.thorough
def test_a_compiler_takes_rewritten_branches() -> None:
    no_worse_than_autocast(Branches, "bf16", backend=aot_eager)


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
    assert ("body_1", "linear.default") in low_ops(model)
    assert model.fc.weight.grad.item() == times


@pytest.mark.thorough(but=["False"])
@pytest.mark.parametrize("trains", [True, False])
def test_what_goes_round_takes_a_gradient_where_the_loop_does(trains: bool) -> None:
    """Then two reads of its low copy sum their gradients in fp32."""

    class Twice(Layers):
        def forward(self, _: Tensor, h: Tensor) -> Tensor:
            return self.repeat(lambda _, h: self.first(h) * self.second(h), h)

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
    casts = [
        str(n.args[0])
        for n in graph.body_1.graph.nodes
        if n.target is torch.ops.aten._to_copy.default
    ]
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
    assert ("body_1", "linear.default") in low_ops(model)
    (graph,) = autoamp.report(model).graphs
    assert "_to_copy" not in graph.body_0.code
    assert not [row for row in autoamp.report(model).ops if row.body == "body_0"]


# -- what stays as it is ---------------------------------------------------------------


class Writes(Layers):
    """One branch writes to a buffer, by itself or as a batch norm that trains."""

    by_norm = False

    def forward(self, _: Tensor, h: Tensor) -> Tensor:
        def writes(h: Tensor) -> Tensor:
            if self.by_norm:
                return self.norm(self.first(h))
            self.seen.add_(1)
            return self.first(h) + self.seen

        return self.choose(writes, lambda h: self.second(h).tanh(), h)


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
    assert low_ops(model) == [("body_1", "linear.default"), ("body_1", "tanh.default")]
    assert "stays as it is: it writes to its input" in reason(model, "cond")


def test_a_norm_that_does_not_train_writes_nothing() -> None:
    model, plain = twins(Writes)
    model.by_norm = plain.by_norm = True
    converted(model.eval())
    inputs = given()
    assert relative_error([model(*inputs)], [plain.eval()(*inputs)]) < 0.02
    assert ("body_0", "linear.default") in low_ops(model)


def fail_in_bodies(monkeypatch) -> None:
    through = passes.collect_facts

    def fail(gm: fx.GraphModule, *given: Any) -> Any:
        if "autoamp_lowered_body" in gm.meta:
            raise RuntimeError("planted")
        return through(gm, *given)

    monkeypatch.setattr(passes, "collect_facts", fail)


def test_a_body_that_the_pass_fails_on_stays_fp32(monkeypatch) -> None:
    fail_in_bodies(monkeypatch)
    model, plain = twins(Branches)
    inputs = given()
    converted(model, strict=False)
    # One low product is left: the one that feeds the branches.
    assert relative_error(results(model, inputs), results(plain, inputs)) < 0.02
    assert low_ops(model) == [("", "linear.default")]
    assert "planted" in reason(model, "cond")


def test_strict_raises_where_the_pass_fails_on_a_body(monkeypatch) -> None:
    fail_in_bodies(monkeypatch)
    with pytest.raises(AutoampError, match="planted"):
        converted(Branches())(*given())


# -- the graph -------------------------------------------------------------------------


@pytest.mark.thorough
def test_sizes_stay_symbolic() -> None:
    model, plain = twins(Recurrent)
    converted(model)
    for batch in (3, 5, 8):
        inputs = torch.randn(STEPS, batch, WIDTH), torch.randn(batch, WIDTH)
        with torch.no_grad():
            assert relative_error([model(*inputs)], [plain(*inputs)]) < 0.02
    assert len(autoamp.report(model).graphs) == 2


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


@pytest.mark.thorough(but=["Branches"])
@pytest.mark.parametrize("kind", [Nested, Branches, Scanned])
def test_rewriting_twice_changes_nothing(kind: type[Layers]) -> None:
    torch.manual_seed(0)
    graph, inputs = captured(kind(), given())
    before = text_of(graph)
    options = {"precision": "bf16", "do_no_harm": False}
    once = autoamp.rewrite(graph, inputs, **options)
    assert text_of(graph) == before
    assert sum("bfloat16" in code for code in text_of(once)) >= 1
    twice = autoamp.rewrite(copy.deepcopy(once), inputs, **options)
    assert text_of(twice) == text_of(once)
    expected, found = graph(*inputs), once(*inputs)
    assert [v.dtype for v in found] == [v.dtype for v in expected]
    assert 0 < relative_error(list(found), list(expected)) < 0.05


@pytest.mark.thorough
def test_exported_branches_are_rewritten() -> None:
    model, plain = twins(Branches)
    inputs = given()[0], torch.randn(BATCH, WIDTH)
    with torch.no_grad():
        program = torch.export.export(model, inputs)
    low = autoamp.rewrite(program, inputs, precision="bf16", do_no_harm=False)
    assert 0 < relative_error([low(*inputs)], [plain(*inputs)]) < 0.02
    bodies = [low.get_submodule(f"body_{i}") for i in range(2)]
    assert all("bfloat16" in str(body.code) for body in bodies)
