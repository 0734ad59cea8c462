"""`convert` changes the call path of a model, and nothing else."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import pickle
import threading
import types
import unittest.mock
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import autoamp
from tests.logs import warned
from tests.metrics import relative_error
from tests.small_models import WIDTH, Of, Quiet, converted, mlp

# What Dynamo itself warns of where a value crosses a graph break.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)

CLOSE = 0.02  # bf16 rounding of a few layers


def runs(model: nn.Module) -> int:
    return int(autoamp.report(model).runs)


class Block(nn.Module):
    """Two layers, batch norm and dropout, with a signature worth keeping."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x)))) * scale


class Broken(nn.Module):
    """A graph break between its two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x).relu()


class Outer(nn.Module):
    """A module whose sub-module may be converted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, WIDTH)


def is_rounded(y: Tensor, exact: Tensor) -> bool:
    """Close to the fp32 result and not equal to it: it went through bf16."""
    assert y.dtype is exact.dtype
    return 0 < relative_error([y], [exact]) < CLOSE


# -- nothing but the call path changes ---------------------------------------------


def test_same_object_class_parameters_and_state(x: Tensor) -> None:
    model = Block()
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    children = list(model.named_modules())
    exact = copy.deepcopy(model)(x)
    signature = inspect.signature(model.forward)
    assert converted(model) is model
    assert is_rounded(model(x), exact)
    assert inspect.signature(model.forward) == signature
    assert model.forward.__name__ == "forward"
    assert type(model) is Block
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[k] is before[k] for k in after)
    assert all(p.dtype is torch.float32 for p in after.values())
    assert list(model.state_dict()) == keys
    assert list(model.named_modules()) == children
    assert autoamp.is_converted(model)


def test_revert_restores_bit_for_bit(x: Tensor) -> None:
    model = Block().eval()
    contents, exact = dict(model.__dict__), model(x)
    assert autoamp.revert(model) is model, "a plain model is left as it is"
    assert model.__dict__ == contents
    converted(model)
    assert not torch.equal(model(x), exact)
    assert autoamp.revert(model) is model
    assert model.__dict__ == contents
    assert torch.equal(model(x), exact)
    assert not autoamp.is_converted(model)
    with pytest.raises(autoamp.UnsupportedModelError, match=r"autoamp\.convert"):
        autoamp.report(model)


def test_forward_hooks_fire_once_per_call(x: Tensor) -> None:
    model, fired = Block(), []
    for name, module in (("root", model), ("layer", model.first)):
        module.register_forward_pre_hook(lambda m, a, n=name: fired.append(f"{n} pre"))
        module.register_forward_hook(lambda m, a, r, n=name: fired.append(f"{n} post"))
    model(x)
    expected = list(fired)
    converted(model)
    for _ in range(2):
        fired.clear()
        model(x)
        assert fired == expected
    assert runs(model) >= 2


def test_backward_hooks_fire_with_fp32_gradients(x: Tensor) -> None:
    model, seen = Block(), []

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def record(module: nn.Module, inputs: Any, outputs: Any) -> None:
            seen.append((name, *(g.dtype for g in outputs)))

        return record

    model.register_full_backward_hook(hook("root"))
    model.second.register_full_backward_hook(hook("layer"))
    model.first.weight.register_hook(lambda g: seen.append(("weight", g.dtype)))
    model(x.requires_grad_()).sum().backward()
    expected = list(seen)
    converted(model)
    for _ in range(2):
        seen.clear()
        model(x).sum().backward()
        assert seen == expected
    assert {entry[1] for entry in seen} == {torch.float32}
    assert len(seen) == 3


def test_train_and_eval(x: Tensor) -> None:
    model = converted(Block())
    model(x)
    mean = model.norm.running_mean.clone()
    assert not torch.equal(mean, torch.zeros_like(mean))
    model.eval()
    with torch.no_grad():
        y = model(x)
    assert torch.equal(model.norm.running_mean, mean)
    with autoamp.disabled():
        assert is_rounded(y, model(x))


def test_double_after_convert_is_exact(x: Tensor) -> None:
    model = converted(mlp())
    model(x)
    model.double()
    exact = copy.deepcopy(model)
    autoamp.revert(exact)
    assert torch.equal(model(x.double()), exact(x.double()))
    assert runs(model) == 2


