"""What applying an assignment writes: literals, dtypes, copies, names, metadata."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autoamp
from autoamp.graph_functions import low_uses, low_weight, saturating_cast
from autoamp.options import Options
from autoamp.pipeline.run import rewrite_graph
from autoamp.rewrite.emitted import CAST_KIND, Cast
from autoamp.rewrite.rewritten import Rewritten
from tests.small_models import rewriting
from tests.strategies import capture

ATEN = torch.ops.aten
WIDTH = 8
FP16_MAX = 65504.0


class Of(nn.Module):
    """A model of one function and two products with a permutation."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)
        for layer in (self.fc, self.other):
            layer.weight.data.copy_(torch.eye(WIDTH).flip(0))

    def forward(self, *args: Tensor) -> Any:
        return self.function(self, *args)


rewritten = rewriting(Of, lambda: torch.arange(32.0).view(4, WIDTH), "fp16", grad=False)


def nodes(found: Rewritten, target: Any) -> list[fx.Node]:
    return [n for n in found.gm.graph.nodes if n.target is target]


def the(found: Rewritten, target: Any) -> fx.Node:
    (only,) = nodes(found, target)
    return only


# -- literals and dtype arguments ------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "written"),
    [
        (1e6, FP16_MAX),
        (-1e6, -FP16_MAX),
        (3.5, 3.5),
        (math.inf, math.inf),
        (-math.inf, -math.inf),
    ],
)
def test_fillings_beyond_the_range_are_the_largest(
    number: float, written: float
) -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(m.fc(x).masked_fill(x > 1, number))

    found = rewritten(function)
    fill = the(found, ATEN.masked_fill.Scalar)
    assert fill.meta["val"].dtype is torch.float16
    assert fill.args[2] == written
    high = rewritten(function, deny=("masked_fill",))
    assert the(high, ATEN.masked_fill.Scalar).args[2] == number


@pytest.mark.parametrize(
    ("make", "op"),
    [
        (torch.zeros_like, ATEN.zeros_like.default),
        (lambda x: x.new_full((4, WIDTH), 2.0), ATEN.new_full.default),
        (lambda x: torch.ones(4, WIDTH), ATEN.ones.default),
    ],
)
def test_a_tensor_made_from_nothing_is_told_its_dtype(
    make: Callable[[Tensor], Tensor], op: Any
) -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(m.fc(x) * make(x))

    name = op._schema.name.removeprefix("aten::")
    for kind, dtype in (("allow", torch.float16), ("deny", torch.float32)):
        found = rewritten(function, **{kind: [name]})
        assert the(found, op).kwargs["dtype"] is dtype
        assert the(found, op).meta["val"].dtype is dtype


def test_a_tensor_of_whole_numbers_is_made_as_it_was() -> None:
    found = rewritten(lambda m, x: m.fc(x) + torch.ones(4, WIDTH, dtype=torch.long))
    assert the(found, ATEN.ones.default).kwargs["dtype"] is torch.long


def test_other_arguments_stay_as_they_were() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(functional.gelu(m.fc(x), approximate="tanh"))

    gelu = the(rewritten(function, allow=("gelu",)), ATEN.gelu.default)
    assert gelu.meta["val"].dtype is torch.float16
    assert gelu.kwargs == {"approximate": "tanh"}


# -- results ---------------------------------------------------------------------------


def test_each_result_of_several_has_its_own_dtype() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        values, indices = m.fc(x).sort(-1)
        return m.other(values + indices)

    found = rewritten(function, allow=("sort", "add"))
    sort = nodes(found, ATEN.sort.default) or nodes(found, ATEN.sort.stable)
    values, indices = sort[0].meta["val"]
    assert (values.dtype, indices.dtype) == (torch.float16, torch.long)
    pieces = {n.args[1]: n.meta["val"].dtype for n in sort[0].users}
    assert pieces == {0: torch.float16, 1: torch.long}


def test_metadata_of_the_original_is_kept() -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        return m.other(m.fc(x).relu())

    gm = capture(Of(function).requires_grad_(False), 1)
    gm.meta["mine"] = 1
    given = (torch.zeros(4, WIDTH),)
    options = Options(precision="fp16", do_no_harm=False)
    found = rewrite_graph(gm, given, options, torch.float16)
    before = {n.name: n for n in found.before.graph.nodes}
    for node in found.gm.graph.nodes:
        if node.name in before:
            assert node.meta.keys() == before[node.name].meta.keys()
            assert node.stack_trace == before[node.name].stack_trace
    assert found.gm.meta == found.before.meta


# -- casts -----------------------------------------------------------------------------


