"""The report as a file for Model Explorer, a viewer of model graphs.

The format is that of `GraphCollection` in `model_explorer/graph_builder.py` of the
package ai-edge-model-explorer (0.1.34): `model-explorer FILE` opens the file, and so
does the web page https://ai.google.dev/edge/model-explorer.  Each captured graph is
there twice, after the pass and before; the two have the same node ids, so that the
viewer's split view moves through both together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from autoamp.dtypes import LOW_DTYPES

_LOW, _FP32, _OTHER, _CAST = "#cfe3f8", "#fbdfb8", "#d5ecd5", "#e3d3f7"
"""Background colours: low precision, fp32, another float, a cast."""


def to_model_explorer(document: Mapping[str, Any]) -> str:
    """The document of a report, as `page/document.py` describes it, as JSON.

    The result opens in Model Explorer: modules are layers, a node's colour is its
    precision, and its attributes are its reason, rule and source line.
    """
    graphs = [
        graph
        for each in document["graphs"]
        for graph in (_graph(each, "after"), _graph(each, "before"))
    ]
    collection = {"label": document["model"], "graphs": graphs}
    return json.dumps(collection, indent=1, ensure_ascii=False) + "\n"


def _graph(graph: Mapping[str, Any], side: str) -> dict[str, Any]:
    key = graph["key"]
    return {
        "id": _id(key, side),
        "nodes": list(_nodes(graph, side)),
        "groupNodeAttributes": {"": _counts(graph, side)},
    }


def _id(key: str, side: str) -> str:
    return f"graph {key}" if side == "after" else f"graph {key}, before the pass"


def _counts(graph: Mapping[str, Any], side: str) -> dict[str, str]:
    """The attributes of the whole graph."""
    ops = [n["decision"] for n in graph["nodes"] if n["decision"]]
    casts = sum(n["kind"] == "cast" for n in graph["nodes"])
    if side == "before":
        return {"float ops": str(len(ops))}
    low = sum(op["precision"] != "fp32" for op in ops)
    return {
        "float ops": str(len(ops)),
        f"in {graph['compute_dtype']}": str(low),
        "casts": str(casts),
    }


def _nodes(graph: Mapping[str, Any], side: str) -> Iterator[dict[str, Any]]:
    nodes = graph["nodes"]
    for node in nodes:
        place = node[side]
        if place is None:
            continue
        found: dict[str, Any] = {
            "id": node["name"],
            "label": f"to {node['cast']['dtype']}" if node["cast"] else node["title"],
            "namespace": node["module"].replace(".", "/"),
            "attrs": [
                {"key": key, "value": value} for key, value in _attributes(node, side)
            ],
            "incomingEdges": [
                {"sourceNodeId": nodes[operand]["name"], "targetNodeInputId": str(i)}
                for i, operand in enumerate(place["operands"])
            ],
            "outputsMetadata": [
                {"id": str(i), "attrs": [{"key": "tensor", "value": value}]}
                for i, value in enumerate(place["values"])
            ],
        }
        if node["body"]:
            found["subgraphIds"] = [_id(node["body"], side)]
        colour = _colour(node, place["precision"])
        if colour:
            found["style"] = {"backgroundColor": colour}
        yield found


def _colour(node: Mapping[str, Any], precision: str) -> str:
    if node["kind"] == "cast":
        return _CAST
    if not precision:
        return ""
    if precision in LOW_DTYPES:
        return _LOW
    return _FP32 if precision == "fp32" else _OTHER


def _attributes(node: Mapping[str, Any], side: str) -> Iterator[tuple[str, str]]:
    """The attributes of a node that has something to say, in the order shown."""
    decision, cast = node["decision"], node["cast"]
    found = [("name", node["name"]), ("kind", node["kind"]), ("op", node["op"])]
    if decision and side == "after":
        keys = ("precision", "category", "reason", "rule", "origin")
        found += [(key, decision[key]) for key in keys]
    if cast:
        kept = "in each call" if cast["every_call"] else "kept until the weight changes"
        found += [("casts", cast["value"]), ("made", kept)]
        found.append(("bytes written", str(cast["bytes"])))
    found += [("module", node["module"]), ("source", node["source"])]
    return ((key, value) for key, value in found if value)
