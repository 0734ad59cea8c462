"""A call of a model, a backward and a step go down through the rooms, and not back up.

A room is a module or a folder at the top of `autoamp`.  A walk follows every call that
the source tells of, beginning where the user or torch calls; `python -m pytest -s`
prints the rooms in the order in which a walk enters them.  A return is a call from a
room into a room above it in the layers: the reader has to go back to a room that the
walk had left.  Only a function that was handed down can be called so.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repository.calls import Package
from tests.repository.test_layering import PACKAGE, layer_of, plant, unit_of

MOST_RETURNS = 2

WALKS: dict[str, tuple[str, ...]] = {
    "convert": ("api:convert",),
    # Torch runs the code between these functions: Dynamo, and the code that it makes.
    "the first call": (
        "model.forward:make_forward.forward",
        "model.entry:Entry.__call__",
        "capture.program:Backend.__call__",
        "capture.program:Backend.__call__.run",
        "capture.graph:scaled.call_scaled",
    ),
    "a later call": (
        "model.forward:make_forward.forward",
        "model.entry:Entry._run",
        "capture.program:Backend.__call__.run",
        "capture.graph:scaled.call_scaled",
        "capture.graph:unscaled.call",
    ),
    "a backward": (
        "training.ledger.backwards:_reached",
        "graph_functions.edge:Unchanged.backward",
        "graph_functions.casts:LowWeight.backward",
    ),
    "a step": (
        "training.first_step:_before_step",
        "training.attach:attach.step",
    ),
}
"""The functions where each walk begins, in the order in which they are called."""


class Call(NamedTuple):
    """One call: `caller` is empty where a walk begins."""

    caller: str
    called: str


@functools.cache
def package() -> Package:
    return Package(PACKAGE)


def walked(package: Package, starts: Iterable[str]) -> Iterator[Call]:
    """The calls of a walk, in source order; each function is entered once."""
    seen: set[str] = set()
    todo = [Call("", start) for start in reversed([*starts])]
    while todo:
        call = todo.pop()
        yield call
        if call.called not in seen:
            seen.add(call.called)
            inside = package.calls_of(call.called)
            todo += [Call(call.called, each) for each in reversed(inside)]


def module_of(function: str) -> str:
    return function.partition(":")[0]


def rooms_of(calls: Iterable[Call]) -> list[str]:
    """The rooms of a walk, in the order in which it enters them."""
    return [*dict.fromkeys(unit_of(module_of(call.called)) for call in calls)]


def returns_of(calls: Iterable[Call]) -> list[Call]:
    """The calls of a walk that lead up the layers, each once."""
    return [
        call
        for call in dict.fromkeys(calls)
        if call.caller and _layer(call.called) > _layer(call.caller)
    ]


def _layer(function: str) -> int:
    layer = layer_of(module_of(function))
    assert layer is not None, function
    return layer


@pytest.mark.thorough
@pytest.mark.parametrize("name", WALKS)
def test_a_walk_goes_down(name: str) -> None:
    starts = [f"autoamp.{start}" for start in WALKS[name]]
    assert not set(starts) - package().functions.keys(), "the walk begins elsewhere"
    calls = [*walked(package(), starts)]
    returns = returns_of(calls)
    entered = [
        file for file, _ in itertools.groupby(module_of(c.called) for c in calls)
    ]
    files = len({*entered})
    print(f"\n{name}: " + " → ".join(rooms_of(calls)))
    print(f"  {files} files, entered again {len(entered) - files} times")
    for each in returns:
        print(f"  returns: {each.caller} calls {each.called}")
    assert len(returns) <= MOST_RETURNS


def planted(tmp_path: Path, files: dict[str, str]) -> list[Call]:
    """The returns of the walk from `api:start` in a package with these files."""
    return returns_of(walked(Package(plant(tmp_path, files)), ["autoamp.api:start"]))


DOWN = """
from autoamp.rules.table import Table

def start():
    table = Table({})
    table.look()

def up():
    pass
"""

TABLE = """
class Table:
    def __init__(self, told):
        self.told = told

    def look(self):
        {}
"""


@pytest.mark.parametrize(
    ("given", "look", "goes_up"),
    [
        ("up", "pass", False),
        ("up", "self.told()", True),
        ("None", "self.told()", False),
        ("lambda: None", "self.told()", False),
        ("functools.partial(up, 1)", "self.told()", True),
        ("up", "from autoamp.rules import lower; lower.call(self.told)", False),
    ],
)
def test_a_climb_is_found(tmp_path, given: str, look: str, goes_up: bool) -> None:
    files = {"api.py": DOWN.format(given), "rules/table.py": TABLE.format(look)}
    returns = planted(tmp_path, files | {"rules/lower.py": "def call(f):\n    f"})
    climb = Call("autoamp.rules.table:Table.look", "autoamp.api:up")
    assert returns == [climb] * goes_up


def test_a_function_put_on_an_object_is_a_climb(tmp_path) -> None:
    start = DOWN.format("None").replace("table.look()", "table.told = up; table.look()")
    files = {"api.py": start, "rules/table.py": TABLE.format("self.told()")}
    assert len(planted(tmp_path, files)) == 1


def test_a_function_handed_on_to_a_dataclass_is_a_climb(tmp_path) -> None:
    table = """
from dataclasses import dataclass

@dataclass
class Table:
    told: object

    def look(self):
        self.told()

def make(told) -> Table:
    return Table(told=told)
"""
    start = """
from autoamp.rules.table import make

def start():
    table = make(up)
    table.look()

def up():
    pass
"""
    assert len(planted(tmp_path, {"api.py": start, "rules/table.py": table})) == 1


def test_the_rooms_are_told_in_order(tmp_path) -> None:
    files = {
        "api.py": "from autoamp.model import one\ndef start():\n    one.go()",
        "model/one.py": "from autoamp.capture.two import two\ndef go():\n    two()",
        "capture/two.py": "def two():\n    pass",
    }
    calls = walked(Package(plant(tmp_path, files)), ["autoamp.api:start"])
    assert rooms_of(calls) == ["api", "model", "capture"]
