"""Follows one parameter of a function through the calls of a package, by its source.

What is followed is the parameter, its parts, and what functions of the package make of
it.  The walk enters each function that is given any of it, as the first parameter that
can hold it, in the order in which Python would evaluate the calls; branches are walked
one after the other, and a function is walked through once.  A *stop* is a stay in one
file, over any number of calls; a *return* is a stop in a file that was left before: so
stops = files + returns.

The code is read, not run.  A method of an object of unknown class is followed where
only one file defines methods of its name and no class of Python or torch has such a
method.  Not followed are words about the value (strings, numbers, dtypes, errors that
are raised), properties, and functions that are handed on as values.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import fx, nn

_PLAIN = {
    "str",
    "bool",
    "int",
    "float",
    "None",
    "torch.dtype",
    "torch.device",
    "object",
}
"""What is said of a value in one of these types is not followed as a part of it."""

_AS_IT_IS = {
    "dict",
    "iter",
    "list",
    "next",
    "reversed",
    "set",
    "sorted",
    "tuple",
    "zip",
}
"""Builtin functions whose results hold their arguments; those of others are lost."""

_KINDS = dict, list, set, str, tuple, Path, torch.Tensor, nn.Module, fx.Graph, fx.Node
_BUILTIN = {name for kind in _KINDS for name in dir(kind)}


class Place(NamedTuple):
    """A function, method ("Class.method") or class of a module."""

    module: str
    name: str


class Package:
    """The functions of a package, found by their names."""

    def __init__(self, root: Path) -> None:
        self.paths: dict[str, str] = {}
        self.functions: dict[Place, ast.FunctionDef] = {}
        self.classes: dict[Place, list[str]] = {}  # with the names of the bases
        self.imports: dict[Place, Place] = {}
        self.methods: dict[str, list[Place]] = defaultdict(list)
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            module = ".".join(part for part in parts if part != "__init__")
            self.paths[module] = str(path.relative_to(root))
            self._read(module, ast.parse(path.read_text(encoding="utf-8")))

    def _read(self, module: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for a in node.names:
                    here = Place(module, a.asname or a.name)
                    self.imports[here] = Place(node.module, a.name)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self.functions[Place(module, node.name)] = node
            elif isinstance(node, ast.ClassDef):
                bases = [b.id for b in node.bases if isinstance(b, ast.Name)]
                self.classes[Place(module, node.name)] = bases
                for each in node.body:
                    if isinstance(each, ast.FunctionDef):
                        place = Place(module, f"{node.name}.{each.name}")
                        self.functions[place] = each
                        self.methods[each.name].append(place)

    def named(self, place: Place | None) -> Place | None:
        """The function or class that a name stands for, through imports."""
        while place in self.imports:
            place = self.imports[place]
        return place if place in self.functions or place in self.classes else None

    def method(self, owner: Place | None, name: str) -> list[Place]:
        """The methods that a call of `name` runs on an object of class `owner`."""
        while owner is not None:
            place = Place(owner.module, f"{owner.name}.{name}")
            if place in self.functions:
                return [place]
            bases = self.classes.get(owner, [])
            owner = self.named(Place(owner.module, bases[0])) if bases else None
        found = [] if name in _BUILTIN or name[:2] == "__" else self.methods[name]
        return found if len({place.module for place in found}) == 1 else []

    def called(self, of: ast.expr, by: Place) -> list[Place]:
        """The functions that a call of `of` in the function `by` may run."""
        if isinstance(of, ast.Name):
            place = self.named(Place(by.module, of.id))
        elif isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name):
            module = self.imports.get(Place(by.module, of.value.id))
            if module is not None and ".".join(module) in self.paths:
                place = self.named(Place(".".join(module), of.attr))
            else:
                owner = Place(by.module, by.name.partition(".")[0])
                return self.method(owner if of.value.id == "self" else None, of.attr)
        else:
            name = of.attr if isinstance(of, ast.Attribute) else "__call__"
            return self.method(None, name)
        if place in self.classes:
            return self.method(place, "__init__")
        return [] if place is None else [place]


class Walk:
    """A walk; `stops` holds each stay as a file and the functions entered there."""

    def __init__(self, package: Package, start: Place, parameter: str) -> None:
        self.package = package
        self.stops: list[tuple[str, list[str]]] = []
        self.returned: dict[Place, bool] = {}
        self.enter(start, parameter)

    @property
    def figures(self) -> tuple[int, int, int]:
        """The numbers of stops, files and returns."""
        files = len({path for path, _ in self.stops})
        return len(self.stops), files, len(self.stops) - files

    def __str__(self) -> str:
        stops, files, returns = self.figures
        lines = [f"{i:3} {p}: {', '.join(f)}" for i, (p, f) in enumerate(self.stops, 1)]
        return "\n".join([f"{stops} stops, {files} files, {returns} returns", *lines])

    def enter(self, place: Place, name: str) -> bool:
        """Walks through a function; whether it returns any of what is followed."""
        path, function = self.package.paths[place.module], self.package.functions[place]
        if not self.stops or self.stops[-1][0] != path:
            self.stops.append((path, []))
        self.stops[-1][1].append(place.name)
        if place not in self.returned:
            self.returned[place] = False
            _Body(self, place, {name}).follow(function.body)
        return self.returned[place] and not _is_plain(function.returns)


class _Body(NamedTuple):
    """A function that is walked through, and its names for what is followed."""

    walk: Walk
    place: Place
    held: set[str]

    def follow(self, nodes: Iterable[ast.AST | None]) -> bool:
        """Walks through all `nodes`; whether the value of one is followed."""
        return sum(self._follow(node) for node in nodes) > 0

    def _follow(self, node: ast.AST | None) -> bool:
        match node:
            case None | ast.FunctionDef() | ast.ClassDef() | ast.Lambda() | ast.Raise():
                return False
            case ast.Name():
                return node.id in self.held
            case ast.Call():
                return self._call(node)
            case ast.Return() | ast.Yield():
                found = self._follow(node.value)
                self.walk.returned[self.place] |= found
                return found
            case ast.Assign():
                return self._bind(node.targets, node.value)
            case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
                return self._bind([node.target], node.value)
            case ast.withitem(optional_vars=ast.expr() as target):
                return self._bind([target], node.context_expr)
            case ast.For():
                found = self._bind([node.target], node.iter)
                return self.follow([*node.body, *node.orelse]) or found
            case ast.comprehension():
                return self._bind([node.target], node.iter) | self.follow(node.ifs)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp():
                return self.follow([*node.generators, node.elt])
            case ast.DictComp():
                return self.follow([*node.generators, node.key, node.value])
            case _:
                found = self.follow(ast.iter_child_nodes(node))
                return found and not isinstance(node, ast.Compare | ast.JoinedStr)

    def _bind(self, targets: list[ast.expr], value: ast.expr | None) -> bool:
        """Follows `value`, and from then on the names that hold it."""
        if found := self._follow(value):
            names = (n for t in targets for n in ast.walk(t) if isinstance(n, ast.Name))
            self.held.update(n.id for n in names if isinstance(n.ctx, ast.Store))
        return found

    def _call(self, node: ast.Call) -> bool:
        """Enters the functions that a call hands any of what is followed to."""
        package, of = self.walk.package, node.func
        values: dict[int | str | None, ast.expr] = {}
        if isinstance(of, ast.Attribute):
            values["self"] = of.value
        values |= dict(enumerate(node.args))
        values |= {keyword.arg: keyword.value for keyword in node.keywords}
        given = [at for at, value in values.items() if self._follow(value)]
        if not given:
            return False
        functions = package.called(of, self.place)
        named = ((f, _parameter(package.functions[f], given)) for f in functions)
        found = [self.walk.enter(function, name) for function, name in named if name]
        if functions and not functions[0].name.endswith(".__init__"):
            return any(found)
        if isinstance(of, ast.Name):  # a class, of which a new object holds it
            made = package.named(Place(self.place.module, of.id))
            return made in package.classes or of.id in _AS_IT_IS
        return "self" in given


def _parameter(function: ast.FunctionDef, given: list[int | str | None]) -> str | None:
    """The first parameter that one of `given` arguments of a call fills."""
    args = function.args
    named = [*args.posonlyargs, *args.args]
    bound = named[1:] if named and named[0].arg in ("self", "cls") else named
    known = {a.arg: a for a in [*named, *args.kwonlyargs]}
    for each in given:
        if isinstance(each, int):
            found = bound[each] if each < len(bound) else args.vararg
        else:
            found = known.get(str(each), args.kwarg)
        if found is not None and not _is_plain(found.annotation):
            return found.arg
    return None


def _is_plain(annotation: ast.expr | None) -> bool:
    names = set() if annotation is None else set(ast.unparse(annotation).split(" | "))
    return bool(names) and names <= _PLAIN
