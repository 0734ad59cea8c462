"""Makes the model that a command names: `package.module:factory`."""

from __future__ import annotations

import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from autoamp_cli.problem import Problem

_SITE = f"{os.sep}site-packages{os.sep}"
_GIVES = "it must return (model, args) or (model, args, kwargs)"


@dataclass(frozen=True)
class Made:
    """What a factory returned: a model, and the arguments of one call of the model.

    Attributes:
        data: batches of arguments, which only `bench` takes; None without.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    data: Any = None


def made_by(name: str, *, data: bool = False, alone: bool = False) -> Made:
    """Calls the factory called `name`; the working directory can be imported from.

    Args:
        data: whether the factory may return batches of data as a fourth part.
        alone: whether it may return the model without arguments.

    Raises:
        Problem: there is no such factory, it raises, or it returns something else.
    """
    factory = function_of(name)
    try:
        returned = factory()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code)
        raise Problem(f"{name} raised {told(error)}") from None
    if alone and not isinstance(returned, tuple):
        returned = returned, ()
    return _checked(name, returned, (2, 3, 4) if data else (2, 3))


def function_of(name: str) -> Callable[..., Any]:
    """The function called `name`, `module:function`.

    Raises:
        Problem: there is no such function.
    """
    module, _, path = name.partition(":")
    if not module or not path:
        raise Problem(f"{name!r} is not the name of a factory: write module:factory")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = importlib.import_module(module)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code)
        raise Problem(f"{name}: {module} cannot be imported: {told(error)}") from None
    try:
        function: Any = functools.reduce(getattr, path.split("."), found)
    except AttributeError:
        raise Problem(f"{name}: module {module} has no {path}") from None
    if not callable(function):
        given = type(function).__name__
        raise Problem(f"{name} is a {given}, not a function; {_GIVES}")
    return function  # type: ignore[no-any-return]


def told(error: BaseException) -> str:
    """An error on one line, with the user's innermost line that raised it."""
    from autoamp.messages import printable_line

    text = printable_line(f"{type(error).__name__}: {error}", 1000)
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "importlib" not in frame.filename and frame.filename != __file__
    ]
    if not frames or isinstance(error, SyntaxError):
        return text
    last = next((f for f in reversed(frames) if _SITE not in f.filename), frames[-1])
    return f"{text} ({last.filename}:{last.lineno}: {last.line})"


def _checked(name: str, returned: Any, lengths: tuple[int, ...]) -> Made:
    import torch

    if not isinstance(returned, tuple) or len(returned) not in lengths:
        given = type(returned).__name__
        if isinstance(returned, tuple):
            given = f"tuple of {len(returned)}"
        raise Problem(f"{name} returned a {given}; {_GIVES}")
    made = Made(*returned)
    parts: tuple[tuple[str, type, str], ...] = (
        ("model", torch.nn.Module, "a torch.nn.Module"),
        ("args", tuple, "a tuple of the arguments of a call"),
        ("kwargs", dict, "a dict of the keyword arguments of a call"),
    )
    for part, kind, must in parts:
        value = getattr(made, part)
        if not isinstance(value, kind):
            given = type(value).__name__
            raise Problem(f"{name} returned a {given} as {part}, which must be {must}")
    if wrong := next((key for key in made.kwargs if not isinstance(key, str)), None):
        raise Problem(f"{name} returned kwargs with the key {wrong!r}, no string")
    return made
