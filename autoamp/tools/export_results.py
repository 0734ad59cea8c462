"""Compares results of one call: of fp32, a rewritten graph, a program, a model.

The weights that a program holds are compared with those of the model, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoamp.dtypes import short_name
from autoamp.errors import ExportError, VerificationError
from autoamp_said import logger_of

logger = logger_of(__name__)

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


def check_finite(
    label: str, given: Sequence[Any], exact: Sequence[Any], low: torch.dtype
) -> None:
    """Checks that results are finite where those of fp32 are.

    Raises:
        ExportError: one is not.
    """
    at = spoiled(given, exact)
    if at is not None:
        raise ExportError(
            f"{label}: output {at} is not finite in {short_name(low)} on the example, "
            "and is in fp32. autoamp.find_overflow(model, *args, "
            f"precision={short_name(low)!r}) names the op, and the keep= or deny= to "
            "export it with"
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
    at = less_true(given, results, exact)
    if at is not None:
        raise VerificationError(
            f"output {at} of the program is farther from fp32 than the rewritten "
            "graph's was: another spelling of its norms computes something else; this "
            "is a bug in autoamp, please report it"
        )


def less_true(
    given: Sequence[Any], results: Sequence[Any], exact: Sequence[Any]
) -> int | None:
    """The position of the first result that is less true than another's by a tenth.

    Args:
        given: the results in question.
        results: those that they stand beside.
        exact: those of fp32.
    """
    at = spoiled(given, exact)
    if at is not None:
        return at
    for at, (one, was, true) in enumerate(zip(given, results, exact, strict=True)):
        if not (isinstance(true, Tensor) and true.is_floating_point()):
            continue
        finite = one.isfinite() & was.isfinite() & true.isfinite()
        now, then, exactly = (t.double()[finite] for t in (one, was, true))
        ours, before = (float((t - exactly).norm()) for t in (now, then))
        if ours > _NO_LESS_TRUE * before + _ROUNDING * float(exactly.norm()):
            return at
    return None


# -- beside the converted model --------------------------------------------------------


def compare_with_converted(
    label: str,
    given: Sequence[Any],
    others: Sequence[Any],
    exact: Sequence[Any],
    *,
    to_the_bit: bool,
    strict: bool,
) -> None:
    """Says where a program gives other results than the converted model itself.

    Args:
        given: the results of the program.
        others: those of the converted model.
        exact: those of fp32.
        to_the_bit: whether each difference counts; else only a result that is less
            true than the model's does, for a program may round elsewhere.
        strict: whether a difference is an error.

    Raises:
        ExportError: the results differ, and `strict` is set.
    """
    is_alike = len(given) == len(others) == len(exact)
    if to_the_bit or not is_alike:
        at = first_difference(given, others)
    else:
        at = less_true(given, others, exact)
    if at is None:
        return
    text = (
        f"output {at} of the exported {label} {_how_far(given, others, at)} that of "
        "the converted model. autoamp.report(model) and the plan of the program have "
        "the precision of each op"
    )
    if strict:
        raise ExportError(text)
    logger.warning("autoamp: %s", text)


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
