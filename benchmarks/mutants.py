"""What mutation testing does to a source file: its mutants, and putting one in place.

The mutations are mutmut's (of numbers, strings, operators, arguments, assignments, ...)
in the bodies of functions and methods.  mutmut leaves decorated functions alone.
Other words in place of a text with a space in it are no faults: tests ask for what a
message has to say, and for no whole sentence.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libcst import CSTNode, FunctionDef, SimpleString, metadata, parse_module
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

NOTHING_IGNORED = IgnoredCode(set(), set(), set())


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: the file, below the top of the repository.
        function: the function or method it is in.
        line: where it starts, in the file as it is.
        change: the lines taken away and put in, as a diff has them.
        twin: 1, or which of several that read the same.
        make: gives the whole file, changed; for a whole package that takes minutes.
    """

    path: str
    function: str
    line: int
    change: str
    twin: int
    make: Callable[[], str]

    @property
    def key(self) -> str:
        """What tells it from every other mutant, and lasts when lines move."""
        twin = f" #{self.twin}" if self.twin > 1 else ""
        return f"{self.path}::{self.function}{twin}\n{self.change}"


def mutants(path: Path, root: Path) -> list[Mutant]:
    """Every mutant of the file `path`, in the order of its lines."""
    wrapper = metadata.MetadataWrapper(parse_module(path.read_text()))
    visitor = MutationVisitor(mutation_operators, NOTHING_IGNORED)
    module = wrapper.visit(visitor)
    positions = wrapper.resolve(metadata.PositionProvider)
    found = []
    twins: Counter[str] = Counter()
    for mutation in visitor.mutations:
        function = mutation.contained_by_top_level_function
        if not isinstance(function, FunctionDef):
            continue
        old, new = mutation.original_node, mutation.mutated_node
        if isinstance(new, SimpleString) and " " in new.value:
            continue
        change = _difference(
            *map(module.code_for_node, (function, _with(function, old, new)))
        )
        twins[function.name.value + change] += 1
        found.append(
            Mutant(
                str(path.relative_to(root)),
                function.name.value,
                positions[old].start.line,
                change,
                twins[function.name.value + change],
                lambda old=old, new=new: module.code_for_node(_with(module, old, new)),
            )
        )
    return sorted(found, key=lambda m: m.line)


def _with(whole: CSTNode, old: CSTNode, new: CSTNode) -> CSTNode:
    changed = deep_replace(whole, old, new)
    assert isinstance(changed, CSTNode)
    return changed


def _difference(before: str, after: str) -> str:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
    return "\n".join(f"{x[0]} {x[1:].strip()}" for x in [*lines][2:] if x[0] != "@")


def put_in_place(path: str, code: str | ast.Module, **names: Any) -> types.ModuleType:
    """Gives every function of the module imported from `path` its code in `code`.

    Functions stay the objects they are, so that all importers run the new code.

    Args:
        **names: further globals of the module, which `code` may use.
    """
    name = path.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    changed = types.ModuleType(name)
    changed.__file__ = module.__file__
    vars(module).update(names)
    vars(changed).update(names)
    # Tests ask for lines outside of the package, which frames tell by their files.
    exec(compile(code, str(module.__file__), "exec"), changed.__dict__)
    mine = dict(functions(vars(module), name))
    for key, new in functions(vars(changed), name):
        old = mine[key]
        old.__code__ = new.__code__
        old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
    return module


class _Watched(ast.NodeTransformer):
    """Puts a call of `_hit(line)` before each statement of each function."""

    def __init__(self) -> None:
        self.lines: list[int] = []

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            return node
        for block in ("body", "orelse", "finalbody"):
            statements = getattr(node, block, None)
            if isinstance(statements, list) and statements:
                watched = [x for s in statements for x in (self._hit(s), s)]
                setattr(node, block, watched)
        if isinstance(node, ast.FunctionDef):
            node.body.insert(0, self._hit(node))
        return node

    def _hit(self, statement: ast.stmt) -> ast.stmt:
        self.lines.append(statement.lineno)
        call = ast.parse(f"_hit({statement.lineno})").body[0]
        return ast.copy_location(call, statement)


def watch(path: Path, root: Path, hit: Callable[[int], object]) -> list[int]:
    """Has `hit` called with the line of each statement of `path` about to run.

    Gives the lines at which statements start.
    """
    watched = _Watched()
    tree = watched.visit(ast.parse(path.read_text()))
    assert isinstance(tree, ast.Module)
    put_in_place(str(path.relative_to(root)), ast.fix_missing_locations(tree), _hit=hit)
    return sorted(set(watched.lines))


def functions(
    namespace: Any, module: str, at: str = ""
) -> Iterator[tuple[str, types.FunctionType]]:
    """(qualified name, function) of what is written in `module`, methods included."""
    for name, value in namespace.items():
        plain = getattr(value, "__func__", getattr(value, "func", value))
        if getattr(plain, "__module__", None) != module:
            continue
        if isinstance(plain, types.FunctionType):
            yield at + name, plain
        elif isinstance(plain, type):
            yield from functions(vars(plain), module, f"{at}{name}.")
