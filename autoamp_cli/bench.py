"""`autoamp bench`: times the ways to run a model, side by side."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from autoamp_cli.asked import asking, convert_options, show, with_convert_options
from autoamp_cli.problem import Problem
from autoamp_cli.words import WAYS

_PATH = click.Path(dir_okay=False, allow_dash=True)
_INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended: 128 and the signal's number."""


class _Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers above 0, separated by commas."""

    name = "numbers"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        """The numbers of a text such as "32,64"."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            self.fail(f"{value!r}: write numbers above 0 such as 32,64,128", param, ctx)
        return tuple(map(int, parts))


class _Names(click.ParamType):  # type: ignore[type-arg]
    """Names of ways, separated by commas."""

    name = "ways"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        """The names of a text such as "autocast,autoamp"."""
        if isinstance(value, tuple):
            return value
        names = tuple(part.strip() for part in value.split(","))
        if wrong := [name for name in names if name not in WAYS]:
            self.fail(f"{wrong[0]!r} is none of {', '.join(WAYS)}", param, ctx)
        return names


@click.command()
@click.option("--infer", is_flag=True, help="Time calls without a backward.")
@click.option(
    "--generate", type=click.IntRange(1), metavar="N", help="Time generating N tokens."
)
@click.option("--ways", type=_Names(), help=f"Any of {','.join(WAYS)}; default all.")
@click.option("--compile", is_flag=True, help="Time each way compiled too.")
@click.option("--rounds", type=click.IntRange(1), help="Time this many steps.")
@click.option(
    "--seconds",
    type=click.FloatRange(0),
    default=10.0,
    show_default=True,
    help="Begin no round after this many seconds.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Compare the losses of this many steps.",
)
@click.option("--sweep", type=_Numbers(), metavar="B,B", help="Batch sizes to measure.")
@click.option("--memory", metavar="SIZE", help="Find the largest batch in 8GiB, ...")
@click.option(
    "--grams-per-kwh", type=click.FloatRange(0), help="Show CO2 at this rate."
)
@click.option("--json", type=_PATH, help="Write the figures as JSON.")
@click.option("--markdown", type=_PATH, help="Write the tables as markdown.")
@click.option("--plot", type=_PATH, help="Write a bar plot of the times as SVG.")
@with_convert_options
@click.argument("factory", metavar="MODULE:FACTORY")
def bench(
    factory: str,
    *,
    infer: bool,
    generate: int | None,
    ways: tuple[str, ...] | None,
    compile: bool,  # noqa: A002 (the option's name)
    rounds: int | None,
    seconds: float,
    steps: int,
    sweep: tuple[int, ...] | None,
    memory: str | None,
    grams_per_kwh: float | None,
    json: str | None,
    markdown: str | None,
    plot: str | None,
    **given: Any,
) -> None:
    """Times a model in fp32, under autocast, and with autoamp, side by side.

    FACTORY() returns (model, args), (model, args, kwargs) or (model, args, kwargs,
    data), where data holds batches, so that the time of loading them is measured too.
    Each way gets a copy of the model.  A step is a forward, a backward and an
    optimizer step, unless --infer or --generate says otherwise.  Exit status: 130
    after Ctrl-C, which prints the figures so far, 2 for bad input, else 0.

    \b
    Examples:
      autoamp bench models.resnet:example
      autoamp bench models.resnet:example --infer --sweep 1,8,64
      autoamp bench models.gpt2:example --generate 32 --json bench.json
    """
    from autoamp.tools.bench_measure import BenchInterrupted, bench_model
    from autoamp_cli.factory import made_by

    if infer and generate:
        raise click.UsageError("--infer and --generate exclude each other")
    paths = [path for path in (json, markdown, plot) if path]
    _refuse_unwritable(paths)
    with asking(factory):
        made = made_by(factory, data=True)
        try:
            found = bench_model(
                made.model,
                made.args,
                made.kwargs,
                options=convert_options(given),
                data=made.data,
                infer=infer,
                generate=generate or 0,
                ways=ways or WAYS,
                compiled=compile,
                rounds=rounds,
                seconds=seconds,
                steps=steps,
                sweep=sweep or (),
                memory=memory,
                grams_per_kwh=grams_per_kwh,
            )
        except BenchInterrupted as interrupted:
            found = interrupted.bench
    if not found.complete:
        _end(found)
    written = (
        (json, found.to_json),
        (markdown, found.to_markdown),
        (plot, found.to_svg),
    )
    for path, make in written:
        if path:
            _write(path, make())
    if "-" not in paths:
        show(found)


def _end(found: Any) -> None:
    """Prints what was measured before Ctrl-C, and ends the command."""
    if found.rows:
        show(found)
        click.echo("Interrupted: the figures measured so far are above.", err=True)
    else:
        click.echo("Interrupted before a step was timed.", err=True)
    raise SystemExit(_INTERRUPTED)


def _refuse_unwritable(paths: Sequence[str]) -> None:
    """Raises a `Problem` for a path that cannot be written, before anything is run."""
    if len(set(paths)) < len(paths):
        raise Problem("two outputs go to the same place; give each its own path")
    for path in paths:
        if path == "-":
            continue
        folder = Path(path).parent
        place = path if os.path.exists(path) else folder
        if not folder.is_dir():
            raise Problem(f"{path} cannot be written: there is no folder {folder}")
        if not os.access(place, os.W_OK):
            raise Problem(f"{path} cannot be written: no permission")


def _write(path: str, text: str) -> None:
    """Writes a file whole or not at all."""
    if path == "-":
        sys.stdout.write(text)
        return
    beside = Path(f"{path}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise Problem(f"{path} cannot be written: {error.strerror}") from None
