"""`python -m website.release`: what a release still lacks, a line each.

The exit status is 1 while anything is missing.  RELEASING.md says what to fill in.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[1]


def missing(root: Path) -> Iterator[str]:
    """What the files below `root` lack on the day of a release."""

    def text(name: str) -> str:
        return (root / name).read_text("utf-8")

    project = tomllib.loads(text("pyproject.toml"))["project"]
    version, citation = project["version"], text("CITATION.cff")
    if "Repository" not in project.get("urls", {}):
        yield "pyproject.toml: [project.urls] with the address `Repository`"
    for field in ("repository-code", "date-released"):
        if not re.search(rf"^{field}: \S", citation, re.MULTILINE):
            yield f"CITATION.cff: {field}"
    newest = re.search(r"^## (.*)$", text("CHANGELOG.md"), re.MULTILINE)
    if newest is None or not re.fullmatch(
        rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d", newest[1]
    ):
        yield f"CHANGELOG.md: the newest section is to be headed {version} - DATE"
    readme = text("README.md")
    if "not released" in readme or "Nothing is released" in readme:
        yield "README.md: it says that nothing is released"
    if "pip install autoamp" not in readme:
        yield "README.md: pip install autoamp"
    links = re.findall(r"\]\(([^)#]+)", readme)
    relative = next((link for link in links if "//" not in link), "")
    if relative:
        yield f"README.md: absolute links, since PyPI has no files ({relative}, ...)"


if __name__ == "__main__":
    lacks = [*missing(REPO)]
    sys.stdout.write("\n".join(lacks or ["nothing is missing"]) + "\n")
    sys.exit(bool(lacks))
