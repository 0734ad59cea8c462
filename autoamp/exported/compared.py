"""Says where an exported program gives other results than the converted model, and why.

The results, and the graphs that a call of the model ran, go in; one sentence comes out.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoamp import compat
from autoamp.capture.engine import Engine
from autoamp.capture.graph import Graph
from autoamp.dtypes import short_name
from autoamp.errors import ExportError
from autoamp.exported.captured import Call
from autoamp.exported.plan import made_by
from autoamp.inspect.text import counted
from autoamp.op_names import base_name
from autoamp.ops import is_view
from autoamp.overflow.remedy import Remedy
from autoamp.printable import class_name

logger = logging.getLogger(__name__)

_SHOWN = 4


@dataclass(frozen=True)
class Made:
    """A program, and what it was made of.

    Attributes:
        gm: the rewritten graph; None where nothing runs low.
        results: the flat results of that graph.
        rule: the rule without which results would not be finite, if there is one.
    """

    program: torch.export.ExportedProgram
    gm: fx.GraphModule | None = None
    results: Sequence[Any] = ()
    rule: Remedy | None = None


def compare_with_converted(
    model: nn.Module, engine: Engine, call: Call, made: Made
) -> None:
    """Says where a program gives other results than the converted model itself.

    Raises:
        ExportError: the results differ, and the conversion is strict.
    """
    before = {graph: graph.runs for graph in engine.record.graphs}
    others = call.results(model)
    at = first_difference(made.results, others)
    if at is None or made.gm is None:
        return
    ran = [g for g in engine.record.graphs if g.runs > before.get(g, 0)]
    how = how_far(made.results, others, at)
    why = _why(ran, made.gm, engine.options.backend)
    if made.rule is not None:
        why = (
            f"the program has {made.rule}, without which its results are not finite; "
            "convert the model with that too"
        )
    text = (
        f"output {at} of the exported {class_name(model)} {how} that of the "
        f"converted model: {why}"
    )
    if engine.options.strict:
        raise ExportError(text)
    logger.warning("autoamp: %s", text)


def _why(ran: Sequence[Graph], gm: fx.GraphModule, backend: object) -> str:
    """What a call of the model runs that the program does not, or the other way."""
    if not any(graph.rewritten for graph in ran):
        return "the model runs in fp32 at this call, as autoamp.report(model) says"
    theirs = _calls(graph.gm for graph in ran)
    ours = _calls([gm])
    apart = [
        f"only the {who} calls {_listed(more)}"
        for who, more in (("model", theirs - ours), ("program", ours - theirs))
        if more
    ]
    if apart:
        return "; ".join(apart)
    if backend != "eager":
        return "both compute with the same ops, and a compiler runs those of the model"
    return (
        "both compute with the same ops in the same precisions, and a kernel of "
        "torch's rounds otherwise for operands that lie elsewhere in memory"
    )


def _calls(graphs: Iterable[fx.GraphModule]) -> Counter[str]:
    """The calls of graphs and bodies, without views, each with the dtype it makes."""
    found: Counter[str] = Counter()
    for graph in graphs:
        for _, node, dtypes in made_by(graph.graph):
            target: Any = node.target
            is_op = isinstance(target, compat.OpOverload)
            shows = is_view(target) if is_op else target is operator.getitem
            name = base_name(target) if is_op else target.__name__
            if dtypes[0].is_floating_point and not shows:
                found[f"{name.rpartition('::')[2]} in {short_name(dtypes[0])}"] += 1
    return found


def _listed(calls: Counter[str]) -> str:
    shown = [
        f"{name} ({counted(count, 'time')})" if count > 1 else name
        for name, count in calls.most_common(_SHOWN)
    ]
    more = len(calls) - len(shown)
    return ", ".join(shown) + (f" and {counted(more, 'other')}" if more > 0 else "")


def how_far(some: Sequence[Any], others: Sequence[Any], at: int) -> str:
    """How the first differing value stands to the other, for "output 0 ... that of"."""
    if len(some) != len(others):
        return "is not one of the same number of outputs as"
    one, other = some[at], others[at]
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return "is another value than"
    if one.dtype != other.dtype or one.shape != other.shape:
        return "has another dtype or shape than"
    if not one.is_floating_point():
        count = int((one != other).sum())
        return f"differs in {count} of {one.numel()} places from"
    finite = one.isfinite() & other.isfinite()
    if bool((one.isfinite() & ~other.isfinite()).any()):
        return "is finite in places, unlike"
    if bool((other.isfinite() & ~one.isfinite()).any()):
        return "is not finite in places, unlike"
    apart = float((one.double() - other.double())[finite].abs().max())
    return f"differs by up to {apart:.2g} from"


def first_difference(some: Sequence[Any], others: Sequence[Any]) -> int | None:
    """The position of the first two values that differ; NaN equals NaN."""
    if len(some) != len(others):
        return min(len(some), len(others))
    for at, (one, other) in enumerate(zip(some, others, strict=True)):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            if one.dtype != other.dtype or one.shape != other.shape:
                return at
            if not bool(((one == other) | (one.isnan() & other.isnan())).all()):
                return at
        elif isinstance(one, Tensor) or isinstance(other, Tensor):
            return at
    return None
