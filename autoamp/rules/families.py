"""Families of ops, read from `rules/families.toml`: how the passes treat which ops."""

from __future__ import annotations

import tomllib
from functools import cache

from autoamp.op_names import parse_op_name
from autoamp.rules.files import builtin_path


@cache
def family(*names: str) -> frozenset[str]:
    """The ops of these families together, without overloads: `aten::add`.

    Raises:
        KeyError: `rules/families.toml` has no such family.
    """
    families = _families()
    return frozenset(op for name in names for op in families[name])


@cache
def _families() -> dict[str, frozenset[str]]:
    text = builtin_path("families").read_text(encoding="utf-8")
    return {
        name: frozenset(map(parse_op_name, table["ops"]))
        for name, table in tomllib.loads(text).items()
    }
