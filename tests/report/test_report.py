"""The report says what was decided, shows where, and prices a change correctly.

Its words are those of the golden texts (`test_golden.py`).
"""

from __future__ import annotations

import functools
import io
import itertools
import json
import linecache
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.report.inside import (
    POLICIES,
    WIDTHS,
    Flips,
    bytes_text,
    energy,
    project,
    seconds_text,
)
from tests.says import says
from tests.small_models import BF16, Of


class Net(nn.Module):
    """Two products with an op between them that is denied by the options below."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc1(x)
        h = torch.relu(h)
        p = torch.exp(h)
        p = p * (p > 1)
        return self.fc2(p)


@functools.cache
def net_report(**options: object) -> autoamp.Report:
    model = autoamp.convert(Net(), **BF16, deny=["exp"], strict=True, **options)
    model(torch.ones(4, 8))
    return autoamp.report(model)


# -- rows ------------------------------------------------------------------------------


def test_rows_are_the_decisions_and_the_graph_agrees() -> None:
    report = net_report()
    decisions = report.rewritten[0].assignment.decisions
    assert [row.name for row in report.ops] == list(decisions)
    assert {row.precision for row in report.ops} == {"bf16", "fp32"}
    nodes = {n.name: n for n in report.graphs[0].graph.nodes}
    for row in report.ops:
        assert row.is_low == decisions[row.name].low
        made = nodes[row.name].meta["val"].dtype
        if made.is_floating_point:
            assert made == (torch.bfloat16 if row.is_low else torch.float32), row
        assert row.reason.strip(), row
        assert row.heading.strip(), row
        assert row.origin.strip(), row
        path, number, code = row.source.split(":", 2)
        assert Path(path) == Path(__file__)
        assert linecache.getline(__file__, int(number)).strip() == code.strip()
    assert [r.module for r in report.ops if "linear" in r.op] == ["fc1", "fc2"]


# -- costs and figures -----------------------------------------------------------------


def best_energy(rewritten: Any, held: str | None = None) -> int | None:
    """The least energy by trying every labelling; with `held` the other way round."""
    problem = rewritten.assignment.problem
    free = [n for n in problem.unary if n not in problem.at_sink]
    assert len(free) <= 12, "too many to try"
    was_low = held in rewritten.assignment.low
    found = []
    for bits in itertools.product((False, True), repeat=len(free)):
        low = frozenset(n for n, bit in zip(free, bits, strict=True) if bit)
        if held is None or (held in low) != was_low:
            found.append(energy(problem, low))
    return min((cost for cost in found if cost is not None), default=None)


def test_costs_are_energies_and_the_optimum_is_one() -> None:
    report = net_report()
    (rewritten,) = report.rewritten
    assert report.cost == report.optimal_cost == best_energy(rewritten)
    for name, policy in POLICIES.items():
        problem = rewritten.assignment.problem
        cost = energy(problem, project(problem, policy(rewritten.classified)))
        assert cost is not None
        assert report.regret[name] == cost - report.optimal_cost >= 0
    other = net_report(placement="forced")
    assert other.regret["forced"] == other.cost - other.optimal_cost > 0
    says(" ".join(other.full().split()), f"{other.regret['forced']:,} above the least")


def test_flipping_a_node_costs_what_trying_every_labelling_says() -> None:
    (rewritten,) = net_report().rewritten
    assignment, solver = rewritten.assignment, Flips(rewritten)
    flipped = []
    for name in assignment.decisions:
        best, change = best_energy(rewritten, held=name), solver.of(name)
        assert (best is None) == isinstance(change, str), name
        if best is not None and not isinstance(change, str):
            rewards = assignment.prices.reward * change.more_in_fp32
            assert change.extra + rewards == best - assignment.cost, name
            flipped.append(name)
    assert {"linear", "relu"} <= set(flipped)


def test_predicted_times_are_the_prices_that_were_minimised() -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512))
    x, device = torch.randn(4096, 512), "cuda:sm_80"
    report = autoamp.explain(model, x, device=device, keep=["1", "2"])
    said, figures = str(report), json.loads(report.to_json())["headline"]
    (costs,), times, headline = report.costs, report.prediction, report.headline
    assert times is not None
    for found, cost in (
        (times.placed, costs.ours),
        (headline.seconds, costs.ours),
        (headline.seconds_fp32, costs.placements["all fp32"]),
        (headline.seconds_autocast, costs.placements["promote"]),
    ):
        assert found == pytest.approx(cost.estimate * 1e-10)
    for placed, told in ((False, times.fp32), (True, times.placed)):
        assert times.seconds(placed=placed) == pytest.approx(told, rel=1e-3)
    assert [each.ops for each in times.classes[:2]] == [2, 1]
    assert sum(each.fp32 for each in times.classes) == pytest.approx(times.fp32)
    assert times.limit == pytest.approx(1 / (1 - times.share_that_may_be_low))
    # What the first linear reads in fp16, and the norm and the second linear in fp32;
    # and the norm's mean and deviation of each row.
    assert headline.kept == (2 + 4 + 4) * 4096 * 512 + 2 * 4 * 4096
    for name in ("seconds_fp32", "seconds_autocast", "seconds"):
        assert seconds_text(figures[name]) in said
    for name in ("kept_fp32", "kept_autocast", "kept"):
        assert bytes_text(figures[name]) in said
    assert f"{figures['speed_up']:.2f} times as fast as fp32" in said
    high = [row for row in report.ops if not row.is_low]
    assert sum(group.count for group in report.stayed) == len(high)
    free = autoamp.explain(nn.LSTM(16, 16), torch.ones(6, 4, 16), device=device)
    assert free.prediction is not None
    assert free.prediction.limit == math.inf, "no op must stay fp32"


def test_a_weight_whose_memory_is_gone_is_not_read() -> None:
    """The process would end with a segmentation fault."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    autoamp.convert(model, precision="fp16", do_no_harm=False)
    model(torch.ones(4, 256))
    model[0].weight.untyped_storage().resize_(0)  # as offloading does
    model[1].weight.untyped_storage().resize_(4)
    rows = {row.name: row.range for row in autoamp.report(model).weights}
    assert {name for name, found in rows.items() if found} == {"0.bias", "1.bias"}


