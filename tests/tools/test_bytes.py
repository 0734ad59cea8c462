"""The counter of bytes against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.bytes import count_step, ways
from benchmarks.traffic import count_traffic
from benchmarks.ways import CPU_BF16
from tests.models import BY_NAME

BF16 = torch.bfloat16
X = torch.randn(10, 100)  # 4000 bytes
BIAS = torch.randn(100)  # 400 bytes
LOW = X.to(BF16)  # 2000 bytes
TABLE = torch.randn(50, 8)  # 1600 bytes, a row 32
IDS = torch.tensor([[1, 2, 3, 4], [1, 1, 1, 1], [0, 9, 9, 0]])  # 96 bytes
ROWS = torch.randn(3, 4, 8)  # 384 bytes, one row of TABLE for each of IDS
HEADS = torch.randn(1, 2, 8, 16)  # 1024 bytes


def moved(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes read and bytes written by a call."""
    traffic = count_traffic(call)
    return traffic.read.total(), traffic.written.total()


def fresh() -> Tensor:
    return X.clone()


@pytest.mark.parametrize(
    ("call", "read", "written"),
    [
        (X.relu, 4000, 4000),
        (lambda: X + BIAS, 4400, 4000),
        (lambda: X + BIAS.expand(10, 100), 4400, 4000),
        (lambda: X + X, 4000, 4000),
        (lambda: X + X.view(100, 10).view(10, 100), 4000, 4000),
        (lambda: LOW + X, 6000, 4000),
        (lambda: X.sum(0), 4000, 400),
        (lambda: BIAS.expand(10, 100).clone(), 400, 4000),
        (lambda: X.t().contiguous(), 4000, 4000),
        (X[:, :50].clone, 2000, 2000),
        (lambda: torch.cat([X, X[:5]]), 6000, 6000),
        (lambda: torch.zeros(10, 100), 0, 4000),
        (lambda: torch.full_like(X, 3), 0, 4000),
    ],
)
def test_an_operator_reads_its_inputs_and_writes_its_outputs(call, read, written):
    assert moved(call) == (read, written)


@pytest.mark.parametrize(
    "call",
    [
        lambda: X.view(100, 10).t()[3:].unsqueeze(0).expand(4, 7, 100),
        lambda: X.detach().split(5),
        X.contiguous,
        lambda: X.to(torch.float32),
        lambda: X.t().t_(),
        lambda: torch.empty(10, 100),
        lambda: torch.empty_like(X),
        lambda: X.new_empty(10),
        lambda: torch._lazy_clone(X),
        lambda: torch.empty(10, 100, device="meta") + 1,
    ],
)
def test_views_and_allocations_move_nothing(call: Callable[[], object]) -> None:
    assert moved(call) == (0, 0)


@pytest.mark.parametrize(
    ("write", "read", "written"),
    [
        (lambda t: t.add_(X), 8000, 4000),
        (lambda t: t.add_(t), 4000, 4000),
        (lambda t: t.mul_(2), 4000, 4000),
        (lambda t: t[:5].mul_(2), 2000, 2000),
        (lambda t: t.zero_(), 0, 4000),
        (lambda t: t.normal_(), 0, 4000),
        (lambda t: t.copy_(LOW), 2000, 4000),
        (lambda t: t.copy_(BIAS), 400, 4000),
        (lambda t: torch.mul(X, 2, out=t), 4000, 4000),
        (lambda t: torch._foreach_mul_([t, t[:0]], 2), 4000, 4000),
        (lambda t: torch._foreach_copy_([t], [LOW]), 2000, 4000),
        (lambda t: torch._foreach_add_([t[:5], t[5:]], [X[:5], X[5:]]), 8000, 4000),
    ],
)
def test_in_place(write: Callable[[Tensor], object], read: int, written: int) -> None:
    target = fresh()
    assert moved(lambda: write(target)) == (read, written)


def test_lookups_read_the_rows_they_take() -> None:
    assert moved(lambda: functional.embedding(IDS, TABLE)) == (96 + 384, 384)
    assert moved(lambda: TABLE[IDS]) == (96 + 384, 384)
    ids = torch.tensor([0, 0])
    assert moved(lambda: TABLE.index_select(0, ids)) == (16 + 64, 64)
    columns = torch.zeros(50, 1, dtype=torch.int64)
    assert moved(lambda: TABLE.gather(1, columns)) == (400 + 200, 200)


def test_scatters_touch_a_part() -> None:
    table, index = TABLE.clone(), [IDS]
    assert moved(lambda: table.index_put_(index, ROWS)) == (96 + 384, 384)
    add = partial(table.index_put_, index, ROWS, accumulate=True)
    assert moved(add) == (96 + 384 + 384, 384)
    # The functional call copies the table first.
    assert moved(lambda: table.index_put(index, ROWS)) == (
        1600 + 96 + 384,
        1600 + 384,
    )
    columns = torch.zeros(50, 1, dtype=torch.int64)  # 400 bytes, 50 elements
    ones = torch.ones(50, 1)  # 200 bytes
    assert moved(lambda: table.scatter_(1, columns, ones)) == (600, 200)
    assert moved(lambda: table.scatter_add_(1, columns, ones)) == (800, 200)
    rows = torch.tensor([0, 0, 1])  # 24 bytes; three rows are 96
    assert moved(lambda: table.index_add_(0, rows, ROWS[0, :3])) == (24 + 192, 96)
    mask = torch.zeros(50, dtype=torch.bool)  # 50 bytes
    mask[:3] = True
    three = ROWS[0, :3]
    assert moved(lambda: table.index_put_([mask], three)) == (50 + 96, 96)


