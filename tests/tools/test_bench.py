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
        "seconds": 12.345,
        "data_seconds": 1.2,
        "deviation": 0.012345,
        "peak": 10**12,
        "casts": 12_345,
    }
    rows = tuple(replace(row, **wide) for row in trained.rows[:1])
    widest = str(replace(trained, rows=rows)).splitlines()
    assert max(map(len, widest)) <= 80
    assert not any("…" in line for line in widest)
    lines = str(trained).splitlines()
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("autocast ") for line in lines) == 1


def test_the_error_is_that_of_the_output_beside_fp32() -> None:
    given = {"inference": True, "ways": ["half"], "precision": "bf16", **QUICK}
    found = autoamp.bench(layers(), X, **given)
    with torch.no_grad():
        exact, low = layers()(X), layers().bfloat16()(X.bfloat16()).float()
    wanted = float((low - exact).norm() / exact.norm())
    assert wanted > 0
    assert found.row("fp32").deviation is None
    assert found.row(".bfloat16()").deviation == pytest.approx(wanted, rel=1e-4)
    says(found, "error", f"{wanted:.2g}")


def test_the_error_is_of_no_memory_that_counts() -> None:
    wide = nn.Linear(4, 50_000)
    found = autoamp.bench(
        wide, torch.randn(8, 4), inference=True, ways=["half"], **QUICK
    )
    # The weights and one output, and no second output beside it.
    output = 8 * 50_000 * 4
    weights = sum(p.nbytes for p in wide.parameters())
    assert found.row("fp32").peak < weights + 1.5 * output


def test_json_holds_every_figure(trained) -> None:
    found = json.loads(trained.to_json())
    assert (found["schema"], found["work"]) == (1, "training")
    assert found["answer"] == trained.answer.sentence
    for row, written in zip(trained.rows, found["rows"], strict=True):
        assert written == json.loads(json.dumps(asdict(row)))


def test_markdown_has_a_line_for_each_way(trained) -> None:
    lines = trained.to_markdown().splitlines()
    assert sum(line.startswith("| autoamp |") for line in lines) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"ways": ["fastest"]}, "'fastest'"),
        ({"generate": 4}, "`generate`"),
        ({"data": []}, "data="),
        ({"sweep": [4]}, "sweep= was removed"),
        ({"loss_fn": lambda out: out}, "one element"),
        ({"trains": False}, "ask for inference"),
        ({"memory": "8GiB"}, "memory= was removed"),
    ],
)
def test_wrong_input_is_refused(wrong, said) -> None:
    model = layers().requires_grad_("trains" not in wrong)
    given = {"ways": ["half"], **wrong}
    given.pop("trains", None)
    with pytest.raises(autoamp.AutoampError) as raised:
        autoamp.bench(model, X, **given)
    says(raised, said)
