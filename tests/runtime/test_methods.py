"""Methods besides `forward` are converted where they compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.small_models import BF16, converted, is_rounded
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

    # None of these compute by themselves.

    def training_step(self, x: Tensor) -> Tensor:
        loss = self.encoder(x).sum()
        loss.backward()
        return loss

    def width(self) -> int:
        return self.encoder[0].in_features

    def count(self) -> int:
        return sum(p.weight.numel() for p in self.decoder) - self.head.weight.numel()

    def start(self) -> None:
        self.encoder[0].weight.data.mul_(1)
        for layer in self.decoder:
            layer.bias.detach().fill_(0)

    def weights(self) -> list[Tensor]:
        return list(self.encoder.parameters())

    def generate(self, x: Tensor) -> Tensor:
        return self(x)

    def _inner(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def pieces(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.decoder:
            yield layer(x)


X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"a": Autoencoder()})
        self.table = nn.Parameter(torch.ones(3))

    def encode(self, x: Tensor) -> Tensor:
        return self.parts["a"].encode(x)

    def each(self, x: Tensor) -> list[Tensor]:
        return [part.encode(x) for part in self.parts.values()]

    def size(self) -> int:
        return self.parts["a"].head.weight.numel() + self.table.numel()


@pytest.mark.parametrize(
    ("kind", "computing"),
    [
        (Autoencoder, {"encode", "decode", "sample", "last", "log_odds"}),
        (Held, {"encode", "each"}),
    ],
)
def test_methods_that_compute_are_told_by_their_source(
    kind: type[nn.Module], computing: set[str]
) -> None:
    """A method of a child counts, and a tensor of a child does not."""
    model = autoamp.convert(kind(), **BF16)
    methods = {name for name in vars(kind) if name not in ("forward", "__init__")}
    assert methods & vars(model).keys() == computing


def test_they_run_rewritten_graphs_and_are_counted() -> None:
    model = Autoencoder()
    plain = copy.deepcopy(model)
    converted(model)
    calls = [("encode", X), ("decode", X[:, :4]), ("sample", 5), ("last", X)]
    for count, (name, given) in enumerate(calls, 1):
        found = getattr(model, name)(given)
        assert is_rounded(found, getattr(plain, name)(given))
        assert runs_of(model) == count
    coverage = autoamp.report(model).coverage
    assert (coverage.calls, coverage.calls_aside) == (4, 0)
    with autoamp.disabled():
        assert torch.equal(model.encode(X), plain.encode(X))


class Counted(Autoencoder):
    """Asks a child's own methods, which look as if they computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Autoencoder()
        self.asked = 0

    def ask(self) -> int:
        self.asked += 1
        return self.parameter_count()

    def parameter_count(self) -> int:
        return self.inner.count() + self.inner.width()

    def encode_or_count(self, x: Tensor | None = None) -> Any:
        return self.parameter_count() if x is None else self.inner.encode(x)


@pytest.mark.parametrize("strict", [False, True])
def test_a_method_that_computes_nothing_is_no_call(strict: bool, caplog) -> None:
    model = autoamp.convert(Counted(), strict=strict, **BF16)
    assert "parameter_count" in vars(model)
    count = Counted().parameter_count()
    assert [model.parameter_count() for _ in range(5)] == [count] * 5
    assert [model.encode_or_count() for _ in range(5)] == [count] * 5
    assert [model.ask() for _ in range(5)] == [count] * 5
    assert model.asked == 5
    report = autoamp.report(model)
    assert (report.coverage.calls, report.skipped) == (0, [])
    model.encode_or_count(X)
    model(X)
    coverage = autoamp.report(model).coverage
    assert (coverage.calls, coverage.calls_aside) == (2, 0)
    assert not warned(caplog)


def test_one_called_by_forward_is_part_of_its_graph() -> None:
    model = autoamp.convert(Autoencoder(), **BF16)
    model(X)
    assert len(autoamp.report(model).graphs) == 1


def test_revert_takes_them_away_though_forward_was_replaced() -> None:
    model = converted(Autoencoder())
    model.forward = model.head.forward
    autoamp.revert(model)
    assert model.encode(torch.ones(2, 8)).shape == (2, 4)
    assert "encode" not in vars(model)


def test_revert_takes_them_away() -> None:
    model = Autoencoder()
    before = dict(model.__dict__)
    autoamp.convert(model, **BF16)
    own = model.decode = lambda z: z  # the user's own, put there since
    autoamp.revert(model)
    assert model.__dict__ == {**before, "decode": own}
    assert autoamp.convert(model, **BF16).decode is own


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
def test_a_method_that_was_taken_before_runs_converted_parts() -> None:
    model = Trained()
    encode = model.encode
    for _ in range(3):
        encode(X)
    assert autoamp.report(model.encoder).runs == 2


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
