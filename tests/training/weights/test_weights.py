"""Copies of weights are never stale, never doubled, and go when their model goes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp import compat
from autoamp.passes.functions import low_weight
from autoamp.runtime.captured_graph import Graph
from autoamp.runtime.conversion import conversion_of
from autoamp.training import weight_copies as copies
from tests.metrics import relative_error
from tests.small_models import WIDTH, converted, mlp

CLOSE = 0.02  # bf16 rounding of two layers; a stale copy is off by 1 and more


def graphs(model: nn.Module) -> list[Graph]:
    state = conversion_of(model)
    return state.engine.record.graphs


def refreshed(model: nn.Module) -> int:
    """Copies made equal to their weight again, over all graphs of the model."""
    return sum(g.copies.refreshed for g in graphs(model) if g.copies is not None)


def error_now(model: nn.Module, x: Tensor) -> float:
    """How far the converted model is from its own fp32 weights."""
    y = model(x)
    with autoamp.disabled():
        return relative_error([y], [model(x)])


MODES: dict[str, Callable[[], Any]] = {
    "training": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def test_weight_that_changes_shape_strides_or_place() -> None:
    model, x = converted(nn.Sequential(nn.Linear(4, 4, bias=False))), torch.randn(2, 4)
    with torch.no_grad():
        assert error_now(model, x) < CLOSE
        model[0].weight.data = model[0].weight.data.t()
        assert error_now(model, x) < CLOSE
        model[0].weight.data = torch.randn(6, 4)
        assert model(x).shape == (2, 6)
        assert error_now(model, x) < CLOSE


@pytest.mark.parametrize("is_converted", [False, True])
@pytest.mark.parametrize(
    ("layer", "through_data", "raises"),
    [(0, False, False), (0, True, False), (2, False, True), (2, True, False)],
)
def test_backward_of_an_old_graph_raises_where_eager_does(
    layer: int, through_data: bool, raises: bool, is_converted: bool
) -> None:
    # Layer 0 has no gradient to its input, so nothing needs its weight in backward.
    model, x = mlp(), torch.randn(3, WIDTH)
    if is_converted:
        converted(model)
    loss = model(x).sum()
    weight = model[layer].weight
    with torch.no_grad():
        (weight.data if through_data else weight).add_(1)
    model(x)
    if raises:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    else:
        loss.backward()


def test_old_graph_keeps_its_own_weights_until_the_next_forward() -> None:
    model, x = converted(mlp()), torch.randn(3, WIDTH, requires_grad=True)
    loss = model(x).sum()
    expected = torch.autograd.grad(loss, x, retain_graph=True)
    model[2].weight.data.add_(1)  # unseen by autograd
    assert torch.equal(torch.autograd.grad(loss, x, retain_graph=True)[0], expected[0])
    with torch.no_grad():
        model[2].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):  # as in eager
        torch.autograd.grad(loss, x)


def test_inference_makes_each_copy_once() -> None:
    model, x = converted(mlp()).eval(), torch.randn(3, WIDTH)
    with torch.no_grad():
        for _ in range(4):
            model(x)
    with torch.inference_mode():
        for _ in range(4):
            model(x)
    assert refreshed(model) == len(list(model.parameters()))


def accumulated(
    model: nn.Module, x: Tensor, micro_batches: int, write: Callable[[], None]
) -> None:
    """One training step of several micro-batches, each exact; `write` ends it."""
    for p in model.parameters():
        p.grad = None
    for _ in range(micro_batches):
        assert error_now(model, x) < CLOSE
        model(x).square().sum().backward()
    write()


def test_micro_batches_share_one_copy_per_step() -> None:
    model, x, steps = converted(mlp()), torch.randn(3, WIDTH), 5
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        accumulated(model, x, 8, optimizer.step)
    # The very first call could not know that the copies would be read again.
    assert refreshed(model) == (steps + 1) * len(list(model.parameters()))


def test_announced_steps_move_no_weight() -> None:
    # A sentinel alive while the step writes would move each weight to new memory.
    model, x = converted(mlp()), torch.randn(3, WIDTH)
    places = [p.data_ptr() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(3):
        accumulated(model, x, 2, optimizer.step)
    assert [p.data_ptr() for p in model.parameters()] == places


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.data -= 0.1 * p.grad


def test_unannounced_steps_lose_their_sentinels_after_two() -> None:
    model, x = converted(mlp()), torch.randn(3, WIDTH)
    weights = list(model.parameters())
    for step in range(6):
        before = refreshed(model)
        places = [copies.compat.data_address(p) for p in weights]
        accumulated(model, x, 4, lambda: by_hand(model))
        moved = [copies.compat.data_address(p) for p in weights] != places
        assert moved == (step < 2)
        assert refreshed(model) - before == len(weights) * (2, 1, 8, 8, 8, 8)[step]


def test_step_that_raises_half_way() -> None:
    model, x = converted(mlp()), torch.randn(3, WIDTH)
    model(x).sum().backward()

    class Broken(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            first, second, *_ = model.parameters()
            with torch.no_grad():
                first.normal_()
                second.data.normal_()
                raise OSError

    for optimizer_step_ in (Broken(model.parameters(), {}).step,) * 3:
        with pytest.raises(OSError):
            optimizer_step_()
        assert error_now(model, x) < CLOSE


def test_closure_that_writes_between_its_forwards() -> None:
    model, x = converted(mlp()), torch.randn(3, WIDTH)
    optimizer = torch.optim.LBFGS(model.parameters(), 0.01, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        assert error_now(model, x) < CLOSE
        loss: Tensor = model(x).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    assert error_now(model, x) < CLOSE


class Lora(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.a = nn.Linear(WIDTH, 2, bias=False)
        self.b = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.b(self.a(x))


@pytest.mark.parametrize("announced", [True, False])
def test_frozen_base_is_copied_once_while_the_adapter_trains(
    announced: bool, monkeypatch
) -> None:
    model, x = converted(Lora()), torch.randn(3, WIDTH)
    # The base is among the optimizer's parameters, as in many scripts.
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    copied: list[Tensor] = []
    copy_all = copies.compat.copy_all

    def spy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        copied.extend(sources)
        copy_all(targets, sources)

    def adapters_by_hand() -> None:
        for p in (model.a.weight, model.b.weight):
            p.data -= 0.01 * p.grad

    monkeypatch.setattr(copies.compat, "copy_all", spy)
    for _ in range(5):
        accumulated(model, x, 2, optimizer.step if announced else adapters_by_hand)
    assert sum(p is model.base.weight for p in copied) == 1
    assert sum(p is model.a.weight for p in copied) >= 5


def test_several_threads_that_train_have_no_sentinels() -> None:
    # Two writers that make one lazy clone real at once corrupt memory.
    model, x = converted(mlp()), torch.randn(3, WIDTH)
    model(x).sum().backward()

    def train() -> None:
        model(x).sum().backward()

    other = threading.Thread(target=train)
    other.start()
    other.join()
    for p in model.parameters():
        assert [copy.sentinel for copy in copies.copies_of(p)] == [None]
    by_hand(model)
    assert error_now(model, x) < CLOSE


def low_copy(weight: Tensor) -> Tensor | None:
    return next((copy.kept for copy in copies.copies_of(weight)), None)


def test_copies_go_with_the_model() -> None:
    model, x = converted(mlp()), torch.randn(3, WIDTH)
    model(x).sum().backward()
    with torch.no_grad():
        model.eval()(x)
    copy = low_copy(model[0].weight)
    assert copy is not None
    gone = [weakref.ref(model), weakref.ref(model[0].weight), weakref.ref(copy)]
    del model, copy
    gc.collect()
    assert [g() for g in gone] == [None] * 3


class TwoHeads(nn.Module):
    """Two linear layers over one Parameter."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False)
        self.two = nn.Linear(WIDTH, WIDTH, bias=False)
        self.one.weight = self.two.weight = shared

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu())


