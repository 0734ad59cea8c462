"""Tests of which the quick tests run a sample, and the slow tests the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given, settings

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, DEEP_STEPS = 9, 14
"""How many steps a random program has at most, in the quick tests and in the slow."""


def some_slow(values: Iterable[Any], is_slow: Callable[[Any], bool]) -> list[Any]:
    """`values` as parameters; those for which `is_slow` holds run with the slow tests.

    A tuple is the values of several parameters.

    Example:
        >>> @pytest.mark.parametrize("name", some_slow(BY_NAME, LARGE.__contains__))
    """
    marks = {True: [pytest.mark.slow], False: []}
    return [
        pytest.param(
            *(value if type(value) is tuple else (value,)), marks=marks[is_slow(value)]
        )
        for value in values
    ]


def each_with_one(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs as parameters; the others take turns, and other pairs are slow.

    Each value has a pair that is not slow, and so has each of the others.

    Example:
        >>> @pytest.mark.parametrize(("name", "low"), each_with_one(CASES, LOW))
    """
    every = [*values]
    longer = max(len(every), len(others))
    turns = {(i % len(every), i % len(others)) for i in range(longer)}
    return [
        pytest.param(value, other, marks=[] if (i, j) in turns else [pytest.mark.slow])
        for i, value in enumerate(every)
        for j, other in enumerate(others)
    ]


def one_in(
    count: int,
    values: Iterable[Any],
    always: Callable[[Any], bool] = lambda _: False,
    first: int = 0,
) -> list[Any]:
    """`values` as parameters; one of each `count` neighbours runs, the rest is slow.

    In a table that keeps related values together, each of its families is sampled.

    Args:
        always: says which values run besides, such as those of a fault that was found.
        first: how many values stand before the first that runs.

    Example:
        >>> @pytest.mark.parametrize("name", one_in(3, LAYERS, {"GRU"}.__contains__))
    """
    every = [*values]
    chosen = every[first::count]
    return some_slow(every, lambda value: value not in chosen and not always(value))


def each_pair(*values: Iterable[Any]) -> list[Any]:
    """All combinations as parameters; those that are not slow have each pair of values.

    The next one that runs is the first of those with the most pairs that none had yet.

    Example:
        >>> @pytest.mark.parametrize(("how", "low", "name"), each_pair(WAYS, LOW, NETS))
    """
    every = [*product(*values)]
    pairs = [{*combinations(enumerate(each), 2)} for each in every]
    left, chosen = set().union(*pairs), set()
    while left:
        best = max(range(len(every)), key=lambda i: len(pairs[i] & left))
        chosen.add(best)
        left -= pairs[best]
    return [
        pytest.param(*each, marks=[] if i in chosen else [pytest.mark.slow])
        for i, each in enumerate(every)
    ]


def explored(
    quick: int, deep: int, examples: Callable[[int], tuple[Any, ...]]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Runs a test on `quick` random examples, and on `deep` larger ones if slow.

    Args:
        examples: the strategies of the test's arguments, for a number of steps.

    Example:
        >>> @explored(25, 400, lambda most: (programs(most=most), choices()))
        ... def test_nothing_changes(program, options): ...
    """

    def decorate(check: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.hypothesis
        @pytest.mark.parametrize(
            ("number", "most"),
            [(quick, STEPS), pytest.param(deep, DEEP_STEPS, marks=SLOW)],
            ids=["quick", "deep"],
        )
        def test(number: int, most: int) -> None:
            settings(max_examples=number)(given(*examples(most))(check))()

        test.__doc__ = check.__doc__
        return test

    return decorate
