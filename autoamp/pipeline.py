"""The passes in order: from a captured graph to a rewritten, verified one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from autoamp.analyse.classify import Classified, classify
from autoamp.analyse.control_flow import BODY_LEFT, BODY_RECORDS, LOWERED_BODY
from autoamp.analyse.facts import Facts, collect_facts
from autoamp.analyse.normalise import Normalised, normalise
from autoamp.errors import VerificationError
from autoamp.options import Options
from autoamp.place.assign import Assignment, assign
from autoamp.place.cost import device_of, price_graph
from autoamp.rewrite.casts import insert_casts
from autoamp.rewrite.cleanup import clean_up
from autoamp.rewrite.emitted import Cast
from autoamp.rewrite.verify import Verifier

_T = TypeVar("_T")


@dataclass(frozen=True)
class Rewritten:
    """One graph, rewritten, and everything that was known and decided on the way.

    Attributes:
        gm: the rewritten graph.
        before: the ATen graph it was made from.
        facts, classified, assignment: what was known, allowed and decided.
        casts: the casts inserted, in graph order.
        recounted: the cost of the emitted graph by an independent count.
        low: the compute dtype.
        seconds: time taken by each pass.
        bodies: the same for sub-graphs (checkpointed regions, branches, loops).
    """

    gm: fx.GraphModule
    before: fx.GraphModule
    facts: Facts
    classified: Classified
    assignment: Assignment
    casts: tuple[Cast, ...]
    recounted: int
    low: torch.dtype
    seconds: dict[str, float]
    bodies: tuple[Rewritten, ...] = field(default=())

    def with_bodies(self) -> Iterator[Rewritten]:
        """This and the bodies in it, in those as well."""
        yield self
        for body in self.bodies:
            yield from body.with_bodies()


def rewrite_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    low: torch.dtype,
    *,
    free_weights: bool = False,
) -> Rewritten:
    """Runs every pass on `gm`, which is not changed.

    Args:
        free_weights: casts of weights are priced at nothing, because whoever runs the
            graph passes cached copies in.

    Raises:
        AutoampError: a pass failed; the message says where.
    """
    start = time.perf_counter()
    normalised = normalise(gm, example_inputs)
    seconds = {"normalise": time.perf_counter() - start}
    return rewrite_normalised(normalised, options, low, free_weights, seconds)


def rewrite_normalised(
    normalised: Normalised,
    options: Options,
    low: torch.dtype,
    free_weights: bool,
    seconds: dict[str, float],
) -> Rewritten:
    """The passes after `normalise`; `seconds` is added to."""
    before = normalised.gm
    bodies = _rewrite_bodies(normalised, options, low, free_weights)
    timed = _Timer(seconds)
    facts = timed("facts", lambda: collect_facts(before))
    rules = options.resolve_rules(low)
    classified = timed(
        "classify",
        lambda: classify(
            before,
            facts,
            rules,
            low,
            options.keep,
            ceiling=options.placement != "tensorflow",
        ),
    )
    prices = timed(
        "price",
        lambda: price_graph(
            before,
            facts,
            classified.verdicts,
            device_of(_device(before), low),
            objective=options.objective,
            do_no_harm=options.do_no_harm,
            free_weights=free_weights,
        ),
    )
    assignment = timed(
        "place", lambda: assign(facts, classified.verdicts, prices, options.placement)
    )
    after, casts = timed(
        "rewrite",
        lambda: insert_casts(
            before, assignment, classified.extreme, low, normalised.fake_mode
        ),
    )
    verifier = timed("stand in", lambda: Verifier(before))
    counted = timed(
        "recount",
        lambda: verifier.recount(after, prices.ops, prices.down, prices.up),
    )
    if counted != assignment.cost:
        raise VerificationError(
            f"the emitted graph costs {counted}, the placement promised "
            f"{assignment.cost} (units of 0.1 ns); this is a bug in autoamp"
        )
    timed("clean up", lambda: clean_up(after))
    timed("verify", lambda: verifier.verify(after, classified.pinned))
    return Rewritten(
        gm=after,
        before=before,
        facts=facts,
        classified=classified,
        assignment=assignment,
        casts=tuple(casts),
        recounted=counted,
        low=low,
        seconds=seconds,
        bodies=bodies,
    )


def _rewrite_bodies(
    normalised: Normalised, options: Options, low: torch.dtype, free_weights: bool
) -> tuple[Rewritten, ...]:
    """Rewrites sub-graphs, each with fp32 edges, and puts them in place.

    One that the passes fail on stays fp32, and the graph round it is still rewritten.
    """
    found: list[Rewritten] = []
    for name, body in list(normalised.gm.named_children()):
        if not (isinstance(body, fx.GraphModule) and body.meta.get(LOWERED_BODY)):
            continue
        inner = Normalised(body, (), normalised.fake_mode)
        try:
            with torch.set_grad_enabled(body.meta[BODY_RECORDS]):
                rewritten = rewrite_normalised(inner, options, low, free_weights, {})
        except Exception as error:
            if options.strict:
                raise
            body.meta[BODY_LEFT] = f"{type(error).__name__}: {error}"
            continue
        setattr(normalised.gm, name, rewritten.gm)
        found.append(rewritten)
    return tuple(found)


class _Timer:
    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def __call__(self, name: str, run: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        result = run()
        self.seconds[name] = time.perf_counter() - start
        return result


def _device(gm: fx.GraphModule) -> torch.device:
    """The device most tensors of the graph live on."""
    seen: dict[torch.device, int] = {}
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            seen[value.device] = seen.get(value.device, 0) + 1
    return max(seen, key=lambda d: seen[d]) if seen else torch.device("cpu")
