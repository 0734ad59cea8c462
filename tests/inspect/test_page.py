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

import networkx as nx
import pytest
import torch
from torch import nn

import autoamp
from autoamp.errors import OptionError, PlacementError
from autoamp.inspect.changes import Flips, flip, remedy_for
from autoamp.inspect.page.costs import flips_of, remedies_of
from autoamp.inspect.page.drawing import MOST_NODES
from autoamp.inspect.report import Report
from autoamp.inspect.rows import ALL_FP32, Section
from tests.inspect.page_models import EVIL, Embedded, ResNet, explained, layers_report


@pytest.fixture(scope="module")
def report() -> Report:
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


def document_in(report: Report) -> dict[str, Any]:
    """The document as the page holds it."""
    found = next(t for t in Markup(report.to_html()).texts("script") if t[:1] == "{")
    document: dict[str, Any] = json.loads(found)
    return document


def pairs_of(report: Report) -> list[tuple[Section, dict[str, Any]]]:
    """Each section of a report with its graph on the page."""
    graphs = document_in(report)["graphs"]
    assert [graph["key"] for graph in graphs] == [s.key for s in report.sections]
    return list(zip(report.sections, graphs, strict=True))


# -- the data -----------------------------------------------------------------------


def test_every_node_and_operand_is_on_the_page(report: Report) -> None:
    for section, graph in pairs_of(report):
        nodes = graph["nodes"]
        sides = {"before": section.rewritten.before, "after": section.rewritten.gm}
        for side, gm in sides.items():
            shown = {n["name"]: n[side] for n in nodes if n[side]}
            assert shown.keys() == {n.name for n in gm.graph.nodes}
            for node in gm.graph.nodes:
                read = [nodes[i]["name"] for i in shown[node.name]["operands"]]
                assert read == [o.name for o in node.all_input_nodes]
        order = [n["name"] for n in nodes if n["after"]]
        assert order == [n.name for n in section.rewritten.gm.graph.nodes]


def test_every_decision_and_cast_is_on_the_page(report: Report) -> None:
    for section, graph in pairs_of(report):
        by_name = {node["name"]: node for node in graph["nodes"]}
        rows = {row.name: row for row in section.ops}
        assert {n for n, e in by_name.items() if e["decision"]} == rows.keys()
        for name, row in rows.items():
            shown = by_name[name]["decision"]
            assert (
                shown["precision"]
                == row.precision
                == (by_name[name]["after"]["precision"] or row.precision)
            )
            assert shown["category"] == row.category
            assert row.origin.endswith(shown["origin"])
            assert shown["rule"] in row.reason
            assert by_name[name]["op"] == row.op
            assert by_name[name]["source"].split(":")[0] in row.source
        casts = {row.name: row for row in section.casts}
        assert {n for n, e in by_name.items() if e["cast"]} == casts.keys()
        for name, cast in casts.items():
            assert by_name[name]["kind"] == "cast"
            assert by_name[name]["before"] is None
            for key, value in by_name[name]["cast"].items():
                assert value == getattr(cast, key)


def test_nodes_stand_in_their_modules(report: Report) -> None:
    for section, graph in pairs_of(report):
        groups = graph["groups"]
        assert groups[0]["parent"] == -1
        assert all(0 <= g["parent"] < i for i, g in enumerate(groups) if i)
        modules = {row.name: row.module for row in section.ops}
        for node in graph["nodes"]:
            assert groups[node["group"]]["path"] == node["module"]
            if node["name"] in modules:
                assert node["module"] == modules[node["name"]]
    paths = {g["path"] for _, graph in pairs_of(report) for g in graph["groups"]}
    assert "blocks.0.up" in paths
    assert any(EVIL in path for path in paths)


