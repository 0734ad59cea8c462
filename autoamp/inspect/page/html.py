"""Puts the page together: the template, style and script files, and the data.

Names and source lines of users reach the page as JSON only.  No text inside the data
can end the element that holds the data, because every `<` is written as an escape.  The
page's content security policy names the page's own scripts by their hashes, so that no
other script runs.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from autoamp.printable import printable_line

SCRIPTS = (
    "data.js",
    "text.js",
    "layout.js",
    "columns.js",
    "stretch.js",
    "draw.js",
    "view.js",
    "state.js",
    "panel.js",
    "module.js",
    "budget.js",
    "overview.js",
    "search.js",
    "keys.js",
    "start.js",
)
"""The script files, in order; together they are one script."""

_SLOT = re.compile(r"\{\{(\w+)\}\}")


def page_of(data: dict[str, Any]) -> str:
    """The page of the data."""
    folder = files(__package__)
    library = _text(folder / "vendor" / "dagre.min.js")
    parts = [_text(folder / "script" / name) for name in SCRIPTS]
    script = '(() => {\n"use strict";\n' + "\n".join(parts) + "})();\n"
    style = _text(folder / "template" / "style.css")
    slots = {
        "title": html.escape(f"autoamp: {printable_line(data['model'], 200)}"),
        "policy": _policy([library, script], [style]),
        "style": style,
        "library": library,
        "script": script,
        "data": as_data(data),
    }
    template = _text(folder / "template" / "page.html")
    # One walk over the template, so that no slot is looked for inside the data.
    return _SLOT.sub(lambda found: slots[found[1]], template)


def as_data(data: dict[str, Any]) -> str:
    """`data` as JSON that may stand inside a `script` element."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _policy(scripts: list[str], styles: list[str]) -> str:
    """The content security policy: nothing is loaded, and only these texts run."""
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"script-src {_hashes(scripts)}; style-src {_hashes(styles)}"
    )


def _hashes(texts: list[str]) -> str:
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(d).decode()}'" for d in digests)
