"""What the tests of placement look at inside of autoamp: the only imports of it."""

from __future__ import annotations

from autoamp.passes.decide.assign import Assignment, assign
from autoamp.passes.decide.cost import Prices, price_graph
from autoamp.passes.decide.devices import (
    Device,
    Rates,
    available,
    device_of,
    named_device,
    rate_at,
)
from autoamp.passes.decide.flops import flops_of, formula_of
from autoamp.passes.decide.kept_values import kept_bytes
from autoamp.passes.decide.memory import weighed, within
from autoamp.passes.decide.mincut import (
    ContradictionError,
    Group,
    Problem,
    Share,
    energy,
    solve,
)
from autoamp.passes.decide.policies import (
    POLICIES,
    forced,
    project,
    promote,
    tensorflow,
)
from autoamp.passes.decide.problem import build_problem, least_cost
from autoamp.passes.decide.verdict import Classified, Mode, Verdict
from autoamp.passes.report_rows import costs_of
from autoamp.passes.see.facts import FP32, Facts, NodeFacts, Operand
from autoamp.reports.why import Again

__all__ = [
    "FP32",
    "POLICIES",
    "Again",
    "Assignment",
    "Classified",
    "ContradictionError",
    "Device",
    "Facts",
    "Group",
    "Mode",
    "NodeFacts",
    "Operand",
    "Prices",
    "Problem",
    "Rates",
    "Share",
    "Verdict",
    "assign",
    "available",
    "build_problem",
    "costs_of",
    "device_of",
    "energy",
    "flops_of",
    "forced",
    "formula_of",
    "kept_bytes",
    "least_cost",
    "named_device",
    "price_graph",
    "project",
    "promote",
    "rate_at",
    "solve",
    "tensorflow",
    "weighed",
    "within",
]
