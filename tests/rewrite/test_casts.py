"""Where casts go: one per value and region; weights, streams, returned values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.nn import functional

from autoamp.graph_functions import low_uses, low_weight
from autoamp.options import Options
from autoamp.pipeline.run import rewrite_graph
from autoamp.rewrite.rewritten import Rewritten
from tests.small_models import Of, node, rewriting
from tests.strategies import Program, capture, choices, inputs, programs

WIDTH = 8


def of(function: Callable[..., Any]) -> Of:
    """A model of one function, a linear layer, a norm and an embedding table."""
    return Of(
        function,
        fc=nn.Linear(WIDTH, WIDTH),
        other=nn.Linear(WIDTH, WIDTH, bias=False),
        norm=nn.LayerNorm(WIDTH),
        table=nn.Embedding(10, WIDTH),
    )


rewritten = rewriting(of, lambda: torch.randn(4, WIDTH, requires_grad=True), "bf16")


def dtype(found: Rewritten, name: str) -> torch.dtype:
    return node(found, name).meta["val"].dtype


def kinds(found: Rewritten) -> Counter[str]:
    return Counter(c.kind for c in found.casts)


def test_one_cast_serves_every_reader() -> None:
    found = rewritten(lambda m, x: (m.fc(x), m.other(x), x @ x.t(), x.exp()))
    downs = [c for c in found.casts if c.kind == "down"]
    assert [(c.name, c.value) for c in downs] == [("x0_bf16", "x0")]
    (shared,) = node(found, "x0_bf16").users
    assert shared.target is low_uses
    assert shared.args[2] == 4


def test_casts_are_named_after_what_they_cast() -> None:
    found = rewritten(lambda m, x: m.fc(x).exp())
    assert [c.name for c in found.casts][:3] == [
        "x0_bf16",
        "model_fc_weight_bf16",
        "model_fc_bias_bf16",
    ]
    ups = [c for c in found.casts if c.kind == "up"]
    assert [c.name for c in ups] in (["linear_fp32"], ["exp_fp32"])
    assert all(c.dtype is torch.float32 for c in ups)
    assert all(c.bytes == 4 * 4 * WIDTH for c in ups)


@pytest.mark.thorough
@settings(max_examples=40)
@given(programs(), choices())
def test_no_value_is_cast_twice_in_one_place(
    program: Program, options: dict[str, Any]
) -> None:
    low = torch.float16 if options["precision"] == "fp16" else torch.bfloat16
    found = rewrite_graph(capture(program), inputs(), Options(**options), low)
    epochs: dict[str, set[tuple[int, int]]] = {}
    for fact in found.facts.nodes.values():
        for operand in fact.operands:
            where = epochs.setdefault(operand.value, set())
            where.add((fact.region, operand.epoch))
    made = Counter((c.value, c.dtype) for c in found.casts)
    for (value, _), count in made.items():
        returned = value in found.facts.returned
        assert count <= len(epochs.get(value, ())) + returned


def test_a_cast_is_not_shared_across_a_grad_mode_boundary() -> None:
    def function(m: Of, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = m.fc(x)
        with torch.no_grad():
            second = m.fc(x)
        return first, second, m.other(x)

    made = Counter(c.value for c in rewritten(function).casts)
    assert made["x0"] >= 2
    assert made["model_fc_weight"] == 2


def test_a_cast_is_made_anew_after_a_write() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        h = x.exp()
        first = m.other(h)
        h.view(-1)[0:3].zero_()
        return first + m.other(h)

    found = rewritten(function, deny=("exp",))
    assert Counter(c.value for c in found.casts)["exp"] in (0, 2)
    assert dtype(found, "exp") is torch.float32
    assert Counter(c.value for c in found.casts)["exp"] == 2


# -- weights ---------------------------------------------------------------------------


@torch.library.custom_op("autoamp_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    """Writes to its argument, and gives nothing back."""
    x.mul_(2)


def test_what_an_op_writes_beside_its_result_is_never_cast() -> None:
    """The op stays fp32; were the storage low, it would write to a cast of it."""

    def forward(m: Of, x: Tensor) -> Tensor:
        made = m.other(x)
        double_(made)
        return m.other(made)

    x = torch.eye(4, WIDTH)
    model = of(forward)
    with torch.no_grad():
        model.other.weight.copy_(torch.eye(WIDTH).flip(0))
        found = rewritten(model, x)
        assert torch.equal(found.gm(x), 2 * x)
    assert dtype(found, "linear") == torch.float32
    assert dtype(found, "linear_1") == found.low


def uses_of_weights(found: Rewritten) -> int:
    return sum(n.target is low_weight for n in found.gm.graph.nodes)


def test_a_weight_used_often_has_a_node_per_use() -> None:
    found = rewritten(lambda m, x: m.other(m.other(m.other(x))))
    assert kinds(found)["weight"] == 1
    assert uses_of_weights(found) == 3
    assert uses_of_weights(rewritten(lambda m, x: m.other(x))) == 0


@pytest.mark.parametrize("free", [True, False])
def test_a_view_of_a_weight_is_repeated_per_use(free: bool) -> None:
    """Whether the weight is cast (its cast is free) or its view, uses stay apart."""

    def function(m: Of, x: Tensor) -> Tensor:
        transposed = m.other.weight.t()
        return sum(x @ transposed for _ in range(12))

    found = rewritten(function, torch.ones(1, WIDTH), free_weights=free)
    views = [n for n in found.gm.graph.nodes if n.target is torch.ops.aten.t.default]
    assert {n.meta["val"].dtype for n in views} == {
        torch.bfloat16 if free else torch.float32
    }
    assert len(views) == (12 if free else 1)
    assert uses_of_weights(found) == 12
    assert kinds(found)["weight" if free else "down"] == (1 if free else 2)


def test_a_repeated_view_takes_no_name_of_another() -> None:
    """The original's nodes keep their names, by which everything is known of them."""

    def function(m: Of, x: Tensor) -> Tensor:
        for _ in range(2):
            turned = m.other.weight.t()
            x = x @ turned @ turned
            first, second = m.other.weight.chunk(2)
            x = torch.cat([x @ first.t(), x @ second.t(), x @ first.t()], -1)[:, 4:]
        return x

    found = rewritten(function, torch.ones(2, WIDTH), free_weights=True)
    before = {n.name: n.target for n in found.before.graph.nodes}
    after = {n.name: n.target for n in found.gm.graph.nodes}
    assert {n: t for n, t in after.items() if n in before}.items() <= before.items()
    assert len(after) > len(before)


