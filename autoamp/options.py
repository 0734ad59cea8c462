"""The options of `convert` and `rewrite`, in one frozen object that checks them."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, UNSCALED, parse_low_dtype, short_name
from autoamp.errors import OptionError, RulesError
from autoamp.kernels.table import KERNEL_NAMES
from autoamp.messages import advice, log_once
from autoamp.rules import Category, Rules
from autoamp.rules.files import COMPLETE, TENSORFLOW
from autoamp.saved.document import SavedReport
from autoamp.saved.load import load
from autoamp.training.scale import LOSS_SCALES, resolve_loss_scale

logger = logging.getLogger(__name__)

PLACEMENTS = ("optimal", "tensorflow", "promote", "forced")
OBJECTIVES = ("time", "memory")
BACKENDS = ("eager", "inductor")
WEIGHT_COPIES = ("kept", "every call")


@dataclass(frozen=True)
class Options:
    """The options a user chose, with the names and defaults of `autoamp.convert`.

    Attributes:
        lock: the report that placements must match; a path is read at once.
        fuse: whether kernels replace chains of calls.
        unfused: the names of kernels to switch off.
        exact_casts: whether the kernels of inductor round at each cast.
        calibrate: whether prices are those of speeds measured on this machine.
        record: the folder of the flight recorder, or None.
        unlist: (category, op) pairs to take out of the rules.  Only the environment
            variables of the automatic mode set this field; a caller cannot.
        own_keep: (module path, reason) pairs that the model itself keeps in fp32.  Only
            the model sets this field.
        chosen: the placement that a budget for error has led to.  Only `budget=` sets
            this field.
        by_variables: whether environment variables gave the options, so that messages
            name variables.  Only the automatic mode sets this field.
        unmet: the patterns of `keep` that have matched no model yet, if the options are
            for all models of a process.  Only `enable` sets this field.

    Raises:
        OptionError: a value is unusable; the message lists the valid values.
        LossScaleError: `loss_scale` is unusable.
        RulesError: `rules` or an op name is unusable.
    """

    precision: str | torch.dtype = "auto"
    rules: Rules | str | None = None
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    infer: Sequence[str] = ()
    clear: Sequence[str] = ()
    keep: Sequence[str] = ()
    loss_scale: Any = "auto"
    backend: str | Callable[..., Any] = "eager"
    placement: str = "optimal"
    objective: str = "time"
    do_no_harm: bool = True
    strict: bool = False
    weight_copies: str = "kept"
    lock: SavedReport | str | os.PathLike[str] | None = None
    heal: bool = False
    guard: bool = True
    fuse: bool = True
    unfused: Sequence[str] = ()
    exact_casts: bool = False
    calibrate: bool = True
    record: str | os.PathLike[str] | None = None
    unlist: tuple[tuple[str, str], ...] = ()
    own_keep: tuple[tuple[str, str], ...] = ()
    chosen: Any = None
    by_variables: bool = dataclasses.field(default=False, compare=False)
    unmet: set[str] | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("allow", "deny", "infer", "clear", "keep"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        if self.precision != "auto" and parse_low_dtype(self.precision) is None:
            raise OptionError(
                f"precision={self.precision!r} is not a low precision: give 'auto', "
                f"{', '.join(map(repr, LOW_DTYPES))} or their torch dtypes"
            )
        _choice("placement", self.placement, PLACEMENTS)
        _choice("objective", self.objective, OBJECTIVES)
        _choice("weight_copies", self.weight_copies, WEIGHT_COPIES)
        if not callable(self.backend):
            _choice("backend", self.backend, BACKENDS, "or any Dynamo backend callable")
        switches = ("do_no_harm", "strict", "heal", "guard", "fuse", "exact_casts")
        for name in (*switches, "calibrate"):
            if not isinstance(getattr(self, name), bool):
                message = f"{name}={getattr(self, name)!r} is not True or False"
                raise OptionError(message)
        object.__setattr__(self, "unfused", _kernels(self.unfused))
        self._check_exact_casts()
        if not (isinstance(self.loss_scale, str) and self.loss_scale in LOSS_SCALES):
            resolve_loss_scale(self.loss_scale, UNSCALED)  # any dtype will do
        self._check_rules()
        object.__setattr__(self, "lock", _report(self.lock))
        if self.record is not None and not isinstance(self.record, str | os.PathLike):
            raise OptionError(f"record={self.record!r} is not the path of a folder")

    def _check_rules(self) -> None:
        """Checks the rules at once, and not only when a model is captured.

        Under precision "auto" it is enough that the rules are valid for one low dtype,
        because a rules file may be written for one dtype.

        Raises:
            RulesError, OptionError: the rules are unusable.
        """
        if self.rules is None and not (
            self.allow or self.deny or self.infer or self.clear or self.unlist
        ):
            return  # the rules we ship
        low = parse_low_dtype(self.precision)
        errors = []
        for dtype in LOW_DTYPES.values() if low is None else (low,):
            try:
                rules = self.resolve_rules(dtype)
            except RulesError as error:
                errors.append(error)
                continue
            if isinstance(self.rules, Rules):
                _check_whole(rules, Rules.default(dtype), self.rules.name)
        if len(errors) == (len(LOW_DTYPES) if low is None else 1):
            raise errors[-1]

    def _check_exact_casts(self) -> None:
        """Refuses `exact_casts` where the back end cannot be told to round.

        Raises:
            OptionError: inductor does not compile the graphs, or cannot round.
        """
        if not self.exact_casts or self.backend == "eager":
            return  # a graph that runs as it is rounds at each cast
        if not compat.is_inductor(self.backend):
            raise OptionError(
                f"exact_casts=True is for backend='inductor', which can be told to "
                f"round at each cast; backend={self.backend!r} cannot"
            )
        if not compat.can_round_at_casts():
            raise OptionError(
                "exact_casts=True needs a torch whose inductor can round at each cast "
                "(torch._inductor.config.emulate_precision_casts)"
            )

    def compiled_by(self, backend: Callable[..., Any]) -> Options:
        """The options for a compilation of the user's own, by another back end."""
        changes: dict[str, Any] = {"backend": backend}
        if self.exact_casts and not compat.is_inductor(backend):
            log_once(
                logger,
                logging.WARNING,
                f"autoamp: {self.advice('exact_casts', True)} is for inductor; another "
                f"compiler ({backend!r}) rounds as it likes",
            )
            changes["exact_casts"] = False
        return self.replace(**changes)

    def advice(self, option: str, value: object) -> str:
        """The text that sets `option` to `value`: a keyword or a variable."""
        return advice(option, value, by_variables=self.by_variables)

    @property
    def locked(self) -> SavedReport | None:
        """The report that placements must match, or None."""
        return self.lock if isinstance(self.lock, SavedReport) else None

    @property
    def kernels_off(self) -> tuple[str, ...]:
        """The names of the kernels that are switched off.

        All kernels are off where TensorFlow's lists decide, since TensorFlow's pass
        replaces nothing.
        """
        off = not self.fuse or self.placement == "tensorflow"
        return KERNEL_NAMES if off else tuple(self.unfused)

    def replace(self, **changes: Any) -> Options:
        """A copy with some options changed, checked like a new one.

        Raises:
            OptionError: there is no option of that name, or its value is unusable.
        """
        for name in changes:
            if name not in OPTION_NAMES:
                there = ", ".join(sorted(OPTION_NAMES))
                raise OptionError(f"unknown option {name!r}; the options are {there}")
        return dataclasses.replace(self, **changes)

    @property
    def kept(self) -> dict[str, str]:
        """The patterns of modules that stay fp32, each to the reason."""
        given = {each: f"kept in fp32 by keep={each!r}" for each in self.keep}
        return {**dict(self.own_keep), **given}

    @property
    def is_tensorflows(self) -> bool:
        """Whether placement and lists are TensorFlow's, apart from the user's rules."""
        name = self.rules.name if isinstance(self.rules, Rules) else str(self.rules)
        lists = name.partition(" + ")[0] in TENSORFLOW.values()
        return lists and self.placement == "tensorflow"

    def resolve_rules(self, low: torch.dtype) -> Rules:
        """The rules in force for compute dtype `low`: defaults, file, then lists."""
        rules = Rules.default(low)
        if isinstance(self.rules, Rules):
            rules = self.rules
        elif self.rules is not None:
            name = self.rules
            if name in TENSORFLOW.values():  # TensorFlow has lists for each dtype
                name = TENSORFLOW[short_name(low)]
            laid = Rules.load(name)
            rules = laid if name in COMPLETE else rules.merge(laid)
        for category, op in self.unlist:
            rules = rules.without(category, op)
        if self.allow or self.deny or self.infer or self.clear:
            rules = rules.with_lists(
                allow=self.allow, deny=self.deny, infer=self.infer, clear=self.clear
            )
        return rules


