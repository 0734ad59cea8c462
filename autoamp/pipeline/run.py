"""The passes in order: from a captured graph to a rewritten, verified one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from autoamp.analyse.classified import Classified
from autoamp.analyse.classify import classify
from autoamp.analyse.facts import Facts, collect_facts
from autoamp.check.verify import Verifier
from autoamp.errors import CaptureError, VerificationError
from autoamp.options import Options
from autoamp.pipeline.retreat import kept_for, retreating
from autoamp.place.assign import Assignment, assign
from autoamp.place.cost import PriceModel, Prices, as_authors_ask, price_graph
from autoamp.place.devices import Device, device_of, main_device
from autoamp.place.problem import promised_casts
from autoamp.rewrite.casts import insert_casts
from autoamp.rewrite.cleanup import clean_up
from autoamp.rewrite.fuse import fuse, leave_out
from autoamp.rewrite.rewritten import Rewritten
from autoamp.trace.control_flow import BODY_LEFT, BODY_RECORDS, LOWERED_BODY
from autoamp.trace.normalise import UNTRACED, Normalised, normalise


@dataclass(frozen=True)
class Setting:
    """Where and how a rewritten graph is to run.

    Attributes:
        free_weights: whether the caller hands casts of weights in, at no price.
        own_kernels: whether the graph runs without a compiler, and so with kernels of
            ours where torch has none.
        own_ops: whether the graph may call ops of autoamp's (`autoamp::attention`).
        price: gives the prices; by default the roofline of the device.
        device: the device that the graph is to run on; by default the one it is on.
    """

    free_weights: bool = False
    own_kernels: bool = False
    own_ops: bool = False
    price: PriceModel | None = None
    device: Device | None = None


def rewrite_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    low: torch.dtype,
    **setting: Any,
) -> Rewritten:
    """Runs every pass on `gm`, which is not changed.

    Args:
        **setting: the fields of `Setting`.

    Raises:
        AutoampError: a pass failed; the message says where.
    """
    seconds: dict[str, float] = {}
    with _timed(seconds, "normalise"):
        normalised = normalise(gm, example_inputs)
    return rewrite_normalised(normalised, options, low, Setting(**setting), seconds)


def rewrite_normalised(
    normalised: Normalised,
    options: Options,
    low: torch.dtype,
    setting: Setting,
    seconds: dict[str, float],
) -> Rewritten:
    """Runs the passes after `normalise`, and adds their times to `seconds`.

    Nodes that a failed check names are pinned to fp32, and the passes run again.
    """
    inner = partial(rewrite_normalised, options=options, low=low, setting=setting)
    bodies, left = _rewrite_bodies(normalised, inner, strict=options.strict)
    where = None if setting.device is None else setting.device.type

    def rewrite(graph: Normalised) -> Rewritten:
        with _timed(seconds, "facts"):
            facts = collect_facts(graph.gm, where)
        facts = replace(facts, own_kernels=setting.own_kernels)
        attempt = Attempt(graph, facts, options, low, setting, seconds)
        return retreating(attempt, graph.gm.graph, strict=options.strict)

    with _timed(seconds, "kernels"):
        on = setting.device or device_of(main_device(normalised.gm), low)
        left_out = leave_out(on, options, own_ops=setting.own_ops)
        fused = fuse(normalised, options, low, where, left_out)
    found = rewrite(fused or normalised)
    if fused is not None and not found.assignment.low:
        found = rewrite(normalised)  # a graph that stays fp32 keeps its very numbers
    for name, why in normalised.gm.meta.get(UNTRACED, {}).items():
        left[name] = kept_for(CaptureError(f"tracing to ATen failed at {name}: {why}"))
    return replace(found, bodies=bodies, given_up={**left, **found.given_up})


@dataclass(frozen=True)
class Attempt:
    """The passes from `classify` on, on one graph."""

    normalised: Normalised
    facts: Facts
    options: Options
    low: torch.dtype
    setting: Setting
    seconds: dict[str, float]

    def __call__(self, given_up: Mapping[str, str]) -> Rewritten:
        """The rewritten graph, in which the nodes `given_up` stay fp32."""
        before, fake_mode = self.normalised.gm, self.normalised.fake_mode
        timed = partial(_timed, self.seconds)
        with timed("classify"):
            classified = self._classified(given_up)
        with timed("price"):
            prices = self._prices(classified)
        with timed("place"):
            assignment = assign(classified, prices, self.options.placement)
        with timed("rewrite"):
            after, casts = insert_casts(
                before, classified, assignment, self.low, fake_mode
            )
        with timed("stand in"):
            verifier = Verifier(before)
        with timed("recount"):
            counted = verifier.recount(after, prices.ops, prices.down, prices.up)
        if counted != assignment.cost:
            raise VerificationError(
                f"the emitted graph costs {counted}, the placement promised "
                f"{assignment.cost} (units of 0.1 ns); this is a bug in autoamp",
                nodes=_not_as_promised(verifier, after, assignment),
            )
        with timed("clean up"):
            clean_up(after)
        with timed("verify"):
            pinned = classified.pinned
            verifier.verify(after, pinned, pinned - classified.promoted)
        return Rewritten(
            gm=after,
            before=before,
            classified=classified,
            assignment=assignment,
            casts=tuple(casts),
            recounted=counted,
            low=self.low,
            seconds=self.seconds,
            given_up=dict(given_up),
            options=self.options,
            again=self._again,
        )

    def _again(self, options: Options, given_up: Mapping[str, str]) -> Rewritten:
        return replace(self, options=options, seconds={})(given_up)

    def _classified(self, given_up: Mapping[str, str]) -> Classified:
        rules = self.options.resolve_rules(self.low)
        return classify(
            self.normalised.gm,
            self.facts,
            rules,
            self.low,
            (*self.options.kept, *rules.keep),
            kept=self.options.kept,
            given_up=given_up,
            ceiling=self.options.placement != "tensorflow",
            to_the_letter=self.options.is_tensorflows,
        )

    def _prices(self, classified: Classified) -> Prices:
        gm = self.normalised.gm
        device = self.setting.device or device_of(main_device(gm), self.low)
        price: PriceModel = self.setting.price or partial(price_graph, device=device)
        prices = price(
            gm,
            classified,
            objective=self.options.objective,
            do_no_harm=self.options.do_no_harm,
            free_weights=self.setting.free_weights,
        )
        return as_authors_ask(prices, classified)


def _not_as_promised(
    verifier: Verifier, after: fx.GraphModule, assignment: Assignment
) -> list[str]:
    """The nodes that caused a recount to differ from the promised cost."""
    promised = frozenset(n for n, d in assignment.decisions.items() if d.low)
    casts = promised_casts(assignment.problem, promised)
    return verifier.not_as_promised(after, promised, casts)


def _rewrite_bodies(
    normalised: Normalised, rewrite: Callable[..., Rewritten], *, strict: bool
) -> tuple[tuple[Rewritten, ...], dict[str, str]]:
    """Rewrites sub-graphs, whose inputs and outputs stay fp32, and puts them in place.

    A sub-graph on which the passes fail stays fp32, and the graph round it is still
    rewritten.  Returns the rewritten sub-graphs, and the reason for each call of a
    sub-graph that stays fp32.

    Args:
        rewrite: `rewrite_normalised` with the options of the graph around.
        strict: whether a failing pass raises.
    """
    found: list[Rewritten] = []
    left: dict[str, str] = {}
    for name, body in list(normalised.gm.named_children()):
        if not (isinstance(body, fx.GraphModule) and body.meta.get(LOWERED_BODY)):
            continue
        inner = Normalised(body, (), normalised.fake_mode)
        try:
            with torch.set_grad_enabled(body.meta[BODY_RECORDS]):
                rewritten = rewrite(inner, seconds={})
        except Exception as error:
            if strict:
                raise
            body.meta[BODY_LEFT] = f"{type(error).__name__}: {error}"
            left |= dict.fromkeys(_callers(normalised.gm, name), kept_for(error))
            continue
        setattr(normalised.gm, name, rewritten.gm)
        found.append(rewritten)
    return tuple(found), left


def _callers(gm: fx.GraphModule, body: str) -> list[str]:
    """The calls that take sub-graph `body` as an operand."""
    operands = [n for n in gm.graph.nodes if n.op == "get_attr" and n.target == body]
    return [user.name for n in operands for user in n.users]


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
