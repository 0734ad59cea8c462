"""torch's profiler names the casts that are autoamp's; no range runs without it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autoamp


class Net(nn.Module):
    """Its own cast is not autoamp's."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        own = x.double().sum().float()
        return self.b(torch.exp(self.a(x))) + own


def ranges_of(call) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        call()
    names = [event.name for event in profiled.events()]
    return Counter(name for name in names if name.startswith("autoamp: "))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_each_cast_of_the_report_is_a_range(precision) -> None:
    # No step is skipped, after which runs are watched node by node.
    options = {"precision": precision, "do_no_harm": False, "loss_scale": 8.0}
    model = autoamp.convert(Net(), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x = torch.randn(4, 8)

    def step() -> None:
        model(x).mean().backward()
        optimizer.step()

    step()
    casts = [each for each in autoamp.report(model).casts if each.kind != "weight"]
    assert casts
    found = ranges_of(step)
    copies = f"autoamp: weight copies in {precision}"
    assert found[copies] == 1
    expected = Counter(
        f"autoamp: {each.kind} cast of {each.value} to {each.dtype}" for each in casts
    )
    assert found - Counter([copies]) == expected
    # A second profile, and a call between them.
    step()
    assert ranges_of(step) == found


def test_results_are_the_same_to_the_bit() -> None:
    torch.manual_seed(0)
    model = autoamp.convert(Net(), precision="bf16", do_no_harm=False)
    x = torch.randn(4, 8, requires_grad=True)
    model(x).sum().backward()
    plain, (gradient,) = model(x), torch.autograd.grad(model(x).sum(), x)
    with profile(activities=[ProfilerActivity.CPU]):
        profiled, (named,) = model(x), torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(plain, profiled)
    assert torch.equal(gradient, named)


def test_a_first_call_and_a_compiled_one_can_be_profiled() -> None:
    x = torch.randn(4, 8)
    compilers = (lambda gm, _: gm.forward, lambda gm, _: gm)
    for backend in ("eager", *compilers):
        model = autoamp.convert(
            Net(), precision="bf16", do_no_harm=False, backend=backend
        )
        ranges_of(lambda model=model: model(x).sum().backward())
        assert autoamp.report(model).runs == 1


def test_no_range_runs_where_nothing_is_recorded(monkeypatch) -> None:
    model = autoamp.convert(Net(), precision="bf16", do_no_harm=False)
    x = torch.randn(4, 8)
    model(x)

    def refuse(*_):
        raise AssertionError

    monkeypatch.setattr(torch.autograd.profiler.record_function, "__enter__", refuse)
    model(x)
    with pytest.raises(AssertionError):
        ranges_of(lambda: model(x))
