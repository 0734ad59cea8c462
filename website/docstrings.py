"""How docstrings are read: `Example:` begins code, as `Examples:` does."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Griffe knows `Examples:` alone, and would take the code below for prose."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames the section of one function, class or module."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.M)
