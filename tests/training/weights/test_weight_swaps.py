"""Weights whose data, memory or very tensor is exchanged while graphs are alive."""

from __future__ import annotations

import copy
import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp import compat
from autoamp.training import weight_copies as copies
from tests.metrics import relative_error
from tests.quick import each_with_one
from tests.training.weights.test_weights import (
    CLOSE,
    MODES,
    WIDTH,
    by_hand,
    error_now,
    low_copy,
    mlp,
    refreshed,
)


def convert(model: nn.Module, precision: str = "bf16", **options: Any) -> nn.Module:
    given = {"loss_scale": 4.0} if precision == "fp16" else {}
    return autoamp.convert(
        model,
        precision=precision,
        do_no_harm=False,
        strict=True,
        **{**given, **options},
    )


class Recomputed(nn.Module):
    """Two layers that the backward runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


def frozen() -> nn.Module:
    return mlp().requires_grad_(False)


# -- exchanged and put back between a forward and its backward -------------------------

Exchange = Callable[[nn.Module], AbstractContextManager[None]]


@contextmanager
def by_data_copy(model: nn.Module) -> Iterator[None]:
    """As `torch_ema`'s `average_parameters`: stored, overwritten, restored."""
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(5 * torch.randn_like(p))
    yield
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data.copy_(old)


@contextmanager
def by_new_data(model: nn.Module) -> Iterator[None]:
    kept = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = 5 * torch.randn_like(p)
    yield
    for p, old in zip(model.parameters(), kept, strict=True):
        p.data = old


def offload(model: nn.Module) -> list[Tensor]:
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.untyped_storage().resize_(0)
    return kept


def bring_back(model: nn.Module, kept: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), kept, strict=True):
        p.untyped_storage().resize_(value.nbytes)
        p.data.copy_(value)


@contextmanager
def by_offloading(model: nn.Module) -> Iterator[None]:
    kept = offload(model)
    bring_back(model, [5 * torch.randn_like(value) for value in kept])
    yield
    offload(model)
    bring_back(model, kept)


def gradients(
    model: nn.Module, x: Tensor, exchange: Exchange, mode: Callable[[], Any]
) -> list[Tensor]:
    """Those of a forward, a forward with other weights, and the first's backward."""
    model(x).sum().backward()
    for leaf in (x, *model.parameters()):
        leaf.grad = None
    loss = model(x).square().sum()
    torch.manual_seed(1)
    with exchange(model):
        model.eval()
        with mode():
            model(x)
        model.train()
    loss.backward()
    return [leaf.grad for leaf in (x, *model.parameters()) if leaf.grad is not None]


def compare_gradients(
    make: Callable[[], nn.Module],
    exchange: Exchange,
    mode: Callable[[], Any] = torch.no_grad,
    **options: Any,
) -> None:
    exact = make()
    other = convert(copy.deepcopy(exact), **options)
    x = torch.randn(3, WIDTH)
    found, expected = (
        gradients(m, x.clone().requires_grad_(), exchange, mode) for m in (other, exact)
    )
    assert relative_error(found, expected) < CLOSE


@pytest.mark.parametrize(
    ("make", "exchange", "options"),
    [
        pytest.param(mlp, by_data_copy, {"precision": "fp16"}, id="fp16"),
        # What AOT autograd saves, without compiling.
        pytest.param(mlp, by_data_copy, {"backend": aot_eager}, id="aot_eager"),
        pytest.param(
            mlp, by_new_data, {"weight_copies": "every call"}, id="every call"
        ),
        pytest.param(frozen, by_new_data, {}, id="frozen"),
        pytest.param(Recomputed, by_data_copy, {}, id="recomputed"),
        pytest.param(Recomputed, by_new_data, {}, id="recomputed, new data"),
        pytest.param(mlp, by_offloading, {}, id="storages emptied and filled"),
    ],
)
def test_backward_has_the_weights_of_its_own_forward(
    make: Callable[[], nn.Module], exchange: Exchange, options: dict[str, Any]
) -> None:
    compare_gradients(make, exchange, **options)


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[torch.Size]]:
    """The shapes of the copies made so far whose memory somebody holds."""
    made: list[tuple[Any, torch.Size]] = []
    copy_all = compat.copy_all

    def spy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        copy_all(targets, sources)
        made.extend((weakref.ref(t.untyped_storage()), t.shape) for t in targets)

    monkeypatch.setattr(compat, "copy_all", spy)
    return lambda: [shape for memory, shape in made if memory() is not None]


