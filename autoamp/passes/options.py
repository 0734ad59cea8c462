"""The options of the passes, in one frozen object that checks them."""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, TypedDict, get_args

import torch

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, Precision, parse_low_dtype, short_name
from autoamp.errors import OptionError, RulesError
from autoamp.messages import advice, class_name, printable_line
from autoamp.passes.kernels.table import KERNEL_NAMES
from autoamp.passes.rules import Category, Rules
from autoamp.passes.rules.model import COMPLETE, TENSORFLOW
from autoamp.removed import OPTIONS as REMOVED

Placement = Literal["optimal", "tensorflow", "promote", "forced"]
Objective = Literal["time", "memory"]
Backend = Literal["eager", "inductor", "aot_eager"]

# The check of a value and the type of a value are one list.
PLACEMENTS: tuple[str, ...] = get_args(Placement)
OBJECTIVES: tuple[str, ...] = get_args(Objective)
BACKENDS: tuple[str, ...] = get_args(Backend)


class RewriteOptions(TypedDict, total=False):
    """The options that `autoamp.rewrite` takes; see `autoamp.convert`."""

    precision: Precision | torch.dtype
    rules: Rules | str | os.PathLike[str] | None
    allow: Sequence[str]
    deny: Sequence[str]
    infer: Sequence[str]
    clear: Sequence[str]
    keep: Sequence[str]
    placement: Placement
    objective: Objective
    do_no_harm: bool
    strict: bool
    fuse: bool | Mapping[str, bool]
    calibrate: bool


@dataclass(frozen=True)
class PassOptions:
    """The options of the passes, with the names and defaults of `autoamp.convert`.

    Attributes:
        fuse: whether kernels replace chains of calls; (name, False) for each kernel
            that is switched off, where only some are.
        exact_casts: whether the kernels of inductor round at each cast.
        calibrate: whether prices are those of speeds measured on this machine.
        unlist: (category, op) pairs to take out of the rules.  Only the environment
            variables of the automatic mode set this field; a caller cannot.
        own_keep: (module path, reason) pairs that the model itself keeps in fp32.  Only
            the model sets this field.
        by_variables: whether environment variables gave the options, so that messages
            name variables.  Only the automatic mode sets this field.

    Raises:
        OptionError: a value is unusable; the message lists the valid values.
        RulesError: `rules` or an op name is unusable.
    """

    precision: Precision | torch.dtype = "auto"
    rules: Rules | str | os.PathLike[str] | None = None
    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    infer: Sequence[str] = ()
    clear: Sequence[str] = ()
    keep: Sequence[str] = ()
    backend: Backend | Callable[..., Any] = "eager"
    placement: Placement = "optimal"
    objective: Objective = "time"
    do_no_harm: bool = True
    strict: bool = False
    fuse: bool | Mapping[str, bool] | tuple[tuple[str, bool], ...] = True
    exact_casts: bool = False
    calibrate: bool = True
    unlist: tuple[tuple[str, str], ...] = ()
    own_keep: tuple[tuple[str, str], ...] = ()
    # Only the words of messages depend on it, and equal options share graphs.
    by_variables: bool = dataclasses.field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("allow", "deny", "infer", "clear", "keep"):
            # The dataclass is frozen, and compares and hashes these fields: tuples.
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        object.__setattr__(self, "rules", _source(self.rules))
        if self.precision != "auto" and parse_low_dtype(self.precision) is None:
            raise OptionError(
                f"precision={self.precision!r} is not a low precision: give "
                f"{', '.join(map(repr, get_args(Precision)))} or a low torch dtype"
            )
        choice("placement", self.placement, PLACEMENTS)
        choice("objective", self.objective, OBJECTIVES)
        if not (callable(self.backend) or self._names_a_backend()):
            extra = 'or any Dynamo backend or its name in torch, except "autoamp"'
            choice("backend", self.backend, BACKENDS, extra)
        for name in ("do_no_harm", "strict", "exact_casts", "calibrate"):
            switch(name, getattr(self, name))
        object.__setattr__(self, "fuse", _kernels(self.fuse))
        self._check_exact_casts()
        self._check_rules()

    @property
    def asks_for_fp32(self) -> bool:
        """Whether the user has named modules or ops that `torch.autocast` may lower."""
        named = self.keep or self.deny or self.infer or self.clear or self.unlist
        return bool(named) or self.rules is not None

    def _names_a_backend(self) -> bool:
        """Whether torch knows another compiler than this one by the name `backend`."""
        name: object = self.backend  # torch knows more names than the type lists
        if name == "autoamp" or not isinstance(name, str):
            return False
        return name in BACKENDS or compat.named_backend(name) is not None

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

    def advice(self, option: str, value: object) -> str:
        """The text that sets `option` to `value`: a keyword or a variable."""
        return advice(option, value, by_variables=self.by_variables)

    @property
    def kernels_off(self) -> tuple[str, ...]:
        """The names of the kernels that are switched off.

        All kernels are off where TensorFlow's lists decide, since TensorFlow's pass
        replaces nothing.
        """
        if self.fuse is False or self.placement == "tensorflow":
            return KERNEL_NAMES
        return () if self.fuse is True else tuple(dict(self.fuse))

    def without_kernels(self, *names: str) -> Self:
        """A copy with some kernels switched off, beside those that are off already.

        Raises:
            OptionError: a name is no kernel.
        """
        off = dict.fromkeys((*self.kernels_off, *names), False)
        return self if self.fuse is False else self.replace(fuse=off)

    def replace(self, **changes: Any) -> Self:
        """A copy with some options changed, checked like a new one.

        Raises:
            OptionError: there is no option of that name, or its value is unusable.
        """
        # `dataclasses.replace` would raise a `TypeError` that lists no options.
        there = names_of(type(self))
        for name in changes:
            if name in REMOVED:
                raise OptionError(f"{name}= was removed: {REMOVED[name]}")
            if name not in there:
                close = difflib.get_close_matches(name, there, 1)
                meant = f"; did you mean {close[0]}?" if close else ";"
                raise OptionError(
                    f"unknown option {name!r}{meant} the options are {', '.join(there)}"
                )
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
            name = os.fspath(self.rules)
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