# -- copies and pickles ------------------------------------------------------------


def scaled(model: nn.Module, x: Tensor) -> Tensor:
    """A `forward` of somebody else's, ten times the model's own."""
    return 10 * type(model).forward(model, x)


def with_partial(model: nn.Module) -> None:
    model.forward = functools.partial(scaled, model)


def with_method(model: nn.Module) -> None:
    model.forward = types.MethodType(scaled, model)


def with_closure(model: nn.Module) -> None:
    old = model.forward

    def forward(x: Tensor) -> Tensor:
        return 10 * old(x)

    model.forward = forward


FORWARDS = [with_partial, with_method, with_closure]


@pytest.mark.parametrize("put", FORWARDS, ids=lambda f: f.__name__)
def test_a_forward_of_the_instance_is_called_and_put_back(
    put: Callable[[nn.Module], None], x: Tensor
) -> None:
    model = mlp()
    plain = model(x)
    put(model)
    contents, signature = dict(model.__dict__), inspect.signature(model.forward)
    converted(model)
    assert inspect.signature(model.forward) == signature
    assert is_rounded(model(x), 10 * plain)
    assert runs(model) == 1
    autoamp.revert(model)
    assert model.__dict__ == contents
    assert torch.equal(model(x), 10 * plain)


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("through", [through_pickle, through_torch_save])
@pytest.mark.parametrize("put", [None, with_partial])
def test_pickles_load_unconverted_and_say_so(
    put: Callable[[nn.Module], None] | None,
    through: Callable[[nn.Module], Any],
    x: Tensor,
    caplog,
) -> None:
    model = Block().eval()
    if put:
        put(model)
    exact, names = model(x), set(model.__dict__)
    converted(model)
    model(x)
    loaded = through(model)
    (warning,) = warned(caplog)
    assert "autoamp.convert(copy)" in warning
    assert not autoamp.is_converted(loaded)
    assert set(loaded.__dict__) == names
    assert torch.equal(loaded(x), exact)
    assert autoamp.is_converted(model)
    assert is_rounded(converted(loaded)(x), exact)


def test_data_parallel_replicas_run_their_own_weights(x: Tensor) -> None:
    model = converted(Block().eval())
    y = model(x)
    replica = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        twin = replica._modules[name] = child._replicate_for_data_parallel()
        for key, p in child._parameters.items():
            setattr(twin, key, torch.zeros_like(p))
    assert torch.count_nonzero(replica(x)) == 0
    assert runs(model) == 2
    assert torch.equal(model(x), y)


def test_functional_call_uses_the_given_weights(x: Tensor) -> None:
    model = converted(mlp())
    y = model(x)
    given = {k: torch.zeros_like(v) for k, v in model.state_dict().items()}
    assert torch.count_nonzero(torch.func.functional_call(model, given, (x,))) == 0
    assert runs(model) == 2
    assert torch.equal(model(x), y)


# -- converting again, and parts of a model ----------------------------------------


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


@pytest.mark.thorough
def test_wrapper_put_over_a_converted_model_survives(x: Tensor) -> None:
    # As accelerate does where it prepares a model that is converted already.
    model = mlp()
    exact = model(x)
    converted(model)
    with_closure(model)
    wrapper = model.__dict__["forward"]
    assert is_rounded(model(x), 10 * exact)
    converted(model, deny=["linear", "gelu"])
    assert torch.equal(model(x), 10 * exact)
    converted(model)
    assert is_rounded(model(x), 10 * exact)
    autoamp.revert(model)
    assert not autoamp.is_converted(model)
    assert model.__dict__["forward"] is wrapper
    assert torch.equal(model(x), 10 * exact)
    assert is_rounded(converted(model)(x), 10 * exact)


@pytest.mark.thorough(but=["deleted"])
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

    converted(model)
    assert is_rounded(model(x), exact)
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


def test_submodule_then_its_parent(x: Tensor) -> None:
    model = Outer(mlp())
    exact = model(x)
    converted(model.inner)
    assert is_rounded(model(x), exact)
    assert runs(model.inner) == 1
    converted(model)
    assert is_rounded(model(x), exact)
    assert runs(model) == 1
    assert runs(model.inner) == 1, "the parent's graph holds everything"
    code = autoamp.report(model).graphs[0].code
    assert "autocast" not in code
    autoamp.revert(model)
    assert is_rounded(model(x), exact)
    assert runs(model.inner) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("make", [Block, Broken, lambda: Outer(Broken())])
