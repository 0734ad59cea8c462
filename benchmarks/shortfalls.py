"""Where a model measured beside autocast misses what is promised."""

from __future__ import annotations

from .metrics import Comparison

KNOWN: dict[tuple[str, str], str] = {
    ("straight_through", "casts"): (
        "a custom autograd.Function gets the dtypes it was captured with, so the low "
        "value in front of it is widened; autocast hands it the bf16 value"
    ),
    ("straight_through", "saved bytes"): (
        "what that Function and its neighbours save is fp32 for the same reason"
    ),
}
"""Shortfalls we know of and keep, with the reason: (case, what)."""


def unknown_shortfalls(record: Comparison) -> list[str]:
    """`shortfalls` without those of `KNOWN`."""
    known = [f"{case}: {what}" for case, what in KNOWN]
    return [s for s in shortfalls(record) if not s.startswith(tuple(known))]


def shortfalls(record: Comparison) -> list[str]:
    """Where the converted model misses what is promised; empty if nowhere.

    Errors are held to `Comparison.error_limit`; everything else
    must be no worse than autocast's.
    """
    found = cost_shortfalls(record)
    for kind in ("output", "grad"):
        error = getattr(record.converted, f"{kind}_error")
        limit = record.error_limit(kind)
        if error > limit:
            found.append(f"{record.name}: {kind} error {error:.3g} > {limit:.3g}")
    return found


def cost_shortfalls(record: Comparison, *, spare_bytes: int = 0) -> list[str]:
    """The shortfalls in anything but errors; `spare_bytes` more may be saved.

    What autocast ran is not compared where it cannot run the case as it is.
    """
    ours, amp = record.converted, record.autocast
    found: list[str] = []

    def expect(holds: bool, text: str) -> None:
        if not holds:
            found.append(f"{record.name}: {text}")

    expect(
        len(ours.runs_gained) > 0 and min(ours.runs_gained) >= 1,
        f"a forward ran no rewritten graph: runs gained {ours.runs_gained}",
    )
    expect(
        ours.output_dtypes == record.fp32.output_dtypes,
        f"output dtypes {ours.output_dtypes}, in fp32 {record.fp32.output_dtypes}",
    )
    if record.autocast_failure:
        return found
    # Not the low flops: what nobody reads is not run at all (a pooler without a head).
    expect(
        ours.counts.high_flops <= amp.counts.high_flops,
        f"fp32 flops {ours.counts.high_flops} > autocast's {amp.counts.high_flops}",
    )
    expect(
        ours.counts.total_casts <= amp.counts.total_casts,
        f"casts {ours.counts.total_casts} > autocast's {amp.counts.total_casts}",
    )
    expect(
        ours.saved.total <= amp.saved.total + spare_bytes,
        f"saved bytes {ours.saved.total} > autocast's {amp.saved.total}",
    )
    return found
