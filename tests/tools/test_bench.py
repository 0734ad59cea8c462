"""`autoamp.bench`: what it measures, what it leaves alone, and what it refuses."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace

import pytest
import torch
from torch import nn

import autoamp
from autoamp.tools import bench_measure
from autoamp.tools import bench_meters as meters
from benchmarks.bytes_step import count_step
from tests.models import BY_NAME
from tests.says import says

QUICK = {"rounds": 2, "steps": 2}
WAYS = ("autocast", "autoamp", "half")
EVEN = {"do_no_harm": False}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))


X = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def trained() -> autoamp.Bench:
    return autoamp.bench(layers(), X, ways=WAYS, **EVEN, **QUICK)


def test_every_way_has_its_figures(trained) -> None:
    names = [row.way for row in trained.rows]
    assert names == ["fp32", "autocast", "autoamp", ".bfloat16()"]
    for row in trained.rows:
        assert not row.error
        assert len(row.times) == 2
        assert row.seconds > 0
        assert row.samples == pytest.approx(16 / row.seconds)
        assert len(row.losses) == 2
        assert row.tokens is None


def test_counts_tell_the_ways_apart(trained) -> None:
    fp32, autocast, ours, half = trained.rows
    assert fp32.casts == fp32.low_flops == 0
    # Two products, their inputs and weights; the ReLU between them is not cast.
    assert autocast.casts > 0
    assert ours.casts > 0
    assert ours.low_flops == half.low_flops == ours.flops == fp32.flops
    assert half.moved < fp32.moved
    assert half.saved < fp32.saved


def test_flops_are_those_of_the_products(trained) -> None:
    # Each product once forward, and in the backward for weights and inputs, of which
    # the first layer's input needs none.
    first, second = 2 * 16 * 32 * 64, 2 * 16 * 64 * 8
    assert trained.row("fp32").flops == 2 * first + 3 * second


def test_the_first_losses_are_those_of_equal_weights(trained) -> None:
    fp32, *low = trained.rows
    for row in low:
        assert row.losses[0] == pytest.approx(fp32.losses[0], rel=0.02)
    assert fp32.losses[1] < fp32.losses[0]


def test_peak_memory_holds_weights_and_optimizer_state(trained) -> None:
    weights = sum(p.nbytes for p in layers().parameters())
    fp32 = trained.row("fp32")
    # Weights, two moments of AdamW, and gradients; and a few times the activations.
    assert 4 * weights <= fp32.peak <= 4 * weights + 20 * 16 * 64 * 4
    assert trained.row(".bfloat16()").peak < fp32.peak


def test_the_model_and_the_process_are_left_alone() -> None:
    model = layers().eval()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    autoamp.bench(model, X, ways=WAYS, **EVEN, **QUICK)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training
    assert all(p.grad is None for p in model.parameters())
    assert not autoamp.is_converted(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()


def test_inference_saves_nothing_for_a_backward() -> None:
    found = autoamp.bench(layers(), X, ways=["half"], inference=True, **QUICK)
    assert found.work == "inference"
    assert [row.losses for row in found.rows] == [(), ()]
    assert [row.saved for row in found.rows] == [None, None]


class OnlyFp32(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer.weight.dtype != torch.float32:
            raise ValueError("fp32 alone\nand a second line")
        return self.layer(x)


def test_a_way_that_fails_costs_its_row() -> None:
    found = autoamp.bench(OnlyFp32(), X, ways=["autocast", "half"], **QUICK)
    assert found.row(".bfloat16()").error == "ValueError: fp32 alone"
    assert found.row("autocast").seconds
    says(found, ".bfloat16()", "ValueError: fp32 alone")
    assert "second line" not in str(found)


def test_a_sweep_measures_every_batch() -> None:
    found = autoamp.bench(layers(), X, ways=["half"], sweep=[4, 40], **QUICK)
    assert found.batches == (4, 40)
    small, large = found.row("fp32", 4), found.row("fp32", 40)
    assert large.flops == 10 * small.flops
    says(found, "batch 40")


def test_ways_that_do_not_fit_together_are_timed_apart(monkeypatch) -> None:
    monkeypatch.setattr(bench_measure, "available", lambda device: 1)
    found = autoamp.bench(layers(), X, ways=["autocast", "half"], **QUICK)
    assert not found.interleaved
    assert [len(row.times) for row in found.rows] == [2, 2, 2]
    assert found.row("fp32").ratio == 1
    says(found, "memory")


def test_data_is_drawn_and_its_time_is_told() -> None:
    drawn = []

    class Batches:
        def __iter__(self):
            for seed in range(3):
                drawn.append(seed)
                yield [
                    torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
                ]

    found = autoamp.bench(layers(), X, data=Batches(), ways=["half"], **QUICK)
    assert drawn[:3] == [0, 1, 2]
    for row in found.rows:
        assert 0 < row.data_seconds < row.seconds
    assert found.rows[0].losses[0] != found.rows[0].losses[1]


def test_the_table_fits_80_columns(trained) -> None:
    wide = {
        "way": ".bfloat16(), compiled",
        "largest_batch": 1_048_576,
        "co2_grams": 0.000123,
        "tokens": 1e7,
        "seconds": 12.345,
        "sigma": 0.0123,
        "peak": 10**12,
        "casts": 12_345,
    }
    rows = tuple(replace(row, **wide) for row in trained.rows[:1])
    widest = str(replace(trained, rows=rows)).splitlines()
    assert max(map(len, widest)) <= 80
    assert not any("…" in line for line in widest)
    lines = str(trained).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("autocast ") for line in lines) == 3


def test_json_holds_every_figure(trained) -> None:
    found = json.loads(trained.to_json())
    assert (found["schema"], found["work"]) == (1, "training")
    assert found["answer"] == trained.answer.sentence
    for row, written in zip(trained.rows, found["rows"], strict=True):
        assert written == json.loads(json.dumps(asdict(row)))


def test_markdown_has_a_line_for_each_way(trained) -> None:
    lines = trained.to_markdown().splitlines()
    assert sum(line.startswith("| autoamp |") for line in lines) == 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"sweep": [0]}, "batch size 0"),
        ({"ways": ["fastest"]}, "'fastest'"),
        ({"generate": 4}, "`generate`"),
        ({"data": []}, "data="),
        ({"sweep": [4], "data": [X]}, "resized"),
        ({"loss_fn": lambda out: out}, "one element"),
        ({"trains": False}, "ask for inference"),
        ({"memory": "much"}, "8GiB"),
    ],
)
def test_wrong_input_is_refused(wrong, said) -> None:
    model = layers().requires_grad_("trains" not in wrong)
    given = {"ways": ["half"], **wrong}
    given.pop("trains", None)
    with pytest.raises(autoamp.AutoampError) as raised:
        autoamp.bench(model, X, **given)
    says(raised, said)


@pytest.mark.parametrize("most", [0, 1, 2, 7, 300, 4097])
def test_the_largest_batch_is_found_on_lines_and_curves(most) -> None:
    for power in (1, 2):
        tried = []

        def peak(size: int, power: int = power, tried: list[int] = tried) -> int | None:
            tried.append(size)
            # Beyond twice the size, memory runs out.
            return 1000 + 8 * size**power if size <= 2 * most + 1 else None

        assert meters.largest_size(peak, 1000 + 8 * most**power) == most
        assert len(tried) == len(set(tried)) <= 40


def test_a_budget_is_read() -> None:
    assert meters.bytes_in("8GiB") == 8 * 2**30
    assert meters.bytes_in("1.5 MB") == 1_500_000
    assert meters.bytes_in(7) == 7
    for wrong in ("", "much", "-1", "0"):
        with pytest.raises(autoamp.AutoampError) as raised:
            meters.bytes_in(wrong)
        says(raised, option="8GiB")


def test_energy_without_a_counter_is_called_an_estimate(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(meters, "POWERCAP", tmp_path / "none")
    found = autoamp.bench(layers(), X, ways=["half"], grams_per_kwh=360, **QUICK)
    fp32 = found.row("fp32")
    assert fp32.energy_from == "estimate"
    assert fp32.joules == pytest.approx(fp32.flops * 2.3e-12 + fp32.moved * 162.5e-12)
    # 1,000 steps, 3.6 MJ a kilowatt-hour.
    assert fp32.co2_grams == pytest.approx(fp32.joules * 0.1)
    says(found, "about")


def test_rapl_is_read_where_it_is_there(monkeypatch, tmp_path) -> None:
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "energy_uj").write_text("2500000")
    (zone / "max_energy_range_uj").write_text("9000000")
    (tmp_path / "intel-rapl:0:1").mkdir()  # a part of the package
    monkeypatch.setattr(meters, "POWERCAP", tmp_path)
    meter, why_not = meters.meter_for(torch.device("cpu"))
    assert (meter.kind, meter.joules(), meter.period) == ("rapl", 2.5, 9.0)
    assert why_not == ""


def test_the_plot_has_a_bar_for_each_way(trained) -> None:
    from xml.etree import ElementTree as ET

    root = ET.fromstring(trained.to_svg())
    bars = [e for e in root if e.tag.endswith("rect")][1:]
    ratios = [row.ratio for row in trained.rows]
    widths = [float(bar.get("width")) for bar in bars]
    assert [w / widths[0] for w in widths] == pytest.approx(ratios, rel=0.01)


@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("resnet", marks=pytest.mark.slow)]
)
def test_bytes_are_those_of_the_benchmark_suite(name: str) -> None:
    case = BY_NAME[name]
    args, kwargs = case.inputs(0)
    found = autoamp.bench(
        case.model(),
        *args,
        ways=("autocast", "autoamp"),
        **EVEN,
        loss_fn=case.loss,
        **QUICK,
        kwargs=kwargs,
    )
    for way in ("fp32", "autocast", "autoamp"):
        count = count_step(case, way)
        assert found.row(way).moved == count.traffic.bytes()
        assert found.row(way).saved == count.saved
