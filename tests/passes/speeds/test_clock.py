"""When one way to run a model is surely faster than another."""

from __future__ import annotations

import pytest

from autoamp.passes.speeds.clock import surely_less


@pytest.mark.parametrize(
    ("mine", "other", "surely"),
    [
        ([1] * 5, [2] * 5, True),
        ([1] * 4, [2] * 4, False),  # chance does this once in 16
        ([1, 1, 1, 1, 3], [2] * 5, False),
        ([1] * 9 + [3], [2] * 10, True),
        ([1] * 8 + [3] * 2, [2] * 10, False),
        ([1] * 9, [1] * 9, False),
    ],
)
def test_surely_is_a_sign_test(
    mine: list[float], other: list[float], surely: bool
) -> None:
    assert surely_less(mine, other) is surely
