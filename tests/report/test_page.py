"""The page of a report: its data is the report's, and it is one safe file."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.reports.page import costs
from tests.report.inside import ALL_FP32, MOST_NODES, Flips
from tests.report.page_models import EVIL, explained, layers_report
from tests.says import says


@pytest.fixture(scope="module")
def report() -> autoamp.Report:
    return layers_report()


class Markup(HTMLParser):
    """The elements of a page, each with its attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open = False
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), []))
        self._open = True

    def handle_data(self, data: str) -> None:
        if self._open:
            self.elements[-1][2].append(data)

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def texts(self, tag: str) -> list[str]:
        """The text of each element with a tag."""
        return ["".join(text) for name, _, text in self.elements if name == tag]


def document_in(report: autoamp.Report) -> dict[str, Any]:
    """The document as the page holds it."""
    found = next(t for t in Markup(report.to_html()).texts("script") if t[:1] == "{")
    document: dict[str, Any] = json.loads(found)
    return document


def pairs_of(report: autoamp.Report) -> list[tuple[Any, dict[str, Any]]]:
    """Each section of a report with its graph on the page."""
    graphs = document_in(report)["graphs"]
    assert [graph["key"] for graph in graphs] == [s.key for s in report.sections]
    return list(zip(report.sections, graphs, strict=True))


# -- the data -----------------------------------------------------------------------


def test_every_node_decision_and_cast_is_on_the_page(report: autoamp.Report) -> None:
    for section, graph in pairs_of(report):
        nodes, groups = graph["nodes"], graph["groups"]
        sides = {"before": section.rewritten.before, "after": section.rewritten.gm}
        for side, gm in sides.items():
            shown = {n["name"]: n[side] for n in nodes if n[side]}
            assert shown.keys() == {n.name for n in gm.graph.nodes}
            for node in gm.graph.nodes:
                read = [nodes[i]["name"] for i in shown[node.name]["operands"]]
                assert read == [o.name for o in node.all_input_nodes]
        order = [n["name"] for n in nodes if n["after"]]
        assert order == [n.name for n in section.rewritten.gm.graph.nodes]
        by_name = {node["name"]: node for node in nodes}
        for row in section.ops:
            node = by_name[row.name]
            assert node["decision"]["precision"] == row.precision
            assert node["after"]["precision"] in (row.precision, "")
            assert (node["op"], node["module"]) == (row.op, row.module)
        assert sum(bool(node["decision"]) for node in nodes) == len(section.ops)
        for cast in section.casts:
            for key, value in by_name[cast.name]["cast"].items():
                assert value == getattr(cast, key)
        assert sum(bool(node["cast"]) for node in nodes) == len(section.casts)
        assert all(g["parent"] < i for i, g in enumerate(groups))
        assert all(groups[n["group"]]["path"] == n["module"] for n in nodes)
    bodies = [n["body"] for _, g in pairs_of(report) for n in g["nodes"] if n["body"]]
    assert bodies == [s.key for s in report.sections if s.body]


def test_reasons_stand_in_the_order_of_the_summary() -> None:
    # The four denied ops move more bytes than the product, and take less time.
    model = nn.Sequential(nn.Linear(2048, 2048), *(nn.Softplus() for _ in range(4)))
    options = {"deny": ["linear", "softplus"]}
    x = torch.randn(2048, 2048)
    report = autoamp.explain(model, x, **options, device="cuda:sm_80")
    ((_, graph),) = pairs_of(report)
    stayed = graph["tables"]["stayed"]
    by_bytes = sorted(report.stayed, key=lambda group: -group.bytes)
    assert [group["reason"] for group in stayed] == [g.reason for g in report.stayed]
    assert list(report.stayed) != by_bytes, "the two orders must differ here"
    assert [graph["nodes"][n]["name"] for n in stayed[0]["nodes"]] == ["linear"]
    printed = " ".join(str(report).split())
    assert all(f"{group['cost']} " in printed for group in stayed)


def test_a_module_of_many_nodes_is_drawn_in_parts() -> None:
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2 * MOST_NODES):
                x = x.sin()
            return x

    (pair,) = pairs_of(explained(Long(), torch.randn(4)))
    groups, nodes = pair[1]["groups"], pair[1]["nodes"]
    counts = [sum(n["group"] == i for n in nodes) for i in range(len(groups))]
    assert max(counts) <= MOST_NODES
    assert [g["is_part"] for g in groups] == [False, *[True] * (len(groups) - 1)]


def test_a_buffer_that_a_float_op_reads_is_no_plumbing() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.ones(8))
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps.add_(1)
            self.running_mean.mul_(0.9)
            return x @ x - self.running_mean

    (pair,) = pairs_of(explained(Scaled(), torch.randn(8, 8)))
    hidden = {n["op"] for n in pair[1]["nodes"] if n["is_plumbing"]}
    assert "steps" in hidden
    assert "running_mean" not in hidden


# -- one voice ----------------------------------------------------------------------


