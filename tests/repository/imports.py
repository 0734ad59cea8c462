"""Reads what a package imports from its source, without importing it.

Used by test_layering.py; kept apart so that the reader can be tested on planted trees.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One import of the package's own module `target` by its module `source`."""

    source: str
    target: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


@dataclass(frozen=True)
class PrivateUse:
    """One mention of a private name of torch (`torch._dynamo`, `torch.fx._x`)."""

    source: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line} uses {self.name}"


def modules_of(root: Path, beside: Collection[Path] = ()) -> dict[str, Path]:
    """Module name to file, for every module of the package whose folder is `root`.

    A package's own `__init__.py` goes by the package's name; a module or package
    `beside` the package by its own.
    """
    found = {path.stem: path for path in beside if not path.is_dir()}
    for folder in (root, *(path for path in beside if path.is_dir())):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(root: Path, beside: Collection[Path] = ()) -> list[Import]:
    """Every import of the project's own modules, late and type-only ones too."""
    modules = modules_of(root, beside)
    found = []
    for source, path in modules.items():
        package = source if path.name == "__init__.py" else source.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            for name in _imported_names(node, package):
                target = _longest_module(name, modules)
                if target is not None:
                    found.append(Import(source, target, node.lineno))
    return found


def private_torch_uses(source: str, path: Path) -> list[PrivateUse]:
    """Every mention in one file of a torch name with a private part, once per line.

    Names below `torch.ops` are operators: an underscore there is ATen's spelling.
    """
    tree = ast.parse(path.read_text(), str(path))
    aliases: dict[str, str] = {}
    found: dict[tuple[str, int], PrivateUse] = {}

    def note(dotted: str, line: int) -> None:
        parts = dotted.split(".")
        for length, part in enumerate(parts, start=1):
            if part.startswith("_") and not part.startswith("__"):
                name = ".".join(parts[: length + 1])
                if parts[0] == "torch" and parts[1] != "ops":
                    found.setdefault((name, line), PrivateUse(source, name, line))
                return

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for item in node.names:
                note(item.name, node.lineno)
                aliases[item.asname or item.name.partition(".")[0]] = (
                    item.name if item.asname else item.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for item in node.names:
                note(f"{node.module}.{item.name}", node.lineno)
                aliases[item.asname or item.name] = f"{node.module}.{item.name}"
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted is not None:
            first, dot, rest = dotted.partition(".")
            # The import has been noted; only private parts after it are news.
            base = aliases.get(first, "")
            if base.partition(".")[0] == "torch" and not _is_private(base):
                note(base + dot + rest, node.lineno)
    return _outermost(list(found.values()))


def attribute_uses(source: str, path: Path, names: Collection[str]) -> list[PrivateUse]:
    """Every attribute in one file that has one of `names`, but for those of `self`."""
    return [
        PrivateUse(source, node.attr, node.lineno)
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Attribute)
        and node.attr in names
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _outermost(uses: list[PrivateUse]) -> list[PrivateUse]:
    """Without the prefixes that a walk meets inside a longer attribute chain."""
    return [
        use
        for use in uses
        if not any(
            other.line == use.line and other.name.startswith(use.name + ".")
            for other in uses
        )
    ]


def _imported_names(node: ast.AST, package: str) -> list[str]:
    """Absolute dotted names that one node imports, each as deep as it could mean."""
    if isinstance(node, ast.Import):
        return [item.name for item in node.names]
    if isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*above, base] if base else above)
        return [f"{base}.{item.name}" for item in node.names]
    if isinstance(node, ast.Call) and node.args:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        literal = node.args[0]
        if name in {"import_module", "__import__"} and isinstance(
            literal, ast.Constant
        ):
            return [str(literal.value)]
    return []


def _longest_module(name: str, modules: dict[str, Path]) -> str | None:
    """The module that a dotted name lies in: `pkg.mod.func` is `pkg.mod`."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def _is_private(dotted: str) -> bool:
    return any(map(is_private, dotted.split(".")))


def _dotted(node: ast.AST) -> str | None:
    """`a.b.c` as text for a chain of attributes on a plain name, else None."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or not parts:
        return None
    return ".".join([node.id, *reversed(parts)])
