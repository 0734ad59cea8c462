"""The environment variables, checked, as options."""

from __future__ import annotations

import contextlib
import difflib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp.dtypes import LOW_DTYPES, parse_low_dtype
from autoamp.errors import AutoampError, OptionError, RulesError
from autoamp.loss_scale import StaticLossScale
from autoamp.options import BACKENDS, Options
from autoamp.plain import plain_line
from autoamp.rules import Rules
from autoamp_autoload import OFF as _OFF
from autoamp_autoload import ON as _ON
from autoamp_autoload import VARIABLE as ENABLE

REPORT_DIR = "AUTOAMP_REPORT_DIR"
_PREFIX = "AUTOAMP_"
_LISTS = ("allow", "deny", "infer", "clear")
_SHOWN, _TOLD = 100, 1000
"""Characters of a value, and of what is wrong with it, that a message holds."""


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
                raise OptionError(_told(name, value, str(error))) from None
    place = given.get(REPORT_DIR)
    return Settings(options, writable(place) if place else None)


def _told(name: str, value: str, problem: str) -> str:
    """One line: values, and the paths in messages, may hold anything, at any length."""
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    return f"{name}={shown!r}: {plain_line(problem, _TOLD)}"


def unknown(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that looks like ours and has no effect."""
    known = sorted({ENABLE, REPORT_DIR, *_VARIABLES})
    found = []
    enable = environ.get(ENABLE, "")
    if enable.strip().lower() not in ("", *_ON, *_OFF):
        valid = ", ".join((*_ON, *_OFF))
        found.append(_told(ENABLE, enable, f"give one of {valid}"))
    for name in sorted(environ):
        if name.startswith(_PREFIX) and name not in known:
            shown = plain_line(name, _SHOWN)
            close = difflib.get_close_matches(shown, known, 1) or known
            found.append(
                f"{shown} is no variable of autoamp; did you mean {', '.join(close)}?"
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
        scale = float(word)
        StaticLossScale(scale)
    except (AutoampError, ValueError):
        raise OptionError(
            "give auto, dynamic, off or a positive finite number"
        ) from None
    return {"loss_scale": scale}


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
        tables = _rules_in_force(options)
        for name in _names(value):
            there = [c for c in _LISTS if any(t.lists(c, name) for t in tables)]
            if category not in there:
                lists = " and ".join(f"the {c} list" for c in there) or "no list"
                raise OptionError(
                    f"{name} is not in the {category} list; it is in {lists}"
                )
        taken = ((category, name) for name in _names(value))
        return {"unlist": (*options.unlist, *taken)}

    return parse


def _rules_in_force(options: Options) -> list[Rules]:
    """For each precision that may be chosen; a rules file may be for one of them."""
    chosen = parse_low_dtype(options.precision)
    found = []
    for low in [*LOW_DTYPES.values()] if chosen is None else [chosen]:
        with contextlib.suppress(RulesError):
            found.append(options.resolve_rules(low))
    return found


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for name in map(str.strip, value.split(",")) if name)


def writable(value: str) -> Path:
    """The report directory, made if need be.

    Raises:
        OptionError: it cannot be written to.
    """
    try:
        path = Path(value).expanduser()  # a RuntimeError where there is no such home
        path.mkdir(parents=True, exist_ok=True)
        # Asked for permission, root is always told yes: also in /proc.
        with tempfile.TemporaryFile(dir=path):
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"{error}; give a directory that can be written"
        raise OptionError(_told(REPORT_DIR, value, problem)) from None


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
