"""Modules that are no models, called outside of any: their results stay fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import autoamp
from tests.small_models import BF16, Of

pytestmark = pytest.mark.usefixtures("off_again")

X = torch.linspace(-1, 1, 5 * 24).reshape(5, 24)


def low_rank() -> nn.Module:
    a = nn.Parameter(torch.linspace(-1, 1, 4 * 24).reshape(4, 24))
    return Of(lambda m, weight: weight + m.b(m.a.t()), a=a, b=nn.Linear(4, 24))


def layer(*kinds: str) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(24, 24)
    for kind in kinds:
        if kind == "low rank":
            parametrize.register_parametrization(made, "weight", low_rank())
        elif kind.endswith("norm"):
            getattr(parametrizations, kind)(made)
        else:
            parametrizations.orthogonal(made, orthogonal_map=kind)
    return made


class Score(type("Metric", (nn.Module,), {"__module__": "torchmetrics.metric"})):  # type: ignore[misc]
    """A metric of a library's that holds a net, as an inception distance does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def update(self, x: Tensor) -> Tensor:
        return self.net(x)


class Tabled(nn.Module):
    """A model that stores a table which a part of its own computes."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24))
        self.register_buffer("table", self._table().detach())

    def _table(self) -> Tensor:
        return self.position(X)


def baked(made: nn.Linear) -> Tensor:
    parametrize.remove_parametrizations(made, "weight")
    return made.weight


def by_the_script_itself(made: Any) -> Tensor:
    """The part was called by the script, and converted, before the weight is read."""
    made.parametrizations.weight[0](made.parametrizations.weight.original)
    return made.weight


def in_a_penalty(made: Any) -> Tensor:
    (made.weight.t() @ made.weight).square().sum().backward()
    return made.parametrizations.weight.original.grad


READ: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "exponential": (lambda: layer("matrix_exp"), baked),
    "cayley": (lambda: layer("cayley"), in_a_penalty),
    "householder": (lambda: layer("householder"), lambda made: made.weight),
    "weight norm": (lambda: layer("weight_norm"), lambda made: made.weight.norm()),
    "spectral norm": (lambda: layer("spectral_norm").eval(), baked),
    "two": (lambda: layer("low rank", "spectral_norm", "low rank").eval(), baked),
    "low rank": (lambda: layer("low rank"), by_the_script_itself),
    "metric": (Score, lambda score: score(X)),
    "update of a metric": (Score, lambda score: score.update(X)),
    "table": (Tabled, lambda model: model.table),
}


@pytest.mark.parametrize("what", READ)
def test_what_is_no_model_computes_as_without_autoamp(what: str) -> None:
    made, read = READ[what]
    torch.manual_seed(0)
    want = read(made())
    autoamp.enable(**BF16)
    torch.manual_seed(0)
    assert torch.equal(read(made()), want)


def test_the_model_is_converted_with_its_parametrised_weights() -> None:
    """And a weight that is read between its steps stays what fp32 computes."""
    autoamp.enable(**BF16)
    net: Any = nn.Sequential(layer("low rank"), nn.Tanh(), nn.Linear(24, 3))
    before = net[0].weight
    for _ in range(2):
        net(X).sum().backward()
        assert torch.equal(net[0].weight, before)
    assert autoamp.is_converted(net)
    assert autoamp.report(net).runs
    autoamp.disable()
    assert torch.equal(net[0].weight, before)


def test_a_table_that_only_another_module_computes_is_a_models_result() -> None:
    """A model called in the `__init__` of a module that does not hold it."""
    autoamp.enable(**BF16)
    model = nn.Sequential(nn.Linear(24, 24), nn.Tanh())

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = model(X)

    Other()
    assert autoamp.is_converted(model)
