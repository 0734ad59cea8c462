"""The check of each pass: the changes that the pass may make, and the proof of them.

The proofs are in `check/`, which shares no code with the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from autoamp.errors import VerificationError
from autoamp.passes.check import allowed_changes
from autoamp.passes.check.allowed_changes import May
from autoamp.passes.check.compare import differences
from autoamp.passes.check.gradient_units import check_scales, check_units
from autoamp.passes.check.invariants import Footprint, check_always, footprint
from autoamp.passes.check.standin import where
from autoamp.passes.check.strides import check_strides
from autoamp.passes.check.verify import Verifier
from autoamp.passes.decide.problem import promised_casts
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.see.nodes import tensors_of
from autoamp.passes.write.layouts import FORMATS


def differs_only(may: May) -> Callable[[Checks, Rewritten, Rewritten], None]:
    """The check of a pass that makes the changes of one row, and no others."""

    def check(_: Checks, was: Rewritten, now: Rewritten) -> None:
        if now.gm is not was.gm:
            differences(was.gm, now.gm, may)

    return check


class Checks:
    """The checks of one run of the passes, which share their findings.

    Each method is given the record before and after a pass, and raises
    `VerificationError` where the pass broke its word.
    """

    def __init__(self) -> None:
        self._verifier: Verifier | None = None
        self._seen: tuple[fx.GraphModule, Footprint] | None = None

    def _verifier_of(self, before: fx.GraphModule) -> Verifier:
        # Kept for all passes of one graph: to run the original on stand-ins is the
        # costly part.
        if self._verifier is None or self._verifier.original is not before:
            self._verifier = Verifier(before)
        return self._verifier

    def always(self, was: Rewritten, now: Rewritten) -> None:
        """The graph waits for nothing anew, sets nothing, and shares no more memory.

        This check runs after every pass that edits a graph.
        """
        after = now.gm if now.code is was.code or now.code is None else now.code
        if after is was.gm:
            return
        # As a rule the pass before has made this graph, and its footprint is known.
        is_known = self._seen is not None and self._seen[0] is was.gm
        before = self._seen[1] if self._seen and is_known else footprint(was.gm)
        self._seen = after, footprint(after)
        check_always(after, before, self._seen[1])

    def replaced(self, was: Rewritten, now: Rewritten) -> None:
        """Calls were replaced by calls that give the same kinds, and nothing else.

        The proof that the numbers are the same stands where the calls are recognised
        (`kernels/`); the tests run both sides of every graph that they convert.
        """
        if now.gm is was.gm:
            return
        for region in differences(was.gm, now.gm, allowed_changes.KERNELS):
            for old, new in region.results:
                gave, gives = (tensors_of(n.meta.get("val")) for n in (old, new))
                for one, other in zip(gave, gives, strict=True):
                    if _kind(one) != _kind(other):
                        raise VerificationError(
                            f"{where(new)} gives {_kind(other)}, where {old.name} gave "
                            f"{_kind(one)}",
                            nodes=[n.name for n in region.old],
                        )

    def recounted(self, was: Rewritten, now: Rewritten) -> None:
        """The casts and ops of the emitted graph cost what the placement promised."""
        verifier = self._verifier_of(was.gm)
        prices, assignment = was.prices, was.assignment
        groups = assignment.problem.groups
        wide = {g.key[0]: g.made for g in groups if g.made is not None}
        counted = verifier.recount(now.gm, prices.ops, prices.down, prices.up, wide)
        if counted != assignment.cost:
            low = frozenset(n for n, d in assignment.decisions.items() if d.low)
            casts = promised_casts(assignment.problem, low)
            raise VerificationError(
                f"the emitted graph costs {counted}, the placement promised "
                f"{assignment.cost} (units of 0.1 ns); this is a bug in autoamp",
                nodes=verifier.not_as_promised(now.gm, low, casts),
            )

    def same_program(self, was: Rewritten, now: Rewritten) -> None:
        """The emitted graph is the program of the graph before, but for its casts."""
        pinned = was.classified.pinned
        self._verifier_of(was.before).verify(
            # An op that type promotion keeps in fp32 may read low values, which it
            # widens itself.
            now.gm,
            pinned,
            pinned - was.classified.promoted,
        )

    def hoisted(self, was: Rewritten, now: Rewritten) -> None:
        """Casts of weights became inputs or constants of the graph; all else stayed."""
        given = _inputs(was.gm)
        extra = _inputs(now.gm)[len(given) :]
        weights = [given[at] for at in now.weights]
        copies = dict(zip(extra, weights, strict=True))
        differences(was.gm, now.gm, allowed_changes.hoisted(copies))

    def edge(self, was: Rewritten, now: Rewritten) -> None:
        """Only gradients changed, and their units agree."""
        if now.gm is was.gm:
            return
        extra = _inputs(now.gm)[len(_inputs(was.gm)) :]
        if len(extra) != 3 * len(now.edge.devices):
            raise VerificationError(f"the edge has the extra inputs {extra}")
        differences(was.gm, now.gm, allowed_changes.scaled(extra))
        check_scales(now.gm, extra)
        check_units(now.gm)

    def laid_out(self, was: Rewritten, now: Rewritten) -> None:
        """Only copies in another layout were added; every result lies as it did."""
        if now.gm is was.gm:
            return
        differences(was.gm, now.gm, allowed_changes.LAYOUTS)
        given = len(_inputs(was.gm)) - len(now.layouts) - 3 * len(now.edge.devices)
        copies = _inputs(now.gm)[given:]
        pairs = zip(copies, now.layouts, strict=False)
        last = {name for name, layout in pairs if layout in FORMATS.values()}
        check_strides(now.gm, last, FORMATS)

    def on_meshes(self, was: Rewritten, now: Rewritten) -> None:
        """Torch's calls on DTensors are back where the model makes them."""
        differences(was.gm, now.gm, allowed_changes.ON_MESHES)
        graphs = [m.graph for m in now.gm.modules() if isinstance(m, fx.GraphModule)]
        for node in (n for graph in graphs for n in graph.nodes):
            if allowed_changes.crosses(node):
                raise VerificationError(
                    f"{where(node)} is not the call that the model makes on the mesh",
                    nodes=[node.name],
                )

    def bound(self, was: Rewritten, now: Rewritten) -> None:
        """The code calls one function for each op of the graph, on the same operands.

        The tests hear which ops each function calls.
        """
        if now.code is not None:
            differences(was.gm, now.code, allowed_changes.BINDINGS)

    def for_compilers(self, was: Rewritten, now: Rewritten) -> None:
        """Functions were exchanged for their forms for compilers, and no others."""
        if now.code is was.code or now.code is was.gm:
            return
        assert now.code is not None
        differences(was.gm, now.code, allowed_changes.COMPILERS)


def _inputs(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op == "placeholder"]


def _kind(value: Tensor) -> tuple[Any, ...]:
    strides = zip(value.shape, value.stride(), strict=True)
    # Kernels give a dimension of size 1 whatever stride they like.
    told = [str(stride) for size, stride in strides if size != 1]
    return (value.dtype, *map(str, value.shape), *told)
