"""`python -m benchmarks.page_images`: the pictures of docs/page.md, in docs/images.

The page of GPT-2's report, as a headless Chromium shows it: the first view, and an op
in fp32 with the reason for it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import autoamp

from .browser import browsing
from .models import gpt2

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH, HEIGHT = 1360, 740
NODE = "layer_norm_3"
READY = "document.querySelectorAll('svg g').length > 5"


def main() -> None:
    """Writes page-overview.png and page-node.png."""
    ids = torch.zeros(2, 128, dtype=torch.int64)
    report = autoamp.explain(gpt2(), kwargs={"input_ids": ids, "labels": ids})
    with tempfile.TemporaryDirectory() as folder, browsing() as browser:
        page = Path(folder) / "report.html"
        report.to_html(page)
        browser.open(WIDTH, HEIGHT)
        for name, place in (("overview", ""), ("node", f"#node={NODE}")):
            browser.load(page)
            browser.wait(READY)
            browser.run(f"location.hash = {place!r}")
            browser.run("new Promise(done => setTimeout(done, 1500))")
            browser.picture(IMAGES / f"page-{name}.png")


if __name__ == "__main__":
    main()
