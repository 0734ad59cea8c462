"""Why the predicted speed-up is what it is, in one paragraph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autoamp.inspect.costs import seconds_text
from autoamp.inspect.sections.bounds import Bounds, OpTime
from autoamp.inspect.sections.dimensions import MULTIPLE, Misfit
from autoamp.inspect.sections.headline import Headline
from autoamp.inspect.text import op_title

LARGER = 8
"""Where a larger batch would help, the speed-up is given at so many times the batch."""


def because_of(
    bounds: Bounds | None, found: Headline, misfits: Sequence[Misfit]
) -> str:
    """Why the predicted speed-up is what it is, and what would raise it most.

    Args:
        bounds: the parts of the predicted time; None where none is predicted.
        found: the figures of the same report.
        misfits: the sizes that are no multiple for tensor cores.

    Returns:
        Up to four sentences; one sentence where no gain is predicted.
    """
    if not found.float_ops:
        return "No time is predicted, because no float op was captured."
    if not found.pays:
        return (
            "No time is predicted, because low precision is no faster than fp32 on "
            "this device."
        )
    if bounds is None or found.share_of_time_low is None:
        return "No time is predicted, because the placement was chosen for memory."
    if not found.low_ops:
        return (
            "The prediction is that of fp32, because every op stays in fp32: "
            "report.stayed has the reasons."
        )
    total = bounds.seconds(placed=False)
    low = (
        f"Ops that run in low precision take {found.share_of_time_low:.0%} of the "
        f"predicted fp32 time of {seconds_text(total)}."
    )
    said = [low, _parts(bounds)]
    if bounds.largest is not None:
        said.append(_largest(bounds.largest, bounds))
    return " ".join([*said, _change(bounds, misfits)])


def _parts(bounds: Bounds) -> str:
    """The parts of the fp32 time, the largest first, and of the time as placed."""
    total, left = (bounds.seconds(placed=each) for each in (False, True))
    before, after = (bounds.shares(placed=each) for each in (False, True))
    words = {
        "arithmetic": "the arithmetic of products",
        "memory": "memory",
        "launches": "starts of kernels",
    }
    names = sorted(words, key=lambda name: before[name], reverse=True)
    waits = [
        f"{words[n]} {seconds_text(before[n] * total)} ({before[n]:.0%})" for n in names
    ]
    now = [seconds_text(after[n] * left) for n in names]
    casts = seconds_text(bounds.casts)
    return (
        f"In fp32 the time goes to {waits[0]}, {waits[1]} and {waits[2]}; as placed "
        f"these take {now[0]}, {now[1]} and {now[2]}, and casts {casts}."
    )


def _largest(op: OpTime, bounds: Bounds) -> str:
    share = op.high.nanoseconds * 1e-9 / bounds.seconds(placed=False)
    flops = sum(each.flops for each in bounds.ops)
    arithmetic = f" and {op.flops / flops:.0%} of the arithmetic" if op.flops else ""
    return (
        f"The op that takes most is {_named(op)}: {share:.0%} of the time{arithmetic}."
    )


def _named(op: OpTime) -> str:
    """The op with its kernel's size and its module."""
    name = op_title(op.op)
    if op.kernel:
        name = f"the convolution of {' x '.join(map(str, op.kernel))}"
    return f"{name} in module {op.module}" if op.module else name


def _change(bounds: Bounds, misfits: Sequence[Misfit]) -> str:
    """The change that would help most: it shortens the largest part of the time."""
    parts = _left(bounds)
    largest = max(parts, key=lambda name: parts[name])
    size = (
        f"{seconds_text(parts[largest])} of the "
        f"{seconds_text(bounds.seconds(placed=True))} that are left"
    )
    match largest:
        case "launches" | "weights":
            why = "starts of kernels" if largest == "launches" else "reading weights"
            now, then = (_speed_up(bounds, times) for times in (1, LARGER))
            return (
                f"A larger batch would help most, because {why} take {size}: at "
                f"{LARGER} times the batch a speed-up of {then:.2f} is predicted, "
                f"instead of {now:.2f}."
            )
        case "memory":
            return (
                'A compiler (backend="inductor"), which joins ops so that they move '
                f"less data, would help most, because memory takes {size}."
            )
        case "stayed":
            return (
                "Dropping the rule or the option that keeps ops in fp32 would help "
                f"most, because these ops take {size}: report.stayed has the reasons."
            )
        case "casts":
            return (
                f"Fewer casts would help most, because casts take {size}: "
                "report.islands shows the fp32 ops that they surround."
            )
    return _arithmetic(bounds, misfits, size)


def _arithmetic(bounds: Bounds, misfits: Sequence[Misfit], size: str) -> str:
    """Padding, where most of the arithmetic is in products with odd sizes."""
    worst, share = bounds.odd_product(misfits)
    if worst is not None and share > 0.5:
        where = f" of {worst.module}" if worst.module else ""
        return (
            f"Padding would help most, because arithmetic takes {size} and tensor "
            f"cores work fastest on multiples of {MULTIPLE}: pad the size "
            f"{worst.size:,}{where} to {worst.next:,}."
        )
    return (
        f"Only less arithmetic would help much: low precision at its full speed takes "
        f"{size}."
    )


def _left(bounds: Bounds) -> Mapping[str, float]:
    """The parts of the time as placed, in seconds; fp32 ops are one part."""
    left = dict.fromkeys(("launches", "arithmetic", "memory", "weights", "stayed"), 0.0)
    for op in bounds.ops:
        parts = op.placed
        left["launches"] += parts.launch * 1e-9
        rest = (parts.nanoseconds - parts.launch) * 1e-9
        if not op.low:
            left["stayed"] += rest
        elif parts.arithmetic > parts.memory:
            left["arithmetic"] += rest
        else:
            # A product at a small batch is bound by its weights, which no compiler
            # can read less often.
            left["weights" if op.by_weights > 0.5 else "memory"] += rest
    return {**left, "casts": bounds.casts}


def _speed_up(bounds: Bounds, times: float) -> float:
    return bounds.seconds(placed=False, times=times) / bounds.seconds(
        placed=True, times=times
    )
