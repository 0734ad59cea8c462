"""The families of ops: each op exists, each family is read, and none is misspelled."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import autoamp
from autoamp.passes.ops import exists
from autoamp.passes.rules import family
from autoamp.passes.rules.model import builtin_path

FAMILIES = tomllib.loads(builtin_path("families").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_a_meaning_and_ops_in_order(name: str) -> None:
    found = FAMILIES[name]
    assert found.keys() == {"meaning", "ops"}
    assert len(found["meaning"].split()) > 3
    assert found["ops"] == sorted(set(found["ops"]))


def test_the_ops_of_families_exist() -> None:
    """An older torch lacks a few; a newer one that drops one must be heard of."""
    missing = {op for name in FAMILIES for op in family(name) if not exists(op)}
    assert len(missing) <= 3, missing
    assert not exists("aten::no_such_op")


def asked(root: Path) -> set[str]:
    """The families that the code under `root` asks for by name."""
    return {
        argument.value
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "family"
        for argument in node.args
        if isinstance(argument, ast.Constant)
    }


def test_every_family_is_read_and_every_read_family_is_there(tmp_path: Path) -> None:
    assert asked(Path(autoamp.__file__).parent) == FAMILIES.keys()
    (tmp_path / "planted.py").write_text('family("misspelled", "noise")')
    assert asked(tmp_path) == {"misspelled", "noise"}
