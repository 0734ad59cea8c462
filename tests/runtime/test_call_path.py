"""A converted call is the model's call, in whichever way it is made."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

import autoamp
from tests.quick import each_with_one
from tests.small_models import CLOSE, WIDTH, Of, converted, is_rounded, mlp, runs

# What Dynamo itself warns of where a value crosses a graph break.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, WIDTH)


# -- programs by ways of calling -------------------------------------------------------


def ten_times(model: nn.Module, x: Tensor) -> Tensor:
    """A `forward` of somebody else's, ten times the model's own."""
    return 10 * type(model).forward(model, x)


def of_a_partial() -> nn.Module:
    model = mlp()
    model.forward = functools.partial(ten_times, model)
    return model


def of_a_method() -> nn.Module:
    model = mlp()
    model.forward = types.MethodType(ten_times, model)
    return model


def of_a_closure() -> nn.Module:
    model = mlp()
    old = model.forward

    def forward(x: Tensor) -> Tensor:
        return 10 * old(x)

    model.forward = forward
    return model


def normed() -> nn.Module:
    layers = nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def hooked() -> nn.Module:
    """Dynamo breaks at the hook, inside a loop of torch's own code."""
    model = mlp()
    model[0].register_full_backward_hook(lambda *_: None)
    return model


PROGRAMS = [mlp, normed, hooked, of_a_partial, of_a_method, of_a_closure]


def called(model: nn.Module, x: Tensor) -> Any:
    return model(x)


def forward(model: nn.Module, x: Tensor) -> Any:
    return model.forward(x)


def in_eval(model: nn.Module, x: Tensor) -> Any:
    with torch.inference_mode():
        return model.eval()(x)


def under_autocast(model: nn.Module, x: Tensor) -> Any:
    if not autoamp.is_converted(model):
        return model(x)
    with torch.autocast("cpu", torch.float16):
        found = model(x)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(found, model(x)), "the region is not the model's"
    return found


def with_other_weights(model: nn.Module, x: Tensor) -> Any:
    given = {k: torch.ones_like(v) for k, v in model.state_dict().items()}
    return functional_call(model, given, (x,))


def as_a_replica(model: nn.Module, x: Tensor) -> Any:
    """As `DataParallel` makes them, with weights of their own."""
    replica = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        twin = replica._modules[name] = child._replicate_for_data_parallel()
        for key, p in child._parameters.items():
            setattr(twin, key, torch.ones_like(p))
    return replica(x)


WAYS = [called, forward, in_eval, under_autocast, with_other_weights, as_a_replica]
EACH = each_with_one(PROGRAMS, WAYS) + [
    pytest.param(mlp, way) for way in (with_other_weights, as_a_replica)
]


@pytest.mark.parametrize(("make", "way"), EACH, ids=lambda f: f.__name__)
def test_a_converted_call_is_the_models_call(
    make: Callable[[], nn.Module], way: Callable[[nn.Module, Tensor], Any], x: Tensor
) -> None:
    model = make()
    contents, signature = dict(vars(model)), inspect.signature(model.forward)
    exact, plain = way(copy.deepcopy(model), x), model(x)
    converted(model)
    assert inspect.signature(model.forward) == signature
    assert is_rounded(way(model, x), exact)
    assert runs(model) > 0
    assert is_rounded(model.train()(x), plain), "and the model's own weights are back"
    autoamp.revert(model)
    assert vars(model) == contents


def test_in_eval_no_statistic_is_written(x: Tensor) -> None:
    model = converted(normed())
    model(x)
    mean = model[1].running_mean.clone()
    assert mean.any()
    model.eval()(x)
    assert torch.equal(model[1].running_mean, mean)


def test_what_another_layer_gives_under_autocast_is_taken(x: Tensor) -> None:
    model, layer = mlp(), nn.Linear(WIDTH, WIDTH)
    exact = model(layer(x))
    converted(model)
    with torch.autocast("cpu", torch.float16):
        h = layer(x)
        y = model(h)
    assert h.dtype is torch.float16
    assert is_rounded(y, exact)
    y.sum().backward()
    assert layer.weight.grad.dtype is torch.float32


def test_a_model_made_double_is_exact(x: Tensor) -> None:
    model = converted(mlp())
    model(x)
    model.double()
    exact = copy.deepcopy(model)
    autoamp.revert(exact)
    assert torch.equal(model(x.double()), exact(x.double()))
    assert runs(model) == 2


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
def test_a_layer_of_torch_script_runs_as_it_is(how: str, x: Tensor) -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    scripted = torch.jit.script(layer) if how == "script" else torch.jit.trace(layer, x)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted)
    expected = model(x)
    assert is_rounded(converted(model, strict=False)(x), expected)
    assert any(row.is_low for row in autoamp.report(model).ops)


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


# -- hooks -----------------------------------------------------------------------------


