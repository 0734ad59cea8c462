"""The report says what was decided, shows where, and prices a change correctly."""

from __future__ import annotations

import functools
import io
import itertools
import json
import linecache
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp import compat
from autoamp.errors import OptionError
from autoamp.inspect import text
from autoamp.inspect.changes import flip
from autoamp.inspect.report import Report
from autoamp.inspect.rows import OURS
from autoamp.inspect.terminal import stayed_fp32
from autoamp.inspect.text import FULL_WIDTH
from autoamp.place.policies import POLICIES, project
from autoamp.place.two_sides import Problem, energy
from autoamp.rewrite.rewritten import Rewritten
from autoamp.saved.rows import OpRow


class Net(nn.Module):
    """Two products with an op between them that is denied by the options below."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(x)
        h = torch.relu(h)
        p = torch.exp(h)
        p = p * (p > 1)
        return self.fc2(p)


def report_of(model: nn.Module, *inputs: torch.Tensor, **options: object) -> Report:
    given = {"precision": "bf16", "do_no_harm": False, "strict": True, **options}
    autoamp.convert(model, **given)
    model(*inputs)
    return autoamp.report(model)


@functools.cache
def net_report(**options: object) -> Report:
    return report_of(Net(), torch.ones(4, 8), deny=["exp"], **options)


def best_energy(rewritten: Rewritten, held: str | None = None) -> int:
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
    legal = [cost for cost in found if cost is not None]
    assert legal
    return min(legal)


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


def test_every_reason_says_something() -> None:
    for row in net_report().ops:
        assert row.reason.strip(), row
        assert row.heading.strip(), row
        assert row.origin.strip(), row


def test_source_lines_are_lines_of_this_file() -> None:
    rows = net_report().ops
    found = set()
    for row in rows:
        path, number, code = row.source.split(":", 2)
        assert Path(path) == Path(__file__)
        assert linecache.getline(__file__, int(number)).strip() == code.strip()
        found.add((row.op, code.strip()))
    assert ("aten::exp.default", "p = torch.exp(h)") in found
    assert [r.module for r in rows if "linear" in r.op] == ["fc1", "fc2"]


def test_casts_have_the_bytes_of_their_shapes() -> None:
    casts = {(c.kind, c.value): c for c in net_report().casts}
    assert casts["weight", "fc1_weight"].bytes == 16 * 8 * 2
    assert casts["weight", "fc2_bias"].bytes == 4 * 2
    assert casts["down", "input_0"].bytes == 4 * 8 * 2
    assert casts["up", "relu"].bytes == 4 * 16 * 4
    assert not casts["weight", "fc1_weight"].every_call
    assert casts["down", "input_0"].every_call


# -- cost ------------------------------------------------------------------------------


def test_costs_are_energies_and_the_optimum_is_one() -> None:
    report = net_report()
    (rewritten,) = report.rewritten
    assert report.optimal_cost == best_energy(rewritten)
    assert report.cost == report.optimal_cost
    assert set(report.regret) == {"tensorflow", "promote", "forced"}
    for name, extra in report.regret.items():
        problem = rewritten.assignment.problem
        low = project(problem, POLICIES[name](rewritten.classified))
        assert extra == energy(problem, low) - report.optimal_cost
        assert extra >= 0


def test_other_placements_show_their_regret() -> None:
    report = net_report(placement="forced")
    assert report.regret["forced"] == report.cost - report.optimal_cost > 0
    above = f"is {report.regret['forced']:,} above the least"
    assert above in " ".join(report.full().split())


# -- why -------------------------------------------------------------------------------


def test_flipping_a_node_costs_what_trying_every_labelling_says() -> None:
    (rewritten,) = net_report().rewritten
    problem = rewritten.assignment.problem
    flipped = [n for n in rewritten.assignment.decisions if _can_flip(problem, n)]
    assert {"linear", "relu"} <= set(flipped)
    for name in flipped:
        change = flip(rewritten, name)
        best = best_energy(rewritten, held=name)
        assert change.extra_cost == best - rewritten.assignment.cost, name
        assert energy(problem, change.low) == best
        assert (name in change.low) != (name in rewritten.assignment.low)


def _can_flip(problem: Problem, name: str) -> bool:
    return name not in problem.at_sink and not any(
        reader == name for reader, _, _ in problem.follows
    )


def test_why_of_an_allow_op() -> None:
    report = net_report()
    change = flip(report.rewritten[0], "linear")
    shown = report.why("linear")
    price = text.amount(change.extra_estimate, False, signed=True)
    assert "linear (aten::linear.default) of graph 0 runs in bf16" in shown
    assert "allow: safe and worth it" in shown
    assert "rules/bf16.toml" in shown
    assert "fc1_weight (weight, bf16 copy)" in shown
    assert "input_0 (fp32, cast to bf16)" in shown
    assert "without do-no-harm it is converted wherever it may be" in shown
    assert f"{price} predicted time, and 1 more allow op in fp32" in shown
    # With the first product in fp32 nothing before `exp` is low any more.
    vanishing = shown.partition("would vanish: ")[2].splitlines()[0]
    assert "input_0 to bf16" in vanishing
    assert "relu to fp32" in vanishing
    assert "fc1_weight to bf16 (weight)" in vanishing
    assert "would change with it: relu" in shown


def test_why_of_a_node_that_cannot_be_low() -> None:
    report = net_report()
    assert 'in bf16    by leaving out deny=["exp"]: ' in report.why("exp")
    chain = report.why("gt")
    assert ": gt must be low (asked for); then " in chain
    assert "exp must stay fp32" in chain.replace("but exp", "exp")


def test_why_of_what_is_no_op() -> None:
    report = net_report()
    (up,) = [c for c in report.casts if c.kind == "up" and c.value == "relu"]
    assert "an up cast of relu to fp32 (256 B), read by exp" in report.why(up.name)
    assert "comes from outside the graph in fp32" in report.why("fc1_weight")


def test_why_takes_a_node_and_names_what_is_close() -> None:
    report = net_report()
    node = next(n for n in report.graphs[0].graph.nodes if n.name == "linear_1")
    assert report.why(node) == report.why("linear_1")
    with pytest.raises(OptionError, match=r"no node 'linaer'; did you mean linear"):
        report.why("linaer")
    with pytest.raises(OptionError, match=r"graph=3: .*it has: 0"):
        report.why("linear", graph=3)


# -- for programs ----------------------------------------------------------------------


def test_json_round_trip(tmp_path: Path) -> None:
    report = net_report()
    written = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == written
    loaded = json.loads(written)
    assert (loaded["schema"], loaded["version"]) == ("autoamp.report", 1)
    assert loaded["cost"] == report.cost
    assert loaded["regret"] == report.regret
    assert [op["name"] for op in loaded["ops"]] == [row.name for row in report.ops]
    assert {op["precision"] for op in loaded["ops"]} == {"bf16", "fp32"}
    assert [c["bytes"] for c in loaded["casts"]] == [c.bytes for c in report.casts]
    placements = loaded["graphs"][0]["placements"]
    assert placements[OURS]["cost"] == report.cost


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


def test_page_is_plain_text_of_fixed_width() -> None:
    shown = net_report().full()
    assert "\x1b" not in shown
    assert max(len(line) for line in shown.splitlines()) <= FULL_WIDTH
    assert "tests/inspect/test_report.py:" in shown
    assert "p = torch.exp(h)" in shown
    assert "an independent recount" in " ".join(shown.split())


def test_page_follows_a_rich_console() -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(net_report())
    assert "autoamp report: Net" in console.export_text()


def row(name: str, category: str, heading: str, size: int) -> OpRow:
    op, source = f"aten::{name}.default", f"/a/b.py:{size}: f()"
    given = {"category": category, "heading": heading, "bytes": size}
    return OpRow(0, "", name, op, "fp32", heading, "m", source, **given)


def test_most_important_fp32_ops_come_first_and_the_rest_are_counted() -> None:
    rows = [row(f"a{i}", "infer", f"reason {i}", 10 * i) for i in range(30)]
    rows += [row("conv", "allow", "kept", 1), row("conv", "allow", "kept", 2)]
    rows += [row("exp", "deny", "reason 29", i) for i in range(9)]
    console = Console(width=FULL_WIDTH, record=True, file=io.StringIO())
    console.print(*stayed_fp32(rows, "bf16"), sep="\n")
    shown = console.export_text()
    order = re.findall(r"• (.+) \(", shown)
    assert order[:3] == ["kept", "reason 29", "reason 28"]
    places = sum("b.py:" in line for line in shown.splitlines())
    assert places < 20
    left = re.search(r"and (\d+) more reasons for (\d+) ops", shown)
    assert left is not None
    assert len(order) + int(left[1]) == 31
    assert "... and 7 more places" in shown


# -- what was not converted ------------------------------------------------------------


def test_skipped_things_are_shown_with_their_reason() -> None:
    report = replace(
        net_report(), skipped=[("graph 7", "Broken: [red]boom[/red] x[0]")]
    )
    assert "graph 7: Broken: [red]boom[/red] x[0]" in report.full()
    assert json.loads(report.to_json())["skipped"][0]["what"] == "graph 7"


def test_names_cannot_steer_a_terminal() -> None:
    kind = type("N\x1b[31m\u202et\n", (Net,), {})
    model = autoamp.convert(kind(), precision="bf16", do_no_harm=False)
    report = autoamp.report(model)
    for shown in (repr(report), report.full(), report.to_json()):
        assert shown.replace("\n", "").isprintable()
    assert report.label == "N\\x1b[31m\\u202et\\n"


def test_a_declined_model_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cpu_low_precision_units", dict)
    model = Net()
    autoamp.convert(model, precision="bf16", do_no_harm=True)
    report = autoamp.report(model)
    assert "not converted, runs in fp32" in report.full()
    assert "bf16 cannot pay here" in report.full()
    assert (report.cost, report.ops, report.compute_dtype) == (0, [], None)
    with pytest.raises(OptionError, match="none was captured"):
        report.why("linear")


def test_a_model_that_was_not_called_yet() -> None:
    model = Net()
    autoamp.convert(model, precision="bf16", do_no_harm=False)
    assert "no graph captured yet: call the model once" in str(autoamp.report(model))
    assert "0 graphs" in repr(autoamp.report(model))


# -- sub-graphs and unknown ops --------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 8)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.b(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, self.a(x), use_reentrant=False) + 1


def test_checkpointed_bodies_are_graphs_of_their_own() -> None:
    report = report_of(Checkpointed(), torch.ones(4, 8))
    outer, body = report.sections
    assert (outer.key, body.graph) == ("0", 0)
    assert any(r.body == body.body and "gelu" in r.op for r in report.ops)
    gelu = next(r.name for r in report.ops if "gelu" in r.op)
    assert f"of graph {body.key} runs in bf16" in report.why(gelu, graph=body.key)
    with pytest.raises(OptionError, match="no node"):
        report.why(gelu, graph=0)
    heading = f"    body of graph 0: {body.body} (checkpointed)"
    assert any(line.startswith(heading) for line in report.full().splitlines())
    weights = [c for c in report.casts if c.body == body.body and c.kind == "weight"]
    assert len(weights) == 2
    running = getattr(report.graphs[0], body.body).code
    for cast in weights:
        assert cast.every_call == (f"{cast.name} = torch.ops.aten._to_copy" in running)
    assert f"{body.key}/{gelu}" in report.to_networkx()
    assert report.cost == sum(
        each.assignment.cost for each in (outer.rewritten, body.rewritten)
    )


@torch.library.custom_op("autoamp_test_report::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(self.fc(x))


def test_ops_in_no_list_are_named() -> None:
    with torch.no_grad():
        report = report_of(Twice().eval(), torch.ones(4, 8))
    (unlisted,) = [r for r in report.ops if not r.listed]
    assert unlisted.op == "autoamp_test_report::twice.default"
    shown = report.full().partition("Ops in no list")[2]
    assert "autoamp_test_report::twice" in shown
    assert "Ops in no list" not in str(net_report())
