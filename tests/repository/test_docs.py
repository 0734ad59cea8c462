"""Every Python block of the pages runs, and every command in them parses.

A Python block finds the names of `namespace`, made anew for it: pages show
`autoamp.explain(model, x)` without making a model each time.  The blocks of the pages
in `CONTINUED` find what the block before them left, and print the text block that
follows them, if one does.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import torch
from torch import nn

import autoamp
import autoamp_cli
from autoamp.auto import environment
from tests.repository.pages import PAGES, REPO, Block, blocks, name_of

SLOW = {
    "docs/bench.md",  # measures for seconds
}
CONTINUED = {"docs/out-of-process.md", "docs/quick-start.md", "docs/report.md"}
CONSOLE = [block for page in PAGES for block in blocks(page, "console")]
PYTHON = [page for page in PAGES if any(blocks(page, "python"))]
_TARGETS = set(re.findall(r"^([\w-]+):", (REPO / "Makefile").read_text(), re.M))


class SummaryWriter:
    """As TensorBoard's, which is not installed here."""

    def __init__(self, folder: str) -> None: ...

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(tag, str)
        assert isinstance(step, int)


def namespace() -> dict[str, Any]:
    """The names that pages take for granted."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    x, y = torch.randn(8, 64), torch.randn(8, 64)
    return {
        "SummaryWriter": SummaryWriter,
        "autoamp": autoamp,
        "data": [(x, y)] * 2,
        "loss_fn": nn.functional.mse_loss,
        "loss_of": lambda out: out.square().mean(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
        "torch": torch,
        "x": x,
        "y": y,
    }


def run(block: Block, names: dict[str, Any]) -> None:
    """Runs a block; an error names the page and the line."""
    padding = "\n" * (block.line - 1)
    exec(compile(padding + block.text, block.page, "exec"), names)


# torch's own, where it copies and saves exported programs.
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] * (name_of(page) in SLOW))
        for page in PYTHON
    ],
    ids=name_of,
)
def test_python_blocks_run(page: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = namespace()
    continued = name_of(page) in CONTINUED
    for block in blocks(page, "python"):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            run(block, names if continued else namespace())
        if continued and (text := shown_below(page, block)):
            assert comparable(printed.getvalue()) == comparable(text), block.where


def shown_below(page: Path, block: Block) -> str:
    """The text block that follows a Python block with nothing between; or ""."""
    after = block.line + block.text.count("\n") + 3  # a fence, an empty line, a fence
    return next((b.text for b in blocks(page, "text") if b.line == after), "")


def comparable(printed: str) -> str:
    """Less what depends on where files lie: lines of source, folders of rules files."""
    kept = re.sub(r"^  source .*\n", "", printed, flags=re.MULTILINE)
    return re.sub(r"\(from /\S*/rules/", "(from rules/", kept)


def test_what_the_diff_of_the_readme_adds_runs() -> None:
    (diff,) = blocks(REPO / "README.md", "diff")
    lines = [line for line in diff.text.splitlines() if not line.startswith("-")]
    assert len(diff.text.splitlines()) == 5
    names = namespace()
    run(replace(diff, text="\n".join(line[1:] for line in lines)), names)
    assert autoamp.is_converted(names["model"])


# -- commands --------------------------------------------------------------------------


def commands(text: str) -> list[list[str]]:
    """The words of each command: lines, less comments, pipes and redirections."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        ends = [i for i, word in enumerate(words) if word in {"|", ">", "&&", ";"}]
        found.append(words[: min(ends, default=len(words))])
    return [words for words in found if words]


def check(words: list[str]) -> None:
    """Raises where a command would be refused before it does anything.

    Raises:
        click.UsageError: the parser of `autoamp` knows no such command or option.
        AutoampError: a variable has a value that cannot be used.
        AssertionError: a variable, `make` target or module does not exist.
    """
    variables, rest = {}, list(words)
    while rest and re.match(r"[A-Z_]+=", rest[0]):
        name, _, value = rest.pop(0).partition("=")
        variables[name] = value
    check_variables(variables)
    program, *arguments = rest or [""]
    if program == "autoamp" and arguments:
        parse(autoamp_cli.main, arguments)
    elif program == "make":
        targets = {word for word in arguments if "=" not in word}
        assert targets <= _TARGETS, targets - _TARGETS
    elif program.endswith("python") and arguments[:1] == ["-m"]:
        check_module(arguments[1])


def check_variables(variables: dict[str, str]) -> None:
    assert environment.remarks(variables) == []
    files = {"AUTOAMP_RULES", "AUTOAMP_REPORT_DIR"}
    environment.read({k: v for k, v in variables.items() if k not in files})


def check_module(name: str) -> None:
    if name.partition(".")[0] in {"benchmarks", "tests", "website"}:
        path = REPO / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def parse(
    command: click.Command, arguments: list[str], parent: click.Context | None = None
) -> None:
    """What click does before it runs a command, less looking for files."""
    name = command.name or "autoamp"
    as_given = mock.patch.object(click.Path, "convert", lambda self, value, *_: value)
    with as_given, contextlib.suppress(click.exceptions.Exit):  # --help
        context = command.make_context(name, list(arguments), parent)
        if isinstance(command, click.Group) and arguments:
            rest = [*context._protected_args, *context.args]
            _, found, left = command.resolve_command(context, rest)
            assert found is not None
            parse(found, left, context)


@pytest.mark.parametrize("block", CONSOLE, ids=lambda block: block.where)
def test_commands_parse(block: Block) -> None:
    for words in commands(block.text):
        check(words)


@pytest.mark.parametrize(
    "line",
    [
        "autoamp nothing",
        "autoamp explain",
        "autoamp explain a:b --nothing",
        "autoamp diff a.json",
        "autoamp rules list --category none",
        "AUTOAMP_NOTHING=1 python train.py",
        "AUTOAMP_LOSS_SCALE=many python train.py",
        "make nothing",
        "python -m benchmarks.nothing",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    (words,) = commands(line)
    with pytest.raises((click.UsageError, autoamp.AutoampError, AssertionError)):
        check(words)
