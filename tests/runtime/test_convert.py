"""`convert` changes the call path of a model and nothing else; `revert` undoes it."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import unittest.mock
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import autoamp
from tests.logs import warned
from tests.metrics import relative_error
from tests.small_models import WIDTH, Of, converted, is_rounded, mlp, runs


class Block(nn.Module):
    """Two layers and batch norm, with a signature worth keeping."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) * scale


def outer(inner: nn.Module) -> nn.Module:
    return Of(lambda m, x: m.head(m.inner(x)), inner=inner, head=nn.Linear(4, 2))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, WIDTH)


# -- nothing but the call path changes -------------------------------------------------


def test_the_object_its_parts_and_signature_stay_and_revert_restores_all(
    x: Tensor,
) -> None:
    model = Block().eval()
    contents, exact = dict(model.__dict__), model(x)
    before, keys = dict(model.named_parameters()), list(model.state_dict())
    parts, signature = list(model.named_modules()), inspect.signature(model.forward)
    assert autoamp.revert(model) is model, "a plain model is left as it is"
    assert model.__dict__ == contents
    assert converted(model) is model
    assert is_rounded(model(x), exact)
    assert inspect.signature(model.forward) == signature
    assert model.forward.__name__ == "forward"
    assert type(model) is Block
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[k] is before[k] for k in after)
    assert {p.dtype for p in after.values()} == {torch.float32}
    assert list(model.state_dict()) == keys
    assert list(model.named_modules()) == parts
    assert autoamp.is_converted(model)
    assert autoamp.revert(model) is model
    assert model.__dict__ == contents
    assert torch.equal(model(x), exact)
    assert not autoamp.is_converted(model)
    with pytest.raises(autoamp.UnsupportedModelError):
        autoamp.report(model)


def test_torch_is_as_before_once_no_model_is_converted() -> None:
    gc.collect()  # models of other tests
    hooks = nn.modules.module._global_module_registration_hooks
    before = len(hooks), vars(nn.Module)["_compiled_call_impl"]
    model = converted(mlp())
    assert vars(nn.Module)["_compiled_call_impl"] is not None
    autoamp.revert(model)
    assert (len(hooks), vars(nn.Module)["_compiled_call_impl"]) == before


# -- converting again, and parts of a model --------------------------------------------


def test_second_convert_changes_options_without_wrapping_twice(x: Tensor) -> None:
    model = mlp()
    contents, exact = dict(model.__dict__), model(x)
    converted(model)
    assert is_rounded(model(x), exact)
    converted(model, deny=["linear", "gelu"])
    assert torch.equal(model(x), exact)
    converted(model, precision="fp16")
    assert is_rounded(model(x), exact)
    assert runs(model) == 1
    autoamp.revert(model)
    assert model.__dict__ == contents


def test_a_wrapper_put_over_a_converted_model_survives(x: Tensor) -> None:
    """As accelerate puts one there where it prepares a model that is converted."""
    model = mlp()
    exact = 10 * model(x)
    old = converted(model).forward
    wrapper = model.forward = lambda x: 10 * old(x)
    assert is_rounded(model(x), exact)
    converted(model, deny=["linear", "gelu"])
    assert torch.equal(model(x), exact)
    assert is_rounded(converted(model)(x), exact)
    autoamp.revert(model)
    assert not autoamp.is_converted(model)
    assert model.__dict__["forward"] is wrapper
    assert torch.equal(model(x), exact)
    assert is_rounded(converted(model)(x), exact)


@pytest.mark.parametrize("how", ["replaced", "deleted"])
def test_a_forward_that_is_taken_away_is_told_once_and_converted_again(
    how: str, x: Tensor, caplog
) -> None:
    model = converted(mlp())
    contents = set(mlp().__dict__)
    model(x)
    if how == "replaced":
        model.forward = lambda x: 2 * nn.Sequential.forward(model, x)
    else:
        del model.forward
    exact = model(x)
    (line,) = warned(caplog)
    assert "forward was replaced or deleted" in line
    assert "forward was replaced" in str(autoamp.report(model))
    assert not autoamp.is_converted(model)
    assert is_rounded(converted(model)(x), exact)
    assert runs(model) == 1
    autoamp.revert(model)
    assert torch.equal(model(x), exact)
    assert set(model.__dict__) - {"forward"} == contents
    assert ("forward" in model.__dict__) == (how == "replaced")


def test_a_forward_that_is_wrapped_or_put_back_is_not_told(x: Tensor, caplog) -> None:
    model = converted(mlp())
    with unittest.mock.patch.object(model, "forward", wraps=model.forward):
        model(x)
    model(x)
    autoamp.revert(model)
    del model
    gc.collect()
    assert warned(caplog) == []


@pytest.mark.parametrize("own_call", [True, False])
def test_a_mock_that_stood_on_a_part_is_not_told(
    own_call: bool, x: Tensor, caplog
) -> None:
    """The part is captured while the mock stands there, and again afterwards."""
    model = outer(mlp())
    exact, own = model(x), model.inner(x)
    converted(model)(x)
    plain = model.inner.forward
    with unittest.mock.patch.object(model.inner, "forward", lambda x: 2 * plain(x)):
        model.inner(x) if own_call else model(x)
    assert is_rounded(model(x), exact)
    assert is_rounded(model.inner(x), own)
    assert warned(caplog) == []
    assert not autoamp.report(model).skipped


def test_a_forward_that_is_taken_away_is_not_told_before_a_call(
    x: Tensor, caplog
) -> None:
    model = mlp()
    plain = model.forward
    converted(model)(x)
    model.forward = plain
    gc.collect()
    assert warned(caplog) == []
    model[0](x)
    (line,) = warned(caplog)
    assert "forward was replaced" in line


