"""Reads and checks the environment variables, and makes options of them."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoamp.auto.report_dir import written_to
from autoamp.dtypes import LOW_DTYPES, parse_low_dtype
from autoamp.errors import AutoampError, OptionError, RulesError
from autoamp.messages import printable_line
from autoamp.passes.ops import parse_op_name
from autoamp.passes.options import BACKENDS, PLACEMENTS
from autoamp.passes.rules import Rules
from autoamp.removed import VARIABLES as REMOVED
from autoamp.training.options import MASTERS, WEIGHT_COPIES, Options
from autoamp.training.scale import LOSS_SCALES, StaticLossScale

ENABLE = "AUTOAMP_ENABLE"
_ON, _OFF = ("1", "true", "on"), ("0", "false", "off")
"""The same values as in `autoamp_autoload`, which runs before this package does."""

REPORT_DIR = "AUTOAMP_REPORT_DIR"
_CACHE_DIR = "AUTOAMP_CACHE_DIR"  # read by `passes/speeds/store.py`
HOT = "AUTOAMP_HOT"
_PREFIX = "AUTOAMP_"
_LISTS = ("allow", "deny", "infer", "clear")
_OLD_LISTS = {"WHITE": "ALLOW", "GRAY": "INFER", "GREY": "INFER", "BLACK": "DENY"}
"""TensorFlow's names of its lists before 2.4, each to the name since."""

_LEVEL, _RULES = "AUTOAMP_LEVEL", "AUTOAMP_RULES"
_GIVE_A_FOLDER = "give a directory that can be written"
_SHOWN, _TOLD = 100, 1000
"""The most characters of a value, and of its problem, in a message."""

_Given = Mapping[str, str]
_Parse = Callable[[str, Options, _Given], dict[str, Any]]
"""A function that gives the options which a variable's value stands for.

Its arguments are the value, the options from the variables read before, and all
variables."""


@dataclass(frozen=True)
class Settings:
    """The settings of the automatic mode.

    Attributes:
        options: the options of `convert`.
        report_dir: the directory for graphs and reports; None writes none.
        hot: whether models are captured only when they are hot, and not at their first
            call.
    """

    options: Options
    report_dir: Path | None = None
    hot: bool = True


def read(environ: Mapping[str, str]) -> Settings:
    """The settings in `environ`; variables that are unset or empty have no effect.

    Raises:
        OptionError: a value is unusable; the message names the variable, the value and
            the valid values.
    """
    given = {k: v.strip() for k, v in environ.items() if k.startswith(_PREFIX)}
    options, problems = Options(by_variables=True), {}
    for name, parse in _VARIABLES.items():
        value = given.get(name)
        # An unusable rules file is told once, and not again by each list that needs it.
        if not value or (name in _READ_RULES and _RULES in problems):
            continue
        try:
            changes = parse(value, options, given)
            options = dataclasses.replace(options, **changes)
        except (AutoampError, OSError, ValueError) as error:
            problems[name] = str(error)
    folder, path = given.get(REPORT_DIR), None
    if folder:
        try:
            path = written_to(folder)
        except (OSError, RuntimeError, ValueError) as error:
            problems[REPORT_DIR] = f"{error}; {_GIVE_A_FOLDER}"
    hot = given.get(HOT, "") or _ON[0]
    if hot.lower() not in (*_ON, *_OFF):
        problems[HOT] = f"give one of {', '.join((*_ON, *_OFF))}"
    if problems:
        no_effect = remarks(environ)
        room = _TOLD // (len(problems) + len(no_effect))
        unusable = [
            _told(name, given[name], why, room) for name, why in problems.items()
        ]
        sentences = [*unusable, *(printable_line(each, room) for each in no_effect)]
        raise OptionError("; ".join(sentences))
    return Settings(options, path, hot.lower() in _ON)


def _told(name: str, value: str, problem: str, room: int = _TOLD) -> str:
    """A one-line message: values, and paths in `problem`, may hold anything."""
    shown = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
    return f"{name}={shown!r}: {printable_line(problem, room)}"


