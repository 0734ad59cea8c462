"""`python -m website` builds the site; a warning or a dead link is an error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import autoamp_cli
from website.built import faults
from website.stage import REPO, stage

SITE = REPO / "build" / "site"


def main() -> int:
    """Stages the pages, builds them, and looks at the result; the exit status."""
    stage(REPO / "build" / "docs", autoamp_cli.main)
    shutil.rmtree(SITE, ignore_errors=True)
    build = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    plain = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(build, cwd=REPO, env=plain, check=False)
    if done.returncode:
        return done.returncode
    found = faults(SITE)
    print("\n".join(found), file=sys.stderr)
    pages = len(list(SITE.rglob("*.html")))
    place = SITE.relative_to(REPO)
    print(f"{pages} pages, {len(found)} faults: {place}/index.html")
    print(f"with search: python -m http.server --directory {place}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