# -- why the predicted speed-up is what it is ------------------------------------------

LINEAR = functools.partial(nn.Linear, bias=False)
CHANGES: dict[str, tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = {
    "because starts of kernels take": (nn.Sequential(*[LINEAR(8, 8)] * 4), (4, 8), {}),
    "because reading weights take": (LINEAR(16384, 16384), (1, 16384), {}),
    "A compiler": (nn.Sequential(LINEAR(64, 64), *[nn.ReLU()] * 9), (1 << 20, 64), {}),
    "Dropping the rule or the option": (
        nn.Sequential(LINEAR(4096, 4096), LINEAR(4096, 4096)),
        (8192, 4096),
        {"keep": ["1"]},
    ),
    "Fewer casts": (LINEAR(64, 8), (1 << 20, 64), {}),
    "Only less arithmetic": (LINEAR(4096, 4096), (8192, 4096), {}),
}


def because(model: nn.Module, *shape: int, **options: Any) -> autoamp.Report:
    given = {"precision": "fp16", "do_no_harm": False, **options}
    with torch.device("meta"):
        model, x = model.to("meta").requires_grad_(False), torch.empty(shape)
        return autoamp.explain(model, x, device="cuda:sm_70", **given)


@pytest.mark.parametrize("change", CHANGES)
def test_the_change_concerns_the_largest_part_of_what_is_left(change: str) -> None:
    model, shape, options = CHANGES[change]
    report = because(model, *shape, **options)
    assert change in report.because
    assert report.because in re.sub(r"\s+", " ", report.full())


def test_the_largest_op_is_named_with_its_kernel_and_its_module() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 11))
    said = because(model, 64, 8, 64, 64).because
    flops = [9 * 62**2, 121 * 52**2]
    assert "the convolution of 11 x 11 in module 1: " in said
    assert f"and {flops[1] / sum(flops):.0%} of the arithmetic" in said
    assert said.count(". ") == 3  # four sentences


def test_where_no_time_is_predicted_the_reason_is_given() -> None:
    x = torch.randn(4, 8)
    report = autoamp.explain(nn.Linear(8, 8), x, device="cpu:plain", **BF16)
    assert "no faster than fp32 on this device" in report.because
    report = autoamp.explain(nn.Flatten(), x.long(), device="cuda:sm_70")
    assert report.because == "No time is predicted, because no float op was captured."
    assert "every op stays in fp32" in because(nn.Tanh(), 4, 8, deny=["tanh"]).because


# -- for programs ----------------------------------------------------------------------