def test_a_cast_says_what_it_is_and_where_it_was_made_for() -> None:
    found = rewritten(lambda m, x: m.fc(x).exp(), deny=("exp",))
    casts = {c.name: c for c in found.casts}
    assert list(casts.values()) == [
        Cast("x0_fp16", "down", "x0", torch.float16, 2 * 4 * WIDTH),
        Cast(
            "model_fc_weight_fp16", "weight", "model_fc_weight", torch.float16, 2 * 64
        ),
        Cast("model_fc_bias_fp16", "weight", "model_fc_bias", torch.float16, 2 * WIDTH),
        Cast("linear_fp32", "up", "linear", torch.float32, 4 * 4 * WIDTH),
    ]
    for node in found.gm.graph.nodes:
        assert node.meta.get(CAST_KIND) == getattr(casts.get(node.name), "kind", None)
        if node.name == "linear_fp32":
            assert node.meta["val"].dtype is torch.float32
            assert node.kwargs == {"dtype": torch.float32}


def test_only_what_may_hold_extremes_saturates() -> None:
    def function(m: Of, x: Tensor, mask: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(x, x, x, mask)

    given = torch.zeros(1, 4, WIDTH), torch.zeros(4, 4)
    found = rewritten(function, *given, allow=("scaled_dot_product_attention",))
    kinds = {n.name: n.target for n in found.gm.graph.nodes if CAST_KIND in n.meta}
    assert kinds["x0_fp16"] is ATEN._to_copy.default
    assert kinds["x1_fp16"] is saturating_cast
    node = the(found, saturating_cast)
    assert node.args[1] is torch.float16
    lowest = torch.full((4, 4), torch.finfo(torch.float32).min)
    assert found.gm(torch.zeros(1, 4, WIDTH), lowest).isfinite().all()


def test_a_written_weight_is_cast_where_it_is_read() -> None:
    """A copy made before the graph runs would miss the write."""

    def function(m: Of, x: Tensor) -> Tensor:
        first = functional.linear(x, m.other.weight)
        m.other.weight.neg_()
        return first + functional.linear(x, m.other.weight)

    found = rewritten(function)
    kinds = {c.value: c.kind for c in found.casts if c.kind != "up"}
    assert kinds == {"x0": "down", "model_other_weight": "down", "neg_": "down"}
    x = torch.arange(32.0).view(4, WIDTH)
    assert torch.equal(found.gm(x), torch.zeros(4, WIDTH))


def test_a_value_returned_twice_is_cast_once() -> None:
    found = rewritten(lambda m, x: (y := m.fc(x), y))
    first, second = found.gm.graph.output_node().args[0]
    assert first is second
    assert first.name == "linear_fp32"
    assert sum(c.kind == "up" for c in found.casts) == 1


def test_what_is_returned_in_fp32_is_not_cast() -> None:
    found = rewritten(lambda m, x: (m.fc(x).exp(), x), deny=("exp",))
    names = [n.name for n in found.gm.graph.output_node().args[0]]
    assert names == ["exp", "x0"]


# -- copies by layout ------------------------------------------------------------------


def copied(write: bool, m: Of, x: Tensor) -> tuple[Tensor, Tensor]:
    """`reshape` copies here: the left half of the rows has gaps."""
    left = x[:, :4]
    flat = left.reshape(-1)
    if write:
        flat = flat.neg_()
    low = functional.linear(left, m.other.weight[:4, :4])
    return low, functional.linear(flat.view(4, 4), m.fc.weight[:4, :4])


@pytest.mark.parametrize("write", [True, False])
def test_a_copy_that_is_written_stays_a_copy(write: bool) -> None:
    """The cast has no gaps: of that `reshape` would be a view, and share the write."""

    def function(m: Of, x: Tensor) -> Any:
        return copied(write, m, x)

    lists = {"allow": ["reshape", "neg_", "slice"]}
    x = torch.arange(32.0).view(4, WIDTH)
    found = rewritten(function, x, **lists)
    assert the(found, ATEN.reshape.default).meta["val"].dtype is torch.float16
    assert len(nodes(found, ATEN.clone.default)) == write, "a view stays a view"
    for got, expected in zip(found.gm(x), function(Of(function), x), strict=True):
        assert torch.equal(got, expected)


def test_pieces_beside_a_returned_size_are_no_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither `unbind` nor a size is one tensor: no piece is taken for the size."""

    class Pieces(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, int]:
            left, right = self.fc(x).unbind(-2)
            return self.fc(left * right), x.shape[0] * 2

    model = autoamp.convert(Pieces(), precision="bf16", do_no_harm=False)
    for rows in (4, 5):  # the second size makes the size a value of the graph
        result, size = model(torch.randn(rows, 2, WIDTH))
        assert (result.shape, size) == ((rows, WIDTH), rows * 2)
    assert "failed check" not in caplog.text


@pytest.mark.parametrize("op", ["clone", "relu"])
def test_what_copies_anyway_is_not_copied_again(op: str) -> None:
    def function(m: Of, x: Tensor) -> Tensor:
        left = x[:, :4]
        own = getattr(left, op)().neg_()
        low = functional.linear(left, m.other.weight[:4, :4])
        return low + functional.linear(own, m.fc.weight[:4, :4])

    found = rewritten(function, allow=(op, "neg_", "slice"))
    assert the(found, ATEN.neg_.default).meta["val"].dtype is torch.float16
    assert len(nodes(found, ATEN.clone.default)) == (op == "clone")


# -- many uses -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uses", "grad", "nodes_of_their_own"), [(8, True, 0), (9, True, 9), (9, False, 0)]
)
def test_gradients_of_many_uses_meet_in_fp32(
    uses: int, grad: bool, nodes_of_their_own: int
) -> None:
    """Of two to eight uses behind one node, of more behind one each."""

    def function(m: Of, x: Tensor, weights: Tensor) -> Tensor:
        y = x.exp()
        return sum(y @ weights[i] for i in range(uses))

    given = torch.zeros(4, WIDTH, requires_grad=grad), torch.zeros(10, WIDTH, WIDTH)
    found = rewritten(function, *given, deny=("exp",))
    casts = [c for c in found.casts if c.value == "exp"]
    assert [c.kind for c in casts] == ["down"]
    shared = [n for n in nodes(found, low_uses) if n.args[0].name == "exp"]
    assert [n.args[2] for n in shared] == ([uses] if grad and uses <= 8 else [])
    own = [n for n in nodes(found, low_weight) if n.args[0].name == "exp"]
    assert len(own) == nodes_of_their_own
    for use in own:
        assert use.args[1].name == casts[0].name
        assert use.name.startswith(f"{casts[0].name}_use")
        assert CAST_KIND not in use.meta


@pytest.mark.parametrize("free", [True, False])
@pytest.mark.parametrize("piece", [True, False])
def test_a_view_of_a_weight_is_repeated_in_later_regions_too(
    free: bool, piece: bool
) -> None:
    """The view's cast serves them: a use of it has its gradient from the weight."""

    def function(m: Of, x: Tensor) -> Tensor:
        view = m.other.weight.chunk(2, 1)[0] if piece else m.other.weight.t()
        total = sum(x @ view for _ in range(3))
        with torch.no_grad():
            constant = x @ view
        return total + constant + sum(x @ view for _ in range(3))

    model = Of(function)
    gm, x = capture(model, 1), torch.ones(1, WIDTH)
    options = Options(precision="bf16", do_no_harm=False)
    found = rewrite_graph(gm, (x,), options, torch.bfloat16, free_weights=free)
    copies = [c.value for c in found.casts if c.value == "model_other_weight"]
    assert copies == ["model_other_weight"]
    products = nodes(found, ATEN.matmul.default)
    assert len({n.args[1] for n in products}) == 7
    assert len(nodes(found, low_weight)) == 6
    found.gm(x).sum().backward()
    half = model.other.weight.grad[:, : WIDTH // 2]
    assert half.unique().tolist() == [6.0]


def test_the_models_own_cast_reads_what_comes() -> None:
    found = rewritten(lambda m, x: m.fc(x).to(torch.float16) + 1)
    assert the(found, ATEN.to.dtype).args[0].name == "linear"
    assert {c.kind for c in found.casts} == {"down", "weight"}


def test_a_cast_is_in_the_module_and_at_the_line_of_what_it_casts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).exp()

    x = torch.zeros(4, WIDTH)
    gm = torch.export.export(Net(), (x,)).module()
    assert isinstance(gm, fx.GraphModule)
    options = Options(precision="fp16", do_no_harm=False, deny=("exp",))
    found = rewrite_graph(gm, (x,), options, torch.float16)
    by_name = {n.name: n for n in found.gm.graph.nodes}
    linear, cast = by_name["linear"], by_name["linear_fp32"]
    assert "self.fc(x)" in linear.stack_trace
    assert cast.stack_trace == linear.stack_trace
    assert cast.meta["nn_module_stack"] == linear.meta["nn_module_stack"]


def test_views_of_a_weight_that_are_repeated_keep_their_names() -> None:
    """A piece of a view of a weight: each use goes back to one of the weight."""

    def function(m: Of, x: Tensor) -> Tensor:
        piece = m.other.weight.t().chunk(2, 1)[0]
        return sum(x @ piece for _ in range(3))

    gm, x = capture(Of(function), 1), torch.ones(1, WIDTH)
    options = Options(precision="fp16", do_no_harm=False)
    found = rewrite_graph(gm, (x,), options, torch.float16, free_weights=True)
    for count, product in enumerate(nodes(found, ATEN.matmul.default), 1):
        piece = product.args[1]
        cut, turned = piece.args[0], piece.args[0].args[0]
        assert (piece.name, cut.name, turned.name) == (
            f"getitem_{count}",
            f"chunk_{count}",
            f"t_{count}",
        )
        (use,) = turned.args
        assert use.target is low_weight
        assert use.name.startswith("model_other_weight_fp16_use")
    assert count == 3
