"""How far a reader goes who follows one value through the package.

`pytest -s tests/repository/test_walk.py` prints the walks.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from tests.repository.walks import Package, Place, Walk

ROOT = Path(__file__).parents[2] / "autoamp"

# The start, the parameter, and two rows of (stops, files, returns): the most that a
# change may leave, which is what there is today, and what the walk is to come down to.
# Whoever shortens a walk lowers its first row.
WALKS = {
    "the model": (Place("autoamp.api", "convert"), "model", (30, 15, 15), (30, 12, 8)),
    "a captured graph": (
        Place("autoamp.passes.run", "prepare"),
        "gm",
        (20, 13, 7),
        (12, 8, 2),
    ),
    "the reading of a step": (
        Place("autoamp.training.step", "move"),
        "reading",
        (8, 6, 2),
        (14, 6, 3),
    ),
}


@cache
def package() -> Package:
    return Package(ROOT)


@pytest.mark.parametrize("of", WALKS)
def test_no_walk_becomes_longer(of: str) -> None:
    start, parameter, most, goal = WALKS[of]
    walk = Walk(package(), start, parameter)
    print(f"\n{of}, at most {most}, goal {goal}: {walk}")
    longer = [has > allowed for has, allowed in zip(walk.figures, most, strict=True)]
    assert not any(longer), f"{of}: {walk.figures} instead of {most}\n{walk}"


PLANTED = {
    "top.py": """
        from house.store import Shelf, keep
        from house import look

        def start(thing, way):
            seen = look.weigh(thing)
            if seen is None:
                raise ValueError(look.title(thing))
            boxed = [look.wrap(part) for part in thing.parts]
            keep(boxed, way)
            look.title(way)
            return Shelf(thing).lay(boxed)
    """,
    "look.py": """
        from house import store

        def weigh(thing) -> int:
            return store.heavy(thing)

        def wrap(part):
            return title(part)

        def title(part):
            return (part, 1)
    """,
    "store.py": """
        class Shelf:
            def __init__(self, thing):
                self.thing = thing

            def lay(self, boxed):
                return self.mark(boxed)

            def mark(self, boxed):
                return boxed

        def keep(boxes, way):
            return len(boxes)

        def heavy(thing: object) -> int:
            return 1
    """,
}


def test_a_walk_through_a_planted_package(tmp_path: Path) -> None:
    for name, text in PLANTED.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    walk = Walk(Package(tmp_path / "house"), Place("house.top", "start"), "thing")
    assert walk.stops == [
        ("top.py", ["start"]),
        # `heavy` takes any object; what `weigh` returns is a number; no error is read.
        ("look.py", ["weigh", "wrap", "title"]),
        ("store.py", ["keep", "Shelf.__init__", "Shelf.lay", "Shelf.mark"]),
    ]
    assert walk.figures == (3, 3, 0)


def test_a_return_is_a_stop_in_a_file_that_was_left(tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    there = "from house.here import end\ndef go(x):\n    end(x)\n    end(x)\n"
    here = "from house.there import go\ndef start(x):\n    go(x)\ndef end(x):\n    x\n"
    (house / "here.py").write_text(here, encoding="utf-8")
    (house / "there.py").write_text(there, encoding="utf-8")
    walk = Walk(Package(house), Place("house.here", "start"), "x")
    assert [path for path, _ in walk.stops] == ["here.py", "there.py", "here.py"]
    assert walk.figures == (3, 2, 1)
    assert str(walk).startswith("3 stops, 2 files, 1 returns\n  1 here.py: start")
