"""Facts and verdicts of small graphs, written down by hand: no tensor, no tracing."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autoamp.passes.rules import Category
from tests.passes.decide.door import (
    Classified,
    Device,
    Facts,
    Mode,
    NodeFacts,
    Operand,
    Prices,
    Verdict,
)

DEVICE = Device("test", 1.0, 1.0, 1.0, 1.0, True)


def fact(name: str, *reads: str | Operand, **changed: Any) -> NodeFacts:
    """A node that reads the values `reads` and makes one; storage: its name's hash."""
    operands = tuple(
        r if isinstance(r, Operand) else Operand(r, "self", False, 0) for r in reads
    )
    facts: dict[str, Any] = {
        "name": name,
        "op": f"aten::{name}.default",
        "is_value": True,
        "makes_floats": True,
        "makes_others": False,
        "operands": operands,
        "mixes_floats": False,
        "numel": 10,
        "read_numel": 10 * len(operands),
        "region": 0,
        "autocast": None,
        "requires_grad": False,
        "storage": zlib.crc32(name.encode()),  # `hash` differs in each process
        "modules": (),
        "source": "",
        "device": "cpu",
    }
    return NodeFacts(**{**facts, **changed})


def facts(
    *nodes: NodeFacts,
    returned: Collection[str] = (),
    constants: Collection[str] = (),
    mutated: Collection[int] = (),
    outside: Collection[int] = (),
    element_of: dict[str, str] | None = None,
) -> Facts:
    """The facts of a graph of `nodes`."""
    return Facts(
        parameters=frozenset(),
        nodes={n.name: n for n in nodes},
        returned=frozenset(returned),
        hooked=frozenset(),
        constants=frozenset(constants),
        weights=frozenset(),
        mutated=frozenset(mutated),
        written_opaquely=frozenset(),
        outside=frozenset(outside),
        element_of=element_of or {},
    )


def verdict(
    category: str, modes: Sequence[Mode] = ("same",), **changed: Any
) -> Verdict:
    """A verdict for a node that reads one value."""
    plain: dict[str, Any] = {
        "category": Category(category),
        "reason": f"{category} because",
        "origin": "a test",
        "pinned": category == "deny",
        "modes": tuple(modes),
    }
    return Verdict(**{**plain, **changed})


def prices(
    graph: Facts,
    ops: dict[str, tuple[int, int]],
    reward: int = 0,
    wide: Mapping[str, int] | None = None,
) -> Prices:
    """`ops` and `wide` as they are; a cast down of any value costs 3, one up 5."""
    values = [f.name for f in graph.nodes.values() if f.is_value]
    down, up = dict.fromkeys(values, 3), dict.fromkeys(values, 5)
    return Prices(ops, down, up, reward, False, DEVICE, wide or {})


def graph_of(text: str, **changed: Any) -> Classified:
    """Facts and verdicts of `allow a; infer b a; deny c a b`: category, name, reads."""
    nodes, verdicts = [], {}
    for line in text.split(";"):
        category, name, *reads = line.split()
        nodes.append(fact(name, *reads))
        verdicts[name] = verdict(category, ["same"] * len(reads))
    return Classified(facts(*nodes, **changed), verdicts)
