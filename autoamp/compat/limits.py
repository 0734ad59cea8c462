"""When Dynamo is to capture no more: of a model, or of code that changes itself."""

from __future__ import annotations

import re
import types
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import nn

from autoamp.compat.frames import entries_of, methods_modules, module_of
from autoamp.messages import printable_line

_MOST_SMALL_GRAPHS = 64  # where a graph holds few nodes
_FEW_NODES = 16  # a graph of fewer has little for a rewrite to decide
_MOST_FRAMES = 64  # functions that Dynamo may trace where most give no graph
_FEW_IN_FRAMES = 2  # fewer nodes for each traced function are not worth a trace
_MOST_TIMES = 6  # the same work may be captured in training, in eval mode, ...
_FREE_NODES = 1000  # captured again without a limit, because they take seconds


_MOST_HOOKED = 3  # graphs that differ in hooks: with some, without, with others


class NoMoreGraphsError(Exception):
    """No graph fits a call, and no more are to be captured; no code of it has run."""


class Amount:
    """How much has been captured.

    Code that cannot be captured well breaks off at each hook, needs new graphs at each
    call, or is mostly Python; without a limit its first calls would take minutes.

    Attributes:
        graphs: how many graphs there are.
    """

    def __init__(self) -> None:
        self.graphs = self._frames = self._nodes = 0
        self._work: dict[Hashable, int] = {}

    def note(self, part: Hashable, nodes: int) -> None:
        """Notes a function that Dynamo has traced.

        Args:
            part: its code and the module that it is a method of.
            nodes: how many nodes its graph has; 0 where there is none.
        """
        self._frames += 1
        self.graphs += nodes > 0
        self._nodes += nodes
        self._work[part] = max(self._work.get(part, 0), nodes)

    @property
    def is_mostly_python(self) -> bool:
        """Whether most functions traced, of many, have no graph, and others a small."""
        few = self._nodes < _FEW_IN_FRAMES * self._frames
        return self._frames > _MOST_FRAMES and few and 2 * self.graphs < self._frames

    @property
    def too_much(self) -> str:
        """Why no more is to be captured; "" while more may be."""
        graphs, nodes, work = self.graphs, self._nodes, sum(self._work.values())
        frames = self._frames
        if graphs > _MOST_SMALL_GRAPHS and nodes < _FEW_NODES * graphs:
            return (
                f"Dynamo made {graphs} graphs of it, of {nodes // graphs} nodes on "
                "average: graphs break at hooks, .item() and print "
                "(TORCH_LOGS=graph_breaks tells where)"
            )
        if self.is_mostly_python:
            return (
                f"Dynamo traced {frames} functions of it and found {nodes} tensor ops: "
                "it is mostly Python.  Convert the modules in it that compute"
            )
        if nodes > _MOST_TIMES * work + _FREE_NODES:
            return (
                f"Dynamo captured {nodes} nodes, for a call that has {work}: each call "
                "needs graphs of its own (TORCH_LOGS=recompiles tells why)"
            )
        return ""


class _Captured(NamedTuple):
    """A frame for which Dynamo has made a graph in the call that is running."""

    code: types.CodeType
    held: dict[str, Any]  # the frame's locals when it began
    before: frozenset[int]  # the ids of the code's earlier entries
    places: frozenset[str]  # what had changed since those were made


class Changing:
    """Finds code whose calls change the values that it was captured anew for.

    `self.losses.append(loss)` in a method changes the length of a list that Dynamo's
    guards hold the method's graph to: every call would need a graph of its own.

    The proof is in Dynamo's guards: a graph was made because something had changed
    since the last one, and by the end of the same call the guards of the new graph fail
    on the same thing, although the call's arguments are the same.  Tensors do not count
    (Dynamo makes their sizes symbols), and neither do truth values, of which there are
    two.

    Attributes:
        whole_numbers: code in which whole numbers of modules are to become symbols,
            because the code counts something.
    """

    def __init__(self, backend: Any) -> None:
        """Args: `backend` is the backend whose graphs are looked at."""
        self.whole_numbers: set[types.CodeType] = set()
        self._backend = backend
        self._met: dict[types.CodeType, int] = {}
        self._places: frozenset[str] = frozenset()
        self._captured: list[_Captured] = []

    def changed(self, frame: Any) -> _Captured | None:
        """What to look at after the call, asked before `frame` is compiled."""
        entries = self._entries(frame.f_code)
        found = {_place(each, frame.f_code, frame.f_locals) for each in entries}
        places = frozenset(place for place, _ in found if place) | self._places
        if not places or not module_of(frame):
            return None
        before = frozenset(map(id, entries))
        return _Captured(frame.f_code, dict(frame.f_locals), before, places)

    def note(self, captured: _Captured) -> None:
        """Notes that Dynamo has made a graph for a frame."""
        self._captured.append(captured)

    @property
    def has_captured(self) -> bool:
        """Whether `found` has anything to look at."""
        return bool(self._captured)

    def found(self) -> list[tuple[types.CodeType, str]]:
        """Code that is to be left to Python, with its changes; asked after a call.

        A number that is counted up becomes a symbol first, and Dynamo needs to see two
        values before that.
        """
        captured, self._captured = self._captured, []
        found = []
        for code, held, before, places in captured:
            for entry in self._entries(code):
                if id(entry) in before:
                    continue
                place, is_number = _place(entry, code, held)
                if place not in places or not place:
                    continue
                self._met[code] = met = self._met.get(code, 0) + 1
                if is_number and met < _MOST_NUMBERS:
                    self.whole_numbers.add(code)
                    continue
                self._places |= {place}
                found.append((code, place))
        return found

    def _entries(self, code: types.CodeType) -> list[Any]:
        return [each for each in entries_of(code) if each.backend is self._backend]


