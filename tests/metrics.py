"""The measuring instruments, which benchmarks share (benchmarks/metrics.py)."""

from __future__ import annotations

from benchmarks.metrics import (
    Comparison,
    CountingMode,
    Counts,
    Figures,
    SavedBytes,
    compare_with_autocast,
    count_ops,
    measure,
    output_and_grad_errors,
    relative_error,
    saved_bytes,
    training_step,
    without_onednn,
)

__all__ = [
    "Comparison",
    "CountingMode",
    "Counts",
    "Figures",
    "SavedBytes",
    "compare_with_autocast",
    "count_ops",
    "measure",
    "output_and_grad_errors",
    "relative_error",
    "saved_bytes",
    "training_step",
    "without_onednn",
]
