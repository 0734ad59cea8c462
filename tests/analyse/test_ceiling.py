"""The ceiling: nothing is rounded that type promotion under autocast would not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

import autoamp
from autoamp.analyse.ceiling import promotes_to_low
from autoamp.graph_functions import low_uses
from autoamp.options import Options
from autoamp.pipeline.run import rewrite_graph
from autoamp.rewrite.rewritten import Rewritten
from autoamp.rules import family
from tests import small_models
from tests.quick import each_with_one, explored
from tests.small_models import Of, rewriting
from tests.strategies import Program, capture, choices, inputs, programs
from tests.truth import MARGIN, errors, leaves

ATEN = torch.ops.aten
WIDTH = 16
LOW = (torch.bfloat16, torch.float16)
SEEDS = 12


def of(function: Callable[..., Any]) -> Of:
    """A model of one function over a few layers, a parameter and two buffers."""
    torch.manual_seed(0)
    return Of(
        function,
        fc=nn.Linear(WIDTH, WIDTH),
        other=nn.Linear(WIDTH, WIDTH),
        norm=nn.LayerNorm(WIDTH),
        table=nn.Embedding(600, WIDTH),
        offset=nn.Parameter(1e3 + torch.randn(WIDTH)),
        mean=torch.full((WIDTH,), 1e4),
        spread=torch.full((WIDTH,), 3.0),
    )


def standardised(m: Of, x: Tensor) -> Tensor:
    return m.fc((x - x.mean(0)) / (x.std(0) + 1e-5))


def masked(m: Of, x: Tensor, keep: Tensor) -> Tensor:
    """Attention of which some rows are masked out entirely."""
    scores = m.fc(x) @ m.other(x).T + (1 - keep) * -1e4
    return scores.softmax(-1) @ x


def lifted(m: Of, x: Tensor) -> Tensor:
    scores = m.fc(x) @ m.other(x).T
    return (scores + torch.full(scores.shape, 1000.0)).softmax(-1) @ x


def branches(m: Of, x: Tensor) -> tuple[Tensor, ...]:
    """One value with eight low readers, whose gradients are summed."""
    h = x * m.spread
    return tuple(functional.linear(h, m.fc.weight.roll(i, 0)) for i in range(8))


def in_place(m: Of, x: Tensor) -> Tensor:
    h = m.fc(x)
    h += x * 3
    h *= m.spread
    return m.other(h)


def filled(m: Of, x: Tensor) -> Tensor:
    h = m.fc(x)
    h[:, 0] = 0
    h[1:3] = 0.5
    return m.other(h)


def pieces(m: Of, x: Tensor) -> Tensor:
    left, right = (x * m.spread).chunk(2, 0)
    return m.fc(left) + m.other(right.flip(0))


X = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1))
KEEP = torch.ones(64, 64).tril().index_fill(0, torch.arange(0, 64, 2), 0.0)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "batch norm": (
        lambda m, x: m.fc(functional.batch_norm(x, None, None, training=True)),
        (1e3 + X,),
    ),
    "layer norm": (lambda m, x: m.fc(m.norm(x)), (1e4 + X,)),
    "group norm": (lambda m, x: m.fc(functional.group_norm(x, 4)), (1e3 + X,)),
    "standardised": (standardised, (1e3 + X,)),
    "neighbours": (lambda m, x: m.fc(x[1:] - x[:-1]), (1e3 + X,)),
    "denormalised": (lambda m, x: m.fc(x) * m.spread + m.mean, (X,)),
    "norm of a sum": (lambda m, x: m.fc(m.norm(m.other(x) + m.mean)), (X,)),
    "parameter": (lambda m, x: m.offset + m.fc(x), (X,)),
    "less a branch": (lambda m, x: x * 100 - m.fc(x), (X,)),
    "mask": (masked, (X, KEEP)),
    "full": (lifted, (X,)),
    "constant": (lambda m, x: m.fc((x + 1e4) - 1e4), (X,)),
    "small": (lambda m, x: m.fc(x * 1e6) + 1e3, (X * 1e-6,)),
    "stream": (lambda m, x: m.other(m.norm(x + m.fc(m.norm(x)))), (1e3 + X,)),
    "rms norm": (
        lambda m, x: m.fc(functional.rms_norm(x, (WIDTH,), m.spread)),
        (1e3 + X,),
    ),
    "look-up": (lambda m, i: m.fc(m.norm(m.table(i) + m.mean)), (torch.arange(64),)),
    "positions": (lambda m, x: m.fc(x) * (torch.arange(WIDTH) * 30.7).cos(), (X,)),
    "branches": (branches, (X,)),
    "in place": (in_place, (X,)),
    "filled": (filled, (X,)),
    "pieces": (pieces, (1e3 + X,)),
    "outer": (lambda m, x: torch.outer(x[0] * m.spread, x[1]), (X,)),
    "dot": (lambda m, x: torch.dot(x[0] * m.spread, x[1]), (X,)),
    "mv": (lambda m, x: torch.mv(m.fc.weight, x[1] * m.spread), (X,)),
    "addr": (lambda m, x: torch.addr(m.fc.weight, x[0], x[1]), (X,)),
    "kron": (lambda m, x: torch.kron(x[:2] * m.spread, x[2:4]), (X,)),
    "einsum of no product": (lambda m, x: torch.einsum("ij->i", x * m.spread), (X,)),
    "einsum of elements": (
        lambda m, x: torch.einsum("ij,ij->ij", x * m.spread, x),
        (X,),
    ),
    "bilinear": (
        lambda m, x: functional.bilinear(x, x, m.fc.weight[None] * m.spread),
        (X,),
    ),
}


@pytest.mark.thorough(but=["batch norm-low0", "bilinear-low56"])
@pytest.mark.parametrize(("name", "low"), each_with_one(CASES, LOW))
def test_no_less_true_than_autocast(name: str, low: torch.dtype) -> None:
    function, data = CASES[name]
    assert errors(of(function), data, low).worst() <= MARGIN


def shifted(x: Tensor, dim: int) -> Tensor:
    powers = (x - x.amax(dim, keepdim=True)).exp()
    return powers / powers.sum(dim, keepdim=True)


def convolved(m: Of, x: Tensor) -> Tensor:
    """A layer over rows that lie in columns: its bias shifts whole rows."""
    return functional.conv1d(x.T, m.fc.weight[:, :, None], m.fc.bias)


def largest_first(m: Of, x: Tensor) -> Tensor:
    scores = convolved(m, x) / 2
    powers = (scores - scores.max(-1)[0].unsqueeze(-1)).exp()
    return powers / powers.sum(-1, keepdim=True) * x.T


def attended(m: Of, x: Tensor) -> Tensor:
    """Attention whose weights are normed over the queries as well."""
    weights = shifted(m.other(x) @ m.fc(x).T / 4, -1)
    return (weights / (weights.sum(0, keepdim=True) + 1e-6)) @ x


SHIFTED: dict[str, Callable[..., Any]] = {
    "convolved": lambda m, x: shifted(convolved(m, x), -1) * x.T,
    "masked": lambda m, x: (
        shifted(convolved(m, x).masked_fill(x.T > 1, -1e4), -1) * x.T
    ),
    "unsqueezed": largest_first,
    "attended": attended,
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "low"), each_with_one(SHIFTED, LOW))
def test_a_bias_that_a_softmax_does_not_feel(name: str, low: torch.dtype) -> None:
    """Its gradient is 0 and noise: no more noise than autocast's, as far as one sees.

    Asserted is that the mean over the seeds lies within three of its standard errors.
    """
    model = of(SHIFTED[name])
    at = 2 + [n for n, _ in model.named_parameters()].index("fc.bias")
    ratios = []
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.25)
        found = errors(model, (torch.randn(64, WIDTH),), low)
        ratios.append(math.log(found.ours[at] / found.autocast[at]))
    error = statistics.stdev(ratios) / math.sqrt(SEEDS)
    assert statistics.mean(ratios) <= 3 * error


class Recurrent(nn.Module):
    """A recurrent layer over a sequence, or a cell stepped over it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layer, nn.RNNBase):
            return self.layer(x)[0]
        h = x.new_zeros(x.shape[1], WIDTH)
        state: Any = (h, h) if isinstance(self.layer, nn.LSTMCell) else h
        seen = []
        for step in x:
            state = self.layer(step, state)
            seen.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(seen)


