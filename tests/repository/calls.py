"""Reads from the source of a package which function calls which, without importing it.

Used by test_walk.py.  Annotations tell the classes of values: a call of a method of a
value whose class nothing tells is left out.  A function that is handed to another one,
or put on an object, is called where the source calls the parameter or the attribute.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.repository import imports

Def = ast.FunctionDef | ast.AsyncFunctionDef


class Type(NamedTuple):
    """A class of the package, or a container of its objects."""

    name: str
    many: bool = False


@dataclass
class Function:
    """One function: `module:Class.method`, or `module:outer.inner`."""

    name: str
    module: str
    node: Def
    owner: str = ""
    outer: Function | None = None
    inner: dict[str, str] = field(default_factory=dict)
    types: dict[str, Type] = field(default_factory=dict)
    read: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def params(self) -> list[str]:
        args = self.node.args
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
        return [a.arg for a in every][bool(self.owner and not self.outer) :]


class Package:
    """The functions of a package, and the calls that they make, in source order."""

    def __init__(self, root: Path) -> None:
        self.functions: dict[str, Function] = {}
        self._names: dict[str, dict[str, str]] = {}
        self._modules = imports.modules_of(root)
        self._bases: dict[str, list[str]] = {}
        self._values: dict[str, Type | None] = {}
        self._fields: dict[str, dict[str, Type | None]] = defaultdict(dict)
        self._handed: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._attributes: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._kept: dict[tuple[str, str], tuple[str, str]] = {}
        trees = {m: ast.parse(p.read_text()) for m, p in self._modules.items()}
        for module, tree in trees.items():
            self._define(module, tree)
        for module, tree in trees.items():
            for each in tree.body:
                if isinstance(each, ast.ClassDef):
                    self._note_class(module, each)
                elif isinstance(each, ast.Assign | ast.AnnAssign):
                    self._note_value(module, each)
        for _ in range(3):  # what a value is may follow from a function read later
            for function in self.functions.values():
                self._note_types(function)
        for function in self.functions.values():
            for node in ast.walk(function.node):
                self._note_handed(function, node)

    # -- names -----------------------------------------------------------------------

    def _define(self, module: str, tree: ast.Module) -> None:
        names = self._names[module] = {}
        is_folder = self._modules[module].name == "__init__.py"
        package = module if is_folder else module.rpartition(".")[0]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for item in node.names:
                    names[item.asname or item.name.partition(".")[0]] = item.name
            elif isinstance(node, ast.ImportFrom):
                base = f"{package}." if node.level else ""
                for item in node.names:
                    names[item.asname or item.name] = f"{base}{node.module}.{item.name}"
        for each in tree.body:
            if isinstance(each, Def):
                names[each.name] = self._add(module, each, each.name)
            elif isinstance(each, ast.Assign | ast.AnnAssign):
                target = (
                    each.targets[0] if isinstance(each, ast.Assign) else each.target
                )
                if isinstance(target, ast.Name):
                    names[target.id] = f"{module}:{target.id}"
            elif isinstance(each, ast.ClassDef):
                names[each.name] = owner = f"{module}:{each.name}"
                self._bases[owner] = []
                for part in each.body:
                    if isinstance(part, Def):
                        self._add(module, part, f"{each.name}.{part.name}", owner)

    def _add(
        self,
        module: str,
        node: Def,
        path: str,
        owner: str = "",
        outer: Function | None = None,
    ) -> str:
        name = f"{module}:{path}"
        this = Function(name, module, node, owner, outer)
        self.functions[name] = this
        for each in _inside(node):
            if isinstance(each, Def):
                path_in = f"{path}.{each.name}"
                this.inner[each.name] = self._add(module, each, path_in, owner, this)
        return name

    def _resolve(self, name: str) -> str:
        """`module:thing` for a dotted name, through names that a package passes on."""
        for _ in range(5):
            if ":" in name or name in self._modules:
                return name
            module, _, thing = name.rpartition(".")
            if module not in self._names or thing not in self._names[module]:
                return ""
            name = self._names[module][thing]
        return ""

    def _named(self, module: str, node: ast.AST | None) -> str:
        """What a name, or a dotted name, stands for at the top of a module."""
        if isinstance(node, ast.Name) and node.id in self._names[module]:
            return self._resolve(self._names[module][node.id])
        if isinstance(node, ast.Attribute):
            base = self._named(module, node.value)
            return self._resolve(f"{base}.{node.attr}") if base in self._modules else ""
        return ""

    def _annotated(self, module: str, node: ast.AST | None) -> Type | None:
        if isinstance(node, ast.BinOp):
            left = self._annotated(module, node.left)
            return left or self._annotated(module, node.right)
        if isinstance(node, ast.Subscript):
            inner = node.slice
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            found = self._annotated(module, parts[-1])
            return None if found is None else Type(found.name, many=True)
        name = self._named(module, node)
        return Type(name) if name in self._bases else None

    # -- classes and the types of values ---------------------------------------------

    def _note_class(self, module: str, node: ast.ClassDef) -> None:
        name = f"{module}:{node.name}"
        bases = (self._named(module, base) for base in node.bases)
        self._bases[name] = [base for base in bases if base in self._bases]
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                found = self._annotated(module, each.annotation)
                self._fields[name][each.target.id] = found

    def _note_value(self, module: str, node: ast.Assign | ast.AnnAssign) -> None:
        """Notes the class of a value that stands at the top of a module."""
        if isinstance(node, ast.AnnAssign):
            found, target = self._annotated(module, node.annotation), node.target
        else:
            made = node.value.func if isinstance(node.value, ast.Call) else None
            name, target = self._named(module, made), node.targets[0]
            found = Type(name) if name in self._bases else None
        if isinstance(target, ast.Name):
            self._values[f"{module}:{target.id}"] = found

    def _lineage(self, name: str) -> Iterator[str]:
        yield name
        for base in self._bases.get(name, ()):
            yield from self._lineage(base)

    def method(self, owner: str, name: str) -> Function | None:
        """The method that objects of a class have under a name."""
        for each in self._lineage(owner):
            module, _, short = each.partition(":")
            if f"{module}:{short}.{name}" in self.functions:
                return self.functions[f"{module}:{short}.{name}"]
        return None

    def _note_types(self, this: Function) -> None:
        args = this.node.args
        for arg in [*args.posonlyargs, *args.args, *args.kwonlyargs]:
            found = self._annotated(this.module, arg.annotation)
            if found is not None:
                this.types[arg.arg] = found
        if this.owner and this.outer is None and args.args:
            this.types[args.args[0].arg] = Type(this.owner)
        for node in ast.walk(this.node):
            if isinstance(node, ast.For | ast.comprehension):
                found = self.type_of(this, node.iter)
                if found is not None and isinstance(node.target, ast.Name):
                    this.types[node.target.id] = Type(found.name)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                self._assign(this, node.optional_vars, node.context_expr, None)
            elif isinstance(node, ast.NamedExpr):
                self._assign(this, node.target, node.value, None)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(this, target, node.value, None)
            elif isinstance(node, ast.AnnAssign):
                declared = self._annotated(this.module, node.annotation)
                self._assign(this, node.target, node.value, declared)

    def _assign(
        self,
        this: Function,
        target: ast.AST,
        value: ast.AST | None,
        declared: Type | None,
    ) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._assign(this, one, other, None)
            return
        found = declared or self.type_of(this, value)
        if isinstance(target, ast.Name) and found is not None:
            this.types[target.id] = found
        elif isinstance(target, ast.Name) and self._function(this, value):
            this.inner.setdefault(target.id, self._function(this, value))
        elif isinstance(target, ast.Name):  # `tell = self.given.tell`
            for read in self._read(this, value):
                this.read[target.id] = read
        if isinstance(target, ast.Attribute):
            owner = self.type_of(this, target.value)
            if owner is None:
                return
            if found is not None:
                self._fields[owner.name].setdefault(target.attr, found)
            if isinstance(value, ast.Name) and value.id in this.params:
                self._kept[owner.name, target.attr] = (this.name, value.id)
            function = self._function(this, value)
            if function:
                self._attributes[owner.name, target.attr].add(function)

    def type_of(self, this: Function, node: ast.AST | None) -> Type | None:
        """The class of the value of an expression, as far as the source tells."""
        if isinstance(node, ast.Name):
            at: Function | None = this
            while at is not None:
                if node.id in at.types:
                    return at.types[node.id]
                at = at.outer
            return self._values.get(self._named(this.module, node))
        if isinstance(node, ast.BoolOp | ast.IfExp):
            parts = node.values if isinstance(node, ast.BoolOp) else [node.body]
            return next(filter(None, (self.type_of(this, p) for p in parts)), None)
        elif isinstance(node, ast.Subscript):
            found = self.type_of(this, node.value)
            return Type(found.name) if found is not None and found.many else None
        elif isinstance(node, ast.Attribute):
            return self._type_of_attribute(this, node)
        elif isinstance(node, ast.Call):
            return self._type_of_call(this, node)
        elif isinstance(node, ast.NamedExpr):
            return self.type_of(this, node.value)
        return None

    def _type_of_attribute(self, this: Function, node: ast.Attribute) -> Type | None:
        owner = self.type_of(this, node.value)
        if owner is None or owner.many:
            return None
        for each in self._lineage(owner.name):
            if self._fields[each].get(node.attr) is not None:
                return self._fields[each][node.attr]
        method = self.method(owner.name, node.attr)
        if method is not None and _is_property(method):
            return self._annotated(method.module, method.node.returns)
        return None

    def _type_of_call(self, this: Function, node: ast.Call) -> Type | None:
        name = self._named(this.module, node.func)
        if name in self._bases:
            return Type(name)
        if isinstance(node.func, ast.Name) and node.args and not name:
            found = self.type_of(this, node.args[0])  # list(...), sorted(...)
            return found if found is not None and found.many else None
        if isinstance(node.func, ast.Attribute) and not name:
            found = self.type_of(this, node.func.value)
            if found is not None and found.many:
                return Type(found.name, node.func.attr in ("values", "items"))
        name = name or self._function(this, node.func)
        if name in self.functions:
            called = self.functions[name]
            return self._annotated(called.module, called.node.returns)
        return None

    # -- functions as values ---------------------------------------------------------

    def _function(self, this: Function, node: ast.AST | None) -> str:
        """The function that an expression names: a name, a method, or a `partial`."""
        if isinstance(node, ast.Call) and node.args:
            called = node.func
            short = called.attr if isinstance(called, ast.Attribute) else ""
            if short == "partial" or (
                isinstance(called, ast.Name) and called.id == "partial"
            ):
                return self._function(this, node.args[0])
        if isinstance(node, ast.IfExp):
            return self._function(this, node.body) or self._function(this, node.orelse)
        if isinstance(node, ast.Name):
            at: Function | None = this
            while at is not None:
                if node.id in at.inner:
                    return at.inner[node.id]
                at = at.outer
        name = self._named(this.module, node)
        if name in self.functions:
            return name
        if isinstance(node, ast.Attribute):
            owner = self.type_of(this, node.value)
            if isinstance(node.value, ast.Call) and not owner:
                owner = self._super(this, node.value)
            if owner is not None and not owner.many:
                method = self.method(owner.name, node.attr)
                if method is not None and not _is_property(method):
                    return method.name
        return ""

    def _super(self, this: Function, node: ast.Call) -> Type | None:
        if isinstance(node.func, ast.Name) and node.func.id == "super":
            bases = self._bases.get(this.owner, [])
            return Type(bases[0]) if bases else None
        return None

    def _note_handed(self, this: Function, node: ast.AST) -> None:
        """Notes the functions that a call hands on, by the parameters they become."""
        if not isinstance(node, ast.Call):
            return
        given: list[tuple[int | str, ast.AST]] = [*enumerate(node.args)]
        given += [(k.arg, k.value) for k in node.keywords if k.arg is not None]
        called = self._named(this.module, node.func) or self._function(this, node.func)
        names = self._parameters(called)
        for at, value in given:
            function = self._function(this, value)
            name = names[at] if isinstance(at, int) and at < len(names) else at
            if not isinstance(name, str):
                continue
            fields = called in self._bases and self.method(called, "__init__") is None
            if function and fields:
                self._attributes[called, name].add(function)
            elif function:
                self._handed[self._made(called), name].add(function)
            elif fields and isinstance(value, ast.Name) and value.id in this.params:
                self._kept[called, name] = (this.name, value.id)

    def _made(self, called: str) -> str:
        init = self.method(called, "__init__") if called in self._bases else None
        return called if init is None else init.name

    def _parameters(self, called: str) -> list[str]:
        made = self._made(called)
        if made in self.functions:
            return self.functions[made].params
        return [*self._fields[called]] if called in self._bases else []

    # -- the calls -------------------------------------------------------------------

    def calls_of(self, name: str) -> list[str]:
        """The functions that one function calls, in source order, each once."""
        this = self.functions[name]
        found: dict[str, None] = {}
        for node in _inside(this.node):
            found |= dict.fromkeys(self._called(this, node))
        return [*found]

    def _called(self, this: Function, node: ast.AST) -> list[str]:
        if isinstance(node, ast.Attribute):
            owner = self.type_of(this, node.value)
            read = None if owner is None else self.method(owner.name, node.attr)
            if read is not None and _is_property(read):
                return [read.name]  # a property is a call
        if not isinstance(node, ast.Call):
            return []
        name = self._named(this.module, node.func)
        if name in self._bases:
            init = self.method(name, "__init__") or self.method(name, "__post_init__")
            return [] if init is None else [init.name]
        function = self._function(this, node.func)
        if function:
            return [function]
        if isinstance(node.func, ast.Name):
            at: Function | None = this
            while at is not None and node.func.id not in at.params:
                at = at.outer
            if at is not None:
                return sorted(self._handed[at.name, node.func.id])
            if node.func.id in this.read:
                return sorted(self._put_on(*this.read[node.func.id]))
        called = self.type_of(this, node.func)
        if called is not None and not called.many:  # an object that is called
            method = self.method(called.name, "__call__")
            return [] if method is None else [method.name]
        read = self._read(this, node.func)
        return sorted({each for one in read for each in self._put_on(*one)})

    def _read(self, this: Function, node: ast.AST | None) -> Iterator[tuple[str, str]]:
        """The class and the attribute that an expression may read."""
        if isinstance(node, ast.IfExp):
            yield from self._read(this, node.body)
            yield from self._read(this, node.orelse)
        elif isinstance(node, ast.Attribute):
            owner = self.type_of(this, node.value)
            if owner is not None and not owner.many:
                yield owner.name, node.attr

    def _put_on(self, owner: str, attribute: str) -> set[str]:
        """The functions that objects of a class hold, or give, under an attribute."""
        found: set[str] = set()
        method = self.method(owner, attribute)
        if method is not None and _is_property(method):
            for node in ast.walk(method.node):
                value = node.value if isinstance(node, ast.Return) else None
                for one in self._read(method, value):
                    found |= self._put_on(*one)
        for each in self._lineage(owner):
            found |= self._attributes[each, attribute]
            if (each, attribute) in self._kept:
                found |= self._handed[self._kept[each, attribute]]
        return found


def _is_property(function: Function) -> bool:
    """Whether a method is called by reading an attribute."""
    names = map(ast.unparse, function.node.decorator_list)
    return any(name.endswith("property") for name in names)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function in source order, but for the functions defined in it."""
    body = node.body if isinstance(node, Def) else [*ast.iter_child_nodes(node)]
    for each in body:
        yield each
        if not isinstance(each, Def):
            yield from _inside(each)