def test_tied_weights_have_one_copy() -> None:
    model = converted(TwoHeads(nn.Parameter(torch.randn(WIDTH, WIDTH))))
    x = torch.randn(3, WIDTH)
    assert error_now(model, x) < CLOSE
    assert refreshed(model) == 1


def test_two_models_that_share_a_parameter_share_its_copy() -> None:
    shared, x = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.randn(3, WIDTH)
    one, two = converted(TwoHeads(shared)), converted(TwoHeads(shared))
    with torch.no_grad():
        one(x)
        two(x)
        assert refreshed(one) + refreshed(two) == 1
        shared.mul_(-2)
        assert error_now(one, x) < CLOSE
        assert error_now(two, x) < CLOSE
    assert refreshed(one) + refreshed(two) == 2


def test_model_made_and_run_under_inference_mode_can_be_converted() -> None:
    with torch.inference_mode():
        model, x = converted(mlp().eval()), torch.randn(3, WIDTH)
        assert error_now(model, x) < CLOSE
        for p in model.parameters():
            p.normal_()
        assert error_now(model, x) < CLOSE


def test_threads_train_on_shared_weights() -> None:
    model, x = converted(mlp()), torch.randn(3, WIDTH, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    failures: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(20):
                found = torch.autograd.grad(model(x).sum(), list(model.parameters()))
                for got, want in zip(found, expected, strict=True):
                    torch.testing.assert_close(got, want)
        except Exception as error:  # noqa: BLE001 - handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- how gradients of uses reach a weight ----------------------------------------------


@pytest.mark.parametrize(
    "plain", [torch.randn(4, 4), torch.randn(4, 3, 2, 2).movedim(-1, 1)]
)
def test_a_use_of_a_weight_runs_no_python_in_the_backward(plain: Tensor) -> None:
    """Of filters neither, where their channels are last."""
    weight = nn.Parameter(plain)
    use = low_weight(weight, weight.detach().bfloat16())
    assert "LowWeight" not in str(use.grad_fn)
    (grad,) = torch.autograd.grad(use, weight, torch.ones_like(use))
    assert (grad.dtype, grad.stride()) == (torch.float32, weight.stride())


def test_the_gradient_of_filters_lies_as_they_do() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2))
    last = weight.detach().bfloat16().contiguous(memory_format=torch.channels_last)
    (grad,) = torch.autograd.grad(low_weight(weight, last), weight, last)
    assert grad.is_contiguous()