def test_twenty_models_of_one_class(make: Callable[[], nn.Module], x: Tensor) -> None:
    for model in [converted(make(), strict=False) for _ in range(20)]:
        y = model(x)
        assert runs(model) == len(autoamp.report(model).graphs) > 0
        with autoamp.disabled():
            assert is_rounded(y, model(x))
        assert autoamp.report(model).skipped == []


# -- threads -----------------------------------------------------------------------


@pytest.mark.thorough(but=["good"])
@pytest.mark.parametrize("first", ["good", "bad"])
def test_calls_after_one_that_raises_are_converted(first: str, x: Tensor) -> None:
    """One refuses three rows, as code that looks at its arguments does."""

    def forward(m: Any, x: Tensor) -> Any:
        if x.shape[0] == 3:
            raise ValueError("three rows")
        return m.fc(x).relu()

    model = converted(Of(forward, fc=nn.Linear(WIDTH, WIDTH)))
    for good in [first == "good", False, True, False, True, True]:
        if good:
            model(x)
        else:
            with pytest.raises(ValueError, match="three rows"):
                model(x[:3])
    assert runs(model) == 3 + (first == "good")
    assert len(autoamp.report(model).graphs) == 1


@pytest.mark.thorough
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


# -- a call that ran no rewritten graph --------------------------------------------


def under_vmap(model: nn.Module, x: Tensor) -> Any:
    return torch.vmap(model)(x)


def under_func_grad(model: nn.Module, x: Tensor) -> Any:
    return torch.func.grad(lambda v: model(v).sum())(x)


def under_a_dispatch_mode(model: nn.Module, x: Tensor) -> Any:
    with Quiet():
        return model(x)


def under_jit_trace(model: nn.Module, x: Tensor) -> Any:
    return torch.jit.trace(model, (x,), check_trace=False)(x)


STEPPED_ASIDE = [under_a_dispatch_mode, under_jit_trace]
CAUSES = {
    under_a_dispatch_mode: "in the dispatch mode Quiet, where Dynamo steps aside",
    under_jit_trace: "torch.jit.trace traces the call",
}
jit_is_old = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@jit_is_old
@pytest.mark.parametrize("call", STEPPED_ASIDE, ids=lambda c: c.__name__)
def test_a_call_past_the_graphs_is_told_once_and_raises_under_strict(
    call: Callable[[nn.Module, Tensor], Any], x: Tensor, caplog
) -> None:
    model = mlp()
    exact = call(model, x)
    converted(model, strict=False)
    model(x)
    assert warned(caplog) == []
    assert torch.equal(call(model, x), exact)
    call(model, x)
    (warning,) = warned(caplog)
    assert "'forward' ran no rewritten graph" in warning
    ((what, why),) = [(s[0], s[1]) for s in autoamp.report(model).skipped]
    assert what == "Sequential"
    assert why.endswith(CAUSES[call])
    assert sum(cause in why for cause in ("Quiet", "torch.jit", "vmap", "limit")) == 1
    assert runs(model) == 1
    converted(model, strict=True)
    with pytest.raises(autoamp.CaptureError, match="ran no rewritten graph"):
        call(model, x)
    model(x)


@pytest.mark.parametrize(
    "call", [under_vmap, under_func_grad], ids=lambda c: c.__name__
)
def test_transforms_of_functions_run_under_autocast(
    call: Callable[[nn.Module, Tensor], Any], x: Tensor, caplog
) -> None:
    model = mlp()
    exact = call(model, x)
    converted(model, strict=False)
    model(x)
    for _ in range(2):
        result = call(model, x)
        assert result.dtype == torch.float32
        assert is_rounded(result, exact)
    (warning,) = warned(caplog)
    assert "under torch.autocast instead of rewritten graphs" in warning
    found = autoamp.report(model)
    assert [what for what, _ in found.skipped] == ["Sequential"]
    assert (found.coverage.calls, found.coverage.calls_aside) == (3, 2)
    low = model(x)
    assert runs(model) == 2, "and the model is not off for good"
    with autoamp.disabled():
        assert is_rounded(low, model(x))


