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

_MEASURED = ("rounds", "seconds", "steps")
"""The options that go to the measurement as they are."""


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
@click.option("--markdown", type=PATH, help="Write the table as markdown.")
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
      autoamp bench models.resnet:example --inference --batch 64
      autoamp bench transformers:gpt2 --sequence 128 --generate 32 --json bench.json
    """
    if inference and generate:
        raise click.UsageError("--inference and --generate exclude each other")
    refuse_unwritable(json_to, markdown)
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
            result = bench_model(
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
            result = interrupted.bench
    if not result.complete:
        if result.rows:
            show(result)
            click.echo("Interrupted: the figures measured so far are above.", err=True)
        else:
            click.echo("Interrupted before a step was timed.", err=True)
        raise SystemExit(INTERRUPTED)
    written = {
        json_to: result.to_json,
        markdown: result.to_markdown,
    }
    for path, make in written.items():
        if path:
            write(path, make())
    if "-" not in written:
        show(result)
