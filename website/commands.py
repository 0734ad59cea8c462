"""From the parser of the command line to the reference of its commands, as Markdown."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import click


def commands_of(
    group: click.Group, prefix: str = "autoamp"
) -> Iterator[tuple[str, click.Command]]:
    """Each command that runs something, with the words that name it."""
    for name, command in sorted(group.commands.items()):
        words = f"{prefix} {name}"
        if isinstance(command, click.Group):
            yield from commands_of(command, words)
        else:
            yield words, command


def reference(group: click.Group) -> str:
    """A heading for each command, with its help, its usage and its options."""
    top = click.Context(group, **group.context_settings)
    return "\n\n".join(_section(words, each, top) for words, each in commands_of(group))


def _section(words: str, command: click.Command, top: click.Context) -> str:
    # A command keeps the first help option that is made of it, with its parent's names.
    context = click.Context(command, top, info_name=words)
    usage = f"{words} {' '.join(command.collect_usage_pieces(context))}"
    parts = [f"### {words}", _prose(command.help or ""), f"```\n{usage}\n```"]
    options = [p for p in command.params if isinstance(p, click.Option)]
    rows = [_row(option, context) for option in options if not option.hidden]
    if rows:
        parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _prose(text: str) -> str:
    """The help text; a paragraph that click keeps as it is becomes a code block."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        f"```\n{each.removeprefix(chr(8)).strip()}\n```"
        if each.startswith("\b")
        else each
        for each in paragraphs
    )


def _row(option: click.Option, context: click.Context) -> str:
    record = option.get_help_record(context)
    assert record is not None  # only hidden options have none
    spelling, meaning = (each.replace("|", "\\|") for each in record)
    return f"| `{spelling}` | {meaning} |"