def remarks(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each variable that has no effect."""
    known = sorted({ENABLE, REPORT_DIR, HOT, _CACHE_DIR, *_VARIABLES})
    found = []
    enable = environ.get(ENABLE, "")
    if enable.strip().lower() not in ("", *_ON, *_OFF):
        valid = ", ".join((*_ON, *_OFF))
        found.append(_told(ENABLE, enable, f"give one of {valid}"))
    for name in sorted(environ):
        if name in REMOVED:
            found.append(f"{name} was removed: {REMOVED[name]}")
        elif f"{name}_".startswith(_PREFIX) and name not in known:
            shown = printable_line(name, _SHOWN)
            found.append(f"{shown} is no variable of autoamp; {_hint(shown, known)}")
    return found


def _hint(name: str, known: list[str]) -> str:
    """A hint at the variable to write instead of an unknown one."""
    if name == _LEVEL:
        return (
            "docs/automatic-mode.md lists what to write for each of TensorFlow's "
            "levels, such as AUTOAMP_PLACEMENT=forced for TENSOR_CORES_ONLY"
        )
    meant = ENABLE if f"{name}_" == _PREFIX else name.upper()
    for old, new in _OLD_LISTS.items():
        meant = meant.replace(f"{old}LIST", f"{new}LIST")
    close = difflib.get_close_matches(meant, known, 1) or known
    return f"did you mean {', '.join(close)}?"


def _precision(value: str, *_: Any) -> dict[str, Any]:
    if value.lower() != "auto" and parse_low_dtype(value) is None:
        raise OptionError(f"give one of auto, {', '.join(LOW_DTYPES)}")
    return {"precision": value.lower()}


def _rules(value: str, *_: Any) -> dict[str, Any]:
    return {"rules": value}


def _keep(value: str, *_: Any) -> dict[str, Any]:
    return {"keep": _names(value)}


def _loss_scale(value: str, *_: Any) -> dict[str, Any]:
    word = value.lower()
    if word in LOSS_SCALES:
        return {"loss_scale": word}
    try:
        scale = float(word)
        StaticLossScale(scale)
    except (AutoampError, ValueError):
        raise OptionError(
            "give auto, dynamic, off or a positive finite number"
        ) from None
    return {"loss_scale": scale}


def _word(option: str, valid: tuple[str, ...]) -> _Parse:
    def parse(value: str, *_: Any) -> dict[str, Any]:
        if value.lower() not in valid:
            raise OptionError(f"give one of {', '.join(valid)}")
        return {option: value.lower()}

    return parse


def _switch(option: str) -> _Parse:
    def parse(value: str, *_: Any) -> dict[str, Any]:
        if value.lower() not in (*_ON, *_OFF):
            raise OptionError(f"give one of {', '.join((*_ON, *_OFF))}")
        return {option: value.lower() in _ON}

    return parse


def _unfused(value: str, options: Options, *_: Any) -> dict[str, Any]:
    return {"fuse": options.without_kernels(*_names(value)).fuse}


def _add(category: str) -> _Parse:
    def parse(value: str, _: Options, given: _Given) -> dict[str, Any]:
        """As in TensorFlow, ops that are both added and removed are not added."""
        kept = _kept(category, value, given)
        for other in _LISTS[: _LISTS.index(category)]:
            there = _kept(other, given.get(_variable(other, "ADD"), ""), given)
            for op in map(parse_op_name, kept):
                if op in map(parse_op_name, there):
                    raise OptionError(
                        f"{op} is in two lists, {_variable(other, 'ADD')} and "
                        f"{_variable(category, 'ADD')}; take it out of one of them"
                    )
        return {category: kept}

    return parse


def _kept(category: str, added: str, given: _Given) -> tuple[str, ...]:
    """The ops that are added to a list and not removed from it."""
    removed = _names(given.get(_variable(category, "REMOVE"), ""))
    return tuple(n for n in _names(added) if not any(_covers(r, n) for r in removed))


def _covers(removed: str, added: str) -> bool:
    """Whether the op `removed` is `added`, or has `added` as an overload."""
    op, of = parse_op_name(removed), parse_op_name(added)
    return of == op or of.startswith(f"{op}.")


def _remove(category: str) -> _Parse:
    def parse(value: str, options: Options, given: _Given) -> dict[str, Any]:
        """An op counts as listed if it is listed for either precision."""
        tables = _rules_in_force(options)
        added = _names(given.get(_variable(category, "ADD"), ""))
        for name in _names(value):
            listed = any(table.lists(category, name) for table in tables)
            if listed or any(_covers(name, other) for other in added):
                continue
            there = [c for c in _LISTS if any(t.lists(c, name) for t in tables)]
            lists = " and ".join(f"the {c} list" for c in there) or "no list"
            raise OptionError(f"{name} is not in the {category} list; it is in {lists}")
        taken = ((category, name) for name in _names(value))
        return {"unlist": (*options.unlist, *taken)}

    return parse


def _variable(category: str, change: str) -> str:
    return f"{_PREFIX}{category.upper()}LIST_{change}"


def _rules_in_force(options: Options) -> list[Rules]:
    """The rules for each precision that may be chosen.

    A precision for which the rules file is unusable is left out.
    """
    chosen = parse_low_dtype(options.precision)
    found = []
    for low in [*LOW_DTYPES.values()] if chosen is None else [chosen]:
        with contextlib.suppress(RulesError):
            found.append(options.resolve_rules(low))
    return found


def _names(value: str) -> tuple[str, ...]:
    return tuple(name for name in map(str.strip, value.split(",")) if name)


def writable(value: str) -> Path:
    """The directory of `enable(report_dir=value)`, created if it is missing.

    Raises:
        OptionError: the directory cannot be written to.
    """
    try:
        return written_to(value)
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"{error}; {_GIVE_A_FOLDER}"
        raise OptionError(_told("report_dir", value, problem)) from None


_VARIABLES: dict[str, _Parse] = {
    "AUTOAMP_PRECISION": _precision,
    _RULES: _rules,
    **{_variable(c, "REMOVE"): _remove(c) for c in _LISTS},
    **{_variable(c, "ADD"): _add(c) for c in _LISTS},
    "AUTOAMP_KEEP": _keep,
    "AUTOAMP_LOSS_SCALE": _loss_scale,
    "AUTOAMP_BACKEND": _word("backend", BACKENDS),
    "AUTOAMP_PLACEMENT": _word("placement", PLACEMENTS),
    "AUTOAMP_DO_NO_HARM": _switch("do_no_harm"),
    "AUTOAMP_STRICT": _switch("strict"),
    "AUTOAMP_GUARD": _switch("guard"),
    "AUTOAMP_FUSE": _switch("fuse"),
    "AUTOAMP_UNFUSED": _unfused,
    "AUTOAMP_CALIBRATE": _switch("calibrate"),
    "AUTOAMP_WEIGHT_COPIES": _word("weight_copies", WEIGHT_COPIES),
    "AUTOAMP_MASTERS": _word("masters", MASTERS),
    "AUTOAMP_EXACT_CASTS": _switch("exact_casts"),
}
"""The variables in reading order: the precision comes before the lists, whose check
needs it."""

_READ_RULES = frozenset(_variable(category, "REMOVE") for category in _LISTS)
"""Variables that cannot be checked if the rules file cannot be read."""