STEPS = 6

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: nn.GRU(WIDTH, WIDTH),
    "deep gru": lambda: nn.GRU(WIDTH, WIDTH, 2, bidirectional=True),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH),
    "deep lstm": lambda: nn.LSTM(WIDTH, WIDTH, 2, bidirectional=True),
    "projected lstm": lambda: nn.LSTM(WIDTH, WIDTH, proj_size=4),
    "computed gru": lambda: weight_norm(nn.GRU(WIDTH, WIDTH), "weight_hh_l0"),
    "rnn": lambda: nn.RNN(WIDTH, WIDTH),
    "computed rnn": lambda: weight_norm(nn.RNN(WIDTH, WIDTH), "weight_hh_l0"),
    "deep rnn": lambda: nn.RNN(WIDTH, WIDTH, 2, "relu", bidirectional=True),
    "gru cell": lambda: nn.GRUCell(WIDTH, WIDTH),
    "lstm cell": lambda: nn.LSTMCell(WIDTH, WIDTH),
    "rnn cell": lambda: nn.RNNCell(WIDTH, WIDTH),
}


def recurrent(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Recurrent(RECURRENT[name]()), torch.randn(STEPS, 8, WIDTH)


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.thorough(but=["gru-low0"])
@pytest.mark.parametrize(("name", "low"), each_with_one(RECURRENT, LOW))
def test_a_state_is_as_wide_as_under_autocast(name: str, low: torch.dtype) -> None:
    """Step by step, as on CPUs whose oneDNN has no kernel of the dtype for an LSTM."""
    model, x = recurrent(name)
    with torch.backends.mkldnn.flags(enabled=name not in ("lstm", "deep lstm")):
        found = errors(model, (x,), low)
    assert found.worst() <= MARGIN


@pytest.mark.parametrize("low", LOW)
def test_a_lstm_of_two_directions_runs_where_onednn_has_no_kernel(
    low: torch.dtype, monkeypatch
) -> None:
    """There autocast raises: an fp32 input has torch choose oneDNN all the same."""
    if low == torch.bfloat16:
        monkeypatch.setattr("autoamp.compat.onednn_has_bf16", lambda: False)
    model, x = recurrent("deep lstm")
    exact = model(x)
    autoamp.convert(model, precision=low, do_no_harm=False, strict=True)
    found = model(x)
    assert 0 < (found - exact).norm() < 0.01 * exact.norm()  # it is low, and right


@pytest.mark.parametrize("bidirectional", [False, True])
def test_one_kernel_of_a_lstm_gives_low_results(
    bidirectional: bool, monkeypatch
) -> None:
    """Two directions are two kernels, whose gradients autocast sums in fp32."""
    monkeypatch.setattr("autoamp.compat.onednn_has_bf16", lambda: True)
    model = Recurrent(nn.LSTM(WIDTH, WIDTH, bidirectional=bidirectional))
    found = small_models.rewritten(model, leaves((torch.ones(2, 3, WIDTH),)), "bf16")
    (layer,) = [n for n in found.gm.graph.nodes if "lstm" in str(n.target)]
    dtypes = {t.meta["val"].dtype for t in (layer.args[0], *layer.users)}
    assert dtypes == {torch.float32 if bidirectional else torch.bfloat16}


@pytest.mark.thorough(but=["gru", "gru cell", "lstm cell"])
@pytest.mark.parametrize("name", [n for n in RECURRENT if "rnn" not in n])
def test_ops_with_a_wide_state_run_low(name: str) -> None:
    model, x = recurrent(name)
    found = small_models.rewritten(model, leaves((x,)), "bf16")
    decisions = found.assignment.decisions.values()
    steps = [d for d in decisions if d.op.startswith(("aten::gru", "aten::lstm"))]
    assert {d.low for d in steps} == {True}


@pytest.mark.parametrize("name", ["batch norm", "neighbours", "mask", "look-up"])
def test_the_ceiling_is_what_holds_it(name: str, monkeypatch) -> None:
    monkeypatch.setattr(
        "autoamp.analyse.classify.under_ceiling", lambda gm, found: found
    )
    function, data = CASES[name]
    assert errors(of(function), data, torch.bfloat16).worst() > 10 * MARGIN


rewritten = rewriting(of, lambda: X.clone().requires_grad_(), "bf16")


def reason(found: Rewritten, name: str) -> str:
    return found.assignment.decisions[name].reason


@pytest.mark.thorough
@explored(25, 300, lambda most: (programs(most=most), choices()))
def test_what_is_low_is_under_the_ceiling_or_moves(
    program: Program, options: dict[str, Any]
) -> None:
    low = torch.float16 if options["precision"] == "fp16" else torch.bfloat16
    found = rewrite_graph(capture(program), inputs(), Options(**options), low)
    facts, verdicts = found.facts, found.classified.verdicts
    promoted = promotes_to_low(found.classified)
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


# -- reasons ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "node", "said"),
    [
        (lambda m, x: m.fc(m.norm(x)), "layer_norm", "reads x0, fp32 from outside"),
        (lambda m, x: m.fc(x) + m.offset, "add", "a parameter: type promotion"),
        (lambda m, x: m.fc(x.exp() * m.fc(x)), "mul", "reads exp, which is fp32"),
        (lambda m, x: m.fc(x) + torch.eye(64, 16), "add", "reads eye, which is fp32"),
    ],
)
def test_the_reason_names_what_is_wide(
    function: Callable[..., Any], node: str, said: str
) -> None:
    found = rewritten(function, deny=["exp"])
    assert said in reason(found, node)
    assert found.assignment.decisions[node].origin == "type promotion"


