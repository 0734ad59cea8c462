"""The ceiling: nothing is rounded that type promotion under autocast would not.

That results are no further from the truth than autocast's is shown by the rows of
tests/table/ceiling.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from autoamp.passes.decide.ceiling import low_under_autocast
from autoamp.passes.functions import low_uses
from autoamp.passes.rules import family
from tests import small_models
from tests.passes.decide.door import Device, price_graph
from tests.quick import explored
from tests.says import says
from tests.small_models import Of, rewriting
from tests.strategies import Program, choices, inputs, programs
from tests.table import oracle
from tests.table.ceiling import (
    LSTM,
    PARTS,
    RECURRENT,
    SEQUENCE,
    WIDTH,
    Recurrent,
    filled,
    in_place,
)
from tests.table.rows import Row

ATEN = torch.ops.aten
LOW = (torch.bfloat16, torch.float16)
X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))


def of(function: Callable[..., Any]) -> Of:
    torch.manual_seed(0)
    return Of(function, **{name: make() for name, make in PARTS.items()})


rewritten = rewriting(of, lambda: X.clone().requires_grad_(), "bf16")


@explored(25, 300, lambda most: (programs(most=most), choices()))
def test_what_is_low_is_under_the_ceiling_or_moves(
    program: Program, options: dict[str, Any]
) -> None:
    found = small_models.rewritten(program, inputs(), **options)
    facts, verdicts = found.facts, found.classified.verdicts
    promoted = low_under_autocast(found.classified)
    above = found.assignment.low - promoted
    assert all(verdicts[name].moves for name in above)
    for name in verdicts:
        for operand, mode in zip(
            facts.nodes[name].operands, verdicts[name].modes, strict=True
        ):
            if facts.producer(operand.value) in above:
                assert mode == "same", "nothing shows the bits of what was moved"
                assert name in found.assignment.low
    assert not above & {facts.producer(value) for value in facts.returned}


# -- recurrent layers ------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("column", ["bf16", "fp16"])
def test_a_state_is_as_wide_as_under_autocast(column: str) -> None:
    """Step by step, as on CPUs whose oneDNN has no kernel of the dtype for an LSTM."""

    def model() -> nn.Module:
        return Recurrent(**{name: make() for name, make in LSTM.items()})

    row = Row("lstm", model, lambda: [torch.randn(SEQUENCE)])
    with torch.backends.mkldnn.flags(enabled=False):
        oracle.check(row, column)
    projected = Recurrent(lstm=nn.LSTM(WIDTH, WIDTH, proj_size=4))
    row = Row("projected", lambda: projected, lambda: [torch.randn(SEQUENCE)])
    oracle.check(row, column)


@pytest.mark.parametrize("low", LOW)
def test_a_lstm_of_two_directions_runs_where_onednn_has_no_kernel(
    low: torch.dtype, monkeypatch
) -> None:
    """There autocast raises: an fp32 input has torch choose oneDNN all the same."""
    if low == torch.bfloat16:
        monkeypatch.setattr("autoamp.compat.onednn_has_bf16", lambda: False)
    model, x = Recurrent(deep=LSTM["deep"]()), torch.randn(SEQUENCE)
    (exact,) = model(x)
    autoamp.convert(model, precision=low, do_no_harm=False, strict=True)
    (found,) = model(x)
    assert 0 < (found - exact).norm() < 0.01 * exact.norm()  # it is low, and right


@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_kernel_of_a_lstm_gives_low_results(
    bidirectional: bool, monkeypatch
) -> None:
    """Two directions are two kernels, whose gradients autocast sums in fp32."""
    monkeypatch.setattr("autoamp.compat.onednn_has_bf16", lambda: True)
    model = Recurrent(one=nn.LSTM(WIDTH, WIDTH, bidirectional=bidirectional))
    x = torch.ones(2, 3, WIDTH).requires_grad_()
    graph = small_models.rewritten(model, (x,), "bf16").gm.graph
    (layer,) = [n for n in graph.nodes if "lstm" in str(n.target)]
    dtypes = {t.meta["val"].dtype for t in (layer.args[0], *layer.users)}
    assert dtypes == {torch.float32 if bidirectional else torch.bfloat16}


def test_ops_with_a_wide_state_run_low() -> None:
    layers = {**RECURRENT["gated units"], **RECURRENT["cells"], "two": LSTM["deep"]}
    model = Recurrent(**{name: make() for name, make in layers.items()})
    x = torch.randn(SEQUENCE).requires_grad_()
    decisions = small_models.rewritten(model, (x,), "bf16").assignment.decisions
    steps = {d.op.split(".")[0]: d.low for d in decisions.values()}
    kinds = ("aten::gru", "aten::lstm", "aten::gru_cell", "aten::lstm_cell")
    assert {kind: steps.get(kind) for kind in kinds} == dict.fromkeys(kinds, True)


# -- what runs low ---------------------------------------------------------------------


def moved_bits(other: Callable[[Tensor], Any]) -> Callable[..., Any]:
    def function(m: Of, x: Tensor) -> Any:
        h = (x * m.spread).t().t()
        return m.fc(h), other(h)

    return function


def like_another(m: Of, x: Tensor) -> Tensor:
    h = m.fc(x)
    return m.other(torch.where(h > 0, h, torch.zeros_like(h)))


def stream(m: Of, x: Tensor) -> Tensor:
    x = x + m.fc(m.norm(x)) * m.spread
    return m.other(m.norm(x))


def moved_twice(m: Of, x: Tensor) -> Tensor:
    """Two products of one view: the cast is behind it, where their gradients meet."""
    h = (x * m.spread).t().contiguous().t()
    return m.fc(h) + m.other(h)


def many(m: Of, x: Tensor) -> Tensor:
    """A norm of many rows; autocast has its result low, and what follows."""
    x = torch.cat([x] * 8)
    return m.other(m.norm(m.fc(x)) + m.fc(x))


TENSORFLOW = {"placement": "tensorflow"}
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], str, str]] = {
    "allowed": (
        lambda m, x: m.other(x + m.fc(m.norm(x))),
        {"allow": ["add"]},
        "add",
        "",
    ),
    "not allowed": (lambda m, x: m.other(x + m.fc(m.norm(x))), {}, "", "add"),
    # TensorFlow's painting has no ceiling: what lies between two products is low.
    "painted": (lambda m, x: m.other(m.fc(x) * m.offset), TENSORFLOW, "mul", ""),
    "not painted": (lambda m, x: m.other(m.fc(x) * m.offset), {}, "", "mul"),
    "a factory": (like_another, {}, "zeros_like where", ""),
    # A low product stays low, whatever is added to it or put into it in place.
    "in place": (in_place, {}, "linear linear_1", ""),
    "filled": (filled, {}, "linear linear_1", ""),
    # Its fp32 is for its backward, and widens nothing that follows.
    "a norm of many rows": (many, {}, "add", "layer_norm"),
    "a norm of few rows": (
        lambda m, x: m.other(m.norm(m.fc(x)) + m.fc(x)),
        {},
        "layer_norm add",
        "",
    ),
    "a residual stream": (stream, {}, "", "mul add"),
    # A move whose bits are seen stays fp32.
    "read": (moved_bits(lambda h: h.log()), {}, "linear", "t_1"),
    "index": (moved_bits(lambda h: h.max(-1)[1]), {}, "linear", "t_1"),
    "compared": (moved_bits(lambda h: h > 0.001), {}, "linear", "t_1"),
    "cast": (moved_bits(lambda h: h.double()), {}, "linear", "t_1"),
    "returned": (moved_bits(lambda h: h), {}, "linear", "t_1"),
    "moved for two": (moved_twice, {}, "", "t_1"),
    "moved without gradients": (moved_twice, {"grad": False}, "t_1", ""),
    # 1e-12 is zero in fp16, and a divisor.
    "a divisor in fp16": (
        lambda m, x: m.other(functional.normalize(m.fc(x), dim=-1)),
        {"precision": "fp16"},
        "",
        "clamp_min div",
    ),
    "a divisor in bf16": (
        lambda m, x: m.other(functional.normalize(m.fc(x), dim=-1)),
        {},
        "clamp_min",
        "",
    ),
}
"""A program, options, the nodes that are low, and those that are fp32."""


@pytest.mark.parametrize("case", CASES)
def test_nodes_are_low_or_not(case: str) -> None:
    function, options, low, high = CASES[case]
    given = () if options.get("grad", True) else (X,)
    found = rewritten(function, *given, **{"strict": True, **options}).assignment
    decided = {n: found.decisions[n].low for n in (*low.split(), *high.split())}
    assert decided == dict.fromkeys(low.split(), True) | dict.fromkeys(
        high.split(), False
    )


@pytest.mark.parametrize(
    ("function", "node", "wide"),
    [
        (lambda m, x: m.fc(m.norm(x)), "layer_norm", "x0"),
        (lambda m, x: m.fc(x) + m.offset, "add", "a parameter"),
        (lambda m, x: m.fc(x.exp() * m.fc(x)), "mul", "exp"),
        (lambda m, x: m.fc(x) + torch.eye(64, 16), "add", "eye"),
    ],
)
def test_the_reason_names_what_is_wide(
    function: Callable[..., Any], node: str, wide: str
) -> None:
    decision = rewritten(function, deny=["exp"]).assignment.decisions[node]
    says(decision.reason, wide)
    assert decision.origin == "type promotion"


# -- casts -----------------------------------------------------------------------------


def test_one_cast_before_three_slices() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        h = x * m.spread
        return m.fc(h[:20]) + m.fc(h[20:40]) + m.other(h[40:60])

    found = rewritten(function)
    assert [c.value for c in found.casts if c.kind == "down"] == ["mul"]
    (uses,) = (n for n in found.gm.graph.nodes if n.target is low_uses)
    assert uses.args[2] == 3


def test_a_wide_product_is_under_the_ceiling_and_no_move_of_it_is_low(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is rounded less than under autocast, and a view of it would be rounded."""
    monkeypatch.setattr("autoamp.compat.products_give_fp32", lambda: True)
    gpu = Device("test", 1e6, 2000.0, 1.0, 100.0, True, type="cuda")
    found = small_models.rewritten(
        of(lambda m, x: (x @ m.fc.weight.t()).t().unsqueeze(0).exp()).requires_grad_(
            False
        ),
        [X],
        "bf16",
        deny=["exp"],
        do_no_harm=True,
        price=lambda gm, seen, _, **told: price_graph(gm, seen, gpu, **told),
    )
    (group,) = (g for g in found.assignment.problem.groups if g.made is not None)
    assert group.value == "matmul"
    assert found.assignment.low <= low_under_autocast(found.classified)
    assert "matmul" in found.assignment.low
    assert [c.value for c in found.casts if c.kind == "up"] == ["matmul"]


