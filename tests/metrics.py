"""The measuring instruments, which benchmarks share."""

from __future__ import annotations

from autoamp.passes.check.saved_bytes import saved_bytes
from autoamp.tools.count import count_ops
from benchmarks.errors import output_and_grad_errors, relative_error, training_step
from benchmarks.metrics import Comparison, compare_with_autocast, without_onednn

__all__ = [
    "Comparison",
    "compare_with_autocast",
    "count_ops",
    "output_and_grad_errors",
    "relative_error",
    "saved_bytes",
    "training_step",
    "without_onednn",
]
