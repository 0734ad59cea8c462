"""`autoamp bench`: times the ways to run a model, side by side."""

from __future__ import annotations

from typing import Any

import click

from autoamp_cli.asked import (
    Names,
    asking,
    convert_options,
    with_convert_options,
    with_name,
)
from autoamp_cli.commands import INTERRUPTED, command
from autoamp_cli.outputs import PATH, refuse_unwritable, show, with_json, write
from autoamp_cli.words import WAYS

_MEASURED = ("rounds", "seconds", "steps", "sweep", "memory", "grams_per_kwh")
"""The options that go to the measurement as they are."""


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


@command()
@click.option("--inference", is_flag=True, help="Time calls without a backward.")
@click.option(
    "--generate", type=click.IntRange(1), metavar="N", help="Time generating N tokens."
)
@click.option(
    "--ways", type=Names(*WAYS), metavar="W,W", help=f"{','.join(WAYS)}; default all."
)
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
@click.option(
    "--sweep",
    type=_Numbers(),
    default=(),
    metavar="B,B",
    help="Batch sizes to measure.",
)
@click.option("--memory", metavar="SIZE", help="Find the largest batch in 8GiB, ...")
@click.option(
    "--grams-per-kwh", type=click.FloatRange(0), help="Show CO2 at this rate."
)
@click.option("--markdown", type=PATH, help="Write the tables as markdown.")
@click.option("--plot", type=PATH, help="Write a bar plot of the times as SVG.")
@with_json
@with_convert_options
@with_name
def bench(
    name: str,
    *,
    inference: bool,
    generate: int | None,
    ways: tuple[str, ...] | None,
    compile: bool,  # noqa: A002 (the option's name)
    json_to: str | None,
    batch: int | None,
    sequence: int | None,
    markdown: str | None,
    plot: str | None,
    **given: Any,
) -> None:
    """Times a model in fp32, under autocast, and with autoamp, side by side.

    NAME is as for explain.  A factory may return batches of data as a fourth part, so
    that the time of loading them is measured too.  A step is a forward, a backward and
    an optimizer step, unless --inference or --generate says otherwise.  Ctrl-C prints
    the figures so far.  Exit status: 130 after Ctrl-C, 2 for bad input, else 0.

    \b
    Examples:
      autoamp bench models.resnet:example
      autoamp bench models.resnet:example --inference --sweep 1,8,64
      autoamp bench transformers:gpt2 --sequence 128 --generate 32 --json bench.json
    """
    if inference and generate:
        raise click.UsageError("--inference and --generate exclude each other")
    refuse_unwritable(json_to, markdown, plot)
    measured = {each: given.pop(each) for each in _MEASURED}
    with asking(name, "timing"):
        from autoamp.tools.bench_measure import BenchInterrupted, bench_model
        from autoamp.tools.named import made_by

        how: dict[str, Any] = {
            "trains": not (inference or generate),
            "room": generate or 0,
        }
        made = made_by(name, batch=batch, sequence=sequence, data=True, **how)
        try:
            found = bench_model(
                made.model,
                made.args,
                made.kwargs,
                options=convert_options(given),
                data=made.data,
                infer=inference,
                generate=generate or 0,
                ways=ways or WAYS,
                compiled=compile,
                **measured,
            )
        except BenchInterrupted as interrupted:
            found = interrupted.bench
    if not found.complete:
        _end(found)
    written = {
        json_to: found.to_json,
        markdown: found.to_markdown,
        plot: found.to_svg,
    }
    for path, make in written.items():
        if path:
            write(path, make())
    if "-" not in written:
        show(found)


def _end(found: Any) -> None:
    """Prints what was measured before Ctrl-C, and ends the command."""
    if found.rows:
        show(found)
        click.echo("Interrupted: the figures measured so far are above.", err=True)
    else:
        click.echo("Interrupted before a step was timed.", err=True)
    raise SystemExit(INTERRUPTED)
