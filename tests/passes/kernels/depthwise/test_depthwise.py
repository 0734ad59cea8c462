"""Depthwise convolutions of our own, beside torch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autoamp
from tests.metrics import relative_error
from tests.passes.kernels.door import depthwise
from tests.small_models import converted

CHANNELS = 3
PLAIN = {3: F.conv1d, 4: F.conv2d}


class Case(NamedTuple):
    """The sizes of images and filters, and how the filters move over the images."""

    image: tuple[int, ...]
    filters: tuple[int, ...]
    stride: list[int]
    padding: list[int]
    batch: int = 2


CASES = {
    "as wide as high": Case((9, 9), (7, 7), [1, 1], [3, 3]),
    "no padding": Case((9, 11), (5, 4), [1, 1], [0, 0]),
    "one number for both": Case((9, 11), (5, 5), [2], [2]),
    "steps": Case((12, 17), (5, 7), [2, 3], [1, 3]),
    "steps over whole filters": Case((7, 7), (7, 7), [8, 8], [3, 3]),
    "an image smaller than its filters": Case((2, 1), (5, 9), [1, 1], [2, 4]),
    "much padding": Case((3, 3), (3, 3), [1, 1], [4, 7]),
    "all is padding": Case((2, 2), (4, 5), [9, 9], [4, 8]),
    "many columns": Case((3, 40), (2, 13), [1, 1], [1, 6]),
    "a sequence": Case((20,), (4,), [1], [3]),
    "a sequence in steps": Case((20,), (9,), [2], [0]),
    "no images": Case((9, 9), (7, 7), [1, 1], [3, 3], batch=0),
}
LAYOUTS = ("first", "last", "neither")


def operands(case: Case, layout: str = "first") -> list[Tensor]:
    """The images, filters and bias of a case, in bf16."""
    torch.manual_seed(0)
    x = torch.randn(case.batch, CHANNELS, *case.image)
    if layout == "last":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    if layout == "neither":
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    weight, bias = torch.randn(CHANNELS, 1, *case.filters), torch.randn(CHANNELS)
    return [t.bfloat16().requires_grad_() for t in (x, weight, bias)]


def gradients(call: Any, case: Case, given: list[Tensor]) -> list[Tensor]:
    """The result, and the gradients of what needs one."""
    result = call(*given, case.stride, case.padding, [1], CHANNELS)
    torch.manual_seed(1)
    grad = torch.randn(result.shape).bfloat16().to(result.dtype)
    needing = [t for t in given if t.requires_grad]
    return [result, *torch.autograd.grad(result, needing, grad)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_torch(name: str, layout: str) -> None:
    case = CASES[name]
    given = operands(case, layout)
    plain = PLAIN[given[0].dim()]
    wide = [t.detach().double().requires_grad_() for t in given]
    found, exact = gradients(depthwise, case, given), gradients(plain, case, wide)
    torchs = gradients(plain, case, given)
    for ours, theirs, true in zip(found, torchs, exact, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        # Both round each number once.
        assert relative_error([ours], [true]) <= 2**-8


@pytest.mark.parametrize("needing", range(3))
def test_what_needs_no_gradient_has_none(needing: int) -> None:
    case = CASES["as wide as high"]
    given = [
        t.requires_grad_(at == needing) for at, t in enumerate(map(fresh, range(3)))
    ]
    found = gradients(depthwise, case, given)
    assert torch.equal(
        found[1], gradients(depthwise, case, operands(case))[1 + needing]
    )


def fresh(at: int) -> Tensor:
    return operands(CASES["as wide as high"])[at].detach()


def test_without_a_bias_and_without_gradients() -> None:
    case = CASES["as wide as high"]
    x, weight, _ = operands(case)
    given = x, weight, None, case.stride, case.padding, [1], CHANNELS
    result = depthwise(*given)
    result.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    with torch.no_grad():
        assert torch.equal(depthwise(*given), result)


# -- where it is called ----------------------------------------------------------------

IMAGE, SEQUENCE = (2, 8, 64, 64), (2, 8, 4096)
CALLED: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "wide": (nn.Conv2d(8, 8, 7, padding=3, groups=8), IMAGE, True),
    "four": (nn.Conv2d(8, 8, 4, groups=8, bias=False), IMAGE, True),
    "padded": (nn.Conv2d(8, 8, 3, padding=2, groups=8), IMAGE, True),
    "a sequence": (nn.Conv1d(8, 8, 9, padding=8, groups=8), SEQUENCE, True),
    "narrow": (nn.Conv2d(8, 8, (7, 3), padding=(3, 1), groups=8), IMAGE, False),
    "few": (nn.Conv2d(8, 8, 7, padding=3, groups=8), (1, 8, 8, 8), False),
    "dilated": (nn.Conv2d(8, 8, 7, dilation=2, groups=8), IMAGE, False),
    "two of each": (nn.Conv2d(8, 16, 7, groups=8), IMAGE, False),
    "groups of two": (nn.Conv2d(8, 8, 7, groups=4), IMAGE, False),
}


def is_called(model: nn.Module) -> bool:
    graphs = [gm.graph for gm in autoamp.report(model).graphs]
    return any(n.target is depthwise for graph in graphs for n in graph.nodes)


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("name", CALLED)
def test_it_is_called_where_torchs_backward_is_slow(name: str) -> None:
    layer, shape, called = CALLED[name]
    model = converted(layer)
    model(torch.randn(shape)).sum().backward()
    assert is_called(model) == called


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("options", [{"fuse": False}, {"precision": "fp16"}])
def test_it_is_not_called(options: dict[str, Any]) -> None:
    layer, shape, _ = CALLED["wide"]
    model = converted(layer, **options)
    model(torch.randn(shape))
    assert not is_called(model)
