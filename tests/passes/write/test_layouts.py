"""Convolutions with the channels last: chosen by a cut, and not seen from outside.

That results, gradients and strides are those of the model is held by the rows of
tests/table/layouts.py, and golden/layouts.txt of tests/passes shows the graphs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoamp
from tests.metrics import relative_error, saved_bytes
from tests.small_models import Of, converted
from tests.table import layouts
from tests.table.rows import ROWS

pytestmark = pytest.mark.usefixtures("bf16_units")


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ROWS[f"layouts/{name}"].model()


def image(batch: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, *layouts.IMAGE[1:], generator=generator)


def stepped(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The result of a training step and the gradients of the parameters."""
    result = model(x)
    result.double().square().mean().backward()
    return [
        result.detach(),
        *(p.grad for p in model.parameters() if p.grad is not None),
    ]


def laid(model: nn.Module) -> tuple[int, int]:
    """The convolutions with their channels last, and the changes of layout."""
    graphs = [gm.graph for gm in autoamp.report(model).graphs]
    nodes = [n for graph in graphs for n in graph.nodes if n.op == "call_function"]
    last = "autoamp_channels_last"
    return (
        sum(last in n.meta and "conv" in str(n.target) for n in nodes),
        sum(getattr(n.target, "__name__", "") == "laid_out" for n in nodes),
    )


LAID = {
    "residual_blocks": (2, 2),
    "u_net": (4, 2),
    "gated_depthwise": (2, 2),
    "volumes": (2, 2),
    "checkpointed_blocks": (4, 2),
    "conv_next": (2, 1),
    "patches_of_swin": (1, 1),
    "channels_put_last_by_a_permutation": (2, 1),
    "layout_of_the_users": (1, 0),
}
"""The convolutions of each row that are laid out anew, and the changes of layout."""


@pytest.mark.parametrize(("width", "is_last"), [(13, True), (15, False)])
def test_wide_depthwise_filters_stay(width: int, is_last: bool) -> None:
    """OneDNN hangs on some that have their channels last."""
    wide = nn.Conv2d(16, 16, width, padding=width // 2, groups=16)
    model = converted(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), wide))
    model(torch.randn(4, 3, 40, 40)).sum().backward()
    nodes = [n for gm in autoamp.report(model).graphs for n in gm.graph.nodes]
    (found,) = (n for n in nodes if "depthwise" in str(n.target))
    assert found.meta.get("autoamp_channels_last", False) == is_last


@pytest.mark.parametrize("name", LAID)
def test_convolutions_have_their_channels_last(name: str) -> None:
    model = model_of(name)
    keys = [*model.state_dict()]
    converted(model)(ROWS[f"layouts/{name}"].inputs()[0])
    assert laid(model) == LAID[name]
    assert [*model.state_dict()] == keys
    assert all(p.is_contiguous() for p in model.state_dict().values())


def large_weight() -> nn.Module:
    """Its copy and its gradient would be permuted at each step of a training."""
    return nn.Sequential(nn.AvgPool2d(16), nn.Conv2d(3, 1024, 3))


def test_no_value_is_kept_in_two_layouts() -> None:
    """A relu keeps its result, and the convolution behind it keeps what it reads.

    They are one value where the image is permuted in front of the relu.
    """
    blocks: list[nn.Module] = [nn.Linear(64, 64, bias=False)]
    for _ in range(3):
        blocks += [nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, bias=False)]
    model = converted(nn.Sequential(*blocks))
    x = torch.randn(4, 32, 64, 64)
    model(x).sum().backward()
    assert laid(model) == (3, 2)  # of what the linear layer gives, and of the result
    kept = saved_bytes(lambda: model(x), model.parameters())
    # What the linear layer reads, and three results; copies of weights are few.
    assert kept.total // (2 * x.numel()) == 1 + 3


