"""Makes names and values from users and files safe to show.

Class names, paths and fields of a checkpoint may hold anything: a terminal's escape
sequences, marks that change the direction of writing, a megabyte of text.  This module
imports nothing.
"""

from __future__ import annotations


def printable(text: str, most: int = 10**6) -> str:
    """`text` in printable characters and line ends, cut in the middle beyond `most`."""
    shown = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)
    if len(shown) > most:
        shown = f"{shown[: most // 2 - 5]} ... {shown[-most // 2 :]}"
    return shown


def printable_line(text: str, most: int = 10**6) -> str:
    """`printable` on one line."""
    return printable(text.replace("\n", "\\n"), most)


def class_name(of: object) -> str:
    """The name of the class of an object, for messages and reports."""
    return printable_line(type(of).__name__, 100)
