"""Solves a solved problem again, with some variables held on a side.

The total is submodular.  So if variables are held on the source side, the smallest
least source side only grows; if they are held on the sink side, it only shrinks.  The
part that all answers share is contracted once, and each answer solves the small rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from autoamp.place.mincut import Network, solve
from autoamp.place.two_sides import Problem, Solution


class Again:
    """Many answers about one problem, each the same as a whole solution would be."""

    def __init__(self, problem: Problem) -> None:
        """Raises ContradictionError: the constraints of `problem` contradict."""
        self._problem = problem
        self._source = solve(problem).source

    def held(self, names: Iterable[str], *, at_source: bool) -> Solution | None:
        """The solution of least cost with variables held on one side; None if illegal.

        Of several, it is the one with the smallest source side.
        """
        network = (self._above if at_source else self._below).copy()
        weights = network.source if at_source else network.sink
        for name in names:
            if name in network.out:  # else the variable stands on that side already
                weights[name] += network.never
        return network.solution(self._problem.unary)

    @cached_property
    def _above(self) -> Network:
        """The network of the variables on the sink side, which may leave it."""
        network = Network(self._problem)
        for name in self._problem.unary:
            if name in self._source:
                network.contract(name, to_source=True)
        return network

    @cached_property
    def _below(self) -> Network:
        """The network of the variables on the source side."""
        network = Network(self._problem)
        for name in self._problem.unary:
            if name not in self._source:
                network.contract(name, to_source=False)
        return network