@pytest.mark.parametrize("trains", [True, False])
def test_the_page_says_the_figures_that_the_summary_prints(trains: bool) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)).requires_grad_(trains)
    x = torch.randn(4096, 512)
    report = autoamp.explain(model, x, device="cuda:sm_80")
    printed = " ".join(str(report).split())
    answers = document_in(report)["answers"]
    gains = answers["gains"]
    assert len(gains["rows"]) == 1 + trains
    said = [gains["title"], *gains["columns"], gains["sentence"], gains["footnote"]]
    said += [text for row in gains["rows"] for text in row]
    for text in [*said, *answers["runs_low"], *answers["next"]]:
        assert text in printed
    before, after = answers["figures"]["before"], answers["figures"]["after"]
    fp32, autocast, placed = gains["rows"][0][1:]
    assert before[0]["value"] == fp32 != placed
    assert autocast in printed
    assert f"{after[0]['value'][:-1]} times as fast as fp32" in printed
    if trains:
        assert [before[1]["value"], after[1]["value"]] == gains["rows"][1][1::2]
        assert gains["rows"][1][2] in after[1]["note"]
    assert "autoamp.compare" in gains["error"], "the error is never predicted"


# -- the costs of the other precision -----------------------------------------------


def test_the_costs_are_those_of_the_solver_where_affordable(
    report: autoamp.Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    flips = [
        solver.of(row.name)
        for section in report.sections
        for solver in [Flips(section.rewritten)]
        for row in section.ops
    ]
    shown = decisions_of(report)
    monkeypatch.setattr(costs, "MOST_WORK", 0)
    for found, unsolved, flip in zip(shown, decisions_of(report), flips, strict=True):
        assert found["flip"]["to"] != found["precision"]
        if isinstance(flip, str):
            assert found["flip"]["kind"] == "never"
            assert unsolved["flip"]["kind"] in ("never", "unknown")
            continue
        assert found["flip"]["kind"] == "exact"
        assert found["flip"]["extra"] == flip.extra
        assert len(found["flip"]["appear"]) == len(flip.appear)
        assert unsolved["flip"]["kind"] == "unknown"


def decisions_of(report: autoamp.Report) -> list[dict[str, Any]]:
    """What the page says of each op, in the order of the report."""
    nodes = [node for _, graph in pairs_of(report) for node in graph["nodes"]]
    return [node["decision"] for node in nodes if node["decision"]]


def test_costs_of_modules_add_up_and_are_those_of_the_solver(
    report: autoamp.Report,
) -> None:
    for (section, graph), each in zip(pairs_of(report), report.costs, strict=True):
        everything = graph["groups"][0]["costs"]
        assert everything["placed"] == each.ours.estimate
        assert everything["fp32"] == each.placements[ALL_FP32].estimate
        assignment = section.rewritten.assignment
        for group in graph["groups"]:
            keep = group["costs"]["keep"]
            ops = [r.name for r in section.ops if _within(r.module, group["path"])]
            low = [name for name in ops if name in assignment.low]
            assert (keep is None) == (not low)
            if keep:
                assert keep["ops"] == len(low)
                change = Flips(section.rewritten).of_all(low, low=False)
                assert not isinstance(change, str)
                assert keep["extra"] == change.extra


def _within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


# -- one safe file ------------------------------------------------------------------


def test_the_page_loads_nothing(report: autoamp.Report) -> None:
    markup = Markup(report.to_html())
    loading = {"src", "href", "srcset", "data", "action", "poster", "background"}
    for _, attributes, _ in markup.elements:
        assert not loading & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    assert {"link", "iframe", "object", "embed", "img"}.isdisjoint(
        tag for tag, _, _ in markup.elements
    )
    (style,) = markup.texts("style")
    assert not re.search(r"url\((?!#)|@import", style)
    *scripts, last = markup.texts("script")
    assert scripts
    assert "fetch(" not in last
    assert "innerHTML" not in last
    assert "insertAdjacentHTML" not in last


def test_the_policy_lets_only_the_pages_own_scripts_run(report: autoamp.Report) -> None:
    markup = Markup(report.to_html())
    policy = next(
        str(attributes["content"])
        for _, attributes, _ in markup.elements
        if attributes.get("http-equiv") == "Content-Security-Policy"
    )
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    _, *scripts = markup.texts("script")  # the data is no script that runs
    for text in [*scripts, *markup.texts("style")]:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_hostile_names_reach_the_page_as_data_only(report: autoamp.Report) -> None:
    page = report.to_html()
    for part in ("<img", "<script>hacked", "</title><script"):
        assert part not in page
    assert len(Markup(page).texts("script")) == 3
    document = document_in(report)
    assert document["model"] == report.label
    text = json.dumps(document)
    assert EVIL in text
    assert "hacked=2" in text, "the source line of the call is shown"


def test_a_report_without_graphs_has_a_page() -> None:
    for report in (
        autoamp.Report("Model", (), ()),
        autoamp.Report("Model", (), (), [("Model", "it is in float64")]),
    ):
        document = document_in(report)
        assert document["graphs"] == []
        skipped = [(each["what"], each["why"]) for each in document["skipped"]]
        assert skipped == list(report.skipped)


# -- writing ------------------------------------------------------------------------


def test_a_file_is_written_whole_or_not_at_all(
    report: autoamp.Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("older")
    text = report.to_html(path)
    assert path.read_text(encoding="utf-8") == text

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(autoamp.OptionError) as raised:
        report.to_json(str(path))
    says(raised, path, "No space left on device")
    assert path.read_text(encoding="utf-8") == text
    assert os.listdir(tmp_path) == ["page.html"]
    for place in ("missing/page.html", "page.html/page.html", "\0"):
        with pytest.raises(autoamp.OptionError) as raised:
            report.to_html(f"{tmp_path}/{place}")
        says(raised, repr(f"{tmp_path}/{place}"))
    assert os.listdir(tmp_path) == ["page.html"]
