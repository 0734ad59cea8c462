"""Deep copies of a converted model are converted; pickles of it are plain models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from tests.logs import warned
from tests.runtime.test_call_path import of_a_method, of_a_partial
from tests.says import says
from tests.small_models import WIDTH, converted, is_rounded, mlp


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Any:
        return self.layer(x)

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


COPIED = [
    *(Model, Anew, ByItems, SharesTheRest, StepsAside, Reduced),
    *(graph_module, of_an_instance, of_a_partial, of_a_method),
]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("make", COPIED, ids=lambda m: m.__name__)
def test_deep_copies_are_converted_and_run_their_own_weights(
    make: Callable[[], Any], called: bool
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
        assert is_rounded(each(x), expected)
    assert not other(x).any()
    assert not isinstance(other, Model) or not other.encode(x).any()
    other(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    methods = {what.partition(".")[2] for what, _ in autoamp.report(model).skipped}
    assert methods <= {"encode"}, "nothing else is the matter"
    autoamp.revert(model)
    changed = {"__deepcopy__"} if make is StepsAside else set()
    assert model.__dict__.keys() - changed == before.keys()
    assert torch.equal(model(x), expected)


def through_pickle(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [through_pickle, through_torch_save, copy.copy]
PICKLED = [(make, way) for make in (Model, Reduced, graph_module) for way in WAYS]
PICKLED += [(of_a_partial, way) for way in WAYS if way is not copy.copy]


@pytest.mark.parametrize(("make", "way"), PICKLED, ids=lambda f: f.__name__)
def test_pickles_are_plain_models(
    make: Callable[[], nn.Module], way: Callable[[nn.Module], Any]
) -> None:
    model, x = make(), torch.randn(3, WIDTH)
    exact, names = model(x), set(model.__dict__)
    converted(model)(x)
    assert b"autoamp" not in pickle.dumps(model)
    other = way(model)
    assert not autoamp.is_converted(other)
    assert make is graph_module or set(other.__dict__) == names
    assert torch.equal(other(x), exact)
    assert autoamp.is_converted(model)
    assert is_rounded(converted(copy.deepcopy(other))(x), exact)


def test_it_is_said_that_a_pickle_is_plain(caplog) -> None:
    through_pickle(converted(Model()))
    (told,) = warned(caplog)
    says(told, option="autoamp.convert(copy)")