def test_what_the_user_allows_is_under_the_ceiling() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(x + m.fc(m.norm(x)))

    assert rewritten(function).classified.verdicts["add"].pinned
    assert "add" in rewritten(function, allow=["add"]).assignment.low


def test_tensorflows_painting_has_no_ceiling() -> None:
    """It paints what lies between two products, whatever it reads."""

    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(m.fc(x) * m.offset)

    assert "mul" not in rewritten(function).assignment.low
    painted = rewritten(function, placement="tensorflow")
    assert "mul" in painted.assignment.low


def test_a_factory_is_as_wide_as_what_it_is_like() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        h = m.fc(x)
        return m.other(torch.where(h > 0, h, torch.zeros_like(h)))

    assert {"zeros_like", "where"} <= rewritten(function).assignment.low


@pytest.mark.parametrize("function", [in_place, filled])
def test_what_is_written_to_keeps_its_precision(function: Callable[..., Any]) -> None:
    """A low product stays low, whatever is added to it or put into it in place."""
    found = rewritten(function, strict=True)
    assert {"linear", "linear_1"} <= found.assignment.low


def test_a_number_that_would_be_zero_stays_fp32_with_what_it_makes() -> None:
    """Zero rows stay zero; divided by an fp16 1e-12 they were NaN."""

    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(functional.normalize(m.fc(x) * 0, dim=-1))

    found = rewritten(function, precision="fp16")
    assert (
        reason(found, "clamp_min") == "computes with 1e-12, which fp16 rounds to zero"
    )
    assert "div" not in found.assignment.low
    assert torch.equal(found.gm(X), found.before(X).half().float())
    assert "clamp_min" in rewritten(function).assignment.low


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x * 1e-6),
        lambda m, x: m.fc(m.norm(x)),
        lambda m, x: m.fc(functional.batch_norm(x, None, None, training=True)),
        lambda m, x: m.fc(torch.softmax(x * 1e-6, -1)),
        lambda m, x: m.fc(torch.cat([x, x], 1)[:, 1 : WIDTH + 1].relu() * 1e-6),
        lambda m, x: m.fc(m.norm(x + m.other(x / 5e5))),
        lambda m, x: m.other((m.fc(x * 1e-6) - m.mean * 50) * 1e-6),
    ],
    ids=["scaled", "norm", "batch", "softmax", "moved", "stream", "buffer"],
)
def test_data_beyond_the_range_of_fp16_is_rounded_after_it_is_in_range(
    function: Callable[..., Any],
) -> None:
    data = (1 + torch.rand(64, WIDTH)) * 5e5
    assert errors(of(function), (data,), torch.float16).worst() <= MARGIN