def test_a_copy_lives_as_long_as_the_graph_that_reads_it(
    alive: Callable[[], list[torch.Size]],
) -> None:
    model, x = convert(mlp()), torch.randn(3, WIDTH, requires_grad=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        loss = model(x).square().sum()
        # The biases' copies, which no backward reads, went with the forward.
        assert alive() == [p.shape for p in model.parameters() if p.dim() == 2]
        loss.backward()
        assert alive() == []
        optimizer.step()


def test_kept_copies_are_not_held_while_the_weights_are_written(
    alive: Callable[[], list[torch.Size]],
) -> None:
    model, x = convert(mlp()), torch.randn(3, WIDTH)
    every = [p.shape for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    in_steps: list[torch.Size] = []
    optimizer.register_step_post_hook(lambda *_: in_steps.extend(alive()))
    for step in range(3):
        for micro_batch in range(3):
            model(x).square().sum().backward()
            # The very first call could not know that there would be a second one.
            assert alive() == (every if step or micro_batch else [])
        optimizer.step()
    assert in_steps == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("through_data", [True, False])
def test_an_old_graph_has_its_own_copies_and_raises_where_eager_does(
    through_data: bool, precision: str
) -> None:
    model, x = convert(mlp(), precision), torch.randn(3, WIDTH, requires_grad=True)
    loss = model(x).sum()
    wanted = torch.autograd.grad(loss, x, retain_graph=True)
    for weight in model.parameters():
        with torch.no_grad():
            (weight.data if through_data else weight).mul_(2)
    model(x)
    if through_data:
        assert torch.equal(torch.autograd.grad(loss, x)[0], wanted[0])
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# -- tensors swapped under the same object ---------------------------------------------


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def moved(model: nn.Module) -> None:
    model.to(torch.float64)
    model.to(torch.float32)


def halved(model: nn.Module) -> None:
    model.half()
    model.float()


def loaded(model: nn.Module) -> None:
    model.load_state_dict({k: 0.5 * v for k, v in model.state_dict().items()})


def swapped(model: nn.Module) -> None:
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(0.5 * p.detach()))


def trained(model: nn.Module, x: Tensor, change: Callable[[nn.Module], None]) -> Any:
    """The losses of three rounds of steps, the weights changed after each."""
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for _ in range(3):
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            losses.append(loss.detach())
            loss.backward()
            optimizer.step()
        del loss
        with torch.no_grad():
            losses.append(model(x).square().sum())
        change(model)
        with torch.no_grad():
            losses.append(model(x).square().sum())
    return losses


def compare_training(change: Callable[[nn.Module], None], precision: str) -> None:
    exact = mlp()
    other, x = convert(copy.deepcopy(exact), precision), torch.randn(3, WIDTH)
    found, expected = trained(other, x, change), trained(exact, x, change)
    assert relative_error(found, expected) < 2 * CLOSE  # squared, each is off twice
    assert autoamp.is_converted(other)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize(
    ("change", "precision"), each_with_one([moved, halved, loaded], ["bf16", "fp16"])
)
def test_modules_that_swap_their_parameters(
    change: Callable[[nn.Module], None], precision: str
) -> None:
    compare_training(change, precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_parameters_swapped_by_hand(precision: str) -> None:
    compare_training(swapped, precision)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nothing_refers_weakly_to_a_weight(precision: str) -> None:
    # For that `swap_tensors` refuses it; what a pass has failed on keeps a graph too.
    model, x = convert(mlp(), precision), torch.randn(3, WIDTH)
    model(x).sum().backward()
    assert [weakref.getweakrefs(p) for p in model.parameters()] == [[]] * 4


def test_nor_does_a_rewritten_graph_module() -> None:
    gm, x = torch.fx.symbolic_trace(mlp()), torch.randn(3, WIDTH)
    result = autoamp.rewrite(gm, [x], precision="bf16", do_no_harm=False)
    expected = 2 * result(x)
    state = {k: v.detach() for k, v in gm.state_dict().items()}
    last = gm.get_parameter("2.weight"), gm.get_parameter("2.bias")
    for p in last:
        torch.utils.swap_tensors(p, nn.Parameter(2 * p.detach()))
    assert state
    assert relative_error([result(x)], [expected]) < CLOSE


def test_an_overflow_before_a_swap_still_has_the_step_skipped() -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    convert(model, "fp16", loss_scale=2.0**15)
    (1e5 * model(x).sum()).backward()
    for p in model.parameters():
        gradient, p.grad = p.grad, None
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))
        p.grad = gradient
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert optimizer.step_was_skipped
    assert all(map(torch.equal, model.parameters(), before))


