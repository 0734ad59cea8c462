"""Danger spreads through every op until something ends it; masks saturate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autoamp.dtypes import parse_low_dtype
from autoamp.errors import RulesError
from autoamp.options import Options
from autoamp.pipeline import Rewritten, rewrite_graph
from autoamp.rules import Rules
from tests.metrics import relative_error
from tests.strategies import capture

WIDTH = 8
HUGE = 5e5


class Of(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(600, WIDTH)
        self.register_buffer("mean", torch.full((WIDTH,), HUGE))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def rewritten(
    function: Callable[..., Any],
    *given: Any,
    precision: str = "fp16",
    grad: bool = True,
    **options: Any,
) -> Rewritten:
    given = given or (torch.randn(4, WIDTH),)
    model = Of(function).requires_grad_(grad)
    chosen = Options(precision=precision, do_no_harm=False, **options)
    low = parse_low_dtype(precision)
    return rewrite_graph(capture(model, len(given)), given, chosen, low)


def dtype(found: Rewritten, name: str) -> torch.dtype:
    return next(n for n in found.gm.graph.nodes if n.name == name).meta["val"].dtype


def forced(found: Rewritten, name: str) -> bool:
    """Whether the taint holds `name` in fp32, and says so."""
    verdict = found.classified.verdicts[name]
    if verdict.origin != "taint":
        return False
    assert verdict.pinned
    assert dtype(found, name) is torch.float32
    return True


# -- range -----------------------------------------------------------------------------


def test_infer_after_exp_is_forced_in_fp16_only() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(m.fc(x).exp() + 1)

    found = rewritten(function)
    assert forced(found, "add")
    assert "downstream of exp" in found.assignment.decisions["add"].reason
    assert not forced(rewritten(function, precision="bf16"), "add")


@pytest.mark.parametrize(
    ("end", "ends"),
    [
        (lambda m, x: x.softmax(-1), True),
        (lambda m, x: x.sigmoid(), True),
        (lambda m, x: x.tanh(), True),
        (lambda m, x: x.clamp(-5.0, 5.0), True),
        (lambda m, x: functional.hardtanh(x), True),
        (lambda m, x: x.clamp(-1e6, 1e6), False),
        (lambda m, x: functional.layer_norm(x, (WIDTH,)), True),
        (lambda m, x: m.fc(x), True),
        (lambda m, x: x @ m.fc.weight, True),
        (lambda m, x: x.clamp(min=0.0), False),
        (lambda m, x: x.relu(), False),
        (lambda m, x: x.t().contiguous().t(), False),
        (lambda m, x: x * 0.5, False),
        (lambda m, x: x.chunk(2, -1)[0].repeat(1, 2), False),
    ],
)
def test_what_ends_the_danger(end: Callable[..., Tensor], ends: bool) -> None:
    found = rewritten(lambda m, x: m.other(end(m, m.fc(x).exp()) + 1))
    assert forced(found, "add") != ends


@pytest.mark.parametrize(
    "unlisted",
    [
        torch.special.bessel_j1,
        lambda x: torch.nextafter(x, x),
        lambda x: torch.ldexp(x, torch.ones(1)),
        lambda x: torch.heaviside(x, x),
    ],
)
def test_an_op_no_rule_knows_does_not_launder_it(
    unlisted: Callable[[Tensor], Tensor],
) -> None:
    """TensorFlow's pass walks its lists, so any other op ends the danger there."""
    rules = Rules.default("fp16")
    known = {"special_bessel_j1", "nextafter", "ldexp", "heaviside"}
    table = {k: r for k, r in rules.table.items() if k.split("::")[1] not in known}
    bare = Rules("fp16 less four ops", table, rules.dtype)
    found = rewritten(lambda m, x: m.other(unlisted(m.fc(x).exp()) + 1), rules=bare)
    decisions = found.assignment.decisions.values()
    assert any(not d.listed for d in decisions)
    assert forced(found, "add")


