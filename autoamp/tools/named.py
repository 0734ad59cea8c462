"""The model that a name stands for: a factory's, or one of transformers."""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import textwrap
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from autoamp.errors import OptionError
from autoamp.messages import error_line
from autoamp.tools.named_transformers import named_model, names_a_model

_SITE = f"{os.sep}site-packages{os.sep}"
_OURS = str(Path(__file__).resolve().parents[1])
"""The folder of the package, and with letters after it that of the commands."""

_OF_A_CALL = (RuntimeError, TypeError, ValueError, LookupError)
"""The errors that wrong arguments of a call lead to."""

_GIVES = "it must return (model, args) or (model, args, kwargs)"
_NAMES = (
    "write module:factory, file.py:factory, transformers:gpt2, "
    "transformers:LlamaConfig(...) or the path of a config.json"
)


@dataclass(frozen=True)
class Made:
    """A model, and the arguments of one call of the model.

    Attributes:
        data: batches of arguments, which only `bench` takes; None without.
    """

    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    data: Any = None


def made_by(
    name: str,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    trains: bool = True,
    meta: bool = False,
    caches: bool = True,
    room: int = 0,
    data: bool = False,
) -> Made:
    """The model called `name`, and a call of it.

    Args:
        name: "package.module:factory" or "file.py:factory", where the function
            `factory()` returns `(model, args)` or `(model, args, kwargs)`; a model of
            transformers, "transformers:gpt2" or "transformers:LlamaConfig(a=1)"; or the
            path of its config.json.  The working directory can be imported from.
        batch, sequence: samples, and tokens of a sample, of a model of transformers; by
            default 1, and as many as the model takes, at most 1,024.
        trains: whether a model of transformers is in training mode and gets labels.
        meta: whether a model of transformers is made on the meta device, without data.
            Otherwise it has random weights, on the GPU if there is one.
        caches: whether a model of transformers that generates returns its cache, which
            no exported program can hold.
        room: tokens that are generated after those of the call.
        data: whether a factory may return batches of data as a fourth part.

    Raises:
        OptionError: no model has that name, its factory raises or returns something
            else, or a number cannot be used.
    """
    refuse_below_one(batch=batch, sequence=sequence)
    if names_a_model(name):
        made: tuple[Any, Any] = named_model(
            name,
            batch=batch or 1,
            sequence=sequence,
            trains=trains,
            meta=meta,
            room=room,
        )
        model, (args, kwargs) = made
        if not caches:
            model.config.use_cache = False
        return Made(model, tuple(args), dict(kwargs))
    if batch or sequence:
        raise OptionError(
            f"{name} makes its own arguments: batch and sequence are for models of "
            "transformers"
        )
    factory = function_of(name)
    try:
        returned = factory()
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code)
        raise OptionError(f"{name} raised {told(error)}") from None
    return _checked(name, returned, (2, 3, 4) if data else (2, 3))


def given(
    question: str,
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    **how: Any,
) -> Made:
    """The model and the call of a question: those given, or those of a name.

    Args:
        model: a module, or a name as for `made_by`.
        kwargs: the keyword arguments of the call; with a name `batch` and `sequence`.
        **how: what `made_by` takes beside them.

    Raises:
        OptionError: as `made_by`, or there are arguments beside a name.
    """
    if not isinstance(model, str):
        return Made(model, tuple(args), dict(kwargs))
    sizes = {key: kwargs[key] for key in ("batch", "sequence") if key in kwargs}
    if args or kwargs.keys() - sizes:
        raise OptionError(
            f"{question}() makes the arguments of a named model itself; give none but "
            "batch and sequence"
        )
    return made_by(model, **sizes, **how)


def refuse_below_one(**sizes: int | None) -> None:
    """Refuses sizes below 1.

    Raises:
        OptionError: a size is below 1.
    """
    for option, value in sizes.items():
        if value is not None and value < 1:
            raise OptionError(f"{option}={value}: give a number above 0")


# -- factories -------------------------------------------------------------------------


