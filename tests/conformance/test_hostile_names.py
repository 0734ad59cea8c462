"""Hostile names: markup, escapes and paths in names, and report directories that bite.

Whatever a module, a class or an error is called, reports, logs and file names show it
as plain text, and nothing is written outside the directory that was asked for.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import autoamp
from autoamp.auto import environment
from autoamp.auto.report_dir import Recorder
from autoamp.capture.engine import Engine
from autoamp.model.conversion import conversion_of
from tests.conformance.table import Figures
from tests.training.steps import BF16

NAMES = {
    "rich": "[red]x[/red]",
    "end of rich": "[/]",
    "link": "[link=file:///etc/passwd]x",
    "html": "<script>alert(1)</script>&\"'",
    "newline": 'a\nb"];\n}',
    "escape": "\x1b[31m\x1b]0;owned\x07",
    "direction": "\u202egnp.exe",
    "up": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "backslash": "\\..\\x",
    "null": "a\x00b",
    "surrogate": "\ud800",
    "percent": "%s%n{0.__class__}",
    "long": "x" * 500,
}
"""Names of modules and of classes."""


def hostile(name: str) -> nn.Module:
    """A model that has `name` for a class, a child and a child's class."""
    # A class cannot be called by a null or half a character.
    of_class = name.replace("\x00", "0").encode("utf-8", "replace").decode()
    layer = type(of_class, (nn.Linear,), {})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._modules[name] = layer(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self._modules[name](x).exp()

    Model.__name__ = Model.__qualname__ = of_class
    return Model()


@pytest.fixture
def everything_logged(caplog) -> Iterator[list[str]]:
    lines: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("autoamp"), Keeps(logging.DEBUG)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


def is_plain(text: str) -> bool:
    return text.replace("\n", "").isprintable()


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_shown_as_they_are(
    kind: str, everything_logged: list[str], tmp_path, figures: Figures
) -> None:
    model = autoamp.convert(hostile(NAMES[kind]), **{**BF16, "strict": False})
    model(torch.randn(2, 8)).sum().backward()
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        model(torch.randn(2, 8))  # past the graphs: what was not converted, and why
    report = autoamp.report(model)
    assert report.skipped
    assert report.runs == 1

    texts = [str(report), repr(report), report.to_json(tmp_path / "a.json")]
    texts += [report.to_dot(), *map(report.why, (row.name for row in report.ops))]
    assert everything_logged
    for text in [*texts, *everything_logged]:
        assert is_plain(text)
    document = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert document["model"] == report.label
    assert {n for n, _ in report.to_networkx().nodes(data="kind")}
    figures.count("names")


def on_a_terminal(name: str) -> tuple[str, list[str]]:
    """What is shown of a model of that name, and the control sequences in it."""
    model = autoamp.convert(hostile(name), **BF16)
    model(torch.randn(2, 8))
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=5000, legacy_windows=False)
    console.print(autoamp.report(model))
    control = r"\x1b(?:\[[0-9;]*[A-Za-z]|.)"
    shown = file.getvalue()
    return re.sub(control, "", shown), sorted(set(re.findall(control, shown)))


@pytest.mark.parametrize("kind", NAMES)
def test_names_are_no_markup(kind: str) -> None:
    """On a terminal that knows colours and links."""
    shown, controls = on_a_terminal(NAMES[kind])
    assert controls == on_a_terminal("plain")[1]
    assert "\x1b" not in shown
    if kind in ("rich", "end of rich", "link", "html", "percent"):
        assert NAMES[kind] in shown


@pytest.mark.parametrize("kind", NAMES)
def test_dot_is_one_graph(kind: str) -> None:
    """Quotes and line ends of a name do not end the string they stand in."""
    model = autoamp.convert(hostile(NAMES[kind]), **BF16)
    model(torch.randn(2, 8))
    without = re.sub(r'"(?:[^"\\]|\\.)*"', "", autoamp.report(model).to_dot())
    assert '"' not in without
    assert without.count("{") == without.count("}") == 2


def test_errors_of_models_are_shown_as_text(everything_logged: list[str]) -> None:
    def fails(gm: Any, inputs: Any) -> Any:
        raise ValueError("\x1b[31m[red]first\nsecond\u202e")

    model = autoamp.convert(
        nn.Sequential(nn.Linear(8, 8)), **{**BF16, "strict": False, "backend": fails}
    )
    model(torch.randn(2, 8))
    report = autoamp.report(model)
    assert "[red]first" in str(report)
    for text in [*everything_logged, str(report), report.to_json()]:
        assert is_plain(text)


# -- the report directory --------------------------------------------------------------


def engine_of(name: str) -> Engine:
    model = autoamp.convert(hostile(name), **BF16)
    model(torch.randn(2, 8))
    state = conversion_of(model)
    assert state.engine is not None
    return state.engine


def below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", NAMES)
def test_files_are_below_the_directory(kind: str, tmp_path) -> None:
    root = tmp_path / "reports"
    recorder = Recorder(root)
    recorder.write(engine_of(NAMES[kind]))
    recorder.finish()
    written = below(tmp_path)
    assert len(written) == 4
    for path in written:
        assert path.parent.parent == root
        assert re.fullmatch(r"[\w.-]+", path.parent.name)
        assert path.read_text(encoding="utf-8")


def test_names_that_collide_have_places_of_their_own(tmp_path) -> None:
    recorder = Recorder(tmp_path)
    engines = [engine_of(name) for name in ("a/b", "a\\b", "a b", "a_b")]
    for engine in [*engines, *engines]:
        recorder.write(engine)
    recorder.finish()
    assert len(list(tmp_path.iterdir())) == len(engines)
    assert len(below(tmp_path)) == 4 * len(engines)


def test_what_is_there_already_is_not_written_over(tmp_path) -> None:
    """Whatever file, folder or link has a name that would be taken."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    root = tmp_path / "reports"
    root.mkdir()
    recorder = Recorder(root)
    engine = engine_of("a")
    (first,) = [recorder._folder(engine.record)]
    stem, _, number = first.name.rpartition("-")
    (root / f"{stem}-{int(number) + 1}").symlink_to(victim)
    (root / f"{stem}-{int(number) + 2}").write_text("mine")
    (root / f"{stem}-{int(number) + 3}").symlink_to(tmp_path / "nowhere")
    other = engine_of("a")
    recorder.write(other)
    assert recorder._folder(other.record).name == f"{stem}-{int(number) + 4}"
    recorder.finish()
    assert victim.read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("what", ["file", "below a file", "loop", "device", "long"])
def test_directories_that_cannot_be(what: str, tmp_path) -> None:
    file, loop = tmp_path / "file", tmp_path / "loop"
    file.write_text("mine")
    loop.symlink_to(loop)
    given = {
        "file": file,
        "below a file": file / "reports",
        "loop": loop / "reports",
        "device": Path(os.devnull),
        "long": tmp_path / ("x" * 300),
    }[what]
    with pytest.raises(autoamp.OptionError, match="report_dir") as caught:
        environment.writable(str(given))
    assert is_plain(str(caught.value))
    assert file.read_text() == "mine"
