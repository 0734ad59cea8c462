"""Methods besides `forward` stay as they are; modules that they call are captured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.small_models import converted, is_rounded
from tests.small_models import runs as runs_of


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self.decoder = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 8)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def decode(self, z: Tensor) -> Tensor:
        for layer in self.decoder:
            z = layer(z)
        return z

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        return self.head(torch.ones(count, 8))

    def last(self, z: Tensor) -> Tensor:
        return self.decoder[-1](z)

    def log_odds(self, x: Tensor) -> Tensor:
        return torch.log(self.head(x).sigmoid()) - (-self.head(x)).sigmoid().log()

    def training_step(self, x: Tensor) -> Tensor:
        loss = self.encoder(x).sum()
        loss.backward()
        return loss

    def generate(self, x: Tensor) -> Tensor:
        return self(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.decoder:
            yield layer(x)


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))

CALLS: list[tuple[Callable[[Any], Any], int]] = [
    (lambda m: m.encode(X), 1),
    (lambda m: m.decode(X[:, :4]), 2),
    (lambda m: m.sample(5), 1),
    (lambda m: m.last(X), 1),
    (lambda m: m.generate(X), 1),
    (lambda m: m._inner(X), 1),
    (lambda m: next(m.pieces(X[:, :4])), 1),
]
"""Calls of methods, and how many calls of modules, or of the model, are in each."""


@pytest.mark.parametrize("strict", [False, True])
def test_modules_that_they_call_run_rewritten_graphs(strict: bool, caplog) -> None:
    model = Autoencoder()
    plain = copy.deepcopy(model)
    converted(model, strict=strict)
    runs = 0
    for call, parts in CALLS:
        assert is_rounded(call(model), call(plain))
        runs += parts
        assert runs_of(model) == runs
    report = autoamp.report(model)
    assert (report.coverage.calls, report.coverage.calls_aside) == (runs, 0)
    assert all(row.is_low for row in report.ops if row.op == "aten::linear.default")
    paths = {"encoder.0", "encoder.2", "decoder.0", "decoder.1", "head"}
    assert {row.module for row in report.ops if row.flops} == paths
    methods = {what for what, why in report.skipped if "run in fp32" in why}
    assert methods == {f"Autoencoder.{name}" for name in ("encode", "decode", "sample")}
    assert model.encode.__func__ is Autoencoder.encode
    with autoamp.disabled():
        assert torch.equal(model.encode(X), plain.encode(X))
    assert not warned(caplog)


CONTAINERS = [nn.ModuleDict({"a": nn.Linear(8, 8)}), nn.ModuleList([nn.Linear(8, 8)])]


@pytest.mark.parametrize("held", CONTAINERS)
def test_a_container_converts_for_the_modules_in_it(held: Any) -> None:
    model = copy.deepcopy(held)
    (part,) = model.children()
    exact = part(X)
    converted(model)
    assert is_rounded(part(X), exact)
    assert runs_of(model) == 1
    with pytest.raises(NotImplementedError, match="forward"):
        model(X)


@pytest.mark.parametrize("replaced", [False, True])
def test_revert_takes_their_modules_back(replaced: bool) -> None:
    model = Autoencoder()
    exact, before = model.encode(X), dict(vars(model))
    converted(model)
    assert is_rounded(model.encode(X), exact)
    if replaced:
        model.forward = before["forward"] = model.head.forward
    autoamp.revert(model)
    assert torch.equal(model.encode(X), exact)
    assert vars(model) == before


# -- the automatic mode ----------------------------------------------------------------


class Trained(Autoencoder):
    def training_step(self, x: Tensor) -> Tensor:
        loss = (self.forward(x) - x).square().mean()
        loss.backward()
        return loss


@pytest.mark.usefixtures("automatic")
@pytest.mark.parametrize("name", ["encode", "forward", "training_step"])
def test_seen_from_the_second_call_on_in_the_automatic_mode(name: str) -> None:
    model = Trained()
    for _ in range(3):
        getattr(model, name)(X)
    report = autoamp.report(model)
    assert report.runs == 2
    assert all(row.is_low for row in report.ops if row.op == "aten::linear.default")
    coverage = report.coverage
    assert (coverage.calls, coverage.calls_aside) == (2, 0)


@pytest.mark.usefixtures("automatic")
def test_a_method_has_its_parts_in_the_models_report_in_the_automatic_mode() -> None:
    model = Trained()
    for _ in range(3):
        model.decode(model._inner(X))
    report = autoamp.report(model)
    assert report.runs == 2 + 2 * 2
    paths = {"encoder.0", "encoder.2", "decoder.0", "decoder.1"}
    assert {row.module for row in report.ops if row.is_low and row.flops} == paths
    methods = {what for what, _ in report.skipped}
    assert methods == {"Trained.decode", "Trained._inner"}


@pytest.mark.usefixtures("automatic")
def test_a_module_is_called_before_its_owner_is_made(caplog) -> None:
    """As botorch's `SingleTaskGP` transforms its data before `super().__init__()`."""

    class HalfMade(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            self.forward(part)
            super().__init__()
            self.part = part

        def forward(self, part: nn.Module) -> Tensor:
            return part(X)

    class Elusive(Autoencoder):
        def modules(self) -> Any:
            raise AttributeError("not yet")

        children = named_children = named_modules = modules

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    for _ in range(2):
        HalfMade(Autoencoder())
        elusive = Elusive()
        for _ in range(3):
            elusive.forward(X)
    assert autoamp.report(elusive).runs == 2
    assert not warned(caplog)