def function_of(name: str) -> Callable[..., Any]:
    """The function called `name`: "module:function" or "file.py:function".

    Raises:
        OptionError: there is no such function; the nearest name is told.
    """
    place, _, path = name.rpartition(":")
    if not place or not path:
        raise OptionError(f"{name!r} names no model: {_nearest_form(name)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        module = _imported(place)
    except OptionError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 (a user's code)
        raise OptionError(
            f"{name}: {place} cannot be imported: {told(error)}"
        ) from None
    try:
        function: Any = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        callables = [key for key, value in vars(module).items() if callable(value)]
        kind = "file" if place.endswith(".py") else "module"
        raise OptionError(
            f"{name}: {kind} {place} has no {path}{_meant(path, callables)}"
        ) from None
    if not callable(function):
        type_name = type(function).__name__
        raise OptionError(f"{name} is a {type_name}, not a function; {_GIVES}")
    return function  # type: ignore[no-any-return]


def _nearest_form(name: str) -> str:
    """The way to write a name that has no colon."""
    if name.endswith(".py"):
        return f"write the function too, as {name}:factory"
    library = sys.modules.get("transformers")
    if library is None and importlib.util.find_spec("transformers") is not None:
        library = importlib.import_module("transformers")
    if library is not None and name in library.CONFIG_MAPPING:
        return f"did you mean transformers:{name}?"
    return _NAMES


def _meant(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _imported(place: str) -> ModuleType:
    """The module of a dotted name, or of the path of a file."""
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    if not path.is_file():
        there = [each.name for each in path.parent.glob("*.py")]
        raise OptionError(f"there is no file {place}{_meant(path.name, there)}")
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` does
    # A file may have the name of a module that is there: its own comes beside it.
    name = name if loaded is None else f"{name}_of_{abs(hash(str(path)))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # noqa: PT018 (both or none)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(name: str, returned: Any, lengths: tuple[int, ...]) -> Made:
    if not isinstance(returned, tuple) or len(returned) not in lengths:
        given = type(returned).__name__
        if isinstance(returned, tuple):
            given = f"tuple of {len(returned)}"
        raise OptionError(f"{name} returned a {given}; {_GIVES}")
    model_and_call = Made(*returned)
    parts: tuple[tuple[str, type, str], ...] = (
        ("model", nn.Module, "a torch.nn.Module"),
        ("args", tuple, "a tuple of the arguments of a call"),
        ("kwargs", dict, "a dict of the keyword arguments of a call"),
    )
    for part, kind, must in parts:
        value = getattr(model_and_call, part)
        if not isinstance(value, kind):
            given = type(value).__name__
            raise OptionError(
                f"{name} returned a {given} as {part}, which must be {must}"
            )
    if wrong := next(
        (key for key in model_and_call.kwargs if not isinstance(key, str)), None
    ):
        raise OptionError(f"{name} returned kwargs with the key {wrong!r}, no string")
    return model_and_call


# -- the line of a user that an error comes from ---------------------------------------


def told(error: BaseException, name: str = "") -> str:
    """An error on one line, with the line of the user's that led to it.

    Args:
        name: as for `place_of`.
    """
    text = error_line(error, 1000)
    place = "" if isinstance(error, SyntaxError) else place_of(error, name)
    return f"{text} ({place})" if place else text


def place_of(error: BaseException, name: str = "") -> str:
    """The innermost line of the user's that led to an error: `net.py:3: x = f(x)`.

    Args:
        name: the name of the model that was called.  Where no line of the user's was
            running, such as in a bare `torch.nn.Sequential`, the line of its factory
            that returns the arguments stands for it.

    Returns:
        "" where there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    others = (sys.base_prefix, _OURS, "<")
    theirs = [
        frame
        for frame in frames
        if _SITE not in frame.filename and not frame.filename.startswith(others)
    ]
    if theirs:
        last = theirs[-1]
        return f"{last.filename}:{last.lineno}: {last.line}"
    is_of_call = isinstance(error, _OF_A_CALL) and name and not names_a_model(name)
    return _returning(name) if is_of_call else ""


def _returning(name: str) -> str:
    """The last line of a factory that returns something: `models.py:3: return ...`."""
    try:
        function = inspect.unwrap(function_of(name))
        file = inspect.getsourcefile(function) or ""
        source, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(source)))
    except (OptionError, OSError, TypeError, SyntaxError):
        return ""
    lines = [each.lineno for each in ast.walk(tree) if isinstance(each, ast.Return)]
    line = first + max(lines, default=1) - 1
    return f"{file}:{line}: {linecache.getline(file, line).strip()}"