def of_the_users() -> nn.Module:
    return model_of("residual_blocks").to(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", [large_weight, of_the_users])
def test_what_gains_nothing_keeps_its_layout(make: Callable[[], nn.Module]) -> None:
    x = image()
    if make is of_the_users:
        x = x.to(memory_format=torch.channels_last)
    model = converted(make())
    model(x)
    assert laid(model) == (0, 0)


def test_a_device_that_gains_nothing_keeps_its_layouts(no_units: None) -> None:
    model = converted(model_of("residual_blocks"))
    model(image())
    assert laid(model) == (0, 0)


def cloned(model: nn.Module, x: Tensor, sizes: set[tuple[int, ...]]) -> int:
    """How many tensors of these sizes torch copies inside its calls in a step."""
    stepped(model, x)
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profiled:
        stepped(model, x)
    clones = [e for e in profiled.events() if e.name == "aten::clone"]
    return sum(tuple(e.input_shapes[0]) in sizes for e in clones)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("conv_next", {(4, 16, 16, 8), (4, 8, 16, 16)}),
        ("patches_of_swin", {(4, 256, 8), (4, 8, 256)}),
    ],
)
def test_a_norm_copies_no_rows_that_lie_in_memory(
    name: str, sizes: set[tuple[int, ...]]
) -> None:
    model, x = model_of(name), image()
    plain = converted(copy.deepcopy(model), fuse={"channels_last": False})
    assert cloned(plain, x, sizes) >= 2
    assert cloned(converted(model), x, sizes) == 0


def test_copies_are_refreshed_after_a_step_and_permuted_by_it() -> None:
    model, x = model_of("residual_blocks"), image()
    plain = copy.deepcopy(model)
    converted(model), converted(plain, fuse={"channels_last": False})
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            stepped(each, x)
            optimizer.step()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.stride() == other.stride()
        assert relative_error(mine, other) < 0.02


def test_weights_that_are_swapped_are_copied_again() -> None:
    model, x = model_of("residual_blocks").eval(), image()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.1)
    converted(model)
    with torch.no_grad():
        model(x)
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.data = new.data.clone()
        assert relative_error(model(x), other(x)) < 0.02
    assert laid(model) == (2, 2)


def test_a_weight_is_shared_in_both_layouts() -> None:
    def function(m: Any, x: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, m.weight)[:, :3]), m.weight)

    weight, x = nn.Parameter(torch.randn(8, 3, 3, 3)), image()
    plain = Of(function, weight=weight)
    ours = (
        converted(Of(function, weight=weight)),
        converted(Of(function, weight=weight), fuse=False),
    )
    for _ in range(2):
        for each in ours:
            assert relative_error(each(x), plain(x)) < 0.03
        with torch.no_grad():
            weight.mul_(1.5)


def test_a_batch_of_another_size_is_laid_out_too() -> None:
    model = converted(model_of("residual_blocks"))
    plain = autoamp.revert(copy.deepcopy(model))
    for batch in (4, 6, 7):
        given = image(batch)
        assert relative_error(model(given), plain(given)) < 0.05
    assert laid(model) == (4, 4)  # one graph for 4, one for any other number


def test_the_report_says_it() -> None:
    model = converted(model_of("residual_blocks"))
    model(image())
    report = autoamp.report(model)
    assert "9 ops run with channels last (2 changes of layout)." in str(report)
    assert "channels last" in report.why("conv2d")


def test_the_report_counts_the_copies_of_both_layouts(monkeypatch) -> None:
    model = converted(model_of("residual_blocks"))
    model(image())
    first = autoamp.report(model).cast_counts
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    with torch.no_grad():
        model(image())  # a graph of its own, with no layout of its own
    both = autoamp.report(model).cast_counts
    assert both.kept == first.kept
    assert first.kept_bytes < both.kept_bytes <= 2 * first.kept_bytes


def test_a_hook_sees_the_layout_of_the_model() -> None:
    seen: list[Any] = []
    model: Any = model_of("residual_blocks")
    model.first.register_forward_hook(lambda _, __, y: seen.append(y.stride()))
    model(image())
    converted(model)(image())
    assert seen[0] == seen[-1]


@pytest.mark.parametrize("grad", [False, True])
def test_an_image_is_permuted_after_its_cast(grad: bool) -> None:
    """Permuted in fp32, the image would move twice the bytes, in both directions."""
    model, x = converted(model_of("residual_blocks")), image().requires_grad_(grad)
    stepped(model, x)
    (gm,) = autoamp.report(model).graphs
    nodes = gm.graph.nodes
    laid_out = (n for n in nodes if getattr(n.target, "__name__", "") == "laid_out")
    moved = next(laid_out).meta["val"]
    assert (moved.dtype, moved.numel()) == (torch.bfloat16, x.numel())
    if grad:
        assert x.grad is not None
        assert x.grad.is_contiguous()