INTERNAL = frozenset(("unlist", "own_keep", "unmet", "by_variables"))
"""The fields that no caller may give."""


def names_of(kind: type[PassOptions]) -> list[str]:
    """The options that a caller may give, sorted."""
    return sorted({each.name for each in dataclasses.fields(kind)} - INTERNAL)


def _check_whole(rules: Rules, builtin: Rules, name: str) -> None:
    """Refuses a `Rules` that holds only a user's changes, so that no op would run low.

    Rules that list every op that the built-in rules allow count as complete, even if
    they deny all of these ops.
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


def _source(rules: Any) -> Rules | str | None:
    """The value of `rules=`, with a text in place of a path object."""
    given = os.fspath(rules) if isinstance(rules, os.PathLike) else rules
    if given is None or isinstance(given, Rules | str):
        return given
    raise OptionError(
        f"rules={printable_line(repr(rules), 300)} is a {class_name(rules)}: give the "
        f"path of a rules file, a complete set ({', '.join(COMPLETE)}) or an "
        "autoamp.Rules object"
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


def _kernels(value: Any) -> bool | tuple[tuple[str, bool], ...]:
    """The value of `fuse=`, with pairs in place of a dict, which has no hash."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, Mapping | tuple):  # a tuple is what this function made
        raise OptionError(
            f"fuse={value!r} is not True, False or a dict such as "
            f"{{{KERNEL_NAMES[0]!r}: False}}"
        )
    given = dict(value)
    for name, on in given.items():
        if name not in KERNEL_NAMES:
            # A cut-off of 0: one kernel is always the closest.
            (close,) = difflib.get_close_matches(str(name), KERNEL_NAMES, 1, 0.0)
            raise OptionError(
                f"fuse names {name!r}, which is no kernel; did you mean {close!r}? "
                f"The kernels are {', '.join(KERNEL_NAMES)}"
            )
        switch(f"fuse[{name!r}]", on)
    return tuple(sorted((name, on) for name, on in given.items() if not on)) or True


def switch(name: str, value: Any) -> None:
    """Refuses a value that is not True or False.

    Raises:
        OptionError: the value is neither.
    """
    if not isinstance(value, bool):
        raise OptionError(f"{name}={value!r} is not True or False")


def choice(name: str, value: Any, valid: tuple[str, ...], extra: str = "") -> None:
    """Refuses a value that is none of the valid ones.

    Raises:
        OptionError: it is none of them.
    """
    if value not in valid:
        options = ", ".join(map(repr, valid)) + (f" {extra}" if extra else "")
        raise OptionError(f"{name}={value!r} is unknown; give one of {options}")