@pytest.mark.parametrize("statistics", [True, False])
def test_a_norm_stays_fp32_if_its_statistics_are_read(statistics: bool) -> None:
    """Their dtype differs between CPU, meta and fake kernels where data is low."""

    def function(m: Of, x: Tensor) -> tuple[Tensor, ...]:
        norm = m.norm
        found = torch.native_layer_norm(m.fc(x), [WIDTH], norm.weight, norm.bias, 1e-5)
        return tuple(m.other(found[0]) * f for f in found[: 3 if statistics else 1])

    found = rewritten(function)
    assert ("native_layer_norm" in found.assignment.low) is not statistics
    values = found.gm(torch.ones(4, WIDTH))
    assert {v.dtype for v in values} == {torch.float32}


@pytest.mark.thorough(but=["weight-True", "view of turned-True", "turned piece-False"])
@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize(
    "view",
    [
        lambda w: w,
        lambda w: w.t(),
        lambda w: w.t().unsqueeze(0).squeeze(0),
        lambda w: w.t().chunk(1, 1)[0],
        lambda w: w.chunk(1, 0)[0].t(),
    ],
    ids=["weight", "turned", "view of turned", "piece of turned", "turned piece"],
)
def test_the_gradient_of_a_weight_used_often_is_exact(
    free: bool, view: Callable[[Tensor], Tensor]
) -> None:
    """Gradients 2048 and 21 times 1: one shared bf16 cast would lose the ones."""

    def function(m: Of, x: Tensor) -> Tensor:
        seen = view(m.other.weight)
        return sum((x @ seen for _ in range(21)), (2048 * x) @ seen)

    model, x = of(function), torch.ones(1, WIDTH)
    found = rewritten(model, x, free_weights=free)
    assert uses_of_weights(found) == 22
    found.gm(x).sum().backward()
    assert model.other.weight.grad.unique().tolist() == [2048 + 21]


def test_a_trained_table_stays_fp32_and_a_frozen_one_need_not() -> None:
    ids = torch.arange(6)
    found = rewritten(lambda m, i: m.fc(m.table(i)), ids)
    assert dtype(found, "embedding") is torch.float32
    why = found.assignment.decisions["embedding"].reason
    assert "adds up the gradients of each row" in why
    model = of(lambda m, i: m.fc(m.table(i)))
    model.requires_grad_(False)
    frozen = rewritten(model, ids)
    assert not frozen.classified.verdicts["embedding"].pinned


# -- streams and returned values -------------------------------------------------------


def test_residual_sums_stay_fp32() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + m.fc(m.norm(x)).relu()
        return m.other(x)

    found = rewritten(function)
    sums = [n for n in found.assignment.decisions if n.startswith("add")]
    assert len(sums) == 3
    for name in sums:
        assert dtype(found, name) is torch.float32
        assert found.assignment.decisions[name].origin == "type promotion"
    assert all(
        dtype(found, n) is torch.bfloat16
        for n in found.assignment.decisions
        if n.startswith("linear")
    )


@pytest.mark.parametrize("what", ["table", "norm", "token"])
def test_what_begins_a_residual_stream_stays_fp32(what: str) -> None:
    """Also where its weights are frozen, and would cost nothing low."""

    def function(m: Of, x: Tensor) -> Tensor:
        if what == "table":
            x = m.table(torch.arange(6))
        elif what == "norm":
            x = m.norm(m.table(torch.arange(6)))
        else:
            x = torch.cat([m.table.weight[:1], m.other(x)])
        x = x + m.fc(x).relu()
        return m.other(x)

    model = of(function)
    model.requires_grad_(False)
    found = rewritten(model, free_weights=True)
    name = {"table": "embedding", "norm": "layer_norm", "token": "cat"}[what]
    for op in (name, "add"):
        assert dtype(found, op) is torch.float32
    asked = rewritten(model, free_weights=True, allow=[name])
    assert not asked.classified.verdicts[name].pinned


