"""Automatic mixed precision for PyTorch by rewriting graphs.

The public names are listed in `__all__`; everything else may change.
"""

from autoamp.api import (
    convert,
    export,
    is_converted,
    load,
    report,
    revert,
    rewrite,
)
from autoamp.ask.compare import Comparison
from autoamp.ask.find_overflow import Overflow
from autoamp.ask.monitor import Monitor
from autoamp.auto.switch import disable, enable
from autoamp.benchmark.bench import Bench
from autoamp.budget.budget import Budget
from autoamp.calibrate.tune import Tuning
from autoamp.capture.program import disabled
from autoamp.errors import (
    AutoampError,
    BudgetError,
    CaptureError,
    CheckpointError,
    ExportError,
    LockError,
    LossScaleError,
    OptionError,
    PlacementError,
    RulesError,
    UnsupportedModelError,
    VerificationError,
)
from autoamp.inspect.figures import LossScaleReport
from autoamp.inspect.frontier import Frontier
from autoamp.inspect.report import Report
from autoamp.planning.plan import plan
from autoamp.planning.result import MeshPlan, Plan
from autoamp.questions import bench, compare, explain, find_overflow, tune
from autoamp.rules import Rules
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
    "Budget",
    "BudgetError",
    "CaptureError",
    "CheckpointError",
    "Comparison",
    "DynamicLossScale",
    "ExportError",
    "Frontier",
    "LockError",
    "LossScale",
    "LossScaleError",
    "LossScaleReport",
    "MeshPlan",
    "Monitor",
    "NoLossScale",
    "OptionError",
    "Overflow",
    "PlacementError",
    "Plan",
    "Report",
    "Rules",
    "RulesError",
    "StaticLossScale",
    "Tuning",
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
    "plan",
    "report",
    "revert",
    "rewrite",
    "tune",
]
