"""Small pieces of text: counts, places in source, names of modules."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_SITE = re.compile(r"^.*?[/\\](?:site|dist)-packages[/\\]")
_PLACE = re.compile(r"^(?P<path>.+?)(?P<line>:\d+: )")
_FILE = re.compile(
    r"(?<![\w.])(?:[A-Za-z]:)?[/\\][^\s:'\"<>|*?]*[/\\][^\s:'\"<>|*?,)]+"
)
_FLEETING = re.compile(r" (?:at|to) 0x[0-9a-fA-F]+|(?<=<eval_with_key>)\.\d+")


def kernels_text(ops: Iterable[Any]) -> list[str]:
    """A line on the chains that run as kernels; no line where there are none.

    Args:
        ops: rows of ops, with `kernel` and `calls`.
    """
    fused = [row for row in ops if row.kernel]
    if not fused:
        return []
    names = Counter(row.kernel for row in fused)
    named = ", ".join(f"{name} ({count:,})" for name, count in names.most_common())
    calls = counted(sum(row.calls for row in fused), "op")
    return [f"{calls} of the model run as {counted(len(fused), 'kernel')}: {named}."]


CANNOT_PAY = "cannot pay here"
"""Part of the reason why a model stays in fp32 on a device without fast units."""

NO_FLOAT_OP = "it has no float op"


def all_high(float_ops: int) -> str:
    """Why a graph was not changed: all of its ops, which the report lists, are fp32."""
    return f"all of its {counted(float_ops, 'float op')} stay fp32"


def not_captured(skipped: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The skipped parts whose ops are not in `Report.ops`."""
    told = re.compile(rf"{NO_FLOAT_OP}|all of its [\d,]+ float ops? stay fp32")
    return [(what, why) for what, why in skipped if not told.fullmatch(why)]


def brief(reason: str, room: int) -> str:
    """The first clauses of `reason` that fit in `room` characters, else its words."""
    if len(reason) <= room:
        return reason
    ends = [m.start() for m in re.finditer(r"[;:,] ", reason) if m.start() <= room]
    if ends and ends[-1] >= room // 2:
        return reason[: ends[-1]]
    return reason[: room - 1].rpartition(" ")[0] + "…"


def counted(count: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `1,024 ops`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def shorten(source: str) -> str:
    """`source` with its path relative to `site-packages` or the working directory."""
    shorter = _SITE.sub("", source)
    return shorter.removeprefix(os.getcwd() + os.sep)


def portable(text: str) -> str:
    """`text` as it reads on every machine and in every process.

    A path to a file becomes relative to `site-packages`, or else to the folder that
    holds the outermost package of the file.  Memory addresses, and the numbers that FX
    gives to generated code, are left out.
    """
    return _FILE.sub(lambda found: _in_package(found[0]), _FLEETING.sub("", text))


def portable_place(source: str) -> str:
    """`file:line: code` with its path as in `portable`, and its code as it is."""
    place = _PLACE.match(source)
    if place is None:
        return portable(source)
    path = _FLEETING.sub("", _in_package(place["path"]))
    return f"{path}{place['line']}{source[place.end() :]}"


@cache
def _in_package(path: str) -> str:
    """`package/module.py` for the path of a file of a package, else the file's name."""
    shorter = _SITE.sub("", path)
    if shorter != path or path.startswith("<"):
        return shorter.replace("\\", "/")
    parts = Path(path).absolute().parts
    first = len(parts) - 1
    while first > 1 and Path(*parts[:first], "__init__.py").is_file():
        first -= 1
    return "/".join(parts[first:])


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