# -- memory given back and taken again -------------------------------------------------


def offloaded(model: nn.Module) -> None:
    bring_back(model, [0.5 * value for value in offload(model)])


def offloaded_typed(model: nn.Module) -> None:
    """As FSDP does it, with the storage that has a dtype."""
    kept = offload(model)
    for p, value in zip(model.parameters(), kept, strict=True):
        p._typed_storage()._resize_(value.numel())
        with torch.no_grad():
            p.copy_(0.5 * value)


@pytest.mark.parametrize(
    ("change", "precision"),
    each_with_one([offloaded, offloaded_typed], ["bf16", "fp16"]),
)
def test_storages_emptied_and_filled(
    change: Callable[[nn.Module], None], precision: str
) -> None:
    compare_training(change, precision)


def test_the_copies_go_with_the_storage() -> None:
    model, x = convert(mlp()).eval(), torch.randn(3, WIDTH)
    with torch.no_grad():
        model(x)
    copies = [weakref.ref(low_copy(p)) for p in model.parameters()]
    assert all(copy() is not None for copy in copies)
    kept = offload(model)
    assert all(copy() is None for copy in copies)
    bring_back(model, kept)
    with torch.no_grad():
        assert error_now(model, x) < CLOSE
        before = refreshed(model)
        model(x)
    assert refreshed(model) == before, "they are watched again"


# -- addresses taken once --------------------------------------------------------------


def write_at(address: int, like: Tensor) -> None:
    """As C code does that was given the address long ago."""
    value = torch.randn_like(like).contiguous()
    ctypes.memmove(address, value.data_ptr(), value.nbytes)


@pytest.mark.parametrize("mode", MODES)
def test_every_call_copies_what_is_written_through_an_address(mode: str) -> None:
    model, x = mlp(), torch.randn(3, WIDTH)
    weight = model[2].weight
    address, place = weight.data_ptr(), compat.data_address(weight)
    convert(model, weight_copies="every call")
    for _ in range(3):
        with MODES[mode]():
            assert error_now(model, x) < CLOSE
        write_at(address, weight)
        with MODES[mode]():
            assert error_now(model, x) < CLOSE
        # Nor does a write by torch, announced or not, move the weight from there.
        by = torch.optim.SGD(model.parameters(), 1.0)
        model(x).sum().backward()
        by.step()
        by_hand(model)
        assert compat.data_address(weight) == place


def test_a_choice_that_there_is_not() -> None:
    with pytest.raises(autoamp.AutoampError, match="'kept', 'every call'"):
        autoamp.convert(mlp(), weight_copies="never")


def test_a_cuda_graph_gets_copies_of_its_own(monkeypatch) -> None:
    # What it captures is written again at each replay, whatever graphs hold it then.
    model, x = convert(mlp()).eval(), torch.randn(3, WIDTH)
    with torch.no_grad():
        model(x)
        kept = [low_copy(p) for p in model.parameters()]
        handed_in = copies.WeightCopies(torch.bfloat16)
        monkeypatch.setattr(copies, "_capturing", lambda: True)
        monkeypatch.setattr(copies, "_aside", lambda devices: True)
        own = handed_in.fresh(list(model.parameters()))
        monkeypatch.undo()
        assert [low_copy(p) for p in model.parameters()] == kept
        for mine, theirs in zip(own, kept, strict=True):
            assert theirs is not None
            assert torch.equal(mine, theirs)
            assert mine.data_ptr() != theirs.data_ptr()
