"""What the tests of placement look at inside of autoamp: the only imports of it."""

from __future__ import annotations

from autoamp.analyse.facts import FP32, Facts, NodeFacts, Operand
from autoamp.analyse.verdict import Classified, Mode, Verdict
from autoamp.inspect.rows import costs_of
from autoamp.inspect.why import Again
from autoamp.place.assign import Assignment, assign
from autoamp.place.cost import Prices, price_graph
from autoamp.place.devices import Device, Rates, device_of, rate_at
from autoamp.place.flops import flops_of, formula_of
from autoamp.place.mincut import ContradictionError, Group, Problem, energy, solve
from autoamp.place.policies import POLICIES, forced, project, promote, tensorflow
from autoamp.place.problem import build_problem, least_cost

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
    "Verdict",
    "assign",
    "build_problem",
    "costs_of",
    "device_of",
    "energy",
    "flops_of",
    "forced",
    "formula_of",
    "least_cost",
    "price_graph",
    "project",
    "promote",
    "rate_at",
    "solve",
    "tensorflow",
]
