"""What else holds a weight's memory keeps holding it, and its writes are seen."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing import get_context

from autoamp import compat
from tests.small_models import WIDTH, converted, mlp
from tests.weights.test_weights import CLOSE, MODES, error_now, graphs, refreshed

Write = Callable[[float], Any]


def unwatched(model: nn.Module) -> int:
    return sum(g.copies.unwatched for g in graphs(model) if g.copies is not None)


def numpy_array(model: nn.Module) -> tuple[Write, Callable[[], Tensor]]:
    """Writes the first weight through a numpy view made before; reads it so, too."""
    array = model[0].weight.detach().numpy()

    def write(value: float) -> None:
        array[:] = value

    return write, lambda: torch.from_numpy(array.copy())


def dlpack_capsule(model: nn.Module) -> tuple[Write, Callable[[], Tensor]]:
    array = np.from_dlpack(model[0].weight.detach())
    other = torch.from_dlpack(model[0].weight.detach())

    def write(value: float) -> None:
        other.fill_(value)

    return write, lambda: torch.from_numpy(array.copy())


def from_numpy(model: nn.Module) -> tuple[Write, Callable[[], Tensor]]:
    array = np.zeros((16, WIDTH), np.float32)
    model[0].weight = nn.Parameter(torch.from_numpy(array))

    def write(value: float) -> None:
        array[:] = value

    return write, lambda: torch.from_numpy(array.copy())


def mapped_file(model: nn.Module) -> tuple[Write, Callable[[], Tensor]]:
    path = Path(model.scratch) / "weights.pt"
    torch.save({"w": torch.zeros(16, WIDTH)}, path)
    loaded = torch.load(path, mmap=True)["w"]
    model[0].weight = nn.Parameter(loaded)
    return loaded.fill_, loaded.clone


def shared_memory(model: nn.Module) -> tuple[Write, Callable[[], Tensor]]:
    weight = model.share_memory()[0].weight
    alias = weight.data

    def write(value: float) -> None:
        alias.fill_(value)

    return write, alias.clone


def flat_buffer(model: nn.Module) -> tuple[Write, Callable[[], Tensor]]:
    """All parameters are views of one buffer, as FSDP makes them."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    for p, piece in zip(
        parameters, flat.split([p.numel() for p in parameters]), strict=True
    ):
        p.data = piece.view_as(p)
    size = parameters[0].numel()

    def write(value: float) -> None:
        flat[:size].fill_(value)

    return write, lambda: flat[:size].view_as(parameters[0]).clone()


def state_dict_held(model: nn.Module) -> tuple[Write, Callable[[], Tensor]]:
    state = model.state_dict()

    def write(value: float) -> None:
        state["0.weight"].fill_(value)

    return write, state["0.weight"].clone


HOLDERS = [
    numpy_array,
    dlpack_capsule,
    from_numpy,
    mapped_file,
    shared_memory,
    flat_buffer,
    state_dict_held,
]


@pytest.mark.thorough(but=["numpy_array-training", "state_dict_held-inference_mode"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("holder", HOLDERS, ids=lambda h: h.__name__)
def test_other_holders_of_the_memory_read_and_write_it(
    holder: Callable[[nn.Module], tuple[Write, Callable[[], Tensor]]],
    mode: str,
    tmp_path,
) -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    model.scratch = str(tmp_path)
    write, read = holder(model)
    converted(model)
    for value in (0.5, -0.25):
        with MODES[mode]():
            assert error_now(model, x) < CLOSE
        write(value)
        assert bool((model[0].weight == value).all())
        with MODES[mode]():
            assert error_now(model, x) < CLOSE
        # What an optimizer writes they see, whether it is announced or not.
        for announce in (True, False):
            with MODES[mode]():
                model(x)
            if announce:
                model[0].weight.grad = torch.ones_like(model[0].weight)
                torch.optim.SGD(model.parameters(), 1.0).step()
            else:
                model[0].weight.data += 2
            gc.collect()
            assert torch.equal(read(), model[0].weight.detach())


def test_array_made_after_the_copy_is_seen_too() -> None:
    model, x = converted(mlp()).eval(), torch.randn(3, WIDTH)
    with torch.no_grad():
        model(x)
        array = model[0].weight.detach().numpy()
        for value in (0.5, -0.25):
            array[:] = value
            assert error_now(model, x) < CLOSE


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


@pytest.mark.thorough(but=["data_ptr", "storage", "dlpack"])
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


@pytest.mark.parametrize(
    "write",
    [
        lambda s: s.fill_(0),
        lambda s: s.__setitem__(0, 77),
        lambda s: s.copy_(torch.randn(16, WIDTH).untyped_storage()),
    ],
    ids=["fill", "item", "copy"],
)
def test_writes_to_the_storage_are_seen(write: Callable[[Any], None]) -> None:
    model, x = converted(mlp()).eval(), torch.randn(3, WIDTH)
    with torch.no_grad():
        model(x)
        before = refreshed(model)
        write(model[0].weight.untyped_storage())
        assert error_now(model, x) < CLOSE
    assert refreshed(model) == before + 1


def test_ties_of_two_parameters_over_one_storage_stay() -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    twin = nn.Parameter(model[0].weight.detach())
    converted(model)
    for mode in MODES.values():
        with mode():
            assert error_now(model, x) < CLOSE
        with torch.no_grad():
            twin.normal_()
        assert torch.equal(twin, model[0].weight)
        with mode():
            assert error_now(model, x) < CLOSE


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
