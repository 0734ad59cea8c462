"""The page in a headless Chromium: it draws, answers clicks and keys, and is safe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from torch import nn

import autoamp
from tests.report.browser import Browser, browsing, executable
from tests.report.page_models import EVIL, Embedded, ResNet, explained, layers_report
from tests.says import says

pytestmark = pytest.mark.skipif(
    executable() is None, reason="no Chromium or Chrome is installed"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    layers_report(blocks=6).to_html(path)
    return path


@dataclass(frozen=True)
class Page:
    """The page of six blocks, freshly loaded; it must run without an error."""

    browser: Browser
    document: dict[str, Any]

    def id_of(self, name: str) -> str:
        """The id of the element of a node of the first graph."""
        names = [node["name"] for node in self.document["graphs"][0]["nodes"]]
        return f"n{names.index(name)}"

    def group(self, path: str) -> str:
        """The id of the element of a module of the first graph."""
        paths = [group["path"] for group in self.document["graphs"][0]["groups"]]
        return f"g{paths.index(path)}"

    def shows(self, element: str) -> bool:
        """Whether the graph has an element with this id at present."""
        found = self.browser.run(f"!!document.getElementById({json.dumps(element)})")
        return bool(found)

    def text(self, selector: str) -> str:
        """The text that a person sees in the first element that matches."""
        found = f"document.querySelector({json.dumps(selector)}).innerText"
        return str(self.browser.run(found))

    def drawn(self, selector: str) -> str:
        """The text of the first element of the graph that matches."""
        found = f"document.querySelector({json.dumps(selector)}).textContent"
        return str(self.browser.run(found))

    def focused(self) -> str:
        """The id of the element that has the focus."""
        return str(self.browser.run("document.activeElement.id"))

    def count(self, selector: str) -> int:
        """The number of elements that match."""
        found = f"document.querySelectorAll({json.dumps(selector)}).length"
        return int(self.browser.run(found))

    def search(self, text: str) -> None:
        """Types a text into the search box and takes the first hit."""
        self.browser.press("/")
        self.browser.type(text)
        self.browser.press("Enter")


@pytest.fixture
def page(browser: Browser, written: Path) -> Iterator[Page]:
    browser.load(written)
    browser.wait("performance.getEntriesByName('drawn').length")
    text = browser.run("document.getElementById('data').textContent")
    page = Page(browser, json.loads(text))
    browser.click(f"#{page.group('blocks')}")  # the six blocks are folded at first
    browser.press("Escape")
    yield page
    assert browser.problems == []
    assert {*browser.requests} == {written.resolve().as_uri()}


def test_the_first_view_is_closed_modules_without_overlap(page: Page) -> None:
    assert page.shows(page.group("blocks.0"))
    assert not page.shows(page.id_of("exp"))
    overlaps = """(() => {
      const leaves = [...document.querySelectorAll(".item:not(.open) > .shape")]
        .map((e) => e.getBoundingClientRect());
      return leaves.filter((a, i) => leaves.some((b, j) => i < j && a.left < b.right &&
        b.left < a.right && a.top < b.bottom && b.top < a.bottom)).length;
    })()"""
    assert page.browser.run(overlaps) == 0
    page.browser.press("E")
    assert page.shows(page.id_of("exp"))
    assert page.browser.run(overlaps) == 0


def test_equal_blocks_are_folded_until_a_click(browser: Browser, written: Path) -> None:
    browser.load(written)
    browser.wait("performance.getEntriesByName('drawn').length")
    text = browser.run("document.getElementById('data').textContent")
    page = Page(browser, json.loads(text))
    fold = page.group("blocks")
    assert "blocks.0\u2013blocks.5 \u00d76" in page.drawn(f"#{fold}")
    assert not page.shows(page.group("blocks.0"))
    browser.click(f"#{fold}")
    assert page.shows(page.group("blocks.0"))
    assert page.shows(page.group("blocks.5"))
    assert "6 blocks that are alike" in page.text("#node")
    browser.click(f"#{fold} .header")
    assert not page.shows(page.group("blocks.0"))


def picked(page: Page) -> str:
    """The id of the item whose details are shown; "" for none."""
    return str(page.browser.run("document.querySelector('.picked')?.id ?? ''"))


def test_a_link_leads_to_a_node_and_back_returns(page: Page, written: Path) -> None:
    page.search("exp_3")
    page.search("exp_4")
    assert page.browser.run("location.hash") == "#node=exp_4"
    page.browser.run("history.back()")
    page.browser.wait("location.hash === '#node=exp_3'")
    page.browser.wait(f"document.querySelector('#{page.id_of('exp_3')}.picked')")
    page.browser.run("history.forward()")
    page.browser.wait(f"document.querySelector('#{page.id_of('exp_4')}.picked')")
    page.browser.run("location.hash = 'side=before&module=blocks.2'")
    page.browser.wait(f"document.querySelector('#{page.group('blocks.2')}.picked')")
    assert page.count("#side-before[aria-pressed='true']") == 1
    page.browser.run("location.hash = 'node=<img src=x>'")
    page.browser.wait("document.getElementById('node').innerText.includes('has no')")
    assert "<img src=x>" in page.text("#node")
    assert picked(page) == ""


def test_a_link_opens_the_page_at_a_node_of_another_graph(page: Page) -> None:
    body = page.document["graphs"][1]
    name = next(n["name"] for n in body["nodes"] if n["decision"])
    page.browser.run(f"location.hash = 'graph={body['key']}&node={name}'")
    page.browser.wait("document.getElementById('graph').value === '1'")
    assert page.browser.run("location.hash").endswith(name)
    page.browser.run("location.reload()")
    page.browser.wait("performance.getEntriesByName('drawn').length")
    page.browser.wait("document.querySelector('.picked')")
    assert name in page.text("#node")
    assert page.browser.run("document.getElementById('graph').value") == "1"


def test_heat_colours_by_predicted_cost(page: Page) -> None:
    page.browser.press("h")
    block = page.group("blocks.0")
    nodes = page.document["graphs"][0]
    cost = nodes["groups"][int(block[1:])]["costs"]["placed"]
    heat = "document.getElementById('{}').style.getPropertyValue('--heat')"
    fill = "getComputedStyle(document.querySelector('#{} .shape')).fill"
    most = max(
        nodes["groups"][int(page.group(f"blocks.{n}")[1:])]["costs"]["placed"]
        for n in range(6)
    )
    share = float(page.browser.run(heat.format(block)).removesuffix("%"))
    assert share == pytest.approx(100 * cost / most)
    assert f"{cost / 10_000:.3g}" in page.drawn(f"#{block} .sub")
    hot = page.browser.run(fill.format(block))
    page.browser.press("h")
    assert page.browser.run(fill.format(block)) != hot
    assert "casts" in page.drawn(f"#{block} .sub")


def test_the_map_moves_the_view(page: Page) -> None:
    place = "document.getElementById('view').getAttribute('transform')"
    for _ in range(6):
        page.browser.press("+")
    assert page.count("#map:not(.idle)") == 1
    before = page.browser.run(place)
    page.browser.click("#map")
    assert page.browser.run(place) != before
    page.browser.press("0")
    assert page.count("#map.idle") == 1, "the window shows the whole graph"


SAVE = """(async () => {
  let saved;
  const made = URL.createObjectURL;
  URL.createObjectURL = (blob) => { saved = blob; return made(blob); };
  HTMLAnchorElement.prototype.click = function () { this.wasClicked = true; };
  document.getElementById("save").click();
  return await saved.text();
})()"""


def test_the_graph_is_saved_as_one_svg_file(page: Page) -> None:
    page.browser.press("E")
    text = page.browser.run(SAVE)
    found = ET.fromstring(text)
    named = [each.text for each in found.iter("{http://www.w3.org/2000/svg}text")]
    assert named.count("exp") == 6
    assert "var(" not in text
    assert "light-dark" not in text
    assert any("</script>" in text for text in named if text)
    assert "<img" not in text


COPY = """(async () => {
  const copied = [];
  navigator.clipboard.writeText = async (text) => { copied.push(text); };
  for (const each of document.querySelectorAll("#node .copy")) each.click();
  await new Promise((go) => setTimeout(go, 20));
  return [copied, document.querySelector("#node .copy").textContent];
})()"""


def test_a_cure_is_copied_by_a_button(page: Page) -> None:
    page.browser.click(f"#{page.group('blocks.0')}")
    copied, said = page.browser.run(COPY)
    assert copied == ['keep=["blocks.0"]']
    assert said == "Copied"


def test_texts_fit_into_their_boxes(page: Page) -> None:
    page.browser.press("E")
    for _ in range(10):  # near by, because far away the widths of texts are rounded
        page.browser.press("+")
    outside = """[...document.querySelectorAll(".item:not(.open)")].filter((e) => {
      const box = e.querySelector(".shape").getBoundingClientRect();
      return [...e.querySelectorAll("text:not(.badge)")].some((t) => {
        const r = t.getBoundingClientRect();
        return r.left < box.left - 1 || r.right > box.right + 1;
      });
    }).map((e) => e.id)"""
    assert page.browser.run(outside) == []


NAMES = """[...document.querySelectorAll("#names text")].map((e) => {
  const { left, right, top, bottom, height } = e.getBoundingClientRect();
  return { text: e.textContent, left, right, top, bottom, height };
})"""


def test_expand_all_shows_the_whole_with_legible_names(
    browser: Browser, tmp_path: Path
) -> None:
    layers_report(12).to_html(tmp_path / "many.html")
    browser.load(tmp_path / "many.html")
    browser.wait("performance.getEntriesByName('drawn').length")
    assert browser.run(NAMES) == [], "titles are legible in the first view"
    browser.press("E")
    where, box = "document.getElementById", ".getBoundingClientRect().toJSON()"
    shown = browser.run(f"{where}('view'){box}")
    around = browser.run(f"{where}('canvas'){box}")
    assert shown["width"] <= around["width"]
    assert shown["height"] <= around["height"]
    assert shown["width"] > shown["height"] / 2, "twelve blocks stand in columns"
    names = browser.run(NAMES)
    assert {f"blocks.{n}.up" for n in range(12)} <= {name["text"] for name in names}
    assert all(name["height"] >= 7 for name in names)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            apart = a["right"] <= b["left"] or b["right"] <= a["left"]
            assert apart or a["bottom"] <= b["top"] or b["bottom"] <= a["top"]
    browser.press("C")
    assert browser.run(NAMES) == []


def test_a_click_opens_and_closes_a_module(page: Page) -> None:
    block, inner = page.group("blocks.0"), page.group("blocks.0.up")
    page.browser.click(f"#{block}")
    assert page.shows(page.id_of("exp"))
    assert page.shows(inner)
    expanded = f"document.getElementById('{block}').getAttribute('aria-expanded')"
    assert page.browser.run(expanded) == "true"
    page.browser.click(f"#{block} .header")
    assert not page.shows(page.id_of("exp"))
    assert page.browser.run(expanded) == "false"


def test_casts_are_counted_on_edges_to_closed_modules(page: Page) -> None:
    page.browser.click(f"#{page.group('blocks.0')}")
    graph = page.document["graphs"][0]
    nodes = graph["nodes"]
    entering = [
        node["name"]
        for node in nodes
        if node["cast"]
        and node["module"] == "blocks.0.up"
        and nodes[node["after"]["operands"][0]]["module"] != "blocks.0.up"
    ]
    assert len(entering) == 1
    labels = "[...document.querySelectorAll('.edge-label')].map((e) => e.textContent)"
    closed = page.browser.run(labels)
    assert "1 cast" in closed
    page.browser.click(f"#{page.group('blocks.0.up')}")
    assert page.shows(page.id_of(entering[0]))
    assert len(page.browser.run(labels)) < len(closed), "the cast is drawn instead"


def test_a_click_shows_why_a_node_is_fp32(page: Page) -> None:
    page.browser.click(f"#{page.group('blocks.0')}")
    page.browser.click(f"#{page.id_of('exp')}")
    said = page.text("#node")
    for part in (
        "deny: dangerous in low precision",
        "Not under these options:",
        "aten::exp.default",
        "blocks.0",
        "page_models.py",
        "torch.exp(self.up(x))",
        "fp32 [4, 32]",
    ):
        assert part in said
    assert page.count(".edge.lit") >= 2
    page.browser.press("Escape")
    assert page.count(".picked") == 0
    assert page.focused() == page.id_of("exp")


def test_a_click_on_a_module_fills_the_panel(page: Page) -> None:
    graph = page.document["graphs"][0]
    block = graph["groups"][int(page.group("blocks.0")[1:])]
    page.browser.click(f"#{page.group('blocks.0')}")
    assert page.count(f"#{page.group('blocks.0')}.picked") == 1
    said = page.text("#node")
    assert "blocks.0" in said
    assert 'keep=["blocks.0"]' in said
    inside = [n for n in graph["nodes"] if n["module"].startswith("blocks.0")]
    low = sum(n["decision"]["precision"] == "bf16" for n in inside if n["decision"])
    high = sum(n["decision"]["precision"] == "fp32" for n in inside if n["decision"])
    assert f"{low} in bf16, {high} in fp32" in said
    assert all(n["name"] in said for n in inside if n["cast"])
    assert "listed by the user: deny=exp" in said
    assert f"{block['costs']['keep']['ops']} ops changed" in said
    page.browser.press("b")
    assert "in bf16" not in page.text("#node"), "before the pass nothing is low"


def test_the_root_of_an_fp32_op_is_one_click_away(
    browser: Browser, tmp_path: Path
) -> None:
    explained(Embedded(), torch.zeros(4, 8).long()).to_html(tmp_path / "root.html")
    browser.load(tmp_path / "root.html")
    browser.wait("performance.getEntriesByName('drawn').length")
    document = json.loads(browser.run("document.getElementById('data').textContent"))
    page = Page(browser, document)
    page.search("layer_norm")
    links = "[...document.querySelectorAll('#node .chain .link')].map(e => e.innerText)"
    assert browser.run(links) == ["layer_norm", "add", "embedding"]
    assert 'By allow=["layer_norm"]' in page.text("#node")
    browser.run(
        "[...document.querySelectorAll('#node section')].find((e) => "
        "e.querySelector('h3').textContent === 'Root').querySelector('.link').click()"
    )
    assert page.count(f"#{page.id_of('embedding')}.picked") == 1
    assert browser.problems == []


def test_a_cast_has_a_shape_and_reasons_of_its_own(page: Page) -> None:
    graph = page.document["graphs"][0]
    cast = next(n["name"] for n in graph["nodes"] if n["cast"])
    page.search(cast)
    shape = f"document.querySelector('#{page.id_of(cast)} .shape').tagName"
    assert page.browser.run(shape) == "polygon"
    assert "because its readers compute in" in page.text("#node")


def test_before_the_casts_there_are_none(page: Page) -> None:
    page.browser.press("E")
    assert page.count(".node.cast") > 0
    assert page.count(".node.low") > 0
    page.browser.click("#side-before")
    assert page.count(".node.cast") == page.count(".node.low") == 0
    assert page.shows(page.id_of("exp"))
    page.browser.press("b")
    assert page.count(".node.cast") > 0


def test_before_shows_the_figures_of_before(page: Page) -> None:
    assert "cast" in page.text("#overview")
    graph = page.document["graphs"][0]
    ops = sum(row["low"] + row["fp32"] for row in graph["tables"]["ops"])
    page.browser.press("i")
    page.browser.press("b")
    page.browser.click("#tab-overview")
    said = page.text("#overview")
    assert "Casts of this graph".lower() not in said.lower()
    for figure in page.document["answers"]["figures"]["before"]:
        assert figure["value"] in said
        assert figure["note"] in said
    counts = """[...[...document.querySelectorAll('#overview table')]
      .find((e) => e.caption.textContent.startsWith('Ops of this graph'))
      .querySelectorAll('td')].map((e) => Number(e.textContent))"""
    assert sum(page.browser.run(counts)) == ops
    assert page.count("#canvas.filtering") == 0, "islands are of the graph after"


def test_search_finds_and_opens(page: Page) -> None:
    page.browser.press("/")
    assert page.focused() == "search"
    page.browser.type("exp_3")
    assert page.count("#found [role=option]") == 1
    page.browser.press("Enter")
    assert page.focused() == page.id_of("exp_3")
    assert page.count(f"#{page.id_of('exp_3')}.picked") == 1
    assert "blocks.3" in page.text("#node")
    page.search("no such node")
    assert "nothing found" in page.text("#found")


def test_the_filter_shows_islands_alone(page: Page) -> None:
    page.browser.click(f"#{page.group('blocks.0')}")
    page.browser.press("i")
    assert page.count(f"#{page.id_of('exp')}.dim") == 0
    assert page.count(f"#{page.group('blocks.0.up')}.dim") == 1
    reasons = page.text("#reasons")
    assert "exp, mul \u00d7 6" in reasons  # one entry for islands that are alike
    page.browser.click(".place:nth-of-type(5)")
    assert page.shows(page.id_of("exp_4"))
    page.browser.press("i")
    assert page.count("#canvas.filtering") == 0


def test_keys_move_between_items(page: Page) -> None:
    page.browser.press("Tab")
    page.browser.run("document.querySelector('.item[tabindex=\"0\"]').focus()")
    seen = [page.focused()]
    for _ in range(3):
        page.browser.press("ArrowDown")
        seen.append(page.focused())
    assert len(set(seen)) == 4
    tops = [f"document.getElementById('{i}').getBoundingClientRect().top" for i in seen]
    places = [page.browser.run(top) for top in tops]
    assert places == sorted(places)
    page.browser.press("ArrowUp")
    assert page.focused() == seen[2]
    block = page.group("blocks.0")
    page.browser.run(f"document.getElementById('{block}').focus()")
    page.browser.press("Enter")
    assert page.shows(page.id_of("exp"))
    assert page.focused() == block
    page.browser.press("Enter")
    assert not page.shows(page.id_of("exp"))
    assert page.count(".item[tabindex='0']") == 1


def test_the_theme_follows_the_system_and_the_switch(page: Page) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.browser.run(ground)
    page.browser.press("t")
    dark = page.browser.run(ground)
    assert light != dark
    page.browser.press("t")
    assert page.browser.run(ground) == light
    for scheme, colour in (("dark", dark), ("light", light)):
        page.browser.run("delete document.documentElement.dataset.theme")
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.browser.send("Emulation.setEmulatedMedia", features=[feature])
        assert page.browser.run(ground) == colour


def test_a_body_is_a_graph_of_its_own(page: Page) -> None:
    options = page.count("#graph option")
    assert options == len(page.document["graphs"]) > 1
    graph = page.document["graphs"][0]
    page.search(next(n["name"] for n in graph["nodes"] if n["body"]))
    page.browser.run(
        "[...document.querySelectorAll('#node .link')]"
        ".find((e) => e.textContent.startsWith('open ')).click()"
    )
    assert page.browser.run("document.getElementById('graph').value") == "1"
    assert page.count(".item") > 0


def test_hostile_names_run_nothing(page: Page) -> None:
    page.browser.press("E")
    name = next(
        node["name"]
        for node in page.document["graphs"][0]["nodes"]
        if EVIL in node["module"] and node["decision"]
    )
    page.search(name)
    assert EVIL in page.text("#node")
    assert "hacked=2" in page.text("#node")
    assert page.browser.run("typeof hacked") == "undefined"
    assert page.count("img") == 0
    assert "hacked=3" in page.text("#title")
    page.browser.press("i")
    page.search("hacked")
    assert page.browser.run("typeof hacked") == "undefined"


def test_every_control_has_a_name(page: Page) -> None:
    page.browser.press("E")
    unnamed = """[...document.querySelectorAll("button, select, input, [role=button]")]
      .filter((e) => !(e.getAttribute("aria-label") || e.textContent.trim() ||
        e.labels?.length)).map((e) => e.outerHTML)"""
    assert page.browser.run(unnamed) == []


def test_plumbing_is_drawn_on_demand(browser: Browser, tmp_path: Path) -> None:
    report = explained(ResNet((1,)), torch.randn(2, 3, 32, 32))
    report.to_html(tmp_path / "resnet.html")
    browser.load(tmp_path / "resnet.html")
    browser.wait("performance.getEntriesByName('drawn').length")
    graph = json.loads(browser.run("document.getElementById('data').textContent"))
    page = Page(browser, graph)
    assert page.shows(page.group("conv1"))
    browser.press("E")
    assert page.shows(page.id_of("bn1_weight"))
    assert not page.shows(page.id_of("bn1_running_mean"))
    browser.click("#plumbing")
    assert page.shows(page.id_of("bn1_running_mean"))
    browser.click("#plumbing")
    assert not page.shows(page.id_of("bn1_running_mean"))
    page.search("bn1_running_var")  # which is drawn because it is asked for
    assert page.count(f"#{page.id_of('bn1_running_var')}.picked") == 1
    assert browser.problems == []


def test_a_model_that_is_not_converted_gets_its_verdict_first(
    browser: Browser, tmp_path: Path
) -> None:
    denied = explained(nn.Linear(8, 8), torch.randn(2, 8), deny=["linear"])
    float64 = autoamp.Report("Net", (), (), [("Net", "it is in float64")])
    for report, why in ((denied, "deny=linear"), (float64, "it is in float64")):
        report.to_html(tmp_path / "kept.html")
        browser.load(tmp_path / "kept.html")
        browser.wait("performance.getEntriesByName('drawn').length")
        first = browser.run("document.getElementById('overview').firstChild.innerText")
        says(first, "Nothing is converted", "fp32", why)
        assert browser.problems == []


def test_a_report_without_graphs_says_so(browser: Browser, tmp_path: Path) -> None:
    for skipped, said in (
        ([], "No graph captured yet"),
        ([("Net", "it is in float64")], "it is in float64"),
    ):
        path = tmp_path / "empty.html"
        autoamp.Report("Net", (), (), skipped).to_html(path)
        browser.load(path)
        browser.wait("performance.getEntriesByName('drawn').length")
        says(browser.run("document.body.innerText"), said)
        assert browser.problems == []
