"""The pages that people read: their code blocks, links and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PAGES = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block.  `where` is the page and the line of its first line of code."""

    page: str
    line: int
    language: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def name_of(page: Path) -> str:
    return page.relative_to(REPO).as_posix()


def blocks(page: Path, language: str) -> Iterator[Block]:
    """The blocks of one language, in their order."""
    text = page.read_text("utf-8")
    for found in _BLOCK.finditer(text):
        if found[1] == language:
            line = text.count("\n", 0, found.start(2)) + 1
            yield Block(name_of(page), line, language, found[2])


def links(page: Path) -> list[str]:
    """The targets of all links and images outside of code blocks."""
    return _LINK.findall(_BLOCK.sub("", page.read_text("utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = _BLOCK.sub("", page.read_text("utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", each))
        .strip()
        .lower()
        .replace(" ", "-")
        for each in headings
    }