def test_networkx_has_casts_between_ops() -> None:
    report = net_report()
    graph = report.to_networkx()
    (up,) = [c for c in report.casts if c.kind == "up" and c.value == "relu"]
    assert list(graph.predecessors(f"0/{up.name}")) == ["0/relu"]
    assert "0/exp" in graph.successors(f"0/{up.name}")
    assert graph.nodes[f"0/{up.name}"]["kind"] == "up cast"
    for row in report.ops:
        data = graph.nodes[f"0/{row.name}"]
        assert (data["category"], data["reason"]) == (row.category, row.reason)
    assert graph.nodes["0/relu"]["precision"] == "bf16"
    assert graph.nodes["0/exp"]["precision"] == "fp32"


# -- the printed page ------------------------------------------------------------------


def test_a_report_is_plain_text_of_fixed_width_or_follows_a_console() -> None:
    report = net_report()
    assert "\x1b" not in report.full()
    assert max(map(len, report.full().splitlines())) <= WIDTHS[1]
    assert max(map(len, str(report).splitlines())) <= WIDTHS[0] == 80
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(report)
    assert "autoamp report: Net" in console.export_text()


def test_the_summary_of_gpt2_fits_a_screen() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=12, n_embd=768, n_head=12, use_cache=False)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    ids = torch.zeros(1, 64, dtype=torch.long)
    report = autoamp.explain(model, kwargs={"input_ids": ids}, device="cuda:sm_80")
    assert len(str(report).splitlines()) <= 24


def test_names_and_reasons_steer_neither_a_terminal_nor_a_notebook() -> None:
    skipped = [("graph 7", "Broken: [red]boom[/red] x[0]")]
    report = replace(net_report(), skipped=skipped)
    assert "graph 7: Broken: [red]boom[/red] x[0]" in report.full()
    kind = type("N\x1b[31m\u202et\n<script>", (Net,), {})
    report = autoamp.report(autoamp.convert(kind(), **BF16))
    for shown in (repr(report), report.full(), report.to_json()):
        assert shown.replace("\n", "").isprintable()
    assert report.label == "N\\x1b[31m\\u202et\\n<script>"
    assert "<pre" in report._repr_html_()
    assert "<script>" not in report._repr_html_()


@pytest.mark.usefixtures("no_units")
def test_a_declined_model_prints() -> None:
    report = autoamp.report(autoamp.convert(Net(), precision="bf16", do_no_harm=True))
    says(report.full(), "not converted", "bf16 cannot pay here")
    assert (report.cost, report.ops, report.compute_dtype) == (0, [], None)
    with pytest.raises(autoamp.OptionError):
        report.why("linear")
    report = autoamp.report(autoamp.convert(Net(), **BF16))
    assert "no graph captured yet: call the model once" in str(report)
    assert "0 graphs" in repr(report)


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_no_report_cuts_a_reason(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reason, why = "many words, " * 20 + "an end", "Broken: it calls out, " * 20 + "so"
    report = replace(net_report(), skipped=[("graph 7", why)])
    group, *_ = report.stayed
    stayed = (replace(group, reason=reason, ops=("op" * 40, "b", "c")),)
    monkeypatch.setitem(vars(report), "stayed", stayed)
    console = Console(width=columns, record=True, file=io.StringIO())
    console.print(report)
    for shown in (console.export_text(), str(report)):
        assert "…" not in shown
        says(" ".join(shown.split()), reason, f"graph 7: {why}", "autoamp")
    assert "…" not in report.full()


def test_checkpointed_bodies_are_graphs_of_their_own() -> None:
    model = Of(
        lambda m, x: (
            checkpoint(lambda y: m.b(y).exp(), m.a(x), use_reentrant=False) + 1
        ),
        a=nn.Linear(8, 8),
        b=nn.Linear(8, 8),
    )
    autoamp.convert(model, **BF16)
    model(torch.ones(4, 8))
    report = autoamp.report(model)
    outer, body = report.sections
    exp = next(r.name for r in report.ops if "exp" in r.op)
    assert f"of graph {body.key} runs in " in report.why(exp, graph=body.key)
    assert report.why(exp) == report.why(exp, graph=body.key)
    with pytest.raises(autoamp.OptionError) as raised:
        report.why(exp, graph=0)
    says(raised, exp, option=f"graph={body.key!r}")
    heading = f"    body of graph 0: {body.body} (checkpointed)"
    assert any(line.startswith(heading) for line in report.full().splitlines())
    weights = [c for c in report.casts if c.body == body.body and c.kind == "weight"]
    assert len(weights) == 2
    running = getattr(report.graphs[0], body.body).code
    for cast in weights:
        assert cast.every_call == (f"{cast.name} = torch.ops.aten._to_copy" in running)
    assert f"{body.key}/{exp}" in report.to_networkx()
    costs = (each.rewritten.assignment.cost for each in (outer, body))
    assert report.cost == sum(costs)
