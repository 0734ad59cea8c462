"""Small pieces of text: counts, places in source, names of modules."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

_SITE = re.compile(r"^.*?[/\\](?:site|dist)-packages[/\\]")


def counted(count: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `1,024 ops`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shorten(source: str) -> str:
    """`source` with its path relative to `site-packages` or the working directory."""
    shorter = _SITE.sub("", source)
    return shorter.removeprefix(os.getcwd() + os.sep)


def op_title(op: str) -> str:
    """The short name of an op: `add` for `aten::add.Tensor`."""
    return op.removeprefix("aten::").partition(".")[0]


def one_name(paths: Sequence[str]) -> str:
    """One pattern for several module paths: `h.*.attn` for `h.0.attn`, `h.1.attn`."""
    distinct = list(dict.fromkeys(paths))
    if len(distinct) == 1:
        return distinct[0]
    patterns = {re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", p) for p in distinct}
    if len(patterns) == 1:
        return patterns.pop()
    return f"{distinct[0]} and {len(distinct) - 1} more"
