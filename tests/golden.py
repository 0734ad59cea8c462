"""Texts that are kept beside their tests, and written anew by one flag.

`REWRITE_GOLDEN=1 pytest tests/passes/test_each_pass.py` writes what is said now;
`git diff` shows what has changed.
"""

from __future__ import annotations

import os
from pathlib import Path


def check(said: str, path: Path) -> None:
    """Asserts that the file holds what is said; with the flag, writes it."""
    if os.environ.get("REWRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(said, encoding="utf-8")
    assert path.exists(), f"no {path.name}: REWRITE_GOLDEN=1 writes it"
    assert said == path.read_text(encoding="utf-8")