def test_a_users_allow_outranks_the_residual_stream() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(x + m.fc(m.norm(x)))

    assert rewritten(function).classified.verdicts["add"].pinned
    found = rewritten(function, allow=("add",))
    assert dtype(found, "add") is torch.bfloat16


def test_a_sum_of_two_branches_is_no_stream() -> None:
    found = rewritten(lambda m, x: m.other(m.fc(x) + m.other(x)))
    assert not found.classified.verdicts["add"].pinned


def test_a_value_returned_and_used_has_a_gradient() -> None:
    """Grad-CAM: the gradient of the loss with respect to an inner activation."""

    def function(m: Of, x: Tensor) -> tuple[Tensor, Tensor]:
        features = m.fc(x)
        return m.other(features.relu()).sum(), features

    x = torch.randn(4, WIDTH, requires_grad=True)
    model = of(function)
    found = rewritten(model, x)
    assert "linear" in found.assignment.low
    loss, features = found.gm(x)
    assert features.dtype is torch.float32
    (gradient,) = torch.autograd.grad(loss, features)
    reference_loss, reference = function(model, x)
    (expected,) = torch.autograd.grad(reference_loss, reference)
    assert gradient.dtype is torch.float32
    assert torch.allclose(gradient, expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_user_casts_are_boundaries(low: str) -> None:
    found = rewritten(lambda m, x: m.fc(x).float().add(1), precision=low)
    assert found.gm(torch.randn(4, WIDTH)).dtype is torch.float32
    boundary = rewritten(lambda m, x: m.fc(x.to(torch.bfloat16).float()))
    fixed = [
        d for d in boundary.assignment.decisions.values() if "boundary" in d.reason
    ]
    assert len(fixed) == 1
    assert not fixed[0].low


NEAR_TIES = torch.tensor([[1.001, 1.002, 1.0, 1.003, 0.9, 0.8, 0.7, 0.6]])


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.topk(2),
        lambda x: x.sort(descending=True),
        lambda x: x.max(-1, keepdim=True),
        lambda x: (x.floor(), x.argmax(-1)),
        lambda x: (torch.div(x, 0.001, rounding_mode="floor"), x > 1),
    ],
    ids=["topk", "sort", "max", "floor", "div"],
)
def test_nothing_is_rounded_before_it_is_chosen_or_cut(
    choose: Callable[[Tensor], Any],
) -> None:
    """1.001, 1.002 and 1.003 are one number in bf16."""

    def function(m: Of, x: Tensor) -> tuple[Tensor, Tensor]:
        chosen, which = choose(x)
        return chosen[:1] @ chosen[:1].t(), which

    x = NEAR_TIES - 0.002 * (choose(NEAR_TIES)[1].dtype is torch.bool)
    found = rewritten(function, x)
    assert found.casts
    expected = function(of(function), x)
    low_copy = choose(x)[0][0].bfloat16().float()
    assert torch.equal(found.gm(x)[1], expected[1])
    assert torch.equal(
        found.gm(x)[0], (low_copy @ low_copy).bfloat16().float().view(1, 1)
    )


@pytest.mark.parametrize("read", [1, 3])
def test_the_statistics_of_a_norm_are_fp32_where_they_are_read(read: int) -> None:
    def function(m: Of, x: Tensor) -> Any:
        found = torch.native_layer_norm(m.fc(x), [WIDTH], None, None, 1e-5)
        return m.other(found[0]), *found[1:read]

    found = rewritten(function)
    x = torch.randn(4, WIDTH)
    assert [t.dtype for t in found.gm(x)] == [torch.float32] * read
    assert ("native_layer_norm" in found.assignment.low) == (read == 1)


def test_running_statistics_made_in_the_graph_get_their_writes() -> None:
    def function(m: Of, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = y.clone(), y.clone()
        functional.batch_norm(x, mean, var, training=True, momentum=1.0)
        return mean, m.fc(x)

    x = torch.randint(-3, 4, (4, WIDTH)).float()
    found = rewritten(function, x, torch.zeros(WIDTH), allow=["clone"])
    assert torch.equal(found.gm(x, torch.zeros(WIDTH))[0], x.mean(0))


def test_pieces_whose_number_is_data_run_low() -> None:
    """No fake tensor can tell the pieces' sizes; those seen while tracing serve."""

    def function(m: Of, x: Tensor) -> Any:
        first, second = torch.tensor_split(m.fc(x), torch.tensor(2))
        return m.other(first), second

    found = rewritten(function)
    assert "tensor_split" in found.assignment.low
    x = torch.randn(4, WIDTH)
    assert [t.shape for t in found.gm(x)] == [(2, WIDTH), (2, WIDTH)]
