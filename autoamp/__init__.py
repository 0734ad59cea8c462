"""Automatic mixed precision for PyTorch by rewriting graphs.

The public names are listed in `__all__`; everything else may change.
"""

from autoamp.api import (
    bench,
    compare,
    convert,
    explain,
    export,
    find_overflow,
    is_converted,
    load,
    report,
    revert,
    rewrite,
)
from autoamp.auto.switch import disable, enable
from autoamp.errors import (
    AutoampError,
    CaptureError,
    CheckpointError,
    ExportError,
    LossScaleError,
    OptionError,
    PlacementError,
    RulesError,
    UnsupportedModelError,
    VerificationError,
)
from autoamp.passes.rules import Rules
from autoamp.removed import NAMES as _REMOVED
from autoamp.report.figures import LossScaleReport
from autoamp.report.report import Report
from autoamp.runtime.program import disabled
from autoamp.tools.bench import Bench
from autoamp.tools.compare import Comparison
from autoamp.tools.find_overflow import Overflow
from autoamp.training.options import ConvertOptions, ExpertOptions
from autoamp.training.scale import (
    DynamicLossScale,
    LossScale,
    NoLossScale,
    StaticLossScale,
)

__version__ = "0.1.0"

__all__ = [
    "AutoampError",
    "Bench",
    "CaptureError",
    "CheckpointError",
    "Comparison",
    "ConvertOptions",
    "DynamicLossScale",
    "ExpertOptions",
    "ExportError",
    "LossScale",
    "LossScaleError",
    "LossScaleReport",
    "NoLossScale",
    "OptionError",
    "Overflow",
    "PlacementError",
    "Report",
    "Rules",
    "RulesError",
    "StaticLossScale",
    "UnsupportedModelError",
    "VerificationError",
    "bench",
    "compare",
    "convert",
    "disable",
    "disabled",
    "enable",
    "explain",
    "export",
    "find_overflow",
    "is_converted",
    "load",
    "report",
    "revert",
    "rewrite",
]


def __dir__() -> list[str]:
    """The public names, without the modules that importing them brings along."""
    return __all__


def __getattr__(name: str) -> object:
    """Says of a name that was removed what to use instead of it."""
    if name in _REMOVED:
        raise AttributeError(f"autoamp.{name} was removed: {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
