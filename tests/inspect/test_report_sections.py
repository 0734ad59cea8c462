"""The parts of a report beyond its rows: islands, weights, sizes, predicted times."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.inspect.report import Report
from autoamp.inspect.text import WIDTH, bytes_text, seconds_text

EVERYTHING = {"do_no_harm": False}


class Between(nn.Module):
    """Products, with `exp` and what hangs on it between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.exp(self.first(x)) * 2 + 1)


def explained(model: nn.Module, *args: Tensor, **options: object) -> Report:
    return autoamp.explain(model, *args, options={**EVERYTHING, **options})


def test_an_island_names_the_op_that_decided_it() -> None:
    report = explained(Between(), torch.randn(8, 64), precision="fp16", deny=["exp"])
    (island,) = report.islands
    assert island.ops == ("exp", "mul", "add")
    assert island.is_between
    assert "exp" in island.decided_by
    assert island.casts == 2  # beside those of the graph's input and output
    assert sum(cast.kind != "weight" for cast in report.casts) == 4
    assert island.bytes == sum(op.bytes for op in report.ops if not op.is_low)


def test_weights_that_fp16_cannot_hold_are_named() -> None:
    model = Between()
    with torch.no_grad():
        model.first.weight[0, 0] = 1e5
        model.second.bias[:] = 1e-9
        model.second.weight[0, :3] = 1e-9
    rows = {
        row.name: row
        for row in explained(model, torch.randn(8, 64), precision="fp16").weights
    }
    assert set(rows) == {
        f"{m}.{p}" for m in ("first", "second") for p in ("weight", "bias")
    }
    first, second = rows["first.weight"].range, rows["second.bias"].range
    assert first is not None
    assert second is not None
    assert (first.too_large, first.largest) == (1, pytest.approx(1e5))
    assert (second.lost, second.count) == (64, 64)
    assert {name for name, row in rows.items() if not row.fits} == {
        "first.weight",
        "second.bias",
    }
    report = explained(model, torch.randn(8, 64), precision="fp16")
    shown = report.full()
    assert "first.weight: the largest magnitude is 1e+05" in shown
    assert "second.bias: 64 of 64 numbers become 0" in shown
    assert "2 weights (first.weight, second.bias) out of the range of fp16" in (
        " ".join(str(report).split())
    )
    in_bf16 = explained(model, torch.randn(8, 64), precision="bf16").weights
    assert all(row.fits for row in in_bf16)


def test_sizes_that_tensor_cores_do_not_like_are_named_with_their_layer() -> None:
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 64))
    x = torch.randn(16, 64)
    there = autoamp.explain(model, x, options=EVERYTHING, device="cuda:sm_80")
    assert {(m.module, m.size, m.next) for m in there.misfits} == {
        ("0", 50, 56),
        ("2", 50, 56),
    }
    assert "50 in" in there.full()
    assert "Pad the size 50 in modules * to 56" in " ".join(str(there).split())
    here = autoamp.explain(model, x, options={**EVERYTHING, "precision": "bf16"})
    assert here.misfits == []


def test_predicted_times_are_the_prices_that_were_minimised() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))
    report = autoamp.explain(model, torch.randn(4096, 512), device="cuda:sm_80")
    found = report.prediction
    assert found is not None
    assert found.placed == pytest.approx(report.cost * 1e-10)
    assert found.fp32 == pytest.approx(
        report.costs[0].placements["all fp32"].estimate * 1e-10
    )
    products, others, casts = found.classes
    assert (products.ops, others.ops) == (2, 1)
    assert casts.fp32 == 0
    assert found.share_that_may_be_low == pytest.approx(1.0)
    denied = autoamp.explain(
        model, torch.randn(4096, 512), options={"deny": ["linear"]}, device="cuda:sm_80"
    ).prediction
    assert denied is not None
    assert denied.share_that_may_be_low < 0.3
    assert denied.limit == pytest.approx(1 / (1 - denied.share_that_may_be_low))


def test_the_summary_says_the_figures_of_the_json() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512))
    x = torch.randn(4096, 512)
    report = autoamp.explain(
        model, x, device="cuda:sm_80", options={"keep": ["1", "2"]}
    )
    said, figures = str(report), json.loads(report.to_json())["headline"]
    found = report.headline
    placements = report.costs[0].placements
    assert found.seconds == pytest.approx(placements["ours"].estimate * 1e-10)
    assert found.seconds_fp32 == pytest.approx(placements["all fp32"].estimate * 1e-10)
    product = 4096 * 512 + 512 * 512 + 512  # numbers that a linear reads
    assert found.kept == 2 * product + 4 * (product + 4096 * 512 + 2 * 512)
    autocast = placements["promote"].estimate
    assert figures["seconds_autocast"] == pytest.approx(autocast * 1e-10)
    for name in ("seconds_fp32", "seconds_autocast", "seconds"):
        assert seconds_text(figures[name]) in said
    for name in ("kept_fp32", "kept_autocast", "kept"):
        assert bytes_text(figures[name]) in said
    assert f"{figures['speed_up']:.2f} times as fast as fp32" in said
    assert f"{figures['low_ops']} of {figures['float_ops']} float ops run in" in said
    high = [row for row in report.ops if not row.is_low]
    assert sum(group.count for group in report.stayed) == len(high)
    costs = [group.seconds for group in report.stayed]
    assert costs == sorted(costs, reverse=True)
    assert 'Leaving out keep=["2"]' in said or 'Leaving out keep=["1","2"]' in said


def test_the_four_questions_stand_in_their_order() -> None:
    report = explained(Between(), torch.randn(8, 64), precision="bf16", deny=["exp"])
    lines = str(report).splitlines()
    questions = [line for line in lines if line.startswith("What ")]
    assert [q.split(",")[0].split(" (")[0] for q in questions] == [
        "What runs low",
        "What it should gain here",
        "What stayed in fp32",
        "What to do next",
    ]
    assert max(map(len, lines)) <= WIDTH == 80


@pytest.mark.thorough
def test_the_summary_of_gpt2_fits_a_screen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(1, 64, dtype=torch.long)
    report = autoamp.explain(model, input_ids=ids, device="cuda:sm_80")
    lines = str(report).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= WIDTH
    assert len(report.full().splitlines()) > len(lines)
    assert "Pad the size 50,257 in module lm_head to 50,264" in str(report)


def test_a_notebook_gets_the_summary_as_html() -> None:
    class Nasty(nn.Linear):
        pass

    Nasty.__name__ = "<script>alert(1)</script>"
    page = explained(Nasty(8, 8), torch.randn(4, 8), precision="bf16")._repr_html_()
    assert "<pre" in page
    assert "<script>" not in page


def test_a_weight_whose_memory_is_gone_is_not_read() -> None:
    """The process would end with a segmentation fault."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    autoamp.convert(model, precision="fp16", do_no_harm=False)
    model(torch.ones(4, 256))
    model[0].weight.untyped_storage().resize_(0)  # as offloading does
    model[1].weight.untyped_storage().resize_(4)
    rows = {row.name: row.range for row in autoamp.report(model).weights}
    assert {name for name, found in rows.items() if found} == {"0.bias", "1.bias"}
