"""Methods besides `forward` stay as they are; modules that they call are captured."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.says import says
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
    with autoamp.disabled():
        assert torch.equal(model.encode(X), plain.encode(X))
    assert not warned(caplog)


class Adapted(nn.Module):
    """Has methods that set something, and that call methods of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Adapter(), Adapter()])
        self.chosen = 0

    def set_adapter(self, name: str) -> None:
        for part in self.parts:
            part.set_adapter(name)

    def merge(self) -> None:
        for part in self.parts:
            part.merge()

    def freeze(self) -> None:
        for part in self.parts:
            part.base.requires_grad_(False)

    def count(self) -> int:
        return sum(part.count() for part in self.parts)

    @property
    def active(self) -> str:
        return self.parts[0].active

    @active.setter
    def active(self, name: str) -> None:
        self.set_adapter(name)

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        before = self.active
        self.set_adapter("none")
        try:
            yield
        finally:
            self.set_adapter(before)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.low_rank = nn.ModuleDict({each: nn.Linear(8, 8) for each in "ab"})
        self.active = "a"

    def set_adapter(self, name: str) -> None:
        with contextlib.suppress(KeyError):
            self.low_rank[name].requires_grad_(True)
        self.active = name

    def merge(self) -> None:
        if self.active != "none":
            self.base.weight.data += self.low_rank[self.active].weight.data
            self.active = "none"

    def count(self) -> int:
        return self.base.weight.numel()

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x)
        return base if self.active == "none" else base + self.low_rank[self.active](x)


def assign(model: Adapted) -> None:
    model.active = "b"


def leave(model: Adapted) -> Any:
    with model.without():
        return [part.active for part in model.parts], model.set_adapter("b")


SETTERS: list[Callable[[Any], Any]] = [
    lambda model: model.set_adapter("b"),
    lambda model: model.merge(),
    lambda model: model.freeze(),
    lambda model: model.count(),
    assign,
    leave,
]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_a_method_that_computes_nothing_is_no_call(
    strict: bool, called: bool, caplog
) -> None:
    for setter in SETTERS:
        model = Adapted()
        plain = copy.deepcopy(model)
        converted(model, strict=strict)
        if called:
            model(X)
        for _ in range(3):
            assert setter(model) == setter(plain)
        report = autoamp.report(model)
        assert (report.coverage.calls, report.skipped) == (called, [])
        for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, wanted)
            assert found.requires_grad == wanted.requires_grad
        with torch.no_grad():
            assert is_rounded(model(X), plain(X))
    assert not warned(caplog)


class Contrastive(nn.Module):
    """Is trained by its methods alone, which compute with a weight of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(8, 8), nn.Linear(6, 8)
        self.projection = nn.Parameter(torch.eye(8))

    def image_features(self, x: Tensor) -> Tensor:
        return self.image(x) @ self.projection

    def text_features(self, x: Tensor) -> Tensor:
        return self.text(x) @ self.projection


def fitted(model: Any, *, precision: str | None) -> Any:
    """`model` after three steps on the cosines of what its two methods give."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if precision:
        options = {**BF16, "precision": precision, "strict": True}
        model, optimizer = autoamp.convert(model, optimizer, **options)
    for _ in range(3):
        pair = model.image_features(X), model.text_features(X[:, 2:])
        loss = -nn.functional.cosine_similarity(*pair).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_without_forward_is_trained_by_its_methods(precision: str) -> None:
    torch.manual_seed(0)
    plain = Contrastive()
    model = fitted(copy.deepcopy(plain), precision=precision)
    fitted(plain, precision=None)
    for found, wide in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, wide, rtol=2**-5, atol=2**-7)
        assert not torch.equal(found, wide)
    report = autoamp.report(model)
    rows = [(row.module, row.precision) for row in report.ops if row.flops]
    assert sorted(rows) == [("image", precision), ("text", precision)]
    for name in ("image_features", "text_features"):
        (why,) = [why for what, why in report.skipped if what == f"Contrastive.{name}"]
        says(why, "fp32")
    assert "What stayed in fp32" in str(report)
    assert "Contrastive.image_features" in str(report)


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


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def score(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("make", [Weights, nn.Module, nn.ModuleList])
def test_a_model_of_which_nothing_could_be_captured_raises(make: Any) -> None:
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        autoamp.convert(make(), **BF16)
    says(raised, make.__name__, "give it a forward")


def test_one_called_by_forward_is_part_of_its_graph() -> None:
    model = autoamp.convert(Autoencoder(), **BF16)
    model(X)
    assert len(autoamp.report(model).graphs) == 1


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
def test_a_method_that_was_taken_before_runs_converted_parts() -> None:
    model = Trained()
    encode = model.encode
    for _ in range(3):
        encode(X)
    assert autoamp.report(model).runs == autoamp.report(model.encoder).runs == 2


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
