"""What all commands share: -h, descriptions in full, and an end by Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any

import click

from autoamp_cli import removed

INTERRUPTED = 130
"""The exit status of a command that Ctrl-C ended: 128 and the signal's number."""


class Command(click.Command):
    """A command whose --json takes a file, or nothing."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Takes a word after --json for the argument of the command that else lacks."""
        arguments = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter:
            if "--json" not in arguments:
                raise
            ctx.params.clear()
            again = ["--json=-" if word == "--json" else word for word in arguments]
            return super().parse_args(ctx, again)
        except click.NoSuchOption as error:
            instead = removed.OPTIONS.get((self.name or "", error.option_name))
            if instead is None:
                raise
            ctx.fail(f"{error.option_name} was removed: {instead}")


class Commands(click.Group):
    """A group that lists its commands with their whole first sentence."""

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 (click's signature)
        formatter: click.HelpFormatter,
    ) -> None:
        """Writes each command beside its description, which click itself would cut."""
        whole = 10**6
        rows = [
            (name, each.get_short_help_str(whole))
            for name, each in sorted(self.commands.items())
            if not each.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Says of a command that was removed what to use instead of it."""
        if args[0] in removed.COMMANDS:
            ctx.fail(f"`{args[0]}` was removed: {removed.COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; Ctrl-C ends it with one line and status 130."""
        if ctx.parent is not None:
            return super().invoke(ctx)
        with _ended_by_ctrl_c():
            return super().invoke(ctx)


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Makes an exit with status 130 of any error after Ctrl-C.

    An import that Ctrl-C meets may raise an error of its own in the place of
    `KeyboardInterrupt`, and click would give both status 1.  torch imports numpy in C++
    and drops any error of that import, so Ctrl-C there would be lost and the command
    would go on: while torch is imported the process ends at once.
    """
    seen = threading.Event()
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        seen.set()
        if _imports_torch(frame):
            click.echo("Interrupted.", err=True)
            sys.stdout.flush()
            os._exit(INTERRUPTED)
        signal.default_int_handler(number, frame)

    listens = before is signal.default_int_handler and (
        threading.current_thread() is threading.main_thread()
    )
    if listens:
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except BaseException as error:
        if not seen.is_set() and not isinstance(error, KeyboardInterrupt):
            raise
        was_told = isinstance(error, SystemExit) and error.code == INTERRUPTED
        if not was_told:
            click.echo("Interrupted.", err=True)
        raise SystemExit(INTERRUPTED) from None
    finally:
        if listens:
            signal.signal(signal.SIGINT, before)


def _imports_torch(frame: FrameType | None) -> bool:
    """Whether `torch/__init__.py` runs in `frame` or in one of its callers."""
    while frame is not None:
        code = frame.f_code.co_name
        if code == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False


command = partial(click.command, cls=Command)
"""The decorator of every command."""
