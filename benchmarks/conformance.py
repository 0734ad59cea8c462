"""Every test model in fp32, under autocast and converted.

`python -m benchmarks.conformance` prints the table; tests/whole/test_models.py holds
each row to it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import track
from torch import nn

from . import report
from .metrics import Comparison, Figures, compare_with_autocast
from .report import Data, said
from .setting import capability

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


def figures(taken: Figures) -> dict[str, Any]:
    """The numbers of one way to run a model, as JSON holds them."""
    counts = taken.counts
    return {
        "output_error": taken.output_error,
        "grad_error": taken.grad_error,
        "casts": counts.total_casts,
        "casts_forward": counts.forward_casts,
        "casts_backward": counts.cast_count(phase="backward"),
        "casts_of_weights": counts.cast_count(source="weight"),
        "weights_refreshed": counts.refreshed,
        "cast_bytes": counts.cast_bytes,
        "flops": counts.flops.total(),
        "low_share": counts.low_share,
        "saved_bytes": taken.saved.total,
        "saved_weight_copies": taken.saved.weight_copies,
    }


def as_json(record: Comparison) -> dict[str, Any]:
    """One case with all its figures and its shortfalls."""
    ways = ("fp32", "rounded", "autocast", "converted")
    return {
        "name": record.name,
        **{way: figures(getattr(record, way)) for way in ways},
        "autocast_failure": record.autocast_failure,
        "shortfalls": shortfalls(record),
    }


HEADER = (
    "model",
    "casts fwd+bwd (tensors refreshed)",
    "autocast's",
    "flops low",
    "autocast's",
    "output error",
    "autocast's",
    "gradient error",
    "autocast's",
    "rounding alone",
    "saved bytes (copies)",
    "autocast's",
    "fp32's",
)


def table(records: Sequence[Comparison]) -> str:
    """The Markdown table; a dagger marks autocast measured without oneDNN."""
    return table_of([as_json(record) for record in records])


def table_of(cases: Sequence[Data]) -> str:
    """The Markdown table of cases as JSON holds them."""
    rows = []
    for case in cases:
        ours, amp, exact = case["converted"], case["autocast"], case["fp32"]
        both = ours, amp
        errors = [
            f"{w[key]:.2e}" for key in ("output_error", "grad_error") for w in both
        ]
        saved = [f"{w['saved_bytes']} ({w['saved_weight_copies']})" for w in both]
        rows.append(
            (
                case["name"] + ("†" if case["autocast_failure"] else ""),
                *map(_casts, both),
                *(f"{way['low_share']:.1%}" for way in both),
                *errors,
                f"{case['rounded']['grad_error']:.2e}",
                *saved,
                str(exact["saved_bytes"]),
            )
        )
    return report.markdown(HEADER, rows)


def _casts(way: Data) -> str:
    passes = f"{way['casts_forward']}+{way['casts_backward']}"
    return f"{passes} ({way['weights_refreshed']})"


def text(data: Data) -> str:
    """The page of what was written: the table, and what fell short."""
    return (
        "\n".join([data["capability"], "", table_of(data["cases"]), *missed(data)])
        + "\n"
    )


def missed(data: Data) -> list[str]:
    """What fell short, and the cases that failed."""
    found = [short for case in data["cases"] for short in case["shortfalls"]]
    return found + [f"{n}: {why}" for n, why in data.get("failures", {}).items()]


def _convert(model: nn.Module) -> nn.Module:
    import autoamp

    converted: nn.Module = autoamp.convert(
        model, precision="bf16", do_no_harm=False, strict=True
    )
    return converted


def _runs(model: nn.Module) -> int:
    import autoamp

    return int(autoamp.report(model).runs)


def measure_all(names: Sequence[str]) -> tuple[list[Comparison], dict[str, str]]:
    """The comparisons of the named cases (all, if none is named), and the failures."""
    from tests.models import BY_NAME

    records, failures = [], {}
    for name in track(names or list(BY_NAME), "comparing with autocast"):
        try:
            records.append(compare_with_autocast(BY_NAME[name], _convert, runs=_runs))
        except Exception as error:  # noqa: BLE001 - one failing case must not hide the rest
            failures[name] = said(error)
    return records, failures


def main() -> int:
    """Prints the table and writes it beside its JSON; 1 if anything fell short."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conformance")
    parser.add_argument("names", nargs="*", help="cases of tests/models (all)")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    given = parser.parse_args()
    records, failures = measure_all(given.names)
    data = {
        "capability": capability("cpu"),
        "cases": [as_json(record) for record in records],
        "failures": failures,
    }
    if not given.names:
        report.write(given.out / "conformance", text(data), data)
    print(text(data))
    short = missed(data)
    print(json.dumps({"cases": len(records), "shortfalls": len(short)}))
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
