"""Keeps the results of an export finite where the results of fp32 are.

The results of the rewritten graph and of fp32, on the example, go in.  If a result left
its range, `find_overflow`'s search names the smallest rule that cures it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp.ask.find_overflow import Search
from autoamp.ask.overflow import Overflow
from autoamp.ask.recorded_call import RecordedCall
from autoamp.ask.replan import replanned
from autoamp.errors import ExportError
from autoamp.exported.captured import Captured
from autoamp.model.kept import left_as_it_is
from autoamp.node_by_node.held import Held
from autoamp.node_by_node.runner import Runner
from autoamp.options import Options
from autoamp.overflow.recorder import Recorder
from autoamp.overflow.remedy import EVERYTHING, Remedy
from autoamp.overflow.trail import Trail
from autoamp.printable import class_name
from autoamp.rewrite.rewritten import Rewritten


def spoiled(given: Sequence[Any], exact: Sequence[Any]) -> int | None:
    """The position of the first result that is not finite, and that fp32 has otherwise.

    An infinity or NaN of fp32's own, as a mask has, is no fault.
    """
    for at, (one, true) in enumerate(zip(given, exact, strict=True)):
        if not isinstance(one, Tensor) or one.dtype in _ALWAYS_FINITE:
            continue
        if not bool((one.isfinite() | (one == true) | true.isnan()).all()):
            return at
    return None


def differs_in_whole_numbers(given: Sequence[Any], exact: Sequence[Any]) -> bool:
    """Whether integers or bools differ from those of fp32: a NaN may have chosen."""
    return any(
        isinstance(one, Tensor)
        and one.dtype in _ALWAYS_FINITE
        and not torch.equal(one, true)
        for one, true in zip(given, exact, strict=True)
    )


_ALWAYS_FINITE = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


def overflow_in(
    graph: Captured,
    model: nn.Module,
    rewritten: Rewritten,
    options: Options,
    *,
    any_harm: bool,
) -> Overflow:
    """The number of a rewritten graph that left its range, with the rule that cures it.

    Args:
        any_harm: whether a float result was spoiled, which the rule has to cure; if
            not, the rule cures each overflow that fp32 does not have.
    """
    player = _Player(graph, model, rewritten, options)
    search = Search(
        player, options, class_name(model), rewritten.low, any_harm=any_harm
    )
    return search.answer(player.recorded(options, 1.0))


def rules_for(found: Overflow, options: Options) -> list[Remedy]:
    """The remedies to export with, the smallest first.

    Raises:
        ExportError: a lock decides which ops run low.
    """
    if options.locked is not None:
        raise ExportError(
            f"{found.label}: {cause(found)}, and the lock says which ops run low: make "
            f"a new lock{f', with {found.proposal}' if found.rule else ''}"
        )
    rules = [] if found.rule is None else [found.rule]
    everything = Remedy(keep=(EVERYTHING,))
    return rules if everything in rules else [*rules, everything]


def cause(found: Overflow) -> str:
    """Why a model cannot be exported as it was placed."""
    if not found:
        return "results on the example are not finite where those of fp32 are"
    return f"results on the example differ from those of fp32, because {found.headline}"


class _Player:
    """Runs the rewritten graph of an export node by node, under options."""

    def __init__(
        self, graph: Captured, model: nn.Module, rewritten: Rewritten, options: Options
    ) -> None:
        self.graph, self.model = graph, model
        self._known = options, rewritten

    def records(self, options: Options) -> list[Rewritten]:
        if options != self._known[0]:
            with torch.no_grad():
                self._known = options, replanned(self._known[1], options)
        return [self._known[1]]

    def recorded(self, options: Options, scale: float) -> RecordedCall:  # noqa: ARG002
        trail = Trail()
        (record,) = self.records(options)
        values = pytree.tree_map_only(torch.Tensor, Tensor.clone, self.graph.values)
        with left_as_it_is(self.model), torch.no_grad():
            run = Runner(record.gm, [Held(), Recorder(trail, exact=True)])
            run.run(*values)
        return RecordedCall(trail)
