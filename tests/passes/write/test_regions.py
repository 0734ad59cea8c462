"""Autocast regions of the model's own keep the dtypes and the numbers they have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import relative_error

WIDTH = 16
CLOSE = 0.02  # bf16 rounding of a few layers


class Layers(nn.Module):
    """Two layers, and a program that calls them."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.program = program

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.program(self, x)


Program = Callable[[Layers, Tensor], tuple[Tensor, ...]]


def region(enabled: bool = True, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    return torch.autocast("cpu", dtype, enabled=enabled)


def on(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region():
        z = m.first(x)
        y = z.new_ones(WIDTH)
        return z, y, z + x, torch.zeros_like(z), z.softmax(-1), torch.cat([z, x])


def off(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region(False):
        return m.second(m.first(x)), m.first(x) * 2


def fp16(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region(dtype=torch.float16):
        z = m.first(x)
    with region():
        return z, m.second(z), z + m.second(z)


def written(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region():
        z = m.first(x)
        z += 1
        y = torch.empty_like(z)
        y.copy_(x)
        loss = functional.mse_loss(z, x)
        return z, y, functional.layer_norm(z, (WIDTH,)), loss


def nested(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region():
        z = m.first(x)
        with region(False):
            y = m.second(z.float())
        return z, y, y @ z.t(), y + z


def checkpointed_on(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region():
        z = checkpoint(lambda t: m.second(m.first(t)).tanh(), x, use_reentrant=False)
    return z, torch.zeros_like(z)


def checkpointed_off(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region(False):
        z = checkpoint(lambda t: m.second(m.first(t)), x, use_reentrant=False)
    return (z,)


def in_a_checkpoint(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    def body(t: Tensor) -> tuple[Tensor, ...]:
        with region():
            z = m.first(t)
        with region(False):
            y = checkpoint(lambda u: m.second(u.float()), z, use_reentrant=False)
        return z, y, torch.ones_like(z)

    return checkpoint(body, x, use_reentrant=False)


def branch_off(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    with region(False):
        z = torch.cond(x.sum() > 0, lambda t: m.second(m.first(t)), m.first, (x,))
    return (z,)


def in_a_branch(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    def branch(t: Tensor) -> tuple[Tensor, ...]:
        with region():
            z = m.first(t)
        with region(False):
            return z + 1, torch.zeros_like(z), m.second(t)

    return torch.cond(x.sum() > 0, branch, branch, (x,))


def read_outside(m: Layers, x: Tensor) -> tuple[Tensor, ...]:
    h = m.first(x)
    with region():
        z = m.second(h)
    return h, z, z + h, torch.zeros_like(z), z.new_zeros(2), torch.cat([z, h]), x.to(z)


ALL_INSIDE: list[Program] = [
    on,
    off,
    fp16,
    written,
    nested,
    checkpointed_on,
    checkpointed_off,
    in_a_checkpoint,
    branch_off,
    in_a_branch,
]


def both(
    program: Program, precision: str, training: bool
) -> list[tuple[tuple[Tensor, ...], list[Tensor]]]:
    """The results and the gradients of a model: as it is, and converted."""
    torch.manual_seed(0)
    model, x = Layers(program), torch.randn(4, WIDTH)
    found = []
    for convert in (False, True):
        if convert:
            autoamp.convert(model, precision=precision, do_no_harm=False, strict=True)
        with torch.set_grad_enabled(training):
            results = model(x)
        if training:
            sum(r.double().sum() for r in results if r.requires_grad).backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        found.append(([r.detach() for r in results], [g.clone() for g in grads]))
        model.zero_grad()
    return found


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("program", ALL_INSIDE, ids=lambda p: p.__name__)
def test_a_region_of_the_models_own_is_left_to_it(
    program: Program, precision: str
) -> None:
    (expected, _), (found, _) = both(program, precision, training=False)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("program", ALL_INSIDE, ids=lambda p: p.__name__)
def test_a_model_trains_in_its_own_regions(program: Program) -> None:
    (expected, true_grads), (found, grads) = both(program, "bf16", training=True)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert all(map(torch.equal, found, expected))
    assert len(grads) == len(true_grads) > 0
    assert relative_error(grads, true_grads) < 1e-6  # sums in another order


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_what_reads_a_regions_results_has_the_dtypes_it_had(
    precision: str, training: bool
) -> None:
    (expected, _), (found, _) = both(read_outside, precision, training)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < CLOSE
