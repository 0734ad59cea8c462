"""The report as a file for Model Explorer, a viewer of model graphs.

The format is that of `GraphCollection` in `model_explorer/graph_builder.py` of the
package ai-edge-model-explorer (0.1.34): `model-explorer FILE` opens the file, and so
does the web page https://ai.google.dev/edge/model-explorer.  The file holds each
captured graph twice, after the pass and before.  Both have the same node ids, so that
the viewer's split view moves through both together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from autoamp.dtypes import LOW_DTYPES
from autoamp.inspect.document import Document
from autoamp.inspect.nodes.node import Node, Nodes
from autoamp.inspect.rows import Section
from autoamp.inspect.text import shorten

_LOW, _FP32, _OTHER, _CAST = "#cfe3f8", "#fbdfb8", "#d5ecd5", "#e3d3f7"
"""Background colours: low precision, fp32, another float, a cast."""


def to_model_explorer(document: Document) -> str:
    """The document of a report as JSON.

    The result opens in Model Explorer: modules are layers, a node's colour is its
    precision, and its attributes are its reason, rule and source line.
    """
    graphs = [
        graph
        for section, nodes in zip(document.sections, document.nodes, strict=True)
        for graph in (_graph(section, nodes, "after"), _graph(section, nodes, "before"))
    ]
    collection = {"label": document.label, "graphs": graphs}
    return json.dumps(collection, indent=1, ensure_ascii=False) + "\n"


def _graph(section: Section, nodes: Nodes, side: str) -> dict[str, Any]:
    return {
        "id": _id(section.key, side),
        "nodes": list(_nodes(nodes, side)),
        "groupNodeAttributes": {"": _counts(section, side)},
    }


def _id(key: str, side: str) -> str:
    return f"graph {key}" if side == "after" else f"graph {key}, before the pass"


def _counts(section: Section, side: str) -> dict[str, str]:
    """The attributes of the whole graph."""
    found = {"float ops": str(len(section.ops))}
    if side == "after":
        found[f"in {section.low}"] = str(sum(row.is_low for row in section.ops))
        found["casts"] = str(len(section.casts))
    return found


def _nodes(nodes: Nodes, side: str) -> Iterator[dict[str, Any]]:
    for node in nodes.entries:
        place = node.after if side == "after" else node.before
        if place is None:
            continue
        found: dict[str, Any] = {
            "id": node.name,
            "label": f"to {node.cast.dtype}" if node.cast else node.title,
            "namespace": node.module.replace(".", "/"),
            "attrs": [
                {"key": key, "value": value} for key, value in _attributes(node, side)
            ],
            "incomingEdges": [
                {"sourceNodeId": operand, "targetNodeInputId": str(i)}
                for i, operand in enumerate(place.operands)
            ],
            "outputsMetadata": [
                {"id": str(i), "attrs": [{"key": "tensor", "value": value}]}
                for i, value in enumerate(place.values)
            ],
        }
        if node.body:
            found["subgraphIds"] = [_id(node.body, side)]
        colour = _colour(node, place.precision)
        if colour:
            found["style"] = {"backgroundColor": colour}
        yield found


def _colour(node: Node, precision: str) -> str:
    if node.cast:
        return _CAST
    if not precision:
        return ""
    if precision in LOW_DTYPES:
        return _LOW
    return _FP32 if precision == "fp32" else _OTHER


def _attributes(node: Node, side: str) -> Iterator[tuple[str, str]]:
    """The attributes of a node that are not empty, in the order shown."""
    row, cast = node.decision, node.cast
    found = [("name", node.name), ("kind", node.kind), ("op", node.op)]
    if row and side == "after":
        found += [("precision", row.precision), ("category", row.category)]
        found += [("reason", row.choice or "by that rule"), ("rule", row.rule)]
        found.append(("origin", shorten(row.origin)))
    if cast:
        kept = "in each call" if cast.every_call else "kept until the weight changes"
        found += [("casts", cast.value), ("made", kept)]
        found.append(("bytes written", str(cast.bytes)))
    found += [("module", node.module), ("source", node.source)]
    return ((key, value) for key, value in found if value)
