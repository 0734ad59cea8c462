"""Automatic mixed precision for PyTorch by rewriting graphs.

Public names are those in `__all__`; everything else may change.
"""

from autoamp.api import convert, is_converted, report, revert, rewrite
from autoamp.errors import (
    AutoampError,
    CaptureError,
    OptionError,
    PlacementError,
    RulesError,
    UnsupportedModelError,
    VerificationError,
)
from autoamp.inspect.report import Report
from autoamp.rules import Rules
from autoamp.runtime.convert import disabled

__version__ = "0.1.0"

__all__ = [
    "AutoampError",
    "CaptureError",
    "OptionError",
    "PlacementError",
    "Report",
    "Rules",
    "RulesError",
    "UnsupportedModelError",
    "VerificationError",
    "convert",
    "disabled",
    "is_converted",
    "report",
    "revert",
    "rewrite",
]