_MOST_NUMBERS = 3
"""How many graphs of a code may fail on a number that their own call has changed."""

_ID = re.compile(r"^___check_\w+\((.*), \d+\)$")
_SIZE = re.compile(r"^len\((.*)\)$")
_NUMBER = re.compile(r"^-?\d+$")


def _place(entry: Any, code: types.CodeType, held: dict[str, Any]) -> tuple[str, bool]:
    """The place that the guards of an entry fail on; whether it is a whole number.

    The first is "" where they hold, and where they fail on a tensor or a truth value.
    """
    text = _failed_guard(entry, held)
    known = _ID.match(text)
    left, equals, right = text.partition(" == ")
    if known:
        left = known[1]
    elif text.startswith("not "):
        left = text.removeprefix("not ")
    elif not equals or right in ("True", "False"):
        return "", False
    size = _SIZE.match(left)
    is_number = size is None and _NUMBER.match(right) is not None
    left = size[1] if size else left
    for name in ("self", *code.co_varnames[:1]):
        left = left.replace(f"L[{name!r}]", "the module").replace(f"{name}.", ".")
    return left, is_number


def _failed_guard(entry: Any, held: dict[str, Any]) -> str:
    """The first guard of an entry that fails, as Python code; "" where all hold."""
    result = entry.guard_manager.check_verbose(held)
    if result.result or not result.verbose_code_parts:
        return ""
    return str(result.verbose_code_parts[0]).partition("  #")[0].strip()


def guards_against(frame: Any, backend: Any) -> list[str]:
    """For each graph that `backend` made of a frame's code, the guard that fails."""
    found = [each for each in entries_of(frame.f_code) if each.backend is backend]
    return [_failed_guard(each, frame.f_locals) for each in found]


def too_many_hooked(guards: Sequence[str]) -> bool:
    """Whether so many graphs differ in hooks alone that no more are to be captured."""
    return sum(_HOOKS.search(guard) is not None for guard in guards) >= _MOST_HOOKED


_HOOKS = re.compile(r"\b(_\w*hooks)\b")
_TENSOR = re.compile(r"^tensor '(.*)' (.*)$")
_MODULE = re.compile(r"\._modules\['([^']*)'\]")


def change_among(guards: Sequence[str], frame: Any) -> str:
    """Names the value, or the hooks, that most of the failed guards are about."""
    places = Counter(_said(guard, frame) for guard in guards if guard)
    return places.most_common(1)[0][0] if places else "something"


def _said(guard: str, frame: Any) -> str:
    """The value that a guard is about, in words."""
    held = _HOOKS.search(guard)
    if held is not None:
        return _said_of_hooks(held[1], _MODULE.findall(guard[: held.start()]), frame)
    text = guard.partition(". ")[0]  # a tensor's has a sentence on its values
    left = re.split(r" [=!]= ", text)[0]
    tensor = _TENSOR.match(left)
    found = _SIZE.match(left) or _ID.match(left) or tensor
    left = found[1] if found else left
    for name in ("self", *frame.f_code.co_varnames[:1]):
        left = left.replace(f"L[{name!r}]", "the module")
    said = re.sub(r"^L\['(\w+)'\]", r"\1", _MODULE.sub(r".\1", left))
    return printable_line(f"{said}: {tensor[2]}" if tensor else said)


def _said_of_hooks(kind: str, path: list[str], frame: Any) -> str:
    """The hooks of a module, by its path, or of all modules, with the newest hook."""
    where: Any = nn.modules.module
    of = f"{kind} of all modules"
    if not kind.startswith("_global"):
        of = f"{kind} of {'.'.join(path) or 'the model'}"
        try:
            (root,) = methods_modules(frame)
            where = root.get_submodule(".".join(path))
        except (AttributeError, ValueError):  # no module below this one
            return of
    hooks = [*getattr(where, kind, {}).values()]
    code = getattr(hooks[-1], "__code__", None) if hooks else None
    if code is None:
        return of
    return f"{of} ({code.co_name}, {code.co_filename}:{code.co_firstlineno})"
