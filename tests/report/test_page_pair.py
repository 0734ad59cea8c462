"""`autoamp diff OLD NEW --html FILE`: two pages side by side, on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from autoamp.passes.saved import diff, load
from autoamp.report.page.pair import page_at, report_of_page
from autoamp_cli import main
from benchmarks.browser import browsing, executable
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


@pytest.mark.skipif(executable() is None, reason="no Chromium or Chrome is installed")
def test_both_reports_are_drawn_side_by_side(folder: Path) -> None:
    out = folder / "diff.html"
    found = differ(folder, "old.html", "new.html", "--html", str(out))
    assert found.exit_code == 1, found.output
    again = differ(folder, "old.html", "new.html", "--html", str(out))
    assert again.exit_code == 1, "an older page of a diff is replaced"
    data = page_data(out)
    graph = data["graphs"][0]
    nodes = graph["nodes"]
    changed = [each for each in graph["changes"] if each["text"] == "bf16 → fp32"]
    assert {nodes[c["new"]]["module"] for c in changed} == {
        "blocks.1.up",
        "blocks.1.down",
    }
    for each in changed:
        assert nodes[each["old"]]["twin"] == each["new"]
        assert nodes[each["new"]]["twin"] == each["old"]
        assert nodes[each["old"]]["after"]["precision"] == "bf16"
    for node in nodes:
        for side in filter(None, (node["before"], node["after"])):
            assert all(0 <= n < len(nodes) for n in side["operands"])
    with browsing() as browser:
        browser.load(out)
        browser.wait("performance.getEntriesByName('drawn').length")
        said = browser.run("document.getElementById('overview').innerText")
        says(said, "changed precision", "old.html", "new.html", "bf16 → fp32")
        number = changed[0]["new"]
        browser.run(
            "[...document.querySelectorAll('#overview .nodes .link')]"
            f".find((e) => e.textContent.startsWith('{nodes[number]['name']}')).click()"
        )
        assert browser.run(f"!!document.querySelector('#n{number}.picked.changed')")
        twin = nodes[number]["twin"]
        assert browser.run(f"!!document.querySelector('#n{twin}.near')")
        said = browser.run("document.getElementById('node').innerText")
        says(said, "It changed from bf16 to fp32")
        groups = graph["groups"]
        root = next(i for i, g in enumerate(groups) if g["label"] == "new.html")
        inner = next(
            i for i, g in enumerate(groups) if i > root and g["path"] == "blocks.1"
        )
        twin = groups[inner]["twin"]
        open_ = "document.getElementById('g{}')?.classList.contains('open')"
        assert browser.run(open_.format(inner))
        browser.click(f"#g{inner} .header")
        assert not browser.run(open_.format(inner))
        assert not browser.run(open_.format(twin))
        assert browser.problems == []


def page_data(path: Path) -> dict[str, Any]:
    """The data of a page of two reports, which `page_at` does not take."""
    text = path.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    found: dict[str, Any] = json.loads(text[start : text.index("</script>", start)])
    return found


def test_a_report_without_a_graph_says_how_to_get_a_page(folder: Path) -> None:
    out = folder / "none.html"
    found = differ(folder, "old.json", "new.html", "--html", str(out))
    assert found.exit_code == 2
    says(found.output, "old.json", "autoamp explain MODEL --html FILE")
    assert not out.exists()


def test_other_files_are_no_pages(folder: Path) -> None:
    other = folder / "other.html"
    for text in (
        "<p>",
        '<script type="application/json" id="data">{}</script>',
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
    page = folder / "new.html"
    before = page.read_text()
    found = differ(folder, "old.html", "new.html", "--html", str(page))
    assert found.exit_code == 2
    assert page.read_text() == before, "a report is not written over"