@pytest.mark.thorough
def test_reasons_stand_in_the_order_of_the_summary() -> None:
    # The four denied ops move more bytes than the product, and take less time.
    model = nn.Sequential(nn.Linear(2048, 2048), *(nn.Softplus() for _ in range(4)))
    options = {"deny": ["linear", "softplus"]}
    x = torch.randn(2048, 2048)
    report = autoamp.explain(model, x, options=options, device="cuda:sm_80")
    ((_, graph),) = pairs_of(report)
    stayed = graph["tables"]["stayed"]
    by_bytes = sorted(report.stayed, key=lambda group: -group.bytes)
    assert [group["reason"] for group in stayed] == [g.reason for g in report.stayed]
    assert list(report.stayed) != by_bytes, "the two orders must differ here"
    assert [graph["nodes"][n]["name"] for n in stayed[0]["nodes"]] == ["linear"]
    printed = " ".join(str(report).split())
    assert all(f"{group['cost']} " in printed for group in stayed)


def test_a_body_has_a_graph_of_its_own(report: Report) -> None:
    graphs = document_in(report)["graphs"]
    bodies = [n["body"] for graph in graphs for n in graph["nodes"] if n["body"]]
    assert bodies
    assert set(bodies) == {graph["key"] for graph in graphs if "/" in graph["key"]}


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


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("blocks", "count"),
    [
        ((1, 1, 1, 1), 51),
        pytest.param((3, 4, 6, 3), 159, marks=pytest.mark.slow, id="resnet50"),
    ],
)
def test_statistics_and_counters_of_a_resnet_are_plumbing(
    blocks: tuple[int, ...], count: int
) -> None:
    model = ResNet(blocks)
    (pair,) = pairs_of(explained(model, torch.randn(2, 3, 32, 32)))
    nodes = pair[1]["nodes"]
    hidden = {node["name"] for node in nodes if node["is_plumbing"]}
    buffers = [n for n, _ in model.named_buffers()]
    assert len(buffers) == count
    assert {name.replace(".", "_") for name in buffers} <= hidden
    for node in nodes:
        assert not (node["is_plumbing"] and node["decision"])
        assert node["kind"] != "state" or node["module"], "beside their reader"
    at_root = [n for n in nodes if n["module"] == "" and not n["is_plumbing"]]
    assert len(at_root) < 8, "the drawing does not begin with a row of buffers"


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


@pytest.mark.thorough
def test_each_call_of_a_shared_relu_has_a_box() -> None:
    (pair,) = pairs_of(explained(ResNet((1, 1)), torch.randn(2, 3, 32, 32)))
    groups, nodes = pair[1]["groups"], pair[1]["nodes"]
    labels = [g["label"] for g in groups if g["path"] == "layers.1.0.relu"]
    assert labels == ["relu, call 1", "relu, call 2", "relu, call 3"]
    assert [g["label"] for g in groups if g["path"] == "relu"] == ["relu"]
    edges = nx.DiGraph()
    for node in nodes:
        for operand in (node["after"] or node["before"])["operands"]:
            a, b = _ancestors(groups, nodes[operand]), _ancestors(groups, node)
            same = len([x for x, y in zip(a, b, strict=False) if x == y])
            ends = a[same : same + 1], b[same : same + 1]
            edges.add_edge(
                *(
                    str(end or name)
                    for end, name in zip(
                        ends, (nodes[operand]["name"], node["name"]), strict=True
                    )
                )
            )
    assert nx.is_directed_acyclic_graph(edges)


def _ancestors(groups: list[dict[str, Any]], node: dict[str, Any]) -> list[int]:
    """The boxes around a node, the outermost first."""
    found = [node["group"]]
    while groups[found[0]]["parent"] >= 0:
        found.insert(0, groups[found[0]]["parent"])
    return found


# -- one voice ----------------------------------------------------------------------


@pytest.mark.thorough(but=["False"])
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


def test_costs_are_exact_where_affordable_and_bounds_elsewhere(report: Report) -> None:
    kinds: list[str] = []
    for section in report.sections:
        rows = section.ops
        solver = Flips(section.rewritten)
        exact = flips_of(section, solver, most=len(rows))
        bounds = flips_of(section, solver, most=0)
        reward = section.rewritten.assignment.prices.reward
        for name, entry in exact.items():
            assert entry["to"] != next(r.precision for r in rows if r.name == name)
            if entry["kind"] == "never":
                with pytest.raises(PlacementError):
                    flip(section.rewritten, name)
                continue
            found = flip(section.rewritten, name)
            assert entry["kind"] == "exact"
            assert entry["extra"] == found.extra_estimate
            assert len(entry["appear"]) == len(found.appear)
            bound = bounds[name]
            kinds.append(bound["kind"])
            if bound["kind"] == "bound":
                most = bound["extra"] + reward * bound["more_allow_in_fp32"]
                assert most >= found.extra_cost
        assert [n for n, e in exact.items() if e["kind"] == "never"] == [
            n for n, e in bounds.items() if e["kind"] == "never"
        ]
    assert kinds.count("bound") > len(kinds) / 2