class Uncapturable(nn.Module):
    """A graph break in a loop of its own method, and no layer: no graph is left."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.eye(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            if x.sum() > 1e9:
                break
            x = x @ weight
        return x


def test_a_model_that_dynamo_captures_nothing_of_is_told(x: Tensor, caplog) -> None:
    model = Uncapturable()
    exact = model(x)
    converted(model, strict=False)
    for _ in range(2):
        assert torch.equal(model(x), exact)
    for _ in range(10):
        assert is_rounded(model(x), exact)
    first, second = warned(caplog)
    assert "'forward' ran no rewritten graph" in first
    assert "Dynamo cannot go on after a graph break in the method" in first
    assert "vmap" not in first
    assert "under torch.autocast" in second
    assert runs(model) == 0


def graph_layer() -> nn.Module:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    return Of(lambda m, x, edges: torch.spmm(edges, x @ m.weight), weight=weight)


def test_a_model_of_sparse_tensors_runs_under_autocast(x: Tensor, caplog) -> None:
    edges = torch.eye(len(x)).to_sparse()
    model = Of(
        lambda m, x, edges: m.second(m.first(x, edges).relu(), edges),
        first=graph_layer(),
        second=graph_layer(),
    )
    exact = model(x, edges)
    converted(model, strict=False)
    model(x, edges)
    for _ in range(2):
        assert is_rounded(model(x, edges), exact)
    (said,) = warned(caplog)
    assert "under torch.autocast" in said
    assert "because it computes on sparse tensors" in said


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def test_a_call_past_the_graphs_names_the_method_and_the_cause(
    x: Tensor, caplog
) -> None:
    model = converted(Encoder(), strict=False)
    model.encode(x)
    with Quiet():
        model.encode(x)
    (warning,) = warned(caplog)
    assert "a call of 'encode' ran no rewritten graph" in warning
    assert "Quiet" in warning
    caplog.clear()
    with torch._dynamo.config.patch(disable=True):
        converted(mlp(), strict=False)(x)
    assert "Dynamo is switched off" in warned(caplog)[0]


def test_backward_hook_inside_a_torch_container(x: Tensor) -> None:
    # Dynamo breaks at the hook, inside a loop of torch's own code: layer by layer then.
    model = mlp()
    model[0].register_full_backward_hook(lambda *_: None)
    exact = model(x.requires_grad_())
    converted(model)
    assert is_rounded(model(x), exact)
    assert runs(model) == 2


@pytest.mark.thorough
def test_calls_that_compute_nothing_now_and_then(x: Tensor) -> None:
    model = Of(lambda m, x: None if x is None else m.inner(x), inner=mlp())
    converted(model, strict=False)
    for _ in range(4):
        assert model(None) is None
        model(x)
    # The first call met no float op at all, and counts as none.
    coverage = autoamp.report(model).coverage
    assert (coverage.calls, coverage.calls_aside) == (7, 3)
    assert runs(model) == 4


def many_shapes(model: nn.Module, shapes: int = 10) -> None:
    with torch._dynamo.config.patch(
        automatic_dynamic_shapes=False, assume_static_by_default=True
    ):
        for rows in range(2, 2 + shapes):
            model(torch.randn(rows, WIDTH))


@pytest.mark.thorough
def test_past_the_recompile_limit_modules_inside_are_captured() -> None:
    model = converted(mlp(), strict=False)
    many_shapes(model)
    coverage = autoamp.report(model).coverage
    assert coverage.calls_aside == 0
    assert coverage.low_flops == coverage.flops


@pytest.mark.thorough
def test_the_recompile_limit_raises_under_strict() -> None:
    """Of a model that multiplies in its own code, and calls no module."""
    linear = nn.functional.linear
    model = Of(lambda m, x: linear(x, m.inner.weight), inner=nn.Linear(WIDTH, 4))
    with pytest.raises(autoamp.CaptureError, match="the recompile limit"):
        many_shapes(converted(model), 40)


def test_many_shapes_with_dynamic_shapes_do_not_reach_the_limit() -> None:
    model = converted(mlp())
    for rows in range(2, 20):
        model(torch.randn(rows, WIDTH))
    assert runs(model) == 18
    assert len(autoamp.report(model).graphs) == 2


# -- inside and around other people's regions --------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ambient_autocast(dtype: torch.dtype, x: Tensor) -> None:
    model, layer = mlp(), nn.Linear(WIDTH, WIDTH)
    exact, after = model(x), model(layer(x))
    converted(model)
    alone = model(x)
    with torch.autocast("cpu", dtype):
        assert torch.equal(model(x), alone)
        h = layer(x)
        assert h.dtype is dtype
        y = model(h)
        assert is_rounded(y, after)
        assert torch.is_autocast_enabled("cpu")
    y.sum().backward()
    assert layer.weight.grad.dtype is torch.float32
    assert is_rounded(alone, exact)
    assert runs(model) == 3


# -- capture at once ---------------------------------------------------------------


def test_example_inputs_capture_at_once_and_leave_no_trace(x: Tensor) -> None:
    model = Block()
    model.dropout = nn.Dropout(0.5)
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


def fails(m: Any, x: Tensor) -> Tensor:
    """Writes its buffer, then raises."""
    m.calls += 1
    y: Tensor = m.layer(x)
    if x.shape[0] == 5:
        raise KeyError("no five rows")
    return y


@pytest.mark.thorough
def test_failing_example_inputs_leave_the_model_as_it_was(x: Tensor) -> None:
    model: Any = Of(fails, layer=nn.Linear(WIDTH, 4), calls=torch.zeros(()))
    contents = dict(model.__dict__)
    with pytest.raises(KeyError, match="no five rows"):
        converted(model, example_inputs=(x,))
    assert model.__dict__ == contents
    assert model.calls == 0
    converted(model, strict=False)
    model(x[:2])
    with pytest.raises(KeyError, match="no five rows"):
        converted(model, strict=False, deny=["linear"], example_inputs=(x,))
    assert autoamp.is_converted(model), "as it was: converted, with the old options"
    assert runs(model) == 1


# -- back ends ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", ["off", 8.0])
def test_a_compiler_takes_sizes_that_change(loss_scale: Any) -> None:
    """Sizes of weight copies and scales never change, and the compiler is told so."""

    def forward(m: Any, x: Tensor) -> Tensor:
        one, two, three = m.fc(x).chunk(3, -1)
        return (one * two + three).view(len(x), -1, 2, WIDTH // 2).sum(2)

    model = Of(forward, fc=nn.Linear(WIDTH, 3 * WIDTH))
    ours = autoamp.convert(
        copy.deepcopy(model),
        precision="bf16",
        do_no_harm=False,
        loss_scale=loss_scale,
        backend=lookup_backend("aot_eager"),
    )
    for length in (6, 4, 7, 9):
        given = torch.randn(2, length, WIDTH)
        assert relative_error(ours(given), model(given)) <= 2**-6
        ours(given).sum().backward()
    assert len(autoamp.report(ours).graphs) == 2  # one for 6, one for every length


@pytest.mark.thorough
def test_inductor_trains_like_eager() -> None:
    """Convolution and batch norm, then a checkpointed MLP."""

    def forward(m: Any, x: Tensor) -> Any:
        x = torch.relu(m.norm(m.conv(x))).flatten(2)
        return torch.utils.checkpoint.checkpoint(m.mlp, x, use_reentrant=False)

    x = torch.randn(2, 3, 4, 4)
    model = Of(
        forward,
        conv=nn.Conv2d(3, 4, 3, padding=1),
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
    assert all(g.dtype is torch.float32 for g in found)
    # Batch norm cancels the gradient of the convolution's bias.
    names = [n for n, _ in model.named_parameters()]
    keep = [i for i, n in enumerate(names) if n != "conv.bias"]
    expected = [p.grad for p in exact.parameters()]
    assert relative_error([found[i] for i in keep], [expected[i] for i in keep]) < 0.05
    mean = model.norm.running_mean
    torch.testing.assert_close(mean, exact.norm.running_mean, atol=1e-2, rtol=1e-2)
    assert runs(model) == 1


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
def test_a_layer_of_torch_script_runs_as_it_is(how: str) -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    scripted = torch.jit.script(layer) if how == "script" else torch.jit.trace(layer, x)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted)
    expected = model(x)
    found = autoamp.convert(model, precision="bf16", do_no_harm=False)(x)
    assert relative_error(found, expected) < CLOSE
    assert any(row.is_low for row in autoamp.report(model).ops)