def test_it_passes_through_storages() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        h = m.fc(x)
        h.view(-1)[0:4].copy_(x.exp().view(-1)[0:4])
        return m.other(h + 1)

    assert forced(rewritten(function), "add")


def test_a_clear_op_is_never_rounded_and_widened_again() -> None:
    """exp -> view -> exp with a low reader beside it: the view itself stays fp32."""

    def function(m: Of, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.fc(x).exp().t().t()
        return m.other(h), h.log()

    found = rewritten(function)
    assert dtype(found, "t") is torch.float32
    assert dtype(found, "t_1") is torch.float32
    (reading,) = (n for n in found.gm.graph.nodes if n.name == "log")
    assert reading.args[0].name == "t_1"


# -- positions -------------------------------------------------------------------------


def rotary(m: Of, x: Tensor) -> Tensor:
    """Angles from positions, as rotary embeddings make them."""
    positions = torch.arange(x.shape[0]).float()
    angles = positions[:, None] * torch.linspace(0.1, 1, WIDTH)[None] + 0.5
    return m.fc(x) * angles.cos()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_positions_stay_exact(precision: str) -> None:
    x = torch.randn(600, WIDTH)
    found = rewritten(rotary, x, precision=precision)
    decisions = found.assignment.decisions
    angles = [n for n, d in decisions.items() if "positions" in d.reason]
    assert angles
    assert all(dtype(found, n) is torch.float32 for n in angles)
    model = Of(rotary)
    gm = rewrite_graph(
        capture(model, 1),
        (x,),
        Options(precision=precision, do_no_harm=False),
        parse_low_dtype(precision),
    ).gm
    error = (gm(x) - model(x)).abs().max() / model(x).abs().max()
    assert error < 4 * torch.finfo(parse_low_dtype(precision)).eps


def test_a_recurrence_over_positions_stays_fp32() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        at = torch.arange(WIDTH).float()
        for _ in range(3):
            at = at[None] * 0.5 + at.flip(0)
            at = at[0] if at.dim() > 1 else at
        return m.fc(x) + at

    found = rewritten(function, precision="bf16")
    names = [n for n in found.assignment.decisions if n.startswith(("mul", "add"))]
    assert len(names) == 7
    assert all(forced(found, n) for n in names)


def test_integers_used_as_indices_carry_no_positions() -> None:
    def function(m: Of, ids: Tensor) -> Tensor:
        return m.fc(m.table(ids + torch.arange(4)) + 1)

    found = rewritten(function, torch.arange(4), precision="bf16")
    assert not forced(found, "add_1")
    assert not any(v.origin == "taint" for v in found.classified.verdicts.values())


def test_narrow_integers_are_exact_in_any_dtype() -> None:
    def function(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        return m.other(m.fc(x) * mask.float())

    x, mask = torch.randn(4, WIDTH), torch.ones(4, WIDTH, dtype=torch.bool)
    assert not forced(rewritten(function, x, mask), "mul")
    assert forced(rewritten(function, x, mask.long()), "mul")


# -- masks and literals ----------------------------------------------------------------


def attention(m: Of, x: Tensor, keep: Tensor, kind: str = "add") -> Tensor:
    """Attention written out, one row fully masked by the smallest fp32 number."""
    least = torch.finfo(torch.float32).min
    scores = m.fc(x) @ m.other(x).t()
    if kind == "add":
        scores = scores + (1.0 - keep.float()) * least
    elif kind == "where":
        scores = torch.where(keep, scores, torch.full_like(scores, least))
    elif kind == "fill":
        scores = scores.masked_fill(~keep, least)
    else:
        given = (1.0 - keep.float()) * least
        return functional.scaled_dot_product_attention(
            m.fc(x)[None], m.other(x)[None], x[None], attn_mask=given[None]
        )[0]
    return scores.softmax(-1) @ m.fc(x)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("kind", ["add", "where", "fill", "sdpa"])
@pytest.mark.parametrize("lists", [{}, {"allow": ["softmax", "add", "where"]}])
def test_a_fully_masked_row_gives_no_nan(
    precision: str, kind: str, lists: dict[str, list[str]]
) -> None:
    keep = torch.ones(4, 4, dtype=torch.bool).tril()
    keep[2] = False
    given = (torch.randn(4, WIDTH), keep)
    found = rewritten(
        lambda m, x, k: attention(m, x, k, kind), *given, precision=precision, **lists
    )
    assert found.assignment.low
    result = found.gm(*given)
    assert result.isfinite().all()
    result.sum().backward()
    for parameter in found.gm.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_mask_given_as_an_input_saturates(precision: str) -> None:
    def function(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            m.fc(x)[None], m.other(x)[None], m.fc(x)[None], attn_mask=mask[None]
        )

    mask = torch.full((4, 4), torch.finfo(torch.float32).min)
    given = (torch.randn(4, WIDTH), mask)
    found = rewritten(function, *given, precision=precision)
    assert "x1" in found.classified.extreme
    assert "scaled_dot_product_attention" in found.assignment.low
    assert found.gm(*given).isfinite().all()


@pytest.mark.parametrize(
    ("precision", "literal"), [("fp16", -1e9), ("bf16", -3.4028234663852886e38)]
)
def test_literals_beyond_the_range_are_clamped(precision: str, literal: float) -> None:
    def function(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        return m.other(m.fc(x).masked_fill(mask, literal).softmax(-1))

    given = (torch.randn(4, WIDTH), torch.ones(4, WIDTH, dtype=torch.bool))
    found = rewritten(function, *given, precision=precision, allow=["softmax"])
    filled = next(n for n in found.gm.graph.nodes if n.name == "masked_fill")
    largest = torch.finfo(parse_low_dtype(precision)).max
    if filled.meta["val"].dtype is not torch.float32:
        assert filled.args[2] == -largest
    assert found.gm(*given).isfinite().all()
    infinite = rewritten(
        lambda m, x, k: m.fc(x).masked_fill(k, float("-inf")).clone(), *given
    )
    assert infinite.gm(*given).isinf().all()


# -- size ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.fc(x * 1e-6),
        lambda m, x: m.fc(functional.layer_norm(x, (WIDTH,))),
        lambda m, x: m.fc(functional.batch_norm(x, None, None, training=True)),
        lambda m, x: m.fc(torch.softmax(x * 1e-6, -1)),
        lambda m, x: m.fc((x + m.fc.bias).softmax(-1)),
        lambda m, x: m.fc(torch.cat([x, x], 1)[:, 1 : WIDTH + 1].relu() * 1e-6),
        lambda m, x: m.fc(functional.layer_norm(x + m.other(x / HUGE), (WIDTH,))),
    ],
    ids=[
        "scaled",
        "norm",
        "batch",
        "softmax",
        "no mask",
        "moved",
        "stream",
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_data_beyond_the_range_is_rounded_after_it_is_brought_into_it(
    function: Callable[..., Any], grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under torch.autocast; cast first it would be infinite."""
    x = (1 + torch.rand(64, WIDTH)) * HUGE
    found = rewritten(function, x, grad=grad)
    expected = found.before(x)
    assert "linear" in found.assignment.low
    # Of each product, in one case of two, both operands and the result are rounded.
    assert relative_error(found.gm(x), expected) < 6 * torch.finfo(torch.half).eps / 2
    monkeypatch.setattr("autoamp.analyse.classify.AMPLE", 0.0)
    assert not rewritten(function, x, grad=grad).gm(x).isfinite().all()


def test_what_bounds_data_is_the_last_to_be_held() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.fc(functional.layer_norm(x, (WIDTH,)).relu())

    found = rewritten(function)
    assert forced(found, "layer_norm")
    assert "(x0)" in found.assignment.decisions["layer_norm"].reason
    assert "relu" in found.assignment.low
    assert "layer_norm" in rewritten(function, precision="bf16").assignment.low
    asked = rewritten(function, allow=["layer_norm"])
    assert "layer_norm" in asked.assignment.low


def test_statistics_and_masks_hold_nothing() -> None:
    """What stays fp32 beside low data, and what saturates, is rounded by no cast."""

    def normalised(m: Of, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return m.other(functional.batch_norm(m.fc(x), mean, var))

    given = (torch.randn(4, WIDTH), torch.zeros(WIDTH), torch.ones(WIDTH))
    assert "batch_norm" in rewritten(normalised, *given).assignment.low

    def masked(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        scores = m.fc(x) @ m.other(x).t()
        return (scores + mask).softmax(-1) @ x

    mask = torch.full((4, 4), torch.finfo(torch.float32).min).triu(1)
    for grad in (True, False):
        found = rewritten(masked, torch.randn(4, WIDTH), mask, grad=grad)
        assert {"add", "softmax"} <= found.assignment.low
        assert found.classified.extreme & {"x0", "x1", "linear"} == {"x1"}


def test_a_number_that_would_be_zero_is_held_with_what_it_makes() -> None:
    """Zero rows stay zero; divided by an fp16 1e-12 they were NaN."""

    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(functional.normalize(m.fc(x) * 0, dim=-1))

    found = rewritten(function)
    reason = found.assignment.decisions["clamp_min"].reason
    assert reason == "computes with 1e-12, which fp16 rounds to zero"
    assert forced(found, "div")
    x = torch.randn(4, WIDTH)
    assert torch.equal(found.gm(x), found.before(x).half().float())
    assert "clamp_min" in rewritten(function, precision="bf16").assignment.low


def test_what_a_huge_divisor_makes_is_held() -> None:
    """A divisor is no filling of a mask: fp16 has few digits for what it makes."""

    def function(m: Of, x: Tensor) -> Tensor:
        return m.fc(functional.layer_norm(x.softmax(-1) / HUGE, (WIDTH,)))

    found = rewritten(function)
    assert "div" not in found.classified.extreme
    assert forced(found, "layer_norm")


def test_sets_that_imitate_other_lists_hold_what_those_hold() -> None:
    """TensorFlow's pass paints what reads a placeholder like anything else."""

    def function(m: Of, x: Tensor) -> Tensor:
        return m.fc((x * 0.5).relu())

    assert forced(rewritten(function), "mul")
    assert "mul" in rewritten(function, rules="tensorflow").assignment.low


def test_streams_are_held_wherever_they_begin() -> None:
    def function(m: Of, i: Tensor) -> Tensor:
        x = m.table(i)
        x = x + m.fc(functional.layer_norm(x, (WIDTH,)))
        return m.other(functional.layer_norm(x, (WIDTH,)))

    found = rewritten(function, torch.arange(4))
    assert forced(found, "layer_norm")
    assert forced(found, "layer_norm_1")


def test_buffers_are_held_and_parameters_are_not() -> None:
    """Nobody trains a buffer; a checkpoint may bring any."""
    buffer = rewritten(lambda m, x: m.fc((m.other(x) - m.mean).relu()))
    assert forced(buffer, "sub")
    parameter = rewritten(lambda m, x: m.fc((m.other(x) - m.fc.bias).relu()))
    assert "sub" in parameter.assignment.low


def test_taint_can_fail() -> None:
    """Without the rule that `exp` taints, the sum after it goes low in fp16."""
    rules = Rules.default("fp16")
    table = {k: r for k, r in rules.table.items() if k != "aten::exp"}
    table["aten::exp"] = Rules.default("bf16").table["aten::exp"]
    blind = Rules("blind", table, rules.dtype)
    found = rewritten(lambda m, x: m.other(m.fc(x).exp() + 1), rules=blind)
    assert not forced(found, "add")
    with pytest.raises(RulesError):
        Rules.default("fp32")