def test_backward_of_a_lookup() -> None:
    table = TABLE.clone().requires_grad_()
    out = functional.embedding(IDS, table)
    # A table of zeros; the gradient's rows are added to its rows.
    assert moved(lambda: out.backward(ROWS)) == (96 + 384 + 384, 1600 + 384)


def test_backward_of_a_slice_writes_zeros_and_the_gradient() -> None:
    x = fresh().requires_grad_()
    out = x[:5]
    assert moved(lambda: out.backward(X[:5])) == (2000, 4000 + 2000)


def test_fused_kernels_count_inputs_and_outputs() -> None:
    norm = partial(functional.layer_norm, X, (100,), BIAS, BIAS + 1)
    # The data and two parameters;
    # the result, a mean and a deviation for each row.
    assert moved(norm) == (4000 + 800, 4000 + 80)
    assert moved(partial(functional.gelu, LOW)) == (2000, 2000)
    attention = partial(functional.scaled_dot_product_attention, HEADS, HEADS + 1)
    value = HEADS + 2
    # Query, key and value; the result and a logsumexp for each of the 16 queries.
    assert moved(lambda: attention(value)) == (3 * 1024, 1024 + 64)


def test_loss_reads_one_element_a_target() -> None:
    scores = torch.randn(6, 50).log_softmax(1).requires_grad_()
    target = torch.arange(6)  # 48 bytes
    losses = partial(functional.nll_loss, scores, target)
    assert moved(losses) == (48 + 24, 4 + 4)  # the loss, and the sum of the weights
    loss = losses()
    one = torch.ones(())
    assert moved(lambda: loss.backward(one)) == (4 + 48 + 4, 1200 + 24)


def _linear() -> tuple[Tensor, Tensor, Tensor]:
    """Data of 160 bytes in fp32, a weight of 48 and a bias of 12."""
    weight = torch.randn(3, 4, requires_grad=True)
    return torch.randn(10, 4), weight, torch.randn(3, requires_grad=True)


def test_a_linear_forward_and_backward() -> None:
    x, weight, bias = _linear()
    gradient = torch.randn(10, 3)  # 120 bytes, as the result
    traffic = count_traffic(
        lambda: functional.linear(x, weight, bias).backward(gradient)
    )
    assert traffic.bytes("forward") == 160 + 48 + 12 + 120
    of_weight, of_bias = 120 + 160 + 48, 120 + 12
    assert traffic.bytes("backward") == of_weight + of_bias
    assert traffic.bytes() == 340 + 460


def test_the_casts_of_autocast() -> None:
    x, weight, bias = _linear()
    with torch.autocast("cpu", BF16):
        traffic = count_traffic(lambda: functional.linear(x, weight, bias))
    casts = (160 + 80) + (48 + 24) + (12 + 6)
    by_op = {line.op: count for line, count in traffic.by_line().items()}
    assert by_op["_to_copy"] == casts
    assert traffic.bytes() == casts + (80 + 24 + 6 + 60)


def test_composite_operators_are_taken_apart_in_inference_mode() -> None:
    scores, target = torch.randn(6, 50), torch.arange(6)  # 1200 and 48 bytes
    with torch.inference_mode():
        loss = moved(lambda: functional.cross_entropy(scores, target))
    # A log_softmax, and a loss that reads 6 of its elements.
    assert loss == (1200 + 48 + 24, 1200 + 8)


def test_beta_of_zero_reads_no_bias() -> None:
    bias, a, b = torch.randn(3), torch.randn(10, 4), torch.randn(4, 3)
    assert moved(lambda: torch.addmm(bias, a, b, beta=0)) == (160 + 48, 120)
    assert moved(lambda: torch.addmm(bias, a, b)) == (12 + 160 + 48, 120)


def test_batch_norm_moves_its_statistics() -> None:
    x = torch.randn(2, 3, 5, 5)  # 600 bytes
    mean, variance = torch.zeros(3), torch.ones(3)
    norm = partial(functional.batch_norm, x, mean, variance)
    assert moved(partial(norm, training=False)) == (624, 600)
    # Both saved statistics and both running ones are written.
    assert moved(partial(norm, training=True)) == (624, 600 + 24 + 24)


def test_a_converted_step_refreshes_all_its_copies_and_repeats() -> None:
    case = BY_NAME["mlp"]
    counts = {way: count_step(case, way) for way in ways(CPU_BF16)}
    ours = counts["autoamp"]
    weights = list(case.model().parameters())
    assert ours.refreshed == len(weights)
    refresh = [line for line in ours.traffic.calls if line.op == "_foreach_copy_"]
    assert [line.phase for line in refresh] == ["forward"]
    moved_by_it = sum(ours.traffic.by_line()[line] for line in refresh)
    assert moved_by_it == sum(w.numel() for w in weights) * (4 + 2)
    assert count_step(case, "autoamp").traffic == ours.traffic
    steps = {way: count.traffic.bytes() for way, count in counts.items()}
    assert steps["bfloat16"] < steps["fp32"] / 1.8
    assert steps["autoamp"] != steps["fp32"]
    both = {line.dtypes for line in ours.traffic.calls if line.op == "addmm"}
    assert both == {"bf16"}
