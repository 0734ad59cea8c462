"""Questions about a model change neither the model nor the random generators."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.small_models import BF16

QUESTIONS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "explain": lambda m, x: autoamp.explain(m, x, **BF16),
    "compare": lambda m, x: autoamp.compare(m, x, **BF16),
    "find_overflow": lambda m, x: autoamp.find_overflow(m, x, **BF16),
}


class Diary(nn.Module):
    """Writes down every call in each way that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.history: list[Any] = ["begun"]
        self.cache: dict[str, Any] = {"deep": {"list": [1]}}
        self.recent: deque[int] = deque([1, 2], maxlen=2)
        self.kinds = {"a"}
        self.ordered = OrderedDict(first=1)
        self.pair = ([], {})
        self.space = SimpleNamespace(seen=[0], count=0)
        self.total = torch.zeros(3)
        self.table = np.zeros(3)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))

    @torch._dynamo.disable
    def write(self, x: Tensor) -> float:
        self.history.append(x.detach())
        self.cache["deep"]["list"].append(2)
        self.cache[f"call {len(self.history)}"] = x.detach()
        self.recent.append(len(self.history))
        self.kinds.add("b")
        self.ordered["second"] = 2
        self.ordered.move_to_end("first")
        self.pair[0].append(1)
        self.pair[1]["key"] = 1
        self.space.seen.append(1)
        self.space.count += 1
        self.total += 1
        self.table += 1
        self.frozen.data.add_(1)
        self.steps.add_(1)
        self.last = x.detach()
        return random.random() + float(np.random.rand()) + float(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.write(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Diary()
        self.hidden = [Diary()]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.inner(x))


def contents(model: Diary) -> str:
    tensors = model.total, model.frozen, model.steps, model.table.tolist()
    named = {k: v for k, v in vars(model).items() if not k.startswith("_")}
    return repr((named, tensors))


def generators() -> str:
    return repr(
        (
            random.getstate(),
            np.random.get_state(),
            torch.get_rng_state().tolist(),
        )
    )


@pytest.mark.parametrize(
    ("question", "converted"),
    [
        *((question, False) for question in QUESTIONS),
        ("find_overflow", True),
        ("explain", True),
    ],
)
def test_a_question_leaves_everything_as_it_was(
    question: str, converted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Outer().train(converted)
    called: list[str] = []
    model.inner.fc.weight.register_hook(lambda _: called.append("gradient"))
    optimizer = torch.optim.Adam(model.parameters())
    if converted:
        autoamp.convert(model, optimizer, **BF16)
    x = torch.randn(4, 8, generator=torch.Generator()).requires_grad_()
    model(x.detach()).sum().backward()
    called.clear()
    diaries = model.inner, model.hidden[0]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before = [contents(diary) for diary in diaries], generators()
    held = [id(value) for d in diaries for value in (d.history, d.cache, d.recent)]
    QUESTIONS[question](model, x)
    assert ([contents(diary) for diary in diaries], generators()) == before
    assert held == [id(v) for d in diaries for v in (d.history, d.cache, d.recent)]
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)
    assert (x.grad, called, dict(optimizer.state)) == (None, [], {})
    assert model.training == converted
    assert autoamp.is_converted(model) == converted
    autoamp.revert(model)


@pytest.mark.parametrize("question", QUESTIONS)
def test_an_error_of_the_models_own_is_raised_and_leaves_it_too(question: str) -> None:
    own = KeyError("of the user's")

    class Fails(Diary):
        def forward(self, x: Tensor) -> Tensor:
            self.write(x)
            raise own

    model = Fails()
    before = contents(model), generators()
    with pytest.raises(KeyError) as raised:
        QUESTIONS[question](model, torch.ones(2, 8))
    assert raised.value is own
    assert (contents(model), generators()) == before
