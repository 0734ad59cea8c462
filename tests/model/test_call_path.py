"""What a model may be called, copied and traced by, converted as before."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoamp
from autoamp.model.conversion import conversion_of
from tests.metrics import relative_error
from tests.small_models import BF16, WIDTH, Of, converted, mlp
from tests.weights.test_weights import CLOSE

# -- keyword arguments of any name -----------------------------------------------------

NAMES = ("mod", "self", "model", "call", "args", "kwargs", "entry", "_model", "torch")


def keyword_model(name: str) -> nn.Module:
    """`forward(x, name=...)`, whose instance has another name than its argument."""
    namespace: dict[str, Any] = {}
    exec(
        f"def forward(me, x, {name}=None):\n    return me.layer(x) * {name}", namespace
    )
    return type("Model", (_Layer,), {"forward": namespace["forward"]})()


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)


class Wrapped(_Layer):
    """Its `forward` is the instance's own, as accelerate puts one there."""

    def __init__(self) -> None:
        super().__init__()
        layer = self.layer

        def forward(x: Tensor, /, **given: Tensor) -> Any:
            return layer(x) * next(iter(given.values()))

        self.forward = forward


@pytest.mark.thorough(but=["mod", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_keyword_arguments_have_any_name(name: str) -> None:
    x, factor = torch.randn(3, WIDTH), torch.randn(WIDTH)
    for model in (keyword_model(name), Wrapped()):
        expected = model.forward(x, **{name: factor})
        converted(model)
        found = model.forward(x, **{name: factor})  # `__call__` has a `self` of torch's
        assert relative_error([found], [expected]) < CLOSE
        assert not torch.equal(found, expected), "it ran in fp32"
        with autoamp.disabled():
            assert torch.equal(model.forward(x, **{name: factor}), expected)


@pytest.mark.thorough(but=["mod-False", "self-True"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ["mod", "self", "kwargs"])
def test_so_have_those_of_a_child(name: str, whole: bool) -> None:
    x, factor = torch.randn(3, WIDTH), torch.randn(WIDTH)
    child = converted(keyword_model(name))
    model = Of(lambda m, x, f: m.child.forward(x, **{name: f}), child=child)
    if whole:
        converted(model)
    with autoamp.disabled():
        expected = model(x, factor)
    assert relative_error([model(x, factor)], [expected]) < CLOSE
    compiled = torch.compile(model, backend="eager")
    assert relative_error([compiled(x, factor)], [expected]) < CLOSE


def test_under_a_transform_too() -> None:
    model, x, factor = keyword_model("mod"), torch.randn(3, WIDTH), torch.randn(WIDTH)
    expected = model(x, mod=factor)
    autoamp.convert(model, **BF16)
    found = torch.func.vmap(lambda row: model(row, mod=factor))(x)
    assert relative_error([found], [expected]) < CLOSE


# -- classes that copy and pickle themselves -------------------------------------------


class Model(_Layer):
    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


class Anew(Model):
    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        made = memo[id(self)] = type(self)()
        made.load_state_dict(self.state_dict())
        return made


class ByItems(Model):
    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        made = memo[id(self)] = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            setattr(made, name, copy.deepcopy(value, memo))
        return made


class SharesTheRest(Model):
    """Only what has weights is copied: the rest of `__dict__` is the original's."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._modules = copy.deepcopy(self._modules, memo)
        return made


class StepsAside(Model):
    """The recipe that has `copy.deepcopy` do what it would without this method."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        own = self.__deepcopy__
        self.__deepcopy__ = None
        made: Any = copy.deepcopy(self, memo)
        self.__deepcopy__ = own
        made.__deepcopy__ = types.MethodType(own.__func__, made)
        return made


def _rebuilt(state: dict[str, Any]) -> Model:
    made = Reduced()
    made.__dict__.update(state)
    return made


class Reduced(Model):
    def __reduce__(self) -> Any:
        return _rebuilt, (self.__dict__,)


def graph_module() -> nn.Module:
    return fx.symbolic_trace(mlp())


def of_an_instance() -> nn.Module:
    """A method of one instance: a hook of somebody's."""
    model = Model()

    def copied(memo: dict[int, Any]) -> Model:
        made = Model()
        made.load_state_dict(model.state_dict())
        return made

    model.__deepcopy__ = copied
    return model


def scaled(model: nn.Module, x: Tensor) -> Any:
    """A `forward` of somebody else's, ten times the model's own."""
    return 10 * type(model).forward(model, x)


def with_partial() -> nn.Module:
    model = Model()
    model.forward = functools.partial(scaled, model)  # type: ignore[method-assign]
    return model


def with_method() -> nn.Module:
    model = Model()
    model.forward = types.MethodType(scaled, model)  # type: ignore[method-assign]
    return model


COPIED = [
    *(Model, Anew, ByItems, SharesTheRest, StepsAside, Reduced),
    *(graph_module, of_an_instance, with_partial, with_method),
]


@pytest.mark.thorough(
    but=[
        "Model-True",
        "Anew-False",
        "ByItems-False",
        "StepsAside-False",
        "Reduced-True",
        "with_partial-True",
    ]
)
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("make", COPIED, ids=lambda m: m.__name__)
def test_deep_copies_are_converted_and_run_their_own_weights(
    make: Callable[[], nn.Module], called: bool
) -> None:
    model, x = make(), torch.randn(3, WIDTH)
    before = model.__dict__.copy()
    expected = model(x)
    converted(model)
    if called:
        model(x)
    other = copy.deepcopy(model)
    third = copy.deepcopy(other)
    gc.collect()
    assert all(map(autoamp.is_converted, (model, other, third)))
    assert type(third).__name__ == type(other).__name__
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    for each in (model, third):
        found = each(x)
        assert relative_error([found], [expected]) < CLOSE
        assert not torch.equal(found, expected), "it ran in fp32"
    assert not other(x).any()
    other(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    state = conversion_of(model)
    assert state.skipped == [], "nothing is the matter"
    autoamp.revert(model)
    changed = {"__deepcopy__"} if make is StepsAside else set()
    assert model.__dict__.keys() - changed == before.keys()
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("make", [Reduced, graph_module], ids=lambda m: m.__name__)
def test_pickles_of_classes_that_reduce_themselves_are_as_before(
    make: Callable[[], nn.Module],
) -> None:
    model, x = make(), torch.randn(3, WIDTH)
    expected = model(x)
    converted(model)(x)
    assert b"autoamp" not in pickle.dumps(model).replace(b"tests", b"")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
        copy.copy(model),
    ):
        assert not autoamp.is_converted(other)
        assert torch.equal(other(x), expected)
    assert autoamp.is_converted(model)


# -- torch.fx --------------------------------------------------------------------------


class Head(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).relu())


def traced(tracer: str, model: nn.Module, x: Tensor) -> Any:
    if tracer == "symbolic_trace":
        return fx.symbolic_trace(model)
    return make_fx(model)(x)


@pytest.mark.parametrize("first", ["traced", "called"])
@pytest.mark.parametrize("tracer", ["symbolic_trace", "make_fx"])
def test_fx_traces_a_converted_child_as_it_was(tracer: str, first: str, caplog) -> None:
    parent, x = Head(mlp()), torch.randn(3, WIDTH)
    expected = parent(x)
    plain = traced(tracer, parent, x)
    converted(parent.body)
    if first == "called":
        parent(x)
    caplog.clear()
    for _ in range(2):
        again = traced(tracer, parent, x)
        assert again.code == plain.code
        assert torch.equal(again(x), expected)
    assert sum("torch.fx has traced it" in r.message for r in caplog.records) == 1
    # The call itself is converted as before, in training too.
    parent(x).sum().backward()
    found = parent.body[0].weight.grad
    autoamp.revert(parent.body).zero_grad()
    parent(x).sum().backward()
    assert relative_error([found], [parent.body[0].weight.grad]) < CLOSE


def test_a_traced_parent_trains_the_same_weights_and_is_converted_in_turn() -> None:
    parent, x = Head(converted(mlp())), torch.randn(3, WIDTH)
    graph = fx.symbolic_trace(parent)
    optimizer = torch.optim.SGD(graph.parameters(), 0.1)
    before = parent.body[0].weight.detach().clone()
    graph(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(parent.body[0].weight, before)
    expected = graph(x)
    assert relative_error([parent(x)], [expected]) < CLOSE
    found = converted(graph)(x)
    assert relative_error([found], [expected]) < CLOSE
    assert not torch.equal(found, expected)


def test_a_leaf_of_the_tracer_stays_converted() -> None:
    class Tracer(fx.Tracer):
        def is_leaf_module(self, m: nn.Module, name: str) -> bool:
            return autoamp.is_converted(m) or super().is_leaf_module(m, name)

    parent, x = Head(converted(mlp())), torch.randn(3, WIDTH)
    graph = fx.GraphModule(parent, Tracer().trace(parent))
    assert any(n.op == "call_module" and n.target == "body" for n in graph.graph.nodes)
    assert torch.equal(graph(x), parent(x))
