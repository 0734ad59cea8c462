"""What was logged while a test ran."""

from __future__ import annotations

import logging

import pytest


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What autoamp warned of; torch logs too."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("autoamp") and record.levelno >= logging.WARNING
    ]
