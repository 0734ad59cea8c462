"""`explain` says what `convert` would do, for any machine, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.passes.decide.devices import (
    figures,
    full_name,
    known_devices,
    named_device,
    roofline,
)
from tests.says import says
from tests.small_models import BF16


class Net(nn.Module):
    """A BatchNorm that moves its statistics, dropout, a number that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 3)
        self.calls = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        hidden = nn.functional.dropout(torch.exp(self.up(self.norm(x))), 0.5)
        return self.down(hidden * scale)


class Broken(nn.Module):
    """Two graphs, the second inside a checkpointed region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return checkpoint(lambda y: torch.relu(self.second(y)), x, use_reentrant=False)


def decided(report: autoamp.Report) -> list[tuple[str, str, str, str]]:
    return [(op.body, op.name, op.precision, op.reason) for op in report.ops]


@pytest.mark.parametrize("make", [Net, Broken])
def test_explain_says_what_convert_then_does(make: type[nn.Module]) -> None:
    model = make()
    x = torch.randn(4, 16 if make is Net else 8)
    said = autoamp.explain(model, x, **BF16)
    autoamp.convert(model, **BF16)
    model(x)
    done = autoamp.report(model)
    assert any(op.is_low for op in said.ops)
    assert decided(said) == decided(done)
    assert said.casts == done.casts
    assert said.cost == done.cost


def test_a_converted_model_is_explained_under_its_own_options_and_goes_on() -> None:
    model = autoamp.convert(Net(), keep=["up"], **BF16)
    x = torch.randn(4, 16)
    model(x)
    before = autoamp.report(model)
    said = autoamp.explain(model, x)
    assert [op.precision for op in said.ops if op.module == "up"] == ["fp32"]
    other = autoamp.explain(model, x, keep=["down"])
    assert [op.precision for op in other.ops if op.module == "down"] == ["fp32"]
    after = autoamp.report(model)
    assert after.runs == before.runs
    assert len(after.graphs) == len(before.graphs)
    assert autoamp.is_converted(model)


@pytest.mark.parametrize("device", known_devices())
def test_every_device_of_the_table_explains(device: str) -> None:
    model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
    kind, _, name = device.partition(":")
    report = autoamp.explain(model, torch.randn(4096, 512), device=device)
    row = figures()[name]
    low = "fp16" if kind == "cuda" else "bf16"
    if low not in row:
        assert report.skipped
        assert not report.ops
        return
    assert report.compute_dtype == low
    assert report.explained_for == row["name"]
    assert {op.precision for op in report.ops if "linear" in op.op} == {low}
    found = report.prediction
    assert found is not None
    assert found.speed_up > 1.5


def test_cpu_facts_do_not_leak_into_a_gpu() -> None:
    """Torch has fp16 kernels of `avg_pool3d` on CUDA, and none on CPU."""
    model = nn.Sequential(nn.Conv3d(8, 8, 3), nn.AvgPool3d(2), nn.Conv3d(8, 8, 3))
    x, options = torch.randn(2, 8, 12, 12, 12), {**BF16, "precision": "fp16"}
    here = autoamp.explain(model, x, **options)
    there = autoamp.explain(model, x, **options, device="cuda:sm_80")
    assert [op.precision for op in here.ops] == ["fp16", "fp32", "fp16"]
    says(here.ops[1].reason, "fp16", "cpu")
    assert [op.precision for op in there.ops] == ["fp16", "fp16", "fp16"]


def test_a_model_without_weights_is_explained() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(100, 64), nn.Linear(64, 64))
    report = autoamp.explain(model, torch.arange(10), device="cuda:sm_90")
    assert [op.op.partition(".")[0] for op in report.ops] == [
        "aten::embedding",
        "aten::linear",
    ]


def test_bad_questions_are_refused_and_change_nothing() -> None:
    model, x = Net(), torch.randn(4, 16)
    before = dict(vars(model))
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.explain(model, x, device="cuda:sm_12")
    says(raised, "cuda:sm_12", option="cuda:sm_70")
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.explain(model, x, precison="bf16")
    says(raised, option="'precison'")
    with pytest.raises(autoamp.UnsupportedModelError):
        autoamp.explain(torch.relu, x)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError) as own:
        autoamp.explain(model, torch.randn(4, 5), **BF16)
    says(own, "running_mean")
    assert vars(model) == before
    assert not autoamp.is_converted(model)


class Cached(nn.Module):
    """Begins a cache as transformers does: with an empty tensor made of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        new = self.up(x)
        empty = torch.tensor([], dtype=new.dtype, device=new.device)
        cached = torch.cat([empty, new], dim=-2)
        one = torch.as_tensor([1.0], device=new.device)
        also_one = torch.as_tensor([1], dtype=torch.float32, device=new.device)
        return self.up(cached) * new.new_tensor(2.0) + one + also_one


def test_numbers_made_on_the_meta_device_break_no_graph() -> None:
    """Under a fake mode torch makes real tensors of them, which other ops refuse."""
    with torch.device("meta"):
        on_meta = Cached()
    x = torch.zeros(64, 256)
    found = autoamp.explain(on_meta, x, device="cuda:sm_80")
    assert len(found.graphs) == 1
    assert "Dynamo" not in str(found.skipped)
    on_cpu = autoamp.explain(Cached(), x, device="cuda:sm_80")
    products = [
        [op.precision for op in each.ops if "linear" in op.op]
        for each in (found, on_cpu)
    ]
    assert products[0] == products[1] != []


def test_fp32_in_tf32_is_said_and_priced() -> None:
    """Torch computes fp32 convolutions in TF32 by default, and no matrix products."""
    images, rows = torch.randn(2, 3, 16, 16), torch.randn(64, 64)
    convolved = autoamp.explain(nn.Conv2d(3, 8, 3), images, device="cuda:sm_80")
    title = " ".join(str(convolved).split())  # it is longer than a line
    says(title, "A100 (compute capability 8.0)", "fp32 convolutions in TF32")
    multiplied = autoamp.explain(nn.Linear(64, 64), rows, device="cuda:sm_80")
    says(multiplied, "A100 (compute capability 8.0)")
    assert "TF32" not in str(multiplied)


NAMES = {
    "h100": "sm_90",
    "H200": "h200",
    "a100": "sm_80",
    "T4": "sm_75",
    "l4": "l4",
    "v100": "sm_70",
    "NVIDIA GeForce RTX 4090": "sm_89",
    "rtx-3090": "rtx3090",
    "b200": "sm_100",
    "sm_120": "sm_120",
    "sm120": "sm_120",
    "cuda:sm_90": "sm_90",
    "sm_90a": "sm_90",
    "cuda:H100": "sm_90",
}


@pytest.mark.parametrize(("name", "key"), NAMES.items())
def test_a_device_has_the_names_that_people_use(name: str, key: str) -> None:
    assert full_name(name) == f"cuda:{key}"
    assert named_device(name, torch.float16) == roofline(key, torch.float16)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("h10", "h100"),
        ("rtx4080", "rtx4090"),
        ("sm_95", "sm_90"),
        ("cuda:sm_121", "sm_120"),
        ("cpu:amxx", "cpu:amx"),
        ("cdua", "cuda"),
    ],
)
def test_an_unknown_device_is_told_with_the_nearest(name: str, nearest: str) -> None:
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.explain(model, x, device=name)
    says(raised, repr(name), f"nearest name is {nearest!r}", "rtx3090")
