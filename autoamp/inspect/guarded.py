"""A part of a report that cannot be made costs itself, and never the report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from rich.console import RenderableType
from rich.text import Text

from autoamp.messages import log_once
from autoamp.printable import printable

logger = logging.getLogger(__name__)

Part = TypeVar("Part")

CAUGHT: tuple[type[Exception], ...] = (Exception,)
"""The errors that cost a part; the tests of the project let them through."""


def attempt(
    name: str, make: Callable[[], Part], instead: Callable[[str], Part]
) -> Part:
    """The part `make()`, or the part that stands `instead` of it, from a sentence.

    Args:
        name: the part's name in that sentence, which is logged as well.
    """
    try:
        return make()
    except CAUGHT as error:
        problem = printable(f"{type(error).__name__}: {error}")
        said = f"Of this report {name} could not be made ({problem}): please report it."
        log_once(logger, logging.WARNING, f"autoamp: {said}")
        return instead(said)


def lines(
    name: str, make: Callable[[], Iterable[RenderableType]]
) -> Iterator[RenderableType]:
    """The same for a part of a text."""

    def instead(said: str) -> list[RenderableType]:
        return [Text(said)]

    yield from attempt(name, lambda: list(make()), instead)
