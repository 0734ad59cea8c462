"""From the built pages to what is wrong with them: dead links, remote resources."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    ("audio", "src"),
    ("embed", "src"),
    ("iframe", "src"),
    ("img", "src"),
    ("link", "href"),
    ("object", "data"),
    ("script", "src"),
    ("source", "src"),
    ("video", "src"),
}
"""Attributes whose address a browser loads by itself."""


@dataclass
class Page(HTMLParser):
    """The addresses and the anchors of one page."""

    path: Path
    loaded: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        if "id" in values:
            self.anchors.add(values["id"])
        canonical = values.get("rel") in {"canonical", "next", "prev"}
        for name, value in values.items():
            if (tag, name) in LOADED and not canonical:
                self.loaded.append(value)
            elif (tag, name) == ("a", "href"):
                self.links.append(value)


def faults(site: Path) -> list[str]:
    """A line for each fault of the pages and style sheets under `site`."""
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))}
    found = [fault for page in pages.values() for fault in _faults(page, pages, site)]
    for sheet in sorted(site.rglob("*.css")):
        if "url(http" in sheet.read_text("utf-8").replace('url("', "url("):
            found.append(f"{sheet.relative_to(site)} loads from the network")
    return found


def _faults(page: Page, pages: dict[Path, Page], site: Path) -> Iterator[str]:
    name = page.path.relative_to(site)
    for address in page.loaded:
        if urlsplit(address).netloc:
            yield f"{name} loads {address}"
        elif not _target(page.path, address, site).exists():
            yield f"{name} loads {address}, which does not exist"
    for address in page.links:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = _target(page.path, address, site)
        if not target.exists():
            yield f"{name} links to {address}, which does not exist"
            continue
        anchor = unquote(parts.fragment)
        if anchor and target in pages and anchor not in pages[target].anchors:
            yield f"{name} links to {address}: the page has no such anchor"


def _target(page: Path, address: str, site: Path) -> Path:
    """The file that `address` means on `page`."""
    path = unquote(urlsplit(address).path)
    if not path:
        return page
    base = site if path.startswith("/") else page.parent
    target = (base / path.lstrip("/")).resolve()
    return target / "index.html" if target.is_dir() else target
