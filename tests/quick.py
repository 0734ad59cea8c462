"""Tests of which the quick tests run a sample, and the slow tests the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings

SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, DEEP_STEPS = 9, 14
"""How many steps a random program has at most, in the quick tests and in the slow."""


def some_slow(values: Iterable[Any], is_slow: Callable[[Any], bool]) -> list[Any]:
    """`values` as parameters; those for which `is_slow` holds run with the slow tests.

    Example:
        >>> @pytest.mark.parametrize("name", some_slow(BY_NAME, LARGE.__contains__))
    """
    marks = {True: [pytest.mark.slow], False: []}
    return [pytest.param(value, marks=marks[is_slow(value)]) for value in values]


def each_with_one(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs as parameters; of each value, one pair runs with the quick tests.

    The quick pairs take the others in turn, so that these are all sampled too.

    Example:
        >>> @pytest.mark.parametrize(("name", "low"), each_with_one(CASES, LOW))
    """
    return [
        pytest.param(
            value, other, marks=[] if i % len(others) == j else [pytest.mark.slow]
        )
        for i, value in enumerate(values)
        for j, other in enumerate(others)
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
