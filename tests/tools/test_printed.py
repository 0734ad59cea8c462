"""An answer is one list of parts: its text and its HTML tell the same."""

from __future__ import annotations

import io
import re
import time
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import autoamp
from autoamp.messages import as_text, told
from autoamp.printed import Line, Printed, Table

BF16 = {"precision": "bf16", "do_no_harm": False}


class Hot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.exp(self.fc(x) + 20))


class Page(HTMLParser):
    """The words of a page, and its elements, each of which must be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.elements: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes) -> None:
        self.open.append(tag)
        self.elements.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        self.words += data.split()


def answers() -> dict[str, Printed]:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), torch.randn(4, 8)
    return {
        "Bench": autoamp.bench(model, x, rounds=2, steps=1, ways=["autoamp"]),
        "Comparison": autoamp.compare(model, x, tolerance=1e-9, **BF16),
        "Overflow": autoamp.find_overflow(Hot(), x, precision="fp16"),
        "Rules": autoamp.Rules.default("bf16"),
    }


@pytest.fixture(scope="module")
def found() -> dict[str, Printed]:
    return answers()


@pytest.mark.parametrize("name", ["Bench", "Comparison", "Overflow", "Rules"])
def test_a_notebook_shows_the_words_of_the_terminal(name, found) -> None:
    answer = found[name]
    page = Page(answer._repr_html_())
    # Wide enough that no cell is broken; the rule below a table's head is no word.
    text = as_text([answer], 2000).replace("─", " ")
    assert page.words == text.split()
    assert "script" not in page.elements
    assert repr(answer).startswith("<autoamp.")
    assert "\n" not in repr(answer)
    assert len(repr(answer)) < 300


def test_the_answer_of_a_bench_comes_first(found) -> None:
    bench = found["Bench"]
    sentence = bench.answer.sentence
    first = next(iter(bench.parts()))
    assert first == Line(f"{sentence[0].upper()}{sentence[1:]}.", "head")
    assert bench._repr_html_().index(sentence[1:40].replace("'", "&#x27;")) < 300


def test_rules_fold() -> None:
    rules = autoamp.Rules.default("fp16")
    page = Page(rules._repr_html_())
    assert page.elements.count("details") == 4
    assert not re.search(r"<details[^>]* open", rules._repr_html_())
    conditions = sum(len(rule.when) for rule in rules.table.values())
    assert conditions
    # A row for each rule and condition, and one for the head of each table.
    assert page.elements.count("tr") == len(rules.table) + conditions + 4


def test_rules_tell_the_modules_they_keep() -> None:
    rules = autoamp.Rules("mine", {}, keep=("head.*",))
    assert "head.*" in str(rules)
    assert Page(rules._repr_html_()).elements.count("details") == 0


class Odd(Printed):
    def parts(self):
        yield Line("<script>alert(1)</script> & co", "failure")
        yield Line("")
        yield Table(["<b>", "n"], [["a<script>", "1"], ["[red]x[/red]", "2"]])
        yield Table(("", ""), [("at", "<i>")], numbers=2)
        yield Table(["a", "b"], [["c", "1"]], title="<u>")


def test_text_of_the_users_is_never_markup() -> None:
    page = Page(Odd()._repr_html_())
    assert not {"script", "i", "b", "u"} & {*page.elements}
    assert {"a<script>", "[red]x[/red]", "<i>", "<u>"} <= {*page.words}
    assert page.elements.count("th") == 4  # a header without a word is not shown
    assert "[red]x[/red]" in str(Odd())
    assert "### <u>" in Odd().to_markdown()


def test_figures_stay_whole_where_the_terminal_is_narrow() -> None:
    class Wide(Printed):
        def parts(self):
            yield Table(["name", "n"], [["word " * 60, "1,234,567"]])

    assert "1,234,567" in str(Wide())
    assert str(Wide()).count("word") == 60
    assert max(map(len, str(Wide()).splitlines())) <= 80


def test_a_report_stands_in_a_monospaced_font() -> None:
    report = autoamp.explain(nn.Linear(8, 8), torch.ones(4, 8), **BF16)
    assert re.match(r'<pre style="font-family:[^"]*monospace;', report._repr_html_())


def test_a_first_item_that_takes_long_is_shown_before_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=100)
    monkeypatch.setattr("autoamp.messages.Console", lambda **_: console)
    monkeypatch.setattr("autoamp.messages.QUIET", 0.05)
    for _ in told(["one"], "waiting"):
        begun = time.monotonic()
        while "waiting" not in shown.getvalue():
            assert time.monotonic() - begun < 60
            time.sleep(0.01)
