"""Log messages: texts logged once, advice on options, signs of life."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from torch.utils.weak import WeakIdKeyDictionary

_logged: dict[str, int] = {}
"""Of how many objects each text has been said."""

_said = WeakIdKeyDictionary()
"""The texts that were said of each object."""

_EACH = 4
"""For how many objects a text is logged each time."""

_LISTS = {each: f"AUTOAMP_{each.upper()}LIST_ADD" for each in ("allow", "deny")}
"""The variables that add ops to a list."""


_FLAGS = {
    "do_no_harm": "--no-do-no-harm",
    "precision": "--precision {}",
    "placement": "--placement {}",
    "rules": "--rules {}",
}
"""The flags of the commands that take options of `convert`, but for `_IN_FILE`."""

_IN_FILE = ("allow", "deny", "infer", "clear")
"""Options that a command takes in a file of rules, by --rules, as it does `keep`."""

_ON_COMMAND_LINE = ContextVar("on the command line", default=False)


@contextlib.contextmanager
def on_command_line() -> Iterator[None]:
    """A region whose texts name the flags of a command, where it has them."""
    token = _ON_COMMAND_LINE.set(True)
    try:
        yield
    finally:
        _ON_COMMAND_LINE.reset(token)


def log_once(
    logger: logging.Logger, level: int, text: str, *, of: object = None
) -> None:
    """Logs `text` at `level`, or as DEBUG if it has been logged before.

    Args:
        of: the model, or what stands for it, that the text is about. The text is then
            logged once for each model, up to four; of a thousand models of one class,
            it is logged again only for the 8th, 16th, 32nd and so on.
    """
    again = text in (_logged if of is None else _said.get(of, ()))
    if of is not None:
        _said.setdefault(of, set()).add(text)
    count = _logged[text] = _logged.get(text, 0) + (not again)
    rare = count > _EACH and count & (count - 1)
    if of is not None and count > 1:
        text = f"{text} (the same holds for {count} models so far)"
    logger.log(logging.DEBUG if again or rare else level, "%s", text)


def log_left_to_autocast(logger: logging.Logger, label: str, *, of: object) -> None:
    """Says, once for each model, that a model's precision is the script's own choice.

    Args:
        label: the class name of the model, or the name of the function.
        of: as for `log_once`.
    """
    text = (
        f"autoamp: {label} is left to the script's own autocast, which chooses the "
        "precision of each op; switch that autocast off (bf16=False, "
        'mixed_precision="no") to let autoamp choose'
    )
    log_once(logger, logging.INFO, text, of=of)


def advice(option: str, value: object, *, by_variables: bool) -> str:
    """The text that sets an option: a keyword, or an environment variable.

    Args:
        option: an option of `convert`.
        value: the value to give; a sequence of names for lists and `keep`.
        by_variables: whether environment variables gave the options, so that there may
            be no line of code that names an option.
    """
    names = [str(each) for each in value] if isinstance(value, list | tuple) else []
    listed = "[" + ", ".join(f'"{each}"' for each in names) + "]"
    if _ON_COMMAND_LINE.get():
        return _on_command_line(option, value, names, listed)
    if not by_variables:
        return f"{option}={listed if names else repr(value)}"
    if option == "keep":
        return f"AUTOAMP_RULES=FILE with keep.modules = {listed} in that file"
    if option in _LISTS:
        return f"{_LISTS[option]}={','.join(names)}"
    if names:
        return f"AUTOAMP_{option.upper()}={','.join(names)}"
    shown = int(value) if isinstance(value, bool) else value
    return f"AUTOAMP_{option.upper()}={shown}"


def _on_command_line(option: str, value: object, names: list[str], listed: str) -> str:
    """The text that sets an option of a command; for some there is none but Python."""
    if option in _FLAGS:
        return _FLAGS[option].format(value)
    if option == "keep":
        return f"--rules FILE with keep.modules = {listed} in that file"
    if option in _IN_FILE:
        each = ", ".join(f'"{name}" = "why"' for name in names)
        return f"--rules FILE with {option} = {{ {each} }} in that file"
    return f"{option}={listed if names else repr(value)} in Python"


@contextlib.contextmanager
def signs_of_life(
    say: Callable[[float], None], *, every: float = 2.0
) -> Iterator[None]:
    """Calls `say` with the seconds since the start, repeatedly, while the block runs.

    Each wait is twice as long as the wait before.

    Args:
        every: seconds until the first call.
    """
    over = threading.Event()
    start = time.monotonic()

    def watch() -> None:
        wait = every
        while not over.wait(wait):
            say(time.monotonic() - start)
            wait *= 2

    thread = threading.Thread(target=watch, name="autoamp-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
