"""`autoamp diff OLD NEW` of two pages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from autoamp.passes.saved_reports import diff, load
from autoamp.reports.page.read import page_at, report_of_page
from autoamp_cli import main
from tests.report.page_models import Layers, explained
from tests.says import says


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages and the JSON of one model: old, and with a module kept in fp32."""
    found = tmp_path_factory.mktemp("pair")
    for name, options in (("old", {}), ("new", {"keep": ["blocks.1"]})):
        report = explained(Layers(4), torch.randn(4, 16), **options)
        report.to_html(found / f"{name}.html")
        report.to_json(found / f"{name}.json")
    return found


def differ(folder: Path, old: str, new: str, *more: str) -> Result:
    paths = [str(folder / old), str(folder / new)]
    return CliRunner().invoke(main, ["diff", *paths, *more])


def test_two_pages_differ_as_their_reports_do(folder: Path) -> None:
    pages = [str(folder / name) for name in ("old.html", "new.html")]
    ours = diff(*(report_of_page(path, page_at(path)) for path in pages))
    theirs = diff(*(load(folder / name) for name in ("old.json", "new.json")))
    assert theirs.changed
    assert ours.same == theirs.same
    for key in ("changed", "casts_added", "casts_removed"):
        assert len(getattr(ours, key)) == len(getattr(theirs, key)), key
    names = [[c.new.name for c in each.changed] for each in (ours, theirs)]
    assert names[0] == names[1]


def test_other_files_are_no_pages(folder: Path) -> None:
    other = folder / "other.html"
    for text in (
        "<p>",
        '<script type="application/json" id="data">{}</script>',
        f'<script type="application/json" id="data">{"[" * 100_000}</script>',
        "\xff",
    ):
        other.write_text(text, encoding="latin-1")
        found = differ(folder, "other.html", "new.html")
        assert found.exit_code == 2
        says(found.output, "other.html")
    damaged = (folder / "old.html").read_text().replace('"tables"', '"other"')
    other.write_text(damaged)
    found = differ(folder, "other.html", "new.html")
    assert found.exit_code == 2
    says(found.output, "damaged")


def test_a_report_is_not_written_over(folder: Path) -> None:
    page = folder / "new.html"
    before = page.read_text()
    found = differ(folder, "old.html", "new.html", "--json", str(page))
    assert found.exit_code == 2
    assert page.read_text() == before
