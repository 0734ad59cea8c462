"""The values a rules file is made of: categories, conditions and rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ConditionValue = bool | int | float | str | tuple[float, float]
"""The value a condition compares with; a pair of numbers for `exponent_outside`."""


class Category(StrEnum):
    """The kinds of op; `rules/README.md` defines each kind and how to choose it."""

    ALLOW = "allow"
    DENY = "deny"
    INFER = "infer"
    CLEAR = "clear"


TESTS = (
    "reduces_at_least",
    "exponent_outside",
    "argument_is",
    "device_is",
    "contracts",
)
"""The tests a condition may make."""


@dataclass(frozen=True)
class Condition:
    """A category that holds for some calls of an op only.

    Attributes:
        test: One of `TESTS`. `reduces_at_least`: every output element is made from
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
