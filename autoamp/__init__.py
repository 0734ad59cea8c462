"""Automatic mixed precision for PyTorch by rewriting graphs.

The public names are listed in `__all__`; everything else may change.

`import autoamp` imports no other module, not even torch: a name brings its module along
when it is first asked for.  Dynamo takes as long to import as torch, and a script that
converts no model has no need of Dynamo.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
    from autoamp.reports.figures import LossScaleReport
    from autoamp.reports.report import Report
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

_HOMES = {
    "autoamp.api": (
        "bench compare convert explain export find_overflow is_converted load "
        "report revert rewrite"
    ),
    "autoamp.auto.switch": "disable enable",
    "autoamp.errors": (
        "AutoampError CaptureError CheckpointError ExportError LossScaleError "
        "OptionError PlacementError RulesError UnsupportedModelError "
        "VerificationError"
    ),
    "autoamp.passes.rules": "Rules",
    "autoamp.reports.figures": "LossScaleReport",
    "autoamp.reports.report": "Report",
    "autoamp.runtime.program": "disabled",
    "autoamp.tools.bench": "Bench",
    "autoamp.tools.compare": "Comparison",
    "autoamp.tools.find_overflow": "Overflow",
    "autoamp.training.options": "ConvertOptions ExpertOptions",
    "autoamp.training.scale": "DynamicLossScale LossScale NoLossScale StaticLossScale",
}
"""The module of each public name, as the imports for type checkers have it."""


def __dir__() -> list[str]:
    """The public names, without the modules that importing them brings along."""
    return __all__


def __getattr__(name: str) -> object:
    """Imports a public name; says of a name that was removed what to use instead."""
    for home, names in _HOMES.items():
        if name in names.split():
            value: object = getattr(importlib.import_module(home), name)
            globals()[name] = value
            return value
    removed = importlib.import_module("autoamp.removed").NAMES
    if name in removed:
        raise AttributeError(f"autoamp.{name} was removed: {removed[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
