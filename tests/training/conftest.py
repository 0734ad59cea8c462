"""Overflows are planted in most of these tests by losses too large for their scale."""

from __future__ import annotations

import math

import pytest


@pytest.fixture(autouse=True)
def _scales_may_be_too_large(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large gradient that enters a graph does not lower the scale of its backward.

    Otherwise hardly a finite loss would overflow.  A module with `REAL_SCALES` does
    without.
    """
    if not getattr(request.module, "REAL_SCALES", False):
        monkeypatch.setattr("autoamp.training.ledger.ENTRY", math.inf)
