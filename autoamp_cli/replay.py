"""`autoamp replay`: the deadly step of a recorded training, run again and explained."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import click

from autoamp_cli.problem import Problem


@click.command()
@click.option("--rank", metavar="N", type=int, help="The rank; else who died first.")
@click.option("--step", metavar="N", type=int, help="The step; else the first death.")
@click.option("--write", metavar="FILE", help="Write the rule; rules= takes the file.")
@click.option("--model", metavar="MODULE:FACTORY", help="Run this, not the script.")
@click.option(
    "--loss", metavar="MODULE:FN", help="The loss of the output, for --model."
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.argument("folder")
@click.pass_context
def replay(
    ctx: click.Context,
    folder: str,
    *,
    rank: int | None,
    step: int | None,
    write: str | None,
    model: str | None,
    loss: str | None,
    as_json: bool,
) -> None:
    """Runs the step at which a recorded training died again, and says why it died.

    FOLDER is the folder of record=.  The training's own script is run again up to its
    first step, in which the recorded state is put in place.  Exit status: 0 if a rule
    cures it, 1 if none does, 3 if the step does not die again, 2 for bad input.

    \b
    Examples:
      autoamp replay flight --write cure.toml
      autoamp replay flight --model models.gpt:factory --loss models.gpt:loss
    """
    from autoamp.errors import AutoampError
    from autoamp.printable import printable_line
    from autoamp.replay.called import called_by
    from autoamp.replay.replay import replay as replayed
    from autoamp.replay.rerun import rerun

    if loss and not model:
        raise Problem("--loss is the loss of the model that --model makes: give both")
    target = Path(write).absolute() if write else None
    try:
        run: Any = rerun
        if model:
            run = called_by(functools.partial(_made, model), _function(loss))
        with contextlib.redirect_stdout(sys.stderr):  # what the script prints
            found = replayed(folder, rank=rank, step=step, run=run)
    except AutoampError as error:
        raise Problem(str(error)) from None
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
    else:
        for line in found.lines():
            click.echo(printable_line(line, 1000))
    if target is not None and found.rule is not None:
        try:
            target.write_text(found.toml(), encoding="utf-8")
        except OSError as error:
            raise Problem(f"{write} cannot be written: {error.strerror}") from None
    elif target is not None:
        click.echo("There is no rule to write.", err=True)
    ctx.exit(found.status)


def _made(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """What a factory gives, which may be the model alone."""
    from torch import nn

    from autoamp_cli.factory import made_by

    returned: Any = _function(name)()
    if isinstance(returned, nn.Module):
        return returned, (), {}
    made = made_by(name)
    return made.model, made.args, made.kwargs


def _function(name: str | None) -> Any:
    """The function called `module:name`; None for no name."""
    if name is None:
        return None
    module, _, path = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = functools.reduce(
            getattr, path.split("."), importlib.import_module(module)
        )
    except Exception as error:  # noqa: BLE001 (a user's code)
        raise Problem(f"{name}: {type(error).__name__}: {error}") from None
    if not callable(found):
        raise Problem(f"{name} is no function")
    return found