def test_a_constant_of_low_readers_is_made_low() -> None:
    found = rewritten(lambda m, x: m.fc(x) @ torch.ones(16, 16) + m.fc(x) @ X.T @ X)
    (ones,) = (n for n in found.gm.graph.nodes if n.target is ATEN.ones.default)
    assert ones.meta["val"].dtype is torch.bfloat16


def test_low_branches_of_a_stream_are_cast_by_nobody() -> None:
    casts = rewritten(stream).casts
    assert not [c for c in casts if c.value in ("linear", "mul", "add")]


@pytest.mark.parametrize("low", LOW, ids=["bf16", "fp16"])
@pytest.mark.parametrize("op", sorted(family("promoting")))
def test_kernels_that_promote_widen_exactly(op: str, low: torch.dtype) -> None:
    """Result and gradients have the bits of the same op on operands cast before."""
    packet = getattr(ATEN, op.split("::")[1])
    x, y, z = (X[i : i + 8].clone() for i in (0, 8, 16))
    call: Callable[[Tensor, Tensor], Tensor] = {
        "aten::where": lambda a, b: packet.self(z > 0, a, b),
        "aten::addcmul": lambda a, b: packet.default(z, a, b),
    }.get(op, getattr(packet, "Tensor", None) or packet.default)

    def outcome(a: Tensor, b: Tensor, cast: bool) -> list[Tensor]:
        leaves = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        result = call(*(v.float() if cast else v for v in leaves))
        assert result.dtype is torch.float32
        result.backward(z)
        return [result, *(v.grad for v in leaves)]

    for a, b in ((x, y.to(low)), (x.to(low), y)):
        for left, right in zip(outcome(a, b, False), outcome(a, b, True), strict=True):
            assert left.dtype is right.dtype
            assert torch.equal(left, right)
