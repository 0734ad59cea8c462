"""Where a frame runs in the model that was converted: the paths of its modules.

A module has one path: the first that `named_modules()` of the converted model gives it.
Dynamo names a module by the way the code of a frame gets at it, and after a graph break
that is another way: `a` or `___stack0`, not `block.a`.  So the modules that a graph
calls are looked up themselves, and the modules around the frame are found on Python's
stack.  Modules whose code is alike share compiled frames, and the graphs of the first
stand for all; guards keep frames apart where options name some of the modules only.
"""

from __future__ import annotations

import functools
import itertools
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import fx, nn

from autoamp.compat.tensors import named_modules_of

Stack = Mapping[str, tuple[Any, Any]]
"""The `nn_module_stack` of a node: for each call the name and the class."""

_CALL = nn.Module._call_impl.__code__


class ModulePath(str):
    """The path of a module from the root of the conversion, as graphs are marked."""

    __slots__ = ()


class Paths:
    """The path of each module, of all models that run the same code."""

    def __init__(self, apart: Callable[[str], Hashable]) -> None:
        """Args: `apart` gives modules that share no graphs unequal keys, by path.

        The key is None for a module that options do not name.
        """
        self._known: dict[int, tuple[weakref.ref[nn.Module], str | None]] = {}
        self._apart = apart
        self._named: dict[str, Hashable] = {}
        self._keys: dict[str | None, Hashable] = {}

    def read(self, root: nn.Module) -> None:
        """Learns the paths of the modules in `root`."""
        self._named, self._keys = {}, {}
        for path, module in modules_in(root):
            self._know(module, path)
            key = self._apart(path)
            if key is not None:
                self._named[path] = key

    @property
    def tells_apart(self) -> bool:
        """Whether some modules that are alike have graphs of their own."""
        return bool(self._named)

    def key(self, path: str | None) -> Hashable:
        """A key equal for modules that may share graphs, with all that is in them."""
        if path not in self._keys:
            start = f"{path}." if path else ""
            inside = [
                (each.removeprefix(start), key)
                for each, key in self._named.items()
                if path is not None and f"{each}.".startswith(start)
            ]
            around = None if path is None else self._apart(path)
            self._keys[path] = around, *inside
        return self._keys[path]

    def _know(self, module: nn.Module, path: str | None) -> None:
        key, known = id(module), self._known
        held = weakref.ref(module, lambda _: known.pop(key, None))
        known[key] = held, path

    def of(self, module: nn.Module) -> str | None:
        """The path of a module; None for a module that is not in the model."""
        if isinstance(module, weakref.ProxyTypes):
            return None
        found = self._known.get(id(module))
        if found is None:  # a deep copy of the model runs, or the model has changed
            root = _around()[0]
            if root is not None:
                self.read(root)
            found = self._known.get(id(module))
        if found is None:
            self._know(module, None)
            return None
        return found[1]

    def by_id(self, key: int) -> str | None:
        """The path of the module with this `id`; None if that is unknown."""
        found = self._known.get(key)
        return None if found is None else found[1]

    def within(self, value: Any) -> Any:
        """The keys of the modules in a local variable; None where it holds none."""
        if isinstance(value, nn.Module):
            return self.key(self.of(value))
        if isinstance(value, types.MethodType):
            return self.within(value.__self__)
        if isinstance(value, list | tuple):
            found = tuple([self.within(each) for each in value])
        elif isinstance(value, dict):
            found = tuple([self.within(each) for each in value.values()])
        else:
            return None
        return found if any(each is not None for each in found) else None