def test_costs_of_modules_add_up_and_are_those_of_the_solver(report: Report) -> None:
    for (section, graph), costs in zip(pairs_of(report), report.costs, strict=True):
        everything = graph["groups"][0]["costs"]
        assert everything["placed"] == costs.ours.estimate
        assert everything["fp32"] == costs.placements[ALL_FP32].estimate
        assignment = section.rewritten.assignment
        for group in graph["groups"]:
            keep = group["costs"]["keep"]
            ops = [r.name for r in section.ops if _within(r.module, group["path"])]
            low = [name for name in ops if name in assignment.low]
            assert (keep is None) == (not low)
            if keep:
                assert keep["ops"] == len(low)
                assert (
                    keep["extra"]
                    == Flips(section.rewritten).of_all(low, low=False).extra_estimate
                )


def _within(module: str, path: str) -> bool:
    return not path or module == path or module.startswith(f"{path}.")


def test_each_fp32_op_has_its_root_and_the_option_that_lowers_it() -> None:
    report = explained(Embedded(), torch.zeros(4, 8).long())
    ((section, graph),) = pairs_of(report)
    nodes = {node["name"]: node for node in graph["nodes"]}
    root = nodes["layer_norm"]["decision"]["root"]
    assert graph["nodes"][root["node"]]["name"] == "embedding"
    chain = [graph["nodes"][i]["name"] for i in root["chain"]]
    assert chain == ["embedding", "add", "layer_norm"]
    assert root["said"] in report.why("layer_norm")
    tried = 0
    for name, node in nodes.items():
        decision = node["decision"]
        if not decision or decision["precision"] != "fp32":
            assert not decision or not (decision["root"] or decision["remedy"])
            continue
        remedy = remedy_for(section.rewritten, name)
        if remedy is None:
            assert decision["remedy"]["words"] == ""
            assert 'allow=["embedding"]' in decision["remedy"]["tried"]
            continue
        assert decision["remedy"]["words"] == remedy.words
        assert decision["remedy"]["extra"] == remedy.extra
        tried += 1
    assert tried == 2
    assert remedies_of(section, most=0) == {}, "nothing affordable"


# -- one safe file ------------------------------------------------------------------


def test_the_page_loads_nothing(report: Report) -> None:
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


def test_the_policy_lets_only_the_pages_own_scripts_run(report: Report) -> None:
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


def test_hostile_names_reach_the_page_as_data_only(report: Report) -> None:
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
        Report("Model", (), ()),
        Report("Model", (), (), [("Model", "it is in float64")]),
    ):
        document = document_in(report)
        assert document["graphs"] == []
        skipped = [(each["what"], each["why"]) for each in document["skipped"]]
        assert skipped == list(report.skipped)


# -- writing ------------------------------------------------------------------------


def test_the_file_is_the_text_and_replaces_an_older_one(
    report: Report, tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    path.write_text("older")
    text = report.to_html(path)
    assert path.read_text(encoding="utf-8") == text
    assert report.to_html(str(path)) == text
    assert os.listdir(tmp_path) == ["page.html"]


def test_an_interrupted_write_leaves_the_older_file(
    report: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "page.html"
    path.write_text("older")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OptionError, match="No space left on device"):
        report.to_html(path)
    assert path.read_text() == "older"
    assert os.listdir(tmp_path) == ["page.html"]


@pytest.mark.thorough(but=["missing/page.html", "\\x00"])
@pytest.mark.parametrize(
    "place", ["missing/page.html", "file/page.html", "folder", "\0"]
)
def test_a_path_that_cannot_be_written_is_named(
    report: Report, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OptionError, match=re.escape(repr(f"{tmp_path}/{place}"))):
        report.to_html(f"{tmp_path}/{place}")
    assert sorted(os.listdir(tmp_path)) == before
