"""The table of rules: loading, laying one over another, and looking ops up."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload

from autoamp.dtypes import LOW_DTYPES, parse_low_dtype
from autoamp.errors import RulesError
from autoamp.messages import FULL_WIDTH, counted, printable_line
from autoamp.passes.ops import (
    base_name,
    exists,
    is_out_variant,
    op_name,
    parse_op_name,
    split_key,
)
from autoamp.passes.rules.model import BUILTIN, FACTS, Category, Rule, builtin_path
from autoamp.passes.rules.parse import read, unknown_op
from autoamp.printed import Line, Printed, Table


@dataclass(frozen=True, repr=False)
class Rules(Printed):
    """An immutable table of op rules; `print(rules)` lists it.

    Attributes:
        name: The name of the set in reports: `fp16`, `bf16 + my_rules.toml`.
        table: Canonical op name to rule.
        dtype: The low dtype the rules were written for, or `any`.
        keep: Patterns of the module paths that stay fp32.
    """

    columns = FULL_WIDTH

    name: str
    table: Mapping[str, Rule]
    dtype: str = "any"
    keep: tuple[str, ...] = ()
    # Every node of every graph is looked up, and the table never changes.
    _found: dict[OpOverload, Rule | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        """Takes its own copy of the table, so that no one can change it later."""
        table: object = self.table
        given = table.items() if isinstance(table, Mapping) else [("table", table)]
        for op, rule in given:
            if not isinstance(rule, Rule):
                raise RulesError(
                    f"Rules({self.name!r}): {op} is {printable_line(repr(rule), 300)}, "
                    'which is no rule: Rules.load("mine.toml") reads rules, and '
                    "with_lists() of Rules, as the options allow, deny, infer and "
                    "clear, moves an op to another list"
                )
        object.__setattr__(self, "table", MappingProxyType(dict(self.table)))

    def __reduce__(self) -> tuple[type[Rules], tuple[Any, ...]]:
        """Copies and pickles by value, which a read-only mapping cannot do itself."""
        return type(self), (self.name, dict(self.table), self.dtype, self.keep)

    def __hash__(self) -> int:
        """Agrees with equality: equal tables have equal sizes."""
        return hash((self.name, self.dtype, self.keep, len(self.table)))

    def __repr__(self) -> str:
        counts = Counter(rule.category for rule in self.table.values())
        listed = ", ".join(f"{counts[each]} {each}" for each in Category)
        return f"<autoamp.Rules {self.name}: {listed}>"

    def parts(self) -> Iterator[Line | Table]:
        """The rules of each category as one table."""
        written = "" if self.dtype == "any" else f", written for {self.dtype}"
        count = counted(len(self.table), "rule")
        yield Line(f"autoamp rules {self.name}: {count}{written}", "head")
        if self.keep:
            yield Line(f"These modules stay fp32: {', '.join(self.keep)}")
        for category in Category:
            names = self.names(category)
            if names:
                title = f"{category}: {counted(len(names), 'rule')}"
                rows: list[tuple[str, str]] = []
                for rule in map(self.table.__getitem__, names):
                    rows.append((rule.op, rule.reason))
                    rows += [("", f"but {condition}") for condition in rule.when]
                yield Table(["op", "reason"], rows, numbers=2, title=title)

    @classmethod
    def default(cls, precision: str | torch.dtype) -> Rules:
        """The built-in rules for `precision`: a name such as `bf16`, or a dtype."""
        dtype = parse_low_dtype(precision)
        for name, low in LOW_DTYPES.items():
            if low is dtype:
                return _load_builtin(name)
        raise RulesError(
            f"there are no rules for precision {precision!r}; "
            f"use one of {', '.join(LOW_DTYPES)}, or their dtypes"
        )

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Rules:
        """The rules in a TOML file, or the built-in set of that name."""
        if isinstance(source, str) and source in BUILTIN:
            return _load_builtin(source)
        try:
            path = Path(source)
            there = path.is_file()
        except (TypeError, ValueError, OSError) as error:
            raise RulesError(
                f"{printable_line(repr(source), 300)} is not the path of a rules "
                f"file: {error}"
            ) from error
        if not there and len(path.parts) == 1 and not path.suffix:
            names = ", ".join(BUILTIN)
            raise RulesError(f"{source}: neither a file nor a built-in set ({names})")
        found = read(path, builtin=False)
        return cls(path.name, found.rules, found.dtype, found.keep)

    def merge(self, *others: Rules) -> Rules:
        """These rules with `others` laid over them in turn; the later rule wins.

        A rule that names an op without an overload replaces the rules of all its
        overloads. A rule keeps the replaced rule's facts about the op's kernels, unless
        it states its own, but not the replaced rule's conditions.
        """
        merged = self
        for other in others:
            clash = {merged.dtype, other.dtype} - {"any"}
            if len(clash) == 2:
                cure = 'say dtype = "any" in its [meta] if it holds for both'
                if other.name in BUILTIN:
                    cure = "give the precision that the set is for, or no rules"
                raise RulesError(
                    f"{other.name} is written for {other.dtype} but {merged.name} "
                    f"for {merged.dtype}; {cure}"
                )
            merged = Rules(
                f"{merged.name} + {other.name}",
                _lay_over(merged, other.table.values()),
                next(iter(clash), "any"),
                tuple(dict.fromkeys((*merged.keep, *other.keep))),
            )
        return merged

    def with_lists(
        self,
        allow: Iterable[str] = (),
        deny: Iterable[str] = (),
        infer: Iterable[str] = (),
        clear: Iterable[str] = (),
    ) -> Rules:
        """These rules with the named ops moved to the given categories."""
        lists = (allow, deny, infer, clear)
        moved: dict[str, Rule] = {}
        for category, names in zip(Category, lists, strict=True):
            if isinstance(names, str):
                raise RulesError(f'{category}="{names}": give a list of op names')
            for written in names:
                op = _user_op(category, written)
                if op in moved and moved[op].category is not category:
                    raise RulesError(
                        f"{op} is in two lists, {moved[op].category}= and {category}=; "
                        "take it out of one of them"
                    )
                reason = f"listed by the user: {category}={written}"
                moved[op] = Rule(op, category, reason, f"{category}=")
        return replace(self, table=_lay_over(self, moved.values())) if moved else self

    def lists(self, category: Category | str, written: str) -> bool:
        """Whether op `written`, or an overload of it, is in `category`."""
        return bool(self._listed(category, written))

    def without(self, category: Category | str, written: str) -> Rules:
        """These rules without the rules that put op `written` in `category`."""
        taken = self._listed(category, written)
        kept = {k: rule for k, rule in self.table.items() if k not in taken}
        return replace(self, table=kept) if taken else self

    def _listed(self, category: Category | str, written: str) -> list[str]:
        op = _user_op(Category(category), written)
        return [
            key
            for key, rule in self.table.items()
            if (key == op or key.startswith(f"{op}.")) and rule.category == category
        ]

    def lookup(self, target: object) -> Rule | None:
        """The rule for `target`, or None; a rule for the exact overload goes first.

        An in-place op has the rule of its plain form unless it has its own. An
        `out=` variant has no rule, and a target that is not an `OpOverload` has none.
        """
        if not isinstance(target, OpOverload):
            return None
        if target not in self._found:
            self._found[target] = self._search(target)
        return self._found[target]

    def _search(self, target: OpOverload) -> Rule | None:
        # The dtype of its result is that of the tensor given, whatever a rule says.
        if is_out_variant(target):
            return None
        overload = split_key(op_name(target))[2]
        own = base_name(target)
        # A user may list our op by its own name, which then counts.
        if own in STANDS_FOR and own not in self.table:
            op, operands = STANDS_FOR[own]
            rule = self.table.get(op)
            return None if rule is None else replace(rule, fp32_operands=operands)
        for name in _own_and_plain(own):
            for key in (f"{name}.{overload}", name):
                if key in self.table:
                    return self.table[key]
        return None

    def names(self, category: Category | str) -> tuple[str, ...]:
        """The ops of a category, sorted."""
        return tuple(sorted(k for k, r in self.table.items() if r.category == category))


STANDS_FOR: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "autoamp::from_local": ("aten::clone", ()),
    "autoamp::redistribute": ("aten::clone", ()),
    "autoamp::to_local": ("aten::clone", ()),
}
"""Ops of autoamp's that every rules file knows by the name of torch's op: that name,
and the operands of ours that stay fp32."""


def _own_and_plain(name: str) -> tuple[str, ...]:
    """The name of an op, and of its plain form if it works in place."""
    if name.endswith("_") and not name.endswith("__"):
        return name, name.removesuffix("_")
    return (name,)


def autocast_rules(device: str) -> Rules:
    """What `torch.autocast` does on a device type, op by op, whatever the dtype.

    An op that has no rule here runs in the widest dtype of its operands.  XPUs have the
    lists of CUDA, and the lists of other devices are nearer to them than to the CPU's.
    """
    return _load_builtin("torch-cpu" if device == "cpu" else "torch-cuda")


@cache
def _load_builtin(name: str) -> Rules:
    found = read(builtin_path(name), builtin=True)
    return Rules(name, found.rules, found.dtype)


def _user_op(category: Category, written: str) -> str:
    if not isinstance(written, str):
        raise RulesError(f"{category}=: {written!r} is not the name of an op")
    op = parse_op_name(written)
    if not exists(op):
        raise RulesError(f"{category}={written}: {unknown_op(op)}")
    return op


def _lay_over(below: Rules, above: Iterable[Rule]) -> dict[str, Rule]:
    table = dict(below.table)
    # Rules of whole ops first: each deletes the rules of single overloads, and must not
    # delete one that is laid over with it.
    for rule in sorted(above, key=lambda r: bool(split_key(r.op)[2])):
        namespace, name, overload = split_key(rule.op)
        base = f"{namespace}::{name}"
        replaced = below.table.get(rule.op)
        for known in _own_and_plain(base):
            replaced = replaced or below.table.get(known)
        if not overload:
            for key in [k for k in table if k.startswith(f"{base}.")]:
                replaced = replaced or table[key]
                del table[key]
        facts = [n for n in FACTS if n not in rule.stated] if replaced else []
        kept = {name: getattr(replaced, name) for name in facts}
        table[rule.op] = replace(rule, **kept)
    return table
