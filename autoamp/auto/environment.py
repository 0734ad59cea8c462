"""The environment variables, checked, as options."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp.dtypes import LOW_DTYPES, parse_low_dtype
from autoamp.errors import AutoampError, OptionError
from autoamp.options import BACKENDS, Options
from autoamp.rules import Rules

ENABLE = "AUTOAMP_ENABLE"
REPORT_DIR = "AUTOAMP_REPORT_DIR"
_PREFIX = "AUTOAMP_"
_ON, _OFF = ("1", "true", "on"), ("0", "false", "off")
_LISTS = ("allow", "deny", "infer", "clear")


@dataclass(frozen=True)
class Settings:
    """What the automatic mode was asked for.

    Attributes:
        options: those of `convert`.
        report_dir: where graphs and reports are written; None for nowhere.
    """

    options: Options
    report_dir: Path | None = None


def read(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`; variables that are unset or empty have no effect.

    Raises:
        OptionError: a value is unusable; names the variable, the value and the valid
            ones.
    """
    given = {k: v.strip() for k, v in environ.items() if k.startswith(_PREFIX)}
    options = Options()
    for name, parse in _VARIABLES.items():
        value = given.get(name)
        if value:
            try:
                options = options.replace(**parse(value, options))
            except (AutoampError, OSError, ValueError) as error:
                raise OptionError(f"{name}={value!r}: {error}") from None
    place = given.get(REPORT_DIR)
    return Settings(options, writable(place) if place else None)


def unknown(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like ours and is none."""
    known = sorted({ENABLE, REPORT_DIR, *_VARIABLES})
    found = []
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, 1) or known
            found.append(
                f"{name} is no variable of autoamp; did you mean {', '.join(close)}?"
            )
    return found


def _precision(value: str, _: Options) -> dict[str, Any]:
    if value.lower() != "auto" and parse_low_dtype(value) is None:
        raise OptionError(f"give one of auto, {', '.join(LOW_DTYPES)}")
    return {"precision": value.lower()}


def _rules(value: str, _: Options) -> dict[str, Any]:
    return {"rules": value}


def _loss_scale(value: str, _: Options) -> dict[str, Any]:
    word = value.lower()
    if word in ("auto", "dynamic", "off"):
        return {"loss_scale": word}
    try:
        return {"loss_scale": float(word)}
    except ValueError:
        raise OptionError("give auto, dynamic, off or a positive number") from None


def _backend(value: str, _: Options) -> dict[str, Any]:
    if value.lower() not in BACKENDS:
        raise OptionError(f"give one of {', '.join(BACKENDS)}")
    return {"backend": value.lower()}


def _switch(option: str) -> Callable[[str, Options], dict[str, Any]]:
    def parse(value: str, _: Options) -> dict[str, Any]:
        if value.lower() not in (*_ON, *_OFF):
            raise OptionError(f"give one of {', '.join((*_ON, *_OFF))}")
        return {option: value.lower() in _ON}

    return parse


def _add(category: str) -> Callable[[str, Options], dict[str, Any]]:
    return lambda value, _: {category: _names(value)}


def _remove(category: str) -> Callable[[str, Options], dict[str, Any]]:
    def parse(value: str, options: Options) -> dict[str, Any]:
        """An op counts as listed if it is so for either precision."""
        chosen = parse_low_dtype(options.precision)
        lows = [*LOW_DTYPES.values()] if chosen is None else [chosen]
        for name in _names(value):
            if not any(Rules.default(low).lists(category, name) for low in lows):
                raise OptionError(f"{name} is not in the {category} list")
        taken = ((category, name) for name in _names(value))
        return {"unlist": (*options.unlist, *taken)}

    return parse


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for name in map(str.strip, value.split(",")) if name)


def writable(value: str) -> Path:
    """The report directory, made if need be.

    Raises:
        OptionError: it cannot be written to.
    """
    path = Path(value).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} is not writable")
    except (OSError, ValueError) as error:
        raise OptionError(
            f"{REPORT_DIR}={value!r}: {error}; give a directory that can be written"
        ) from None
    return path.resolve()


_VARIABLES: dict[str, Callable[[str, Options], dict[str, Any]]] = {
    "AUTOAMP_PRECISION": _precision,
    "AUTOAMP_RULES": _rules,
    **{f"AUTOAMP_{c.upper()}LIST_REMOVE": _remove(c) for c in _LISTS},
    **{f"AUTOAMP_{c.upper()}LIST_ADD": _add(c) for c in _LISTS},
    "AUTOAMP_LOSS_SCALE": _loss_scale,
    "AUTOAMP_BACKEND": _backend,
    "AUTOAMP_DO_NO_HARM": _switch("do_no_harm"),
    "AUTOAMP_STRICT": _switch("strict"),
}
"""In the order they are read: lists are checked against the precision."""