def test_a_part_then_its_parent(x: Tensor) -> None:
    model = outer(mlp())
    exact = model(x)
    converted(model.inner)
    assert is_rounded(model(x), exact)
    assert runs(model.inner) == 1
    converted(model)
    assert is_rounded(model(x), exact)
    assert runs(model) == 1
    assert runs(model.inner) == 1, "the parent's graph holds everything"
    assert "autocast" not in autoamp.report(model).graphs[0].code
    autoamp.revert(model)
    assert is_rounded(model(x), exact)
    assert runs(model.inner) == 2


# -- threads ---------------------------------------------------------------------------


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="without a GPU, a CUDA build (2.11) frees what it guards devices with, with "
    "the thread that first made fake tensors, and so plain torch crashes too",
)
def test_models_trained_in_eight_threads_are_captured_once_each(x: Tensor) -> None:
    models = [converted(mlp()) for _ in range(8)]

    def train(model: nn.Module) -> None:
        for _ in range(10):
            model(x).sum().backward()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(train, models))
    assert [runs(model) for model in models] == [10] * 8
    assert [len(autoamp.report(model).graphs) for model in models] == [1] * 8


def test_disabled_is_nested_and_of_this_thread(x: Tensor) -> None:
    model, elsewhere = converted(mlp()), []
    low = model(x)
    with autoamp.disabled():
        exact = model(x)
        with autoamp.disabled():
            assert torch.equal(model(x), exact)
        assert torch.equal(model(x), exact)
        thread = threading.Thread(target=lambda: elsewhere.append(model(x)))
        thread.start()
        thread.join()
    assert torch.equal(elsewhere[0], low)
    assert torch.equal(model(x), low)
    assert is_rounded(low, exact)
    assert autoamp.is_converted(model)


# -- capture at once -------------------------------------------------------------------


def test_example_inputs_capture_at_once_and_leave_no_trace(x: Tensor) -> None:
    model = Block()
    model.second = nn.Sequential(nn.Dropout(0.5), model.second)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    buffers = dict(model.named_buffers())
    random = torch.get_rng_state()
    converted(model, example_inputs=(x,))
    assert len(autoamp.report(model).graphs) == 1
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(b is buffers[n] for n, b in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    model(x)
    assert len(autoamp.report(model).graphs) == 1
    with torch.inference_mode():  # for serving
        converted(model.eval(), example_inputs=(x,))
        model(x)
    assert len(autoamp.report(model).graphs) == 1


def test_failing_example_inputs_leave_the_model_as_it_was(x: Tensor) -> None:
    def fails(m: Any, x: Tensor) -> Tensor:
        m.calls += 1
        y: Tensor = m.layer(x)
        if x.shape[0] == 5:
            raise KeyError("no five rows")
        return y

    model: Any = Of(fails, layer=nn.Linear(WIDTH, 4), calls=torch.zeros(()))
    contents = dict(model.__dict__)
    with pytest.raises(KeyError):
        converted(model, example_inputs=(x,))
    assert model.__dict__ == contents
    assert model.calls == 0
    converted(model, strict=False)
    model(x[:2])
    with pytest.raises(KeyError):
        converted(model, strict=False, deny=["linear"], example_inputs=(x,))
    assert autoamp.is_converted(model), "as it was: converted, with the old options"
    assert runs(model) == 1


# -- back ends -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", ["off", 8.0])
def test_a_compiler_takes_sizes_that_change(loss_scale: Any) -> None:
    """Sizes of weight copies and scales never change, and the compiler is told so."""

    def forward(m: Any, x: Tensor) -> Tensor:
        one, two, three = m.fc(x).chunk(3, -1)
        return (one * two + three).view(len(x), -1, 2, WIDTH // 2).sum(2)

    model = Of(forward, fc=nn.Linear(WIDTH, 3 * WIDTH))
    options = {"loss_scale": loss_scale, "backend": lookup_backend("aot_eager")}
    ours = converted(copy.deepcopy(model), strict=False, **options)
    for length in (6, 4, 7, 9):
        given = torch.randn(2, length, WIDTH)
        assert relative_error(ours(given), model(given)) <= 2**-6
        ours(given).sum().backward()
    assert len(autoamp.report(ours).graphs) == 2  # one for 6, one for every length


def test_inductor_trains_like_eager() -> None:
    """Convolution and batch norm, then a checkpointed MLP."""

    def forward(m: Any, x: Tensor) -> Any:
        x = torch.relu(m.norm(m.conv(x))).flatten(2)
        return torch.utils.checkpoint.checkpoint(m.mlp, x, use_reentrant=False)

    x = torch.randn(2, 3, 4, 4)
    model = Of(
        forward,
        conv=nn.Conv2d(3, 4, 3, padding=1, bias=False),
        norm=nn.BatchNorm2d(4),
        mlp=nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)),
    )
    exact = copy.deepcopy(model)
    converted(model, backend="inductor")
    y, want = model(x), exact(x)
    assert is_rounded(y, want)
    y.square().sum().backward()
    want.square().sum().backward()
    found = [p.grad for p in model.parameters()]
    assert {g.dtype for g in found} == {torch.float32}
    assert relative_error(found, [p.grad for p in exact.parameters()]) < 0.05
    mean = model.norm.running_mean
    torch.testing.assert_close(mean, exact.norm.running_mean, atol=1e-2, rtol=1e-2)
    assert runs(model) == 1