def test_hooks_are_called_as_before_with_fp32_gradients(x: Tensor) -> None:
    model, seen = normed(), []

    def backward(name: str) -> Callable[..., None]:
        return lambda m, a, y: seen.append((name, *(grad.dtype for grad in y)))

    for name, module in (("root", model), ("layer", model[3])):
        module.register_forward_pre_hook(lambda m, a, n=name: seen.append((n, "pre")))
        module.register_forward_hook(lambda m, a, y, n=name: seen.append((n, "post")))
        module.register_full_backward_hook(backward(name))
    model[0].weight.register_hook(lambda g: seen.append(("weight", g.dtype)))
    model(x.requires_grad_()).sum().backward()
    expected = list(seen)
    assert len(expected) == 7
    converted(model)
    for _ in range(2):
        seen.clear()
        model(x).sum().backward()
        assert seen == expected
    assert runs(model) >= 2


# -- keyword arguments of any name -----------------------------------------------------

NAMES = ("mod", "self", "model", "call", "args", "kwargs", "entry", "_model", "torch")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


def keyword_model(name: str) -> nn.Module:
    """`forward(x, name=...)`, whose instance has another name than its argument."""
    namespace: dict[str, Any] = {}
    code = f"def forward(me, x, {name}=None):\n    return me.layer(x) * {name}"
    exec(code, namespace)
    return type("Model", (Layer,), {"forward": namespace["forward"]})()


class Wrapped(Layer):
    """Its `forward` is the instance's own, as accelerate puts one there."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layer

        def forward(x: Tensor, /, **given: Tensor) -> Any:
            return layer(x) * next(iter(given.values()))

        self.forward = forward


@pytest.mark.parametrize("name", NAMES)
def test_keyword_arguments_have_any_name(name: str, x: Tensor) -> None:
    factor = torch.randn(WIDTH)
    for model in (keyword_model(name), Wrapped()):
        expected = model.forward(x, **{name: factor})
        converted(model)
        # `__call__` has a `self` of torch's.
        assert is_rounded(model.forward(x, **{name: factor}), expected)
        with autoamp.disabled():
            assert torch.equal(model.forward(x, **{name: factor}), expected)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["mod", "self", "kwargs"])
def test_so_have_those_of_a_child(name: str, whole: bool, x: Tensor) -> None:
    factor, child = torch.randn(WIDTH), converted(keyword_model(name))
    model = Of(lambda m, x, f: m.child.forward(x, **{name: f}), child=child)
    if whole:
        converted(model)
    with autoamp.disabled():
        expected = model(x, factor)
    assert is_rounded(model(x, factor), expected)
    compiled = torch.compile(model, backend="eager")
    assert is_rounded(compiled(x, factor), expected)


def test_so_have_those_under_a_transform(x: Tensor) -> None:
    model, factor = keyword_model("mod"), torch.randn(WIDTH)
    expected = model(x, mod=factor)
    converted(model, strict=False)
    found = torch.func.vmap(lambda row: model(row, mod=factor))(x)
    assert is_rounded(found, expected)


# -- torch.fx --------------------------------------------------------------------------


def head(body: nn.Module) -> Any:
    return nn.Sequential(body, nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("first", ["traced", "called"])
@pytest.mark.parametrize("tracer", [lambda m, x: fx.symbolic_trace(m), make_fx])
def test_fx_traces_a_converted_child_as_it_was(
    tracer: Any, first: str, x: Tensor, caplog
) -> None:
    def traced() -> Any:
        return make_fx(parent)(x) if tracer is make_fx else tracer(parent, x)

    parent = head(mlp())
    expected, plain = parent(x), traced()
    converted(parent[0])
    if first == "called":
        parent(x)
    caplog.clear()
    for _ in range(2):
        again = traced()
        assert again.code == plain.code
        assert torch.equal(again(x), expected)
    assert sum("torch.fx has traced it" in r.message for r in caplog.records) == 1
    # The call itself is converted as before, in training too.
    parent(x).sum().backward()
    found = parent[0][0].weight.grad
    autoamp.revert(parent[0]).zero_grad()
    parent(x).sum().backward()
    assert is_rounded(found, parent[0][0].weight.grad)


def test_a_traced_parent_trains_the_same_weights_and_is_converted_in_turn(
    x: Tensor,
) -> None:
    parent = head(converted(mlp()))
    graph, weight = fx.symbolic_trace(parent), parent[0][0].weight
    optimizer, before = torch.optim.SGD(graph.parameters(), 0.1), weight.clone()
    graph(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    expected = graph(x)
    torch.testing.assert_close(parent(x), expected, rtol=CLOSE, atol=CLOSE)
    assert is_rounded(converted(graph)(x), expected)


def test_a_leaf_of_the_tracer_stays_converted(x: Tensor) -> None:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return autoamp.is_converted(m) or super().is_leaf_module(m, name)

    parent = head(converted(mlp()))
    graph = fx.GraphModule(parent, Tracer().trace(parent))
    assert any(n.op == "call_module" and n.target == "0" for n in graph.graph.nodes)
    assert torch.equal(graph(x), parent(x))
