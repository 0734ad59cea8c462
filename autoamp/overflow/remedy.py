"""The remedies that might keep a number in its range, the narrowest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoamp import compat
from autoamp.messages import advice
from autoamp.op_names import base_name, parse_op_name
from autoamp.options import Options
from autoamp.overflow.location import OP, Location, location_of, readers
from autoamp.overflow.trail import Step
from autoamp.rewrite.rewritten import Rewritten

EVERYTHING = "*"
"""The pattern of `keep=` that keeps a whole model in fp32."""


@dataclass(frozen=True)
class Remedy:
    """Options of `convert` that would keep a number in its range.

    Attributes:
        deny: ops that stay in fp32.
        keep: modules that stay in fp32.
    """

    deny: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.advice(by_variables=False)

    def advice(self, *, by_variables: bool) -> str:
        """The remedy as text: keyword arguments, or environment variables."""
        parts = [("deny", self.deny), ("keep", self.keep)]
        given = [(name, [*names]) for name, names in parts if names]
        each = [advice(name, names, by_variables=by_variables) for name, names in given]
        return (" and " if by_variables else ", ").join(each)

    def __add__(self, other: Remedy) -> Remedy:
        return Remedy(
            tuple(dict.fromkeys((*self.deny, *other.deny))),
            tuple(dict.fromkeys((*self.keep, *other.keep))),
        )

    def on(self, options: Options) -> Options:
        """`options` with this remedy; denied ops leave `allow`, `infer`, `clear`."""
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


def candidates(step: Step, records: Sequence[Rewritten]) -> list[Remedy]:
    """Remedies for the ops that compute with the number at `step`, the narrowest first.

    A remedy is narrower the fewer low ops it puts back into fp32.
    """
    found: dict[Remedy, int] = {}
    for location in _computing(step):
        if "::" in location.op:
            name = parse_op_name(location.op).partition(".")[0]
            found[Remedy(deny=(name,))] = _of_op(name, records)
        for path in location.modules:
            found[Remedy(keep=(path,))] = _of_module(path, records)
    found = {remedy: count for remedy, count in found.items() if count}
    return sorted(found, key=lambda remedy: (found[remedy], bool(remedy.keep)))


def _computing(step: Step) -> list[Location]:
    """The ops that compute in low precision with the number at `step`."""
    if step.node is not None and (step.is_cast or step.is_given):
        read = [location_of(node) for node in readers(step.node)]
        if step.location.kind == OP:
            read.append(step.location)
        return read
    return [step.location]


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
