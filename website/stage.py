"""From the repository to the folder of Markdown files that the site is built of.

`docs/` is copied as it is, and the README is the first page.  The index of errors and
the reference of commands are generated.  What the pages link to
outside of `docs/` is copied too, and the links follow.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import click

from website.commands import reference
from website.errors import index

REPO = Path(__file__).resolve().parent.parent
MOVED = {
    "../benchmarks/results/": "results/",
    "benchmarks/results/": "results/",
    "../README.md": "index.md",
    "../rules/README.md": "rules.md",
    "../rules/": "rules/",
    "../CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "docs/": "",
}
"""The start of a link in the repository, and that of the same link on the site."""
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"]
COMMANDS = "command-line.md"
"""The page at whose end the generated reference stands."""
ERRORS = "errors.md"
"""The generated index of errors."""


def stage(folder: Path, commands: click.Group) -> None:
    """Fills `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(REPO / "docs", folder)
    _copy(REPO / "benchmarks" / "results", folder / "results", "*.md")
    _copy(REPO / "rules", folder / "rules", "*.toml")
    sources = {
        "index.md": "README.md",
        "rules.md": "rules/README.md",
        "changelog.md": "CHANGELOG.md",
        "contributing.md": "CONTRIBUTING.md",
    }
    for target, source in sources.items():
        shutil.copy(REPO / source, folder / target)
    (folder / ERRORS).write_text(index(REPO) + "\n", "utf-8")
    sources[ERRORS] = "autoamp/errors.py"
    with (folder / COMMANDS).open("a", encoding="utf-8") as end:
        end.write(f"\n## Every command and option\n\n{reference(commands)}\n")
    for page in folder.glob("*.md"):
        text = moved_links(page.read_text("utf-8"))
        source = sources.get(page.name, f"docs/{page.name}")
        page.write_text(f"{text}\n{last_line(source)}", "utf-8")
    for page in (folder / "results").glob("*.md"):
        page.write_text(titled(page.stem, page.read_text("utf-8")), "utf-8")


def last_line(source: str) -> str:
    """The version, and the file that a page is made of, or a link to edit that file."""
    address = PROJECT.get("urls", {}).get("Repository")
    edit = f"[Edit this page]({address}/edit/main/{source})" if address else source
    return f"---\n\nautoamp {PROJECT['version']} \u00b7 {edit}\n"


def moved_links(text: str) -> str:
    """Markdown whose links lead to the places that the site has for them."""
    for old, new in MOVED.items():
        text = text.replace(f"]({old}", f"]({new}")
    return text


def titled(name: str, text: str) -> str:
    """A page of results under a heading: the files begin with the processor."""
    return text if text.startswith("# ") else f"# Results: {name}\n\n{text}"


def _copy(source: Path, target: Path, *patterns: str) -> None:
    target.mkdir(parents=True)
    for pattern in patterns:
        for path in source.glob(pattern):
            shutil.copy(path, target / path.name)