def test_what_is_fp32_for_its_backward_widens_nothing() -> None:
    """A norm of many rows; autocast has its result low, and what follows."""
    many = torch.randn(512, WIDTH)
    found = rewritten(
        lambda m, x: m.other(m.norm(m.fc(x)) + m.fc(x)), many.requires_grad_()
    )
    assert "layer_norm" not in found.assignment.low
    assert "add" in found.assignment.low
    few = rewritten(lambda m, x: m.other(m.norm(m.fc(x)) + m.fc(x)))
    assert {"layer_norm", "add"} <= few.assignment.low


# -- moves -----------------------------------------------------------------------------


def test_one_cast_before_three_slices() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        h = x * m.spread
        return m.fc(h[:20]) + m.fc(h[20:40]) + m.other(h[40:60])

    found = rewritten(function)
    assert [c.value for c in found.casts if c.kind == "down"] == ["mul"]
    (uses,) = (n for n in found.gm.graph.nodes if n.target is low_uses)
    assert uses.args[2] == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda h: h.log(),
        lambda h: h.max(-1)[1],
        lambda h: h > 0.001,
        lambda h: h.double(),
        lambda h: h,
    ],
    ids=["reader", "index", "comparison", "cast", "result"],
)
def test_a_move_whose_bits_are_seen_stays_fp32(other: Callable[..., Any]) -> None:
    def function(m: Of, x: Tensor) -> Any:
        h = (x * m.spread).t().t()
        return m.fc(h), other(h)

    found = rewritten(function)
    assert "linear" in found.assignment.low
    assert "t_1" not in found.assignment.low


