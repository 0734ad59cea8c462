"""Tests of the recorder: each step is noted, however short it is."""

from __future__ import annotations

import pytest

from autoamp.flight import recorder


@pytest.fixture(autouse=True)
def _each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(recorder.EVERY, "1")
