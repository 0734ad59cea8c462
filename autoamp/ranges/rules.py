"""The rules that might keep a number in its range, the narrowest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoamp import compat
from autoamp.op_names import base_name, parse_op_name
from autoamp.options import Options
from autoamp.pipeline import Rewritten
from autoamp.ranges.spot import OP, Spot, readers, spot_of
from autoamp.ranges.trail import Step
from autoamp.saying import advice

EVERYTHING = "*"
"""The pattern of `keep=` that keeps a whole model in fp32."""


@dataclass(frozen=True)
class Rule:
    """One rule, or several in one line, that options of `convert` state.

    Attributes:
        deny: ops that stay in fp32.
        keep: modules that stay in fp32.
    """

    deny: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.advice(by_variables=False)

    def advice(self, *, by_variables: bool) -> str:
        """How the rule is to be written, as keyword arguments or as variables."""
        parts = [("deny", self.deny), ("keep", self.keep)]
        given = [(name, [*names]) for name, names in parts if names]
        each = [advice(name, names, by_variables=by_variables) for name, names in given]
        return (" and " if by_variables else ", ").join(each)

    def __add__(self, other: Rule) -> Rule:
        return Rule(
            tuple(dict.fromkeys((*self.deny, *other.deny))),
            tuple(dict.fromkeys((*self.keep, *other.keep))),
        )

    def on(self, options: Options) -> Options:
        """`options` with this rule added; ops leave other lists that name them."""
        denied = set(map(parse_op_name, self.deny))

        def without(names: Sequence[str]) -> tuple[str, ...]:
            return tuple(n for n in names if parse_op_name(n) not in denied)

        return options.replace(
            deny=(*options.deny, *self.deny),
            keep=(*options.keep, *self.keep),
            allow=without(options.allow),
            infer=without(options.infer),
            clear=without(options.clear),
        )


def candidates(step: Step, records: Sequence[Rewritten]) -> list[Rule]:
    """Rules about the ops that compute with the number at `step`, the narrowest first.

    A rule is narrower the fewer low ops it puts back into fp32.
    """
    found: dict[Rule, int] = {}
    for spot in _computing(step):
        if "::" in spot.op:
            name = parse_op_name(spot.op).partition(".")[0]
            found[Rule(deny=(name,))] = _of_op(name, records)
        for path in spot.modules:
            found[Rule(keep=(path,))] = _of_module(path, records)
    found = {rule: count for rule, count in found.items() if count}
    return sorted(found, key=lambda rule: (found[rule], bool(rule.keep)))


def _computing(step: Step) -> list[Spot]:
    """The ops that compute in low precision with the number at `step`."""
    if step.node is not None and (step.is_cast or step.is_given):
        read = [spot_of(node) for node in readers(step.node)]
        if step.spot.kind == OP:
            read.append(step.spot)
        return read
    return [step.spot]


def _of_op(name: str, records: Sequence[Rewritten]) -> int:
    return sum(op == name for op, _ in _low_ops(records))


def _of_module(path: str, records: Sequence[Rewritten]) -> int:
    inside = f"{path}."
    return sum(each == path or each.startswith(inside) for _, each in _low_ops(records))


def _low_ops(records: Sequence[Rewritten]) -> Iterator[tuple[str, str]]:
    """The base name and the module path of each low op, ops in bodies included."""
    for record in records:
        for each in record.with_bodies():
            for node in each.before.graph.nodes:
                decision = each.assignment.decisions.get(node.name)
                if decision is None or not decision.low:
                    continue
                of_torch = isinstance(node.target, compat.OpOverload)
                op = base_name(node.target) if of_torch else ""
                fact = each.facts.nodes[node.name]
                yield op, fact.module