def modules_in(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module in `root` once, by its first path, as graphs name it.

    Modules that a module holds in plain attributes, lists, dictionaries and objects
    come last: `named_modules()` does not list them, and graphs call them.
    """
    seen: set[int] = set()
    waiting = [("", root)]
    while waiting:
        new: list[tuple[str, nn.Module]] = []
        for prefix, start in waiting:
            for path, module in named_modules_of(start, prefix):
                if id(module) not in seen:
                    seen.add(id(module))
                    new.append((path, module))
        yield from new
        waiting = []
        for path, module in new:
            plain = {n: v for n, v in vars(module).items() if n not in _OF_EVERY_MODULE}
            waiting += _held(plain, path, seen)


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def _held(
    value: Any, path: str, seen: set[int], levels: int = 3
) -> Iterator[tuple[str, nn.Module]]:
    """The modules in a plain value, looked into once, and only so many levels deep."""
    if isinstance(value, weakref.ProxyTypes):  # passes for the module it stands for
        return
    if isinstance(value, nn.Module):
        yield path, value
        return
    if isinstance(value, list | tuple):
        parts: Any = enumerate(value)
    elif isinstance(value, dict):
        parts = value.items()
    elif type(value).__module__ in ("builtins", "torch"):
        return
    else:
        parts = getattr(value, "__dict__", {}).items()
    if levels and id(value) not in seen:
        seen.add(id(value))
        for name, each in list(itertools.islice(parts, _MOST)):
            inside = f"{path}.{name}" if path else str(name)
            yield from _held(each, inside, seen, levels - 1)


_MOST = 256
"""How many values of one list or object are looked at: a vocabulary has a million."""


class Place(NamedTuple):
    """Where the frame runs that Dynamo is capturing."""

    paths: Paths
    around: list[nn.Module]  # the modules whose calls the frame is in, outermost first
    variables: Mapping[str, Any]  # the local variables of the frame

    def path_of(self, key: str, source: str) -> str | None:
        """The path of a module that the frame calls; None if nothing is known of it.

        Args:
            key: Dynamo's key of the call, which most often begins with the `id`.
            source: the way in which the code of the frame gets at the module.
        """
        number = key.partition("@")[0]
        if number.isdecimal():
            return self.paths.by_id(int(number))
        return self.spelled(source)  # a recurrent layer, which stays one call

    def spelled(self, source: str) -> str | None:
        """The path of what a source of Dynamo's names; None where it has none."""
        match = _VARIABLE.match(source)
        value = self.variables.get(match[1]) if match else None
        if match is None or not isinstance(value, nn.Module):
            temporary = match is not None and match[1].startswith("___stack")
            return None if temporary else module_path(source)
        start, rest = self.paths.of(value), module_path(f"L['self']{match[2]}")
        if start is None:
            return None
        return f"{start}.{rest}" if start and rest else start or rest


_VARIABLE = re.compile(r"^L\['(\w+)'\](.*)$", re.DOTALL)


class _ThisThread(threading.local):
    place: Place | None = None


_THREAD = _ThisThread()


@contextmanager
def placed(frame: Any, paths: Paths) -> Iterator[None]:
    """A region in which Dynamo captures `frame`."""
    root, around = _around()
    if root is not None:
        paths.read(root)
    before, _THREAD.place = _THREAD.place, Place(paths, around, frame.f_locals)
    try:
        yield
    finally:
        _THREAD.place = before


def note_paths(gm: fx.GraphModule) -> None:
    """Marks the nodes of a graph that Dynamo has captured with the paths of modules."""
    place = _THREAD.place
    if place is None:
        return
    for node in gm.graph.nodes:
        source = getattr(node, "_dynamo_source", None)
        if node.op == "placeholder" and source is not None:
            node.meta["autoamp_path"] = place.spelled(source_name(source)) or ""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                stack = rooted(node.meta.get("nn_module_stack") or {})
                if stack:
                    node.meta["nn_module_stack"] = stack


def rooted(stack: Stack) -> Stack:
    """The calls of modules that a node is in, each named by the module's path."""
    place = _THREAD.place
    if place is None:
        return stack
    found: dict[str, tuple[Any, Any]] = {}
    for module in place.around:
        path = place.paths.of(module)
        if path:
            found[f"{_AROUND}{id(module)}"] = ModulePath(path), type(module)
    for key, (source, kind) in stack.items():
        name = None if isinstance(source, ModulePath) else str(source)
        path = source if name is None else place.path_of(key, name)
        if path is not None:
            found[key] = ModulePath(path), kind
    return found


_AROUND = "around "
"""Begins the keys of the modules whose calls are around a graph's frame."""


def paths_where_run(stack: Stack, here: str) -> tuple[str, ...]:
    """`paths_in(stack)`, in a run of the graph for a module that shares it.

    Args:
        here: the path of the module around the frame that runs, by `around_now`.
    """
    around = _around_in(stack)
    moves = here and around and around != here
    return tuple(_moved(p, around, here) if moves else p for p in paths_in(stack))


def path_where_run(path: str, graph: fx.Graph, here: str) -> str:
    """The path of a weight of `graph`, in a run as for `paths_where_run`."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in graph.nodes)
    around = next(filter(None, map(_around_in, stacks)), "")
    return _moved(path, around, here) if here and around else path


def _around_in(stack: Stack) -> str:
    """The path of the module around the frame that a graph was captured in."""
    found = [str(e[0]) for key, e in stack.items() if key.startswith(_AROUND)]
    return found[-1] if found else ""


def _moved(path: str, there: str, here: str) -> str:
    """A path in, or around, the module at `there`, as it is for the module `here`."""
    if f"{path}.".startswith(f"{there}."):
        return here + path[len(there) :]
    rest = there[len(path) :]
    around = there.startswith(f"{path}.") and here.endswith(rest)
    return here[: -len(rest)] if around else path


def around_now() -> str:
    """The path of the innermost module whose call this thread is in; "": the root's."""
    root, around = _around()
    if root is None or not around:
        return ""
    return next((path for path, m in modules_in(root) if m is around[-1]), "")


def paths_in(stack: Stack) -> tuple[str, ...]:
    """The paths in the `nn_module_stack` of a node, outermost first."""
    names = (entry[0] for entry in stack.values())
    paths = (n if isinstance(n, ModulePath) else module_path(str(n)) for n in names)
    return tuple(path for path in paths if path)


def source_name(source: Any) -> str:
    """The name of a source of Dynamo's: in torch 2.11 `name` is a method."""
    name = source.name
    return str(name() if callable(name) else name)


@functools.lru_cache(maxsize=4096)  # every node asks, modules are few
def module_path(source: str) -> str:
    """A Dynamo source as a user would write it: `L['mod'].fc.weight` is `fc.weight`.

    `_modules['0']`, `_parameters['w']`, `[0]` and `['a']` all become dotted names; an
    argument taken by `*args` is called `input.0`, one taken by `**kwargs` its own name.
    """
    path = re.sub(r"\._(modules|parameters|buffers)\b", "", source)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    path = re.sub(r"\.?\w+\.__self__\b", "", path)  # a method called in `forward`
    path = re.sub(r"^L?\.?(mod|self)\b\.?", "", path.removeprefix("L.")).strip(".")
    return re.sub(r"^args\.(?=\d)", "input.", path.removeprefix("kwargs."))


def guard_place(found: Any, paths: Paths, *, inner: bool) -> None:
    """Has a captured frame run only for modules that may share its graphs.

    Args:
        found: Dynamo's result for the frame that is being captured.
        inner: whether the frame is no part of the root's own code.
    """
    guards: Any = found.guarded_code.guard_manager.root
    place = _THREAD.place
    if place is None or not (inner and paths.tells_apart):
        return
    here = place.around[-1] if place.around else None
    told = False  # whether the local variables tell where the frame is
    for child in guards.get_child_managers():
        match = _VARIABLE.match(child.get_source())
        value = place.variables.get(match[1]) if match and not match[2] else None
        key = paths.within(value)
        if key is not None:
            _guard(child, functools.partial(_is_within, paths, key))
            told = told or value is here
    if not told:
        path = None if here is None else paths.of(here)
        _guard(guards, functools.partial(_is_around, paths, paths.key(path)))


def _is_within(paths: Paths, key: Any, value: Any) -> bool:
    return bool(paths.within(value) == key)


def _is_around(paths: Paths, key: Hashable, _: Any) -> bool:
    # The innermost module whose call Python's stack shows, below the root's.
    frame: Any = sys._getframe(1)
    while frame is not None and id(frame.f_code) not in _ROOTS:
        if frame.f_code is _CALL:
            return paths.key(paths.of(frame.f_locals["self"])) == key
        frame = frame.f_back
    return paths.key(None) == key


def _guard(manager: Any, check: Callable[[Any], bool]) -> None:
    said = ["autoamp: the options say the same of the modules"]
    try:
        manager.add_lambda_guard(check, said, None)
    except TypeError:  # torch 2.11
        manager.add_lambda_guard(check, said)
    except RuntimeError:  # a dictionary's manager takes no guard of its own
        return


def root_frame(function: Callable[..., Any]) -> Callable[..., Any]:
    """Marks the method in which calls of a root begin: `f(self, model, ...)`."""
    _ROOTS[id(function.__code__)] = function.__code__
    return function


_ROOTS: dict[int, types.CodeType] = {}  # code that Dynamo makes may have no hash


def _around() -> tuple[nn.Module | None, list[nn.Module]]:
    """The root whose call this thread is in, and the calls of modules inside it.

    A root that is a part of a converted model has its own path, and is called itself.
    """
    frame: Any = sys._getframe(1)
    around: list[nn.Module] = []
    while frame is not None and id(frame.f_code) not in _ROOTS:
        if frame.f_code is _CALL:
            around.append(frame.f_locals["self"])
        frame = frame.f_back
    if frame is None:
        return None, around[::-1]
    model = frame.f_locals["args"][0]
    root = frame.f_locals["self"].root_of(model)
    return root, [*([] if model is root else [model]), *around[::-1]]
