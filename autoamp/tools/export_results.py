"""Compares results of one call: of fp32, a rewritten graph, a program, a model.

The weights that a program holds are compared with those of the model, too.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import ExportError, VerificationError
from autoamp.messages import class_name, counted
from autoamp.passes.ops import base_name, is_view
from autoamp.runtime.engine import Engine
from autoamp.runtime.graph import Graph
from autoamp.tools.export_plan import made_by
from autoamp.tools.export_program import Call, Captured, Placed

logger = logging.getLogger(__name__)

_SHOWN = 4

_ALWAYS_FINITE = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)

_NO_LESS_TRUE = 1.1
"""How much larger an error may be: the bound of docs/accuracy.md."""

_ROUNDING = 1e-6
"""Of the size of a result: the rounding of fp32 itself, where nothing is low."""


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


def spoiled(given: Sequence[Any], exact: Sequence[Any]) -> int | None:
    """The position of the first result that is not finite, and that fp32 has otherwise.

    An infinity or NaN of fp32's own, as a mask has, is no fault.
    """
    for at, (one, true) in enumerate(zip(given, exact, strict=True)):
        if not isinstance(one, Tensor) or one.dtype in _ALWAYS_FINITE:
            continue
        if not bool((one.isfinite() | (one == true) | true.isnan()).all()):
            return at
    return None


def differs_in_whole_numbers(given: Sequence[Any], exact: Sequence[Any]) -> bool:
    """Whether integers or bools differ from those of fp32: a NaN may have chosen."""
    return any(
        isinstance(one, Tensor)
        and one.dtype in _ALWAYS_FINITE
        and not torch.equal(one, true)
        for one, true in zip(given, exact, strict=True)
    )


def check_same(given: Sequence[Any], results: Sequence[Any]) -> None:
    """Checks that a program gives the results that the rewritten graph gave.

    Raises:
        VerificationError: a result differs in a bit.
    """
    at = first_difference(given, results)
    if at is not None:
        raise VerificationError(
            f"output {at} of the exported program is not that of the rewritten graph; "
            "this is a bug in autoamp, please report it"
        )


def check_as_true(
    given: Sequence[Any], results: Sequence[Any], exact: Sequence[Any]
) -> None:
    """Checks that a program in another spelling is as near to fp32 as the graph was.

    Raises:
        VerificationError: a result is farther off, by more than a tenth.
    """
    blame = (
        "another spelling of its norms computes something else; this is a bug in "
        "autoamp, please report it"
    )
    at = spoiled(given, exact)
    if at is not None:
        raise VerificationError(f"output {at} of the program is not finite: {blame}")
    for at, (one, was, true) in enumerate(zip(given, results, exact, strict=True)):
        if not (isinstance(true, Tensor) and true.is_floating_point()):
            continue
        finite = one.isfinite() & was.isfinite() & true.isfinite()
        now, then, exactly = (t.double()[finite] for t in (one, was, true))
        size = float(exactly.norm())
        ours, before = (float((t - exactly).norm()) for t in (now, then))
        if ours > _NO_LESS_TRUE * before + _ROUNDING * size:
            raise VerificationError(
                f"output {at} of the program is {ours:.3g} from that in fp32, and the "
                f"rewritten graph's was {before:.3g}: {blame}"
            )


# -- beside the converted model --------------------------------------------------------


def compare_with_converted(
    graph: Captured, engine: Engine, call: Call, made: Placed
) -> None:
    """Says where a program gives other results than the converted model itself.

    Args:
        engine: runs the graphs of the converted model.
        made: what the program was made of.

    Raises:
        ExportError: the results differ, and the conversion is strict.
    """
    before = {each: each.runs for each in engine.record.graphs}
    others = call.results(graph.model)
    at = first_difference(made.results, others)
    if at is None:
        return
    ran = [each for each in engine.record.graphs if each.runs > before.get(each, 0)]
    why = _why(ran, made.prepared.gm, engine.options.backend)
    if made.rule is not None:
        why = (
            f"the program has {made.rule}, without which its results are not finite; "
            "convert the model with that too"
        )
    text = (
        f"output {at} of the exported {class_name(graph.model)} "
        f"{_how_far(made.results, others, at)} that of the converted model: {why}"
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


def _how_far(some: Sequence[Any], others: Sequence[Any], at: int) -> str:
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
    if bool((one.isfinite() & ~other.isfinite()).any()):
        return "is finite in places, unlike"
    if bool((other.isfinite() & ~one.isfinite()).any()):
        return "is not finite in places, unlike"
    apart = float((one.double() - other.double())[one.isfinite()].abs().max())
    return f"differs by up to {apart:.2g} from"


def check_weights(
    held: Iterable[tuple[str, Tensor]],
    read: Iterable[str],
    sources: Mapping[str, str],
    weights: Mapping[str, Tensor],
) -> None:
    """Checks each weight of a program against the weight of the model.

    Of the code that made the program only the names of weights are taken.

    Args:
        held: the weights of the program by their names.
        read: the names of those that some op reads.
        sources: for each weight of the program, the path of the model's weight.
        weights: the model's parameters and buffers by their paths.

    Raises:
        VerificationError: a weight is not the model's, rounded once to its dtype; or no
            op reads it; or the program holds it twice in one dtype.
    """
    seen: dict[tuple[str, torch.dtype], str] = {}
    used = set(read)
    for name, value in held:
        if name not in used:
            raise VerificationError(f"the program holds {name}, which no op reads")
        path = sources.get(name, "")
        if path not in weights:
            continue  # a constant of the program's own
        key = (path, value.dtype)
        if key in seen:
            raise VerificationError(
                f"the program holds {path} twice in {value.dtype}: as {seen[key]} and "
                f"as {name}"
            )
        seen[key] = name
        if not _is_rounded(value, weights[path]):
            raise VerificationError(
                f"{name} of the program is not {path} of the model in {value.dtype}"
            )


def _is_rounded(value: Tensor, source: Tensor) -> bool:
    """Whether `value` is `source` in the dtype of `value`; NaN equals NaN."""
    meant = source.detach().to(value.dtype)
    if meant.shape != value.shape:
        return False
    if meant.is_meta or value.is_meta or meant.layout is not torch.strided:
        return True  # no numbers to read
    return bool(((meant == value) | (meant.isnan() & value.isnan())).all())