OPTION_NAMES = frozenset(f.name for f in dataclasses.fields(Options)) - {
    "unlist",
    "own_keep",
    "chosen",
    "unmet",
    "by_variables",
}
"""The options that a caller may give."""


def _check_whole(rules: Rules, builtin: Rules, name: str) -> None:
    """Refuses a `Rules` that holds only a user's changes, so that no op would run low.

    Rules that list every op that the built-in rules allow count as complete, even if
    they deny all of these ops.

    Raises:
        OptionError: the rules are not complete.
    """
    ours = set(builtin.names(Category.ALLOW))
    if ours & set(rules.names(Category.ALLOW)) or ours <= rules.table.keys():
        return
    raise OptionError(
        f"rules={name!r} is a Rules object, which is used without the built-in rules. "
        f"It lists {len(rules.table)} ops, and allows no matrix product, convolution "
        "or other op that the built-in rules allow, so that nothing would run in low "
        "precision. To change the built-in rules, give the path of the file "
        '(rules="mine.toml"), or Rules.default("bf16").merge(rules)'
    )


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        items = tuple(value)
    except TypeError:
        raise OptionError(f"{name}={value!r} is not a list of names") from None
    for item in items:
        if not isinstance(item, str):
            raise OptionError(f"{name} holds {item!r}, which is not a name")
    return items


def _kernels(value: Any) -> tuple[str, ...]:
    names = _strings("unfused", value)
    for name in names:
        (close,) = difflib.get_close_matches(name, KERNEL_NAMES, 1, 0.0)
        if isinstance(value, str):
            raise OptionError(
                f"unfused={value!r} is a string; give a list: unfused=[{close!r}]"
            )
        if name not in KERNEL_NAMES:
            raise OptionError(
                f"unfused holds {name!r}, which is no kernel; did you mean {close!r}? "
                f"The kernels are {', '.join(KERNEL_NAMES)}"
            )
    return names


def _report(value: Any) -> SavedReport | None:
    """The report that `lock` names; later changes of the file have no effect."""
    if value is None or isinstance(value, SavedReport):
        return value
    if not isinstance(value, str | os.PathLike):
        raise OptionError(f"lock={value!r} is not the path of a saved report")
    try:
        return load(value)
    except OptionError as error:
        raise OptionError(f"lock={str(value)!r}: {error}") from None


def _choice(name: str, value: Any, valid: tuple[str, ...], extra: str = "") -> None:
    if value not in valid:
        options = ", ".join(map(repr, valid)) + (f" {extra}" if extra else "")
        raise OptionError(f"{name}={value!r} is unknown; give one of {options}")
