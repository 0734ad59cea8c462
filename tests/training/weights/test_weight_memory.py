"""What else holds a weight's memory keeps holding it, and its writes are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import get_context

from autoamp import compat
from tests.small_models import WIDTH, converted, mlp
from tests.training.weights.test_weights import CLOSE, error_now, graphs, refreshed


def unwatched(model: nn.Module) -> int:
    return sum(g.copies.unwatched for g in graphs(model) if g.copies is not None)


def test_caching_comes_back_when_the_array_is_gone() -> None:
    model, x = converted(mlp()).eval(), torch.randn(3, WIDTH)
    with torch.inference_mode():
        arrays = [p.detach().numpy() for p in model.parameters()]
        for _ in range(3):
            model(x)
        assert refreshed(model) == 3 * len(arrays)
        assert unwatched(model) == len(arrays)
        del arrays
        model(x)
        assert unwatched(model) == 0
        before = refreshed(model)
        for _ in range(3):
            model(x)
        assert refreshed(model) == before


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p.data_ptr(),
        lambda p: p.detach().numpy().sum(),
        lambda p: p.untyped_storage().data_ptr(),
        lambda p: torch.from_dlpack(p.detach()).sum(),
    ],
    ids=["data_ptr", "numpy", "storage", "dlpack"],
)
def test_a_look_at_the_memory_costs_one_refresh(look: Callable[[Tensor], Any]) -> None:
    model, x = converted(mlp()).eval(), torch.randn(3, WIDTH)
    weights = list(model.parameters())
    with torch.no_grad():
        for _ in range(5):
            model(x)
            before = refreshed(model)
            for p in weights:
                look(p)
            for _ in range(3):
                model(x)
            assert refreshed(model) - before == len(weights)


def _hogwild(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.fill_(0.125)


def test_weights_moved_to_shared_memory_after_the_first_call() -> None:
    model, x = converted(mlp()), torch.randn(3, WIDTH)
    model(x).sum().backward()
    model.share_memory()
    assert error_now(model, x) < CLOSE
    plain = mlp()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        p.data = q.data
    worker = get_context("fork").Process(target=_hogwild, args=(plain,))
    worker.start()
    worker.join()
    assert all(bool((p == 0.125).all()) for p in model.parameters())
    assert error_now(model, x) < CLOSE


def test_lazy_clones_are_only_of_plain_unshared_memory() -> None:
    # Can the check above fail?  A held array forbids the clone, a free tensor does not.
    free = nn.Parameter(torch.randn(4))
    assert compat.held_alone(free)
    array = free.detach().numpy()
    assert not compat.held_alone(free)
    del array
    assert compat.held_alone(free)
    part = nn.Parameter(torch.empty(0))
    part.data = torch.randn(8)[:4]  # a write would copy all eight
    assert not compat.held_alone(part)
    frozen = torch.randn(4)
    capsule = np.from_dlpack(frozen)
    assert not compat.held_alone(frozen)
    del capsule
    assert compat.held_alone(frozen)
    assert not compat.held_alone(torch.eye(3).to_sparse())
