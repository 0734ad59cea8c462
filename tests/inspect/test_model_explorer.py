"""The report as a file for Model Explorer."""

import json

import pytest
import torch
from torch import nn

import autoamp
from autoamp.inspect.text import shorten
from tests.inspect.page_models import layers_report


@pytest.fixture(scope="module")
def report():
    return layers_report()


@pytest.fixture(scope="module")
def graphs(report):
    return json.loads(report.to_model_explorer())["graphs"]


def by_id(graph):
    return {node["id"]: node for node in graph["nodes"]}


def attributes(node):
    return {each["key"]: each["value"] for each in node["attrs"]}


def test_each_graph_is_there_after_and_before_the_pass(report, graphs) -> None:
    assert len(graphs) == 2 * len(report.sections)
    for section, after, before in zip(
        report.sections, graphs[::2], graphs[1::2], strict=True
    ):
        assert before["id"] == f"{after['id']}, before the pass"
        for graph, gm in (
            (after, section.rewritten.gm),
            (before, section.rewritten.before),
        ):
            nodes = {node.name: node for node in gm.graph.nodes}
            assert by_id(graph).keys() == nodes.keys()
            for node in graph["nodes"]:
                sources = [edge["sourceNodeId"] for edge in node["incomingEdges"]]
                operands = nodes[node["id"]].all_input_nodes
                assert sources == [operand.name for operand in operands]


def test_a_node_says_why_and_where(report, graphs) -> None:
    for section, after in zip(report.sections, graphs[::2], strict=True):
        nodes = by_id(after)
        for row in section.ops:
            node, said = nodes[row.name], attributes(nodes[row.name])
            assert said["precision"] == row.precision
            assert said["category"] == row.category
            assert said.get("source", "") == shorten(row.source)
            assert node["namespace"] == row.module.replace(".", "/")
        for row in section.casts:
            assert nodes[row.name]["label"] == f"to {row.dtype}"


def test_colours_tell_precisions_and_casts_apart(report, graphs) -> None:
    for section, after in zip(report.sections, graphs[::2], strict=True):
        nodes = by_id(after)
        colours = {}
        for row in section.ops:
            found = nodes[row.name].get("style", {}).get("backgroundColor")
            colours.setdefault(row.is_low, set()).add(found)
        casts = {nodes[row.name]["style"]["backgroundColor"] for row in section.casts}
        assert not (colours[True] & colours.get(False, set()))
        assert len(casts) == 1
        assert not (casts & colours[True])


def test_a_body_is_a_graph_to_go_to() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=False)

    options = {"precision": "bf16", "do_no_harm": False}
    report = autoamp.explain(Region(), torch.ones(4, 8), options=options)
    graphs = json.loads(report.to_model_explorer())["graphs"]
    targets = {
        target
        for graph in graphs
        for node in graph["nodes"]
        for target in node.get("subgraphIds", ())
    }
    ids = {graph["id"] for graph in graphs}
    assert targets == {i for i in ids if "body" in i or "wrap" in i} != set()


def test_it_is_written_whole_or_not_at_all(report, tmp_path) -> None:
    path = tmp_path / "graphs.json"
    assert report.to_model_explorer(path) == path.read_text()
    for write in (report.to_model_explorer, report.to_json, report.to_html):
        with pytest.raises(autoamp.OptionError, match="cannot be written there"):
            write(tmp_path / "none" / "file")
    assert list(tmp_path.iterdir()) == [path]


def test_a_report_without_graphs() -> None:
    empty = autoamp.report(autoamp.convert(nn.Linear(2, 2), precision="bf16"))
    assert json.loads(empty.to_model_explorer()) == {"label": "Linear", "graphs": []}
