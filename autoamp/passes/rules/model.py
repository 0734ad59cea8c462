"""The values a rules file is made of: categories, conditions and rules."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import RulesError
from autoamp.passes.ops import parse_op_name

ConditionValue = bool | int | float | str | tuple[float, float]
"""The value a condition compares with; a pair of numbers for `exponent_outside`."""


class Category(StrEnum):
    """The kinds of op; `rules/README.md` defines each kind and how to choose it."""

    ALLOW = "allow"
    DENY = "deny"
    INFER = "infer"
    CLEAR = "clear"


@dataclass(frozen=True)
class Condition:
    """A category that holds for some calls of an op only.

    Attributes:
        test: The comparison. `reduces_at_least`: every output element is made from
            `value` input elements or more. `exponent_outside`: the scalar exponent
            lies below or above the pair `value`. `argument_is`: the schema argument
            `argument` (its default, if not given) equals `value`. `device_is`: the
            op runs on a device of type `value`. `contracts`: an `einsum` sums over an
            index that two operands share, if `value` is true, or does not, if false.
        value: The value the test compares with.
        category: The category where the test holds.
        reason: Why the op is in that category.
        argument: For `argument_is`, the name of the schema argument.
    """

    test: str
    value: ConditionValue
    category: Category
    reason: str
    argument: str = ""

    def __str__(self) -> str:
        test = " ".join(filter(None, (self.test, self.argument)))
        return f"{self.category} where {test} {self.value}: {self.reason}"


@dataclass(frozen=True)
class Rule:
    """The category of one op, with its reason and facts about its kernels.

    Attributes:
        op: Canonical key: `aten::linear` (every overload) or
            `aten::sum.dim_IntList`.
        category: The category where no condition of `when` holds.
        reason: Why the op is in that category.
        origin: Where the rule came from: a file, or the name of a user's list.
        fp32_operands: Schema arguments that stay fp32 even where the op runs low.
        restores: Whether the outputs are bounded whatever the inputs, so that a cast of
            the outputs need not saturate.
        restores_given: Arguments that bound the outputs, as for `restores`, where each
            is a number within the range of the low dtype (`clamp` with both bounds).
        jumps: Whether the output jumps where the input crosses a number. Such an op
            computes in the precision in which its operands were made, so that no cast
            rounds the operands first.
        may_round: Whether the op is denied only for how it computes, so that its result
            may be rounded and does not widen the ops that read it.
        no_kernel: Device types for which torch has no kernel in the low dtype,
            forward or backward.
        when: Conditional categories; the first whose test holds wins.
        stated: The attributes that the file or list gave itself; the others are
            taken over from the rule that this one replaces.
    """

    op: str
    category: Category
    reason: str
    origin: str
    fp32_operands: tuple[str, ...] = ()
    restores: bool = False
    restores_given: tuple[str, ...] = ()
    jumps: bool = False
    may_round: bool = False
    no_kernel: tuple[str, ...] = ()
    when: tuple[Condition, ...] = ()
    stated: frozenset[str] = frozenset()


FACTS = (
    "fp32_operands",
    "restores",
    "restores_given",
    "jumps",
    "no_kernel",
)
"""Attributes that are facts about an op: a rule that replaces another keeps them."""


TENSORFLOW = {"fp16": "tensorflow", "bf16": "tensorflow-bf16"}
"""Precision to the rule set that holds TensorFlow's lists for it."""

COMPLETE = ("torch-cuda", "torch-cpu", *TENSORFLOW.values())
"""The complete rule sets, which are not laid over the built-in rules."""

BUILTIN = (*LOW_DTYPES, *COMPLETE)
"""The names of the rule sets that come with the package."""

_PACKAGE = Path(__file__).resolve().parents[2]
_CANDIDATES = (_PACKAGE / "_rules", _PACKAGE.parent / "rules")


def directory(candidates: tuple[Path, ...] = _CANDIDATES) -> Path:
    """The directory of the built-in files: in the wheel, or else in the checkout.

    A directory of another project that happens to be called `rules` lies beside the
    package in some layouts, so a candidate counts only if it has our files.
    """
    for candidate in candidates:
        if all((candidate / f"{name}.toml").is_file() for name in BUILTIN):
            return candidate
    tried = " and ".join(str(candidate) for candidate in candidates)
    raise RulesError(
        f"the built-in rules files are missing (looked in {tried}); "
        "reinstall autoamp, or give the path of a rules file"
    )


def builtin_path(name: str) -> Path:
    """The file of the built-in rule set `name`."""
    return directory() / f"{name}.toml"


def is_builtin(path: Path) -> bool:
    """Whether `path` is the file of a built-in rule set."""
    return path.resolve().parent == directory() and path.stem in BUILTIN


# Asked at every node of every graph.
@cache
def is_default(origin: str) -> bool:
    """Whether a rule's origin is a file of the built-in rules for one dtype."""
    return origin in {str(builtin_path(name)) for name in LOW_DTYPES}


@cache
def family(*names: str) -> frozenset[str]:
    """The ops of these families together, without overloads: `aten::add`.

    Raises:
        KeyError: `rules/families.toml` has no such family.
    """
    return frozenset(op for name in names for op in _families()[name])


@cache
def _families() -> dict[str, frozenset[str]]:
    text = builtin_path("families").read_text(encoding="utf-8")
    return {
        name: frozenset(map(parse_op_name, table["ops"]))
        for name, table in tomllib.loads(text).items()
    }
