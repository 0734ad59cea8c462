"""Values and gradients of one call, node by node, and the errors between two calls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from autoamp import compat
from autoamp.ask.comparison import Errors, NodeError
from autoamp.ask.lockstep import Key
from autoamp.saved.rows import OpRow

Node = tuple[int, str, str]
"""A graph's number, a body's path or "", a node's name."""


@dataclass
class Heard:
    """The numbers of one call and its backward.

    Attributes:
        values, flows: each node's result and its gradient.
        added: the error that each low node adds by itself.
        output: the float tensors of the output.
        gradients: the gradients of the parameters, by name.
        loss: the loss; None without a backward.
        returned: the output as the model returned it.
    """

    values: dict[Key, Tensor] = field(default_factory=dict)
    flows: dict[Key, Tensor] = field(default_factory=dict)
    added: dict[Key, float] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    loss: float | None = None
    returned: Any = None


def errors_of(heard: Heard, fp32: Heard) -> Errors:
    """The errors of one call against the call in fp32."""
    names = sorted(fp32.gradients.keys() & heard.gradients.keys())
    return Errors(
        relative_error(heard.output, fp32.output),
        relative_error(
            [heard.gradients[n] for n in names], [fp32.gradients[n] for n in names]
        ),
    )


def relative_error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """||found - wanted|| / ||wanted|| in fp64; NaN if either holds a NaN.

    Infinity if the shapes differ, because the two calls took different branches.  Of
    DTensors the parts that this rank holds are compared.
    """
    found, wanted = ([*map(compat.own_memory, each)] for each in (found, wanted))
    if [t.shape for t in found] != [t.shape for t in wanted]:
        return math.inf
    distance = sum(
        float((a.double() - b.double()).square().sum())
        for a, b in zip(found, wanted, strict=True)
    )
    size = sum(float(b.double().square().sum()) for b in wanted)
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return math.nan if math.isnan(distance) else math.sqrt(distance / size)


def node_errors(rows: Sequence[OpRow], fp32: Heard, mixed: Heard) -> list[NodeError]:
    """The errors of each op in its worst run; the op that adds most comes first."""
    keys: dict[Node, list[Key]] = defaultdict(list)
    for key in mixed.values.keys() & fp32.values.keys():
        keys[key[:3]].append(key)
    found = []
    for row in rows:
        ran = keys.get((row.graph, row.body, row.name), [])
        if not ran:
            continue
        flows = [k for k in ran if k in mixed.flows and k in fp32.flows]
        found.append(
            NodeError(
                graph=row.graph,
                body=row.body,
                name=row.name,
                op=row.op,
                precision=row.precision,
                module=row.module,
                source=row.source,
                error=max(_error(mixed.values, fp32.values, k) for k in ran),
                added=max(mixed.added.get(k, 0.0) for k in ran),
                gradient=max(
                    (_error(mixed.flows, fp32.flows, k) for k in flows), default=0.0
                ),
            )
        )
    return sorted(found, key=lambda node: -node.added)


def _error(
    found: Mapping[Key, Tensor], wanted: Mapping[Key, Tensor], key: Key
) -> float:
    return relative_error([found[key]], [wanted[key]])
