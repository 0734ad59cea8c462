"""`compare` runs fp32 and mixed precision side by side, and finds the costly ops."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import relative_error
from tests.says import says
from tests.small_models import BF16


class Net(nn.Module):
    """The results of `rough` are large and nearly cancel; the other layers are tame."""

    def __init__(self) -> None:
        super().__init__()
        self.tame, self.rough = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.tame(x)))
        shift = 100 * torch.ones_like(hidden)
        return self.head(self.rough(hidden + shift) - self.rough(shift))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        def region(y: Tensor) -> Tensor:
            return torch.relu(self.inner(y))

        return self.outer(checkpoint(region, x, use_reentrant=False))


def errors_by_hand(
    model: nn.Module, x: Tensor, **options: object
) -> tuple[float, float]:
    """The errors that a converted copy has, measured outside of autoamp."""
    results = []
    for convert in (False, True):
        twin = copy.deepcopy(model)
        if convert:
            autoamp.convert(twin, **{**BF16, **options})
        torch.manual_seed(7)
        output = twin(x)
        output.float().sum().backward()
        grads = [p.grad for p in twin.parameters() if p.grad is not None]
        results.append(([output.detach()], grads))
    (wanted, wanted_grads), (found, grads) = results
    return relative_error(found, wanted), relative_error(grads, wanted_grads)


@pytest.mark.parametrize("make", [Net, Checkpointed])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_errors_are_those_of_the_converted_model(
    make: type[nn.Module], precision: str
) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(8, 32 if make is Net else 16)
    options = {**BF16, "precision": precision, "loss_scale": "off"}
    output, gradients = errors_by_hand(model, x, **options)
    torch.manual_seed(7)
    found = autoamp.compare(model, x, **options)
    assert found.errors.output == pytest.approx(output, rel=1e-3)
    if precision == "bf16":  # fp16 is compared at a loss scale, and has less error
        assert found.errors.gradients == pytest.approx(gradients, rel=1e-3)
    assert 0 < found.errors.gradients <= gradients * 1.001


def test_the_op_and_the_module_that_cost_most_come_first() -> None:
    torch.manual_seed(0)
    found = autoamp.compare(Net(), torch.randn(8, 32), **BF16)
    products = [node for node in found.nodes if "linear" in node.op]
    assert {node.module for node in products} == {"tame", "rough", "head"}
    assert "sub" in found.nodes[0].op
    assert found.nodes[0].added > 10 * max(node.added for node in products) > 0
    assert all(node.added == 0 for node in found.nodes if node.precision == "fp32")
    assert found.regions[0].module == "rough"
    assert found.regions[0].gives_back > 0.5 * found.errors.worst
    says(found, module="rough")


def test_a_region_in_fp32_has_the_error_of_keep() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 32)
    model.drop.p = 0.0
    found = autoamp.compare(model, x, **BF16)
    for region in found.regions:
        if region.module in ("rough", "head"):
            output, _ = errors_by_hand(model, x, keep=[region.module])
            assert region.errors.output == pytest.approx(output, rel=0.05)


def test_the_set_for_a_tolerance_is_minimal_and_reaches_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 32)
    plain = autoamp.compare(model, x, **BF16)
    wanted = plain.errors.worst / 4
    found = autoamp.compare(model, x, **BF16, tolerance=wanted)
    assert found.keep == ("rough",)
    assert found.kept_errors is not None
    assert found.kept_errors.worst <= wanted
    rules = found.to_rules(tmp_path / "rules.toml")
    autoamp.convert(model, rules=str(rules), **BF16)
    model(x)
    high = {op.module for op in autoamp.report(model).ops if not op.is_low}
    assert "rough" in high
    assert "tame" not in high


def test_its_options_go_into_convert() -> None:
    """The options that were given are among them, and the error is what was found."""
    torch.manual_seed(0)
    model, x = Net(), torch.randn(8, 32)
    given: Any = {**BF16, "keep": ["head"], "fuse": {"gelu": False}}
    wanted = autoamp.compare(model, x, **given).errors.worst / 4
    found = autoamp.compare(model, x, **given, tolerance=wanted)
    assert found.options["keep"] == ["head", *(found.keep or ())]
    assert found.keep
    after = autoamp.compare(autoamp.convert(model, **found.options), x)
    assert found.kept_errors is not None
    assert after.errors.worst == pytest.approx(found.kept_errors.worst, rel=1e-6)
    assert after.errors.worst <= wanted
    assert after.options == found.options
    none = autoamp.compare(Net(), x, **BF16)
    assert none.options == BF16
    with pytest.raises(autoamp.OptionError) as raised:
        _ = replace(none, tolerance=1e-30, keep=None).options
    says(raised, "tolerance", "1e-30")


def test_a_tolerance_that_is_had_anyway_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = autoamp.compare(Net(), torch.randn(8, 32), **BF16, tolerance=10.0)
    assert found.keep == ()
    rules = found.to_rules(tmp_path / "rules.toml")
    before = rules.read_text()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(autoamp.OptionError) as raised:
        replace(found, label="other").to_rules(rules)
    says(raised, "rules.toml", "No space left")
    assert rules.read_text() == before
    assert [*tmp_path.iterdir()] == [rules], "a draft was left"
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.compare(Net(), torch.randn(8, 32), **BF16).to_rules("x.toml")
    says(raised, option="tolerance")


def test_autocast_stands_beside_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), nn.ReLU()), torch.randn(4, 16)
    found = autoamp.compare(model, x, **BF16)
    assert found.autocast is not None
    assert found.autocast.output == pytest.approx(found.errors.output, rel=0.2)


def test_bad_questions_are_refused() -> None:
    model, x = Net(), torch.randn(8, 32)
    for tolerance in (0.0, -1.0, math.inf):
        with pytest.raises(autoamp.OptionError) as raised:
            autoamp.compare(model, x, **BF16, tolerance=tolerance)
        says(raised, option=f"tolerance={tolerance}")
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.compare(model, x, **BF16, loss_fn=lambda output: output)
    says(raised, "one element", option="loss_fn")
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        autoamp.compare(nn.Linear(4, 4).double(), torch.randn(2, 4).double())
    says(raised, "float64")


class Branches(nn.Module):
    """Takes another branch, of another shape where `wide`, when its numbers round."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.wide, self.edge = wide, 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.double().sum().item() == self.edge:
            return self.second(y)
        z = self.third(y * 2)
        return torch.cat([z, z]) if self.wide else z


@pytest.mark.parametrize("wide", [False, True])
def test_a_branch_that_only_one_precision_takes_is_compared(wide: bool) -> None:
    torch.manual_seed(0)
    model, x = Branches(wide=wide), torch.randn(4, 8)
    model.edge = model.first(x).double().sum().item()
    found = autoamp.compare(model, x, **BF16)
    assert found.errors.output > 0.1  # two branches, of two layers
    assert {node.graph for node in found.nodes} == {0}