def test_gradients_of_what_is_moved_are_summed_in_fp32() -> None:
    """Two products of one view: the cast is behind it, where their gradients meet."""

    def function(m: Of, x: Tensor) -> Tensor:
        h = (x * m.spread).t().contiguous().t()
        return m.fc(h) + m.other(h)

    assert "t_1" not in rewritten(function).assignment.low
    frozen = rewritten(function, X, grad=False)
    assert "t_1" in frozen.assignment.low
    assert len([c for c in frozen.casts if c.kind == "down"]) == 1


def test_a_constant_of_low_readers_is_made_low() -> None:
    found = rewritten(lambda m, x: m.fc(x) @ torch.ones(16, 16) + m.fc(x) @ X.T @ X)
    (ones,) = (n for n in found.gm.graph.nodes if n.target is ATEN.ones.default)
    assert ones.meta["val"].dtype is torch.bfloat16


# -- what is left to type promotion ----------------------------------------------------


def test_low_branches_of_a_stream_are_cast_by_nobody() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        x = x + m.fc(m.norm(x)) * m.spread
        return m.other(m.norm(x))

    found = rewritten(function)
    assert {"mul", "add"} & found.assignment.low == set()
    assert not [c for c in found.casts if c.value in ("linear", "mul", "add")]


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