@pytest.mark.parametrize("natively", [True, False])
def test_gradients_of_uses_are_summed_in_fp32(
    natively: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "casts_gradients", lambda: natively)
    weight = nn.Parameter(torch.ones(3, 2))
    copy = weight.detach().bfloat16()
    uses = [low_weight(weight, copy) for _ in range(1000)]
    assert ("LowWeight" in str(uses[0].grad_fn)) is not natively
    torch.stack([u.float() for u in uses]).sum().backward()
    assert torch.equal(weight.grad, torch.full((3, 2), 1000.0))
    assert torch.equal(weight, torch.ones(3, 2))
    assert weight.dtype == torch.float32


def test_in_a_cuda_graph_weights_beside_shards_keep_their_own_layouts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharded, whole = (torch.randn(4, 3, 2, 2) for _ in range(2))

    class OneShard:
        """Parameters of FSDP, of which `sharded` is one that FSDP has gathered."""

        def of(self, weight: Tensor) -> Any:
            return self if weight is sharded else None

        def copy(self, weight: Tensor, low: torch.dtype, layout: Any) -> Tensor:
            return weight.to(low, memory_format=layout)

    monkeypatch.setattr(copies, "SHARDED", OneShard())
    # As while a CUDA graph is captured, on a stream of its own.
    monkeypatch.setattr(copies, "_aside", lambda devices: True)
    monkeypatch.setattr(copies, "_capturing", lambda: True)
    layouts = torch.preserve_format, torch.channels_last
    lows = copies.WeightCopies(torch.bfloat16, layouts=layouts).fresh([sharded, whole])
    assert torch.equal(lows[0], sharded.bfloat16())
    assert torch.equal(lows[1], whole.bfloat16())
    assert lows[0].is_contiguous()
    assert lows[1].is_contiguous(memory_format=torch.channels_last)
