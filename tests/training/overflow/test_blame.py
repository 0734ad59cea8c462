"""A skipped step is blamed on the op that overflowed; a rule against it is proposed.

In fp16 a loss scale skips the step; in bf16, which has none, the guard does.
"""

from __future__ import annotations

import ast
import gc
import logging
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, WIDTH, Between

GUARDED: dict[str, Any] = {**BF16, "strict": True}


def line_of(name: str) -> str:
    """`test_blame.py:N`, the line of this file that ends in the marker of a fault."""
    lines = Path(__file__).read_text().splitlines()
    (found,) = [n for n, text in enumerate(lines, 1) if text.endswith(f"# {name}")]
    return f"{Path(__file__).name}:{found}:"


class Product(Between):
    def middle(self, x: Tensor) -> Tensor:
        return (x * 400) * 400 / 1e5  # fp16 product


class Region(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return (self.last(y) * 400) * 400 / 1e5  # fp16 region

        return checkpoint(region, x * 1.5, use_reentrant=False)


class SecondGraph(Between):
    def middle(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return (self.last(x) * 400) * 400 / 1e5  # fp16 second graph


class Backward(Between):
    """On the way back, the large factor comes before the small one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steep", 2e4 * torch.eye(WIDTH))

    def middle(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * 1e-5, self.steep)  # fp16 backward


class WideProduct(Between):
    def middle(self, x: Tensor) -> Tensor:
        return x.abs().add(1) * 1e30 * 1e30  # bf16 product


class WideRegion(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return self.last(y).abs().add(1) * 1e30 * 1e30  # bf16 region

        return checkpoint(region, x * 1.5, use_reentrant=False)


class Tame(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return nn.functional.dropout(self.last(y).abs(), 0.3)

        return checkpoint(region, x * 1.5, use_reentrant=False)


class WideSecondGraph(Between):
    def middle(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.last(x).abs().add(1) * 1e30 * 1e30  # bf16 second graph


class Fp32(Between):
    """A sum that stays in fp32 by its rule."""

    def middle(self, x: Tensor) -> Tensor:
        return x.add(100).exp().cumsum(0)  # bf16 fp32


class WideBackward(Between):
    """The forward is finite; the slope of a square root at zero is not."""

    def middle(self, x: Tensor) -> Tensor:
        return x.relu().mul(0).sqrt()  # bf16 backward


class WideBackwardRegion(Between):
    def middle(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return self.last(y).mul(0).sqrt()  # bf16 backward region

        return checkpoint(region, x * 1.5, use_reentrant=False)


class Edge(Between):
    """3.4e38 is infinite in bf16, and finite in fp32."""

    def middle(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x.mul(0).add(1), self.wide)  # edge
        return y.float() * 1e-38

    def __init__(self) -> None:
        super().__init__()
        wide = torch.zeros(WIDTH, WIDTH)
        wide[:, :2] = torch.tensor([torch.finfo(torch.bfloat16).max, 1.1e36])
        self.register_buffer("wide", wide)


FAULTS: dict[str, Callable[[], nn.Module]] = {
    "fp16 product": Product,
    "fp16 region": Region,
    "fp16 second graph": SecondGraph,
    "fp16 backward": Backward,
    "bf16 product": WideProduct,
    "bf16 region": WideRegion,
    "bf16 second graph": WideSecondGraph,
    "bf16 fp32": Fp32,
    "bf16 backward": WideBackward,
    "bf16 backward region": WideBackwardRegion,
}
BF16_FAULTS = [name for name in FAULTS if name.startswith("bf16")]


class Training:
    """A training, one step at a time: in fp16 with a loss scale, or else in bf16."""

    def __init__(
        self, make: Callable[[], nn.Module], scale: float | None = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = model = make()
        given = {**GUARDED, **options}
        if scale is not None:
            given = {**BF16, "precision": "fp16", **options}
            given.setdefault("loss_scale", autoamp.DynamicLossScale(scale))
        self.optimizer: Any = torch.optim.SGD(model.parameters(), 1e-3)
        self.options = given
        self.convert()

    def convert(self, **more: Any) -> None:
        autoamp.convert(self.model, self.optimizer, **{**self.options, **more})

    def step(self, x: Tensor | None = None, factor: float = 1.0) -> bool:
        """Whether the step was skipped."""
        x = torch.randn(6, WIDTH) if x is None else x
        self.optimizer.zero_grad()
        (self.model(x).square().mean() * factor).backward()
        self.optimizer.step()
        return bool(self.optimizer.step_was_skipped)

    @property
    def skips(self) -> tuple[str, ...]:
        return skips_of(self.model)


def skips_of(model: nn.Module) -> tuple[str, ...]:
    found = autoamp.report(model).loss_scale
    return () if found is None else found.skips


def training_of(name: str, **options: Any) -> Training:
    """A training of one of `FAULTS`."""
    scale = None if name.startswith("bf16") else 2.0**12
    return Training(FAULTS[name], scale, **options)


@pytest.mark.parametrize("name", FAULTS)
def test_a_step_skipped_after_another_names_the_op(name: str, caplog: Any) -> None:
    training = training_of(name)
    with caplog.at_level(logging.INFO, logger="autoamp"):
        assert [training.step() for _ in range(3)] == [True] * 3
    for why in training.skips[1:]:
        says(why, op="aten::", line=line_of(name))
        says(caplog.messages, why)
        if name.startswith("fp16"):
            says(why, "fp16")
        else:
            assert ("the gradient of aten::" in why) == ("backward" in name)
    assert training.skips[0].startswith("step 1: ")


class State(Between):
    """An overflow before code that holds state, which was poisoned before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.BatchNorm1d(WIDTH)
        self.group = nn.InstanceNorm1d(2, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(WIDTH))
        for buffer in self.buffers():
            if buffer.is_floating_point():
                buffer.fill_(torch.nan)

    def middle(self, x: Tensor) -> Tensor:
        x = (x * 400) * 400 / 1e5  # state
        if self.kind == "norm":
            return self.norm(x)
        if self.kind == "instance":
            return self.group(x.view(-1, 2, WIDTH // 2)).view(x.shape)
        if self.kind == "copied":
            self.mean.copy_(x.detach().mean(0))
        elif self.kind == "average":
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


KINDS = "norm", "instance", "copied", "average", "assigned"


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_no_result_depends_on_is_not_blamed(kind: str) -> None:
    training = Training(lambda: State(kind), 2.0**12)
    assert all(training.step() for _ in range(4))
    assert all(line_of("state") in why for why in training.skips[1:])


def test_statistics_are_blamed_where_a_norm_reads_them() -> None:
    training = Training(lambda: State("norm").train(False), 2.0**8)
    assert all(training.step(torch.zeros(6, WIDTH)) for _ in range(2))
    says(training.skips[1], module="norm.running_mean")


def test_the_error_at_the_floor_names_the_op() -> None:
    scale = autoamp.DynamicLossScale(4.0, min_scale=1.0)
    training = Training(Backward, 4.0, loss_scale=scale)
    assert training.step(factor=1024.0)
    assert training.step(factor=1024.0)
    with pytest.raises(autoamp.LossScaleError) as raised:
        training.step(factor=1024.0)
    says(raised, line=line_of("fp16 backward"))


def test_a_module_and_a_weight_are_named_as_their_users_know_them() -> None:
    planted = nn.Sequential(nn.Linear(WIDTH, WIDTH), Product())
    training = Training(lambda: planted, 2.0**8)
    assert all(training.step() for _ in range(2))
    says(training.skips[1], module=" in 1 (")
    inner = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    training = Training(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), inner), 2.0**8)
    assert training.step(factor=1e6)
    says(training.skips[0], module="the gradient of 1.1.", op="aten::linear")


def test_a_run_whose_gradients_were_thrown_away_hides_no_other() -> None:
    kept, thrown = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    optimizer: Any = torch.optim.SGD([*kept.parameters(), *thrown.parameters()], 1e-3)
    for model in (kept, thrown):
        options = {"precision": "fp16", "loss_scale": autoamp.DynamicLossScale(2.0**8)}
        autoamp.convert(model, optimizer, **{**BF16, **options})
    for model in (kept, thrown):
        (model(torch.randn(6, WIDTH)).square().mean() * 1e6).backward()
    thrown.zero_grad()
    optimizer.step()
    says(skips_of(kept)[0], module="the gradient of weight", op="aten::linear")


@pytest.mark.parametrize("scale", [2.0**8, None], ids=["fp16", "bf16"])
def test_what_is_not_the_models_fault_is_said_to_be_so(scale: float | None) -> None:
    training = Training(Between, scale)
    assert [training.step(factor=torch.inf) for _ in range(2)] == [True] * 2
    says(training.skips[1], "the gradient of output 0", "outside of the model")
    training = Training(Between, scale)
    bad = torch.full((6, WIDTH), torch.nan)
    assert [training.step(bad) for _ in range(2)] == [True] * 2
    says(training.skips[1], "input.0", "that argument")


class Squashed(Between):
    """The infinity of an input is gone from the result, and comes back as NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


def test_an_infinity_that_only_the_backward_shows() -> None:
    training = Training(Squashed)
    bad = torch.randn(6, WIDTH)
    bad[0, 0] = torch.inf
    assert [training.step(bad) for _ in range(2)] == [True] * 2
    says(
        training.skips[1],
        "NaN",
        "input.0",
        op="the gradient of aten::linear.default",
    )


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ["bf16 product", "bf16 backward"])
def test_two_models_in_one_optimizer(first: bool, name: str) -> None:
    """The model that made the infinity is named for both, wherever it stands."""
    torch.manual_seed(0)
    bad, good = FAULTS[name](), Between()
    models = [bad, good] if first else [good, bad]
    for each in (bad, good):
        autoamp.convert(each, **GUARDED)
    params = [p for each in models for p in each.parameters()]
    optimizer: Any = torch.optim.SGD(params, 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, WIDTH)
        for each in models:
            x = each(x)
        x.float().square().mean().backward()
        optimizer.step()
        assert optimizer.step_was_skipped
    for why in skips_of(bad)[1:]:
        says(why, line=line_of(name))
        assert "in the model" not in why
    for why in skips_of(good)[1:]:
        says(why, f"in the model {type(bad).__name__}", line=line_of(name))


def test_two_optimizers_of_one_model() -> None:
    """One takes its step after the same backward; the other's skip is explained."""

    class Branches(Between):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), self.last(x).mul(0).sqrt()  # branches

    torch.manual_seed(0)
    model = autoamp.convert(Branches(), **GUARDED)
    for order in (("first", "last"), ("last", "first")):
        mine = [
            torch.optim.SGD(getattr(model, name).parameters(), 1e-3) for name in order
        ]
        for _ in range(3):
            for each in mine:
                each.zero_grad()
            one, other = model(torch.randn(6, WIDTH))
            (one.mean() + other.mean()).backward()
            for name, each in zip(order, mine, strict=True):
                each.step()
                skipped = bool(getattr(each, "step_was_skipped", False))
                assert skipped is (name == "last")
    skips = skips_of(model)
    assert sum(line_of("branches") in why for why in skips) >= 4


def test_a_step_that_only_just_overflowed_is_explained_by_the_next() -> None:
    training = Training(Between, 2.0**16)
    x = torch.randn(6, WIDTH)
    while training.step(x, 1e3):
        pass
    count = len(training.skips)
    assert count > 1
    training = Training(Between, autoamp.report(training.model).loss_scale.scale * 2)
    assert training.step(x, 1e3)
    assert not training.step(x, 1e3)
    (why,) = training.skips
    says(why, "the limit of fp16")


def test_a_trail_keeps_no_values_alive() -> None:
    training = Training(Product, 2.0**12)
    training.step()
    x = torch.randn(6, WIDTH)
    gone = weakref.ref(x)
    training.step(x)
    del x
    gc.collect()
    assert gone() is None


def test_a_watched_step_has_the_gradients_of_any_other() -> None:
    """A step after a skipped one is watched; its dropout and its numbers are the same.

    A checkpointed region is computed again in its backward.
    """
    found = []
    for watched in (False, True):
        training = Training(Tame)
        x = torch.randn(6, WIDTH)
        assert training.step(x, factor=torch.inf if watched else 1.0) == watched
        training = training if watched else Training(Tame)
        torch.manual_seed(1)
        assert not training.step()
        found.append([p.grad.clone() for p in training.model.parameters()])
    for plain, seen in zip(*found, strict=True):
        assert torch.equal(plain, seen)


# -- the rule that is proposed ---------------------------------------------------------


CURED: dict[str, tuple[Callable[[], nn.Module], float | None]] = {
    "fp16 product": (Product, 2.0**12),
    "fp16 region": (Region, 2.0**12),
    "fp16 second graph": (SecondGraph, 2.0**12),
    "edge": (Edge, None),
}


@pytest.mark.parametrize("name", ["fp16 product", "edge"])
def test_a_rule_is_proposed_once(name: str, caplog: Any) -> None:
    training = Training(*CURED[name])
    assert all(training.step() for _ in range(6))
    (proposal,) = [m for m in warned(caplog) if "would keep that in fp32" in m]
    says(proposal, "steps in a row", option="convert(model, ", line=line_of(name))
    assert re.search(r"(deny|keep)=\[", proposal)


def test_a_scale_that_is_to_fall_is_no_reason_for_a_rule(caplog) -> None:
    falling = autoamp.DynamicLossScale(2.0**15, climbs=False)
    training = Training(Backward, 2.0**15, loss_scale=falling)
    assert all(training.step(factor=16.0) for _ in range(6))
    assert not any("steps in a row" in line for line in warned(caplog))


@pytest.mark.parametrize("name", CURED)
def test_a_conversion_with_the_rule_trains_on(name: str, caplog: Any) -> None:
    """The user gives the rule that the warning spells, between two steps."""
    make, scale = CURED[name]
    training = Training(make, scale)
    assert all(training.step() for _ in range(4)), training.skips
    (proposal,) = [m for m in warned(caplog) if "would keep that in fp32" in m]
    (rule,) = re.findall(r"autoamp\.convert\(model, (\w+)=(\[.*?\])\)", proposal)
    training.convert(**{rule[0]: ast.literal_eval(rule[1])})
    assert not any(training.step() for _ in range(4)), training.skips


def test_two_skips_after_one_backward_count_once(caplog: Any) -> None:
    torch.manual_seed(0)
    model = autoamp.convert(Edge(), **GUARDED)
    optimizers: list[Any] = [
        torch.optim.SGD(part.parameters(), 1e-3) for part in (model.first, model.last)
    ]
    found, proposed = [], []
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(6, WIDTH)).square().mean().backward()
        for each in optimizers:
            each.step()
        found.append([bool(each.step_was_skipped) for each in optimizers])
        proposed.append(any("would keep that" in line for line in warned(caplog)))
    assert found == [[True, True]] * 4
    # If each skip counted, the rule would be proposed one backward earlier.
    assert proposed == [False, False, False, True]
    assert sum(line_of("edge") in why for why in skips_of(model)) == 6


@pytest.mark.parametrize("name", BF16_FAULTS)
def test_no_rule_is_proposed_that_fp32_would_not_cure(name: str, caplog: Any) -> None:
    training = training_of(name)
    assert all(training.step() for _ in range(6))
    assert not any("would keep that in fp32" in line for line in warned(caplog))
    says(warned(caplog), "it has no loss scale")
