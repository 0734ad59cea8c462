"""The site: every page is in its navigation, every link leads somewhere."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import click
import pytest

import autoamp
import autoamp_cli
from tests.repository.pages import PAGES, REPO, anchors, links, name_of
from website.built import faults
from website.commands import commands_of, reference
from website.errors import TO_DO, index, messages
from website.stage import moved_links, stage

DOCS = REPO / "docs"
SITE = REPO / "build" / "site"
NAVIGATION = (REPO / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]


def in_navigation() -> list[str]:
    return re.findall(r": ([\w/-]+\.md)$", NAVIGATION, re.MULTILINE)


def dead(page: Path) -> list[str]:
    """The links of a page that lead to no file, or to no heading of a page."""
    found = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def test_the_navigation_has_every_page_once() -> None:
    assert len(in_navigation()) == len(set(in_navigation()))
    staged = {"index.md", "rules.md", "changelog.md", "contributing.md", "errors.md"}
    assert set(in_navigation()) - staged == {path.name for path in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert dead(page) == []


def test_a_dead_link_and_a_dead_anchor_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[a](#a-b-c) [b](#d) [c](no.md) ![d](no.png)\n")
    assert dead(page) == ["#d", "no.md", "no.png"]


def test_the_python_reference_has_every_public_name_once() -> None:
    text = (DOCS / "api.md").read_text("utf-8")
    names = re.findall(r"^::: autoamp\.(\w+)$", text, re.MULTILINE)
    assert sorted(names) == sorted(autoamp.__all__)


# -- the generated reference -----------------------------------------------------------


def test_the_reference_has_every_command_and_option() -> None:
    text = reference(autoamp_cli.main)
    found = dict(commands_of(autoamp_cli.main))
    assert {"autoamp run", "autoamp rules why"} <= set(found)
    for words, command in found.items():
        assert f"### {words}\n" in text
        section = text.partition(f"### {words}\n")[2].partition("\n### ")[0]
        for each in command.params:
            if isinstance(each, click.Option) and not each.hidden:
                assert each.opts[0] in section, f"{words} {each.opts[0]}"


@functools.cache
def errors() -> str:
    return index(REPO) + "\n\n## "


def section(error: str) -> str:
    """The part of the index of errors about a class."""
    return errors().partition(f"\n## {error}\n")[2].partition("\n\n## ")[0]


def test_the_index_has_every_public_error_with_what_to_do() -> None:
    public = {name for name in autoamp.__all__ if name.endswith("Error")}
    assert public <= set(TO_DO)
    for name in TO_DO:
        assert TO_DO[name] in section(name), name


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("OptionError", "<name>=<value> is not True or False"),
        ("UnsupportedModelError", "convert the model it was made from"),  # in a helper
        ("ExportError", "<where>: the plan in it cannot be read: <problem>"),
        ("RulesError", "give the path of a TOML file of op rules"),  # a constant's text
        ("RankError", "start all ranks again"),
    ],
)
def test_the_index_has_the_messages_of_an_error(error: str, message: str) -> None:
    assert message in section(error)


def test_messages_are_read_where_they_are_made(tmp_path: Path) -> None:
    (tmp_path / "autoamp").mkdir()
    (tmp_path / "autoamp" / "a.py").write_text(
        """
HELP = "see the manual"
def told(x):
    return "a" if x else f"b: {HELP}"
def f(x):
    why = f"{x} is  {len(x)} long"
    if x:
        raise OwnError(why)
    if x is None:
        raise OwnError(told(x))
    raise OwnError(f"{x.name}: " + HELP) from OtherError("c")
"""
    )
    found = messages(tmp_path, {"OwnError"})["OwnError"]
    assert list(found) == [
        "<x> is \u2026 long",
        "a",
        "b: see the manual",
        "<name>: see the manual",
    ]
    assert set(found.values()) == {"autoamp/a.py"}


# -- staged and built ------------------------------------------------------------------


def test_staged_links_follow_what_was_copied(tmp_path: Path) -> None:
    stage(tmp_path / "docs", autoamp_cli.main)
    staged = tmp_path / "docs"
    assert {path.name for path in DOCS.glob("*.md")} <= {
        path.name for path in staged.glob("*.md")
    }
    assert [link for page in staged.rglob("*.md") for link in dead(page)] == []
    assert "### autoamp explain\n" in (staged / "command-line.md").read_text("utf-8")
    ends = {page.name: page.read_text("utf-8") for page in staged.glob("*.md")}
    assert ends["rules.md"].endswith("rules/README.md\n")
    assert all(f"autoamp {autoamp.__version__} " in end[-200:] for end in ends.values())
    edited = [end.rpartition(" \u00b7 ")[2].strip() for end in ends.values()]
    assert [source for source in edited if not (REPO / source).exists()] == []
    assert moved_links("[a](../rules/bf16.toml)") == "[a](rules/bf16.toml)"


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://a.example/b.js"></script>',
        '<img src="//a.example/b.png">',
        '<link rel="stylesheet" href="http://a.example/b.css">',
        '<img src="nowhere.png">',
        '<a href="nowhere.html">a</a>',
        '<a href="#nowhere">a</a>',
        '<a href="index.html#nowhere">a</a>',
    ],
)
def test_faults_of_a_built_page_are_found(html: str, tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    fine = '<p id="a"><a href="#a">a</a><a href="https://a.example">b</a></p>'
    page.write_text(fine)
    assert faults(tmp_path) == []
    page.write_text(fine + html)
    assert len(faults(tmp_path)) == 1


@pytest.mark.skipif(not SITE.exists(), reason="the site is not built: `make docs`")
def test_the_built_site_has_no_faults() -> None:
    assert faults(SITE) == []
