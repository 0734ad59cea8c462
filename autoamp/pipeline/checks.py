"""The check of each pass: the changes that the pass may make, and the proof of them.

The proofs are in `check/`, which shares no code with the passes.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from autoamp import compat
from autoamp.check import allowed_changes as kinds
from autoamp.check.alike import check_alike
from autoamp.check.allowed_changes import May
from autoamp.check.calls_once import check_calls_once
from autoamp.check.differences import differences
from autoamp.check.gathers import check_low_gathers
from autoamp.check.gradient_units import check_scales, check_units
from autoamp.check.mesh_calls import check_mesh_calls
from autoamp.check.same_calls import check_same_calls
from autoamp.check.strides import check_strides
from autoamp.check.together import check_together
from autoamp.check.verify import Verifier
from autoamp.errors import VerificationError
from autoamp.graph_functions import (
    FOR_COMPILERS,
    checkpointed,
    low_weight,
    low_weight_unscaled,
    scale_grad,
    traced_scale_grad_,
    traced_scale_grad_apart,
)
from autoamp.pipeline.work import Work
from autoamp.place.layouts import FORMATS
from autoamp.place.problem import promised_casts

_FORMS: dict[Any, tuple[Any, ...]] = {
    **{function: (traced,) for function, traced in FOR_COMPILERS.items()},
    scale_grad: (
        FOR_COMPILERS[scale_grad],
        traced_scale_grad_,
        traced_scale_grad_apart,
    ),
    checkpointed: (compat.CHECKPOINT,),
}
"""The functions that a compiler may get in the place of a function."""


class Checks:
    """The checks of one run of the passes, which share their findings.

    Each method is given the work before and after a pass, and raises
    `VerificationError` where the pass broke its word.
    """

    def __init__(self) -> None:
        self._verifier: Verifier | None = None

    def _verifier_of(self, before: fx.GraphModule) -> Verifier:
        if self._verifier is None or self._verifier.original is not before:
            self._verifier = Verifier(before)
        return self._verifier

    def replaced(self, was: Work, now: Work) -> None:
        """Calls were replaced by calls that give the same numbers, and nothing else."""
        if now.gm is was.gm:
            return
        found = differences(was.gm, now.gm, May(replace=True))
        check_alike(found, every=was.options.strict)

    def made_once(self, was: Work, now: Work) -> None:
        """Calls on the mesh are gone that were made before, and nothing else."""
        if now.gm is not was.gm:
            check_calls_once(was.gm, now.gm)

    def recounted(self, was: Work, now: Work) -> None:
        """The casts and ops of the emitted graph cost what the placement promised."""
        assert was.prices is not None
        assert was.assignment is not None
        verifier = self._verifier_of(was.gm)
        prices, assignment = was.prices, was.assignment
        counted = verifier.recount(now.gm, prices.ops, prices.down, prices.up)
        if counted != assignment.cost:
            low = frozenset(n for n, d in assignment.decisions.items() if d.low)
            casts = promised_casts(assignment.problem, low)
            raise VerificationError(
                f"the emitted graph costs {counted}, the placement promised "
                f"{assignment.cost} (units of 0.1 ns); this is a bug in autoamp",
                nodes=verifier.not_as_promised(now.gm, low, casts),
            )

    def same_program(self, was: Work, now: Work) -> None:
        """The emitted graph is the program of the graph before, but for its casts."""
        assert was.before is not None
        assert was.classified is not None
        pinned = was.classified.pinned
        self._verifier_of(was.before).verify(
            now.gm, pinned, pinned - was.classified.promoted
        )

    def hoisted(self, was: Work, now: Work) -> None:
        """Casts of weights became inputs or constants of the graph; all else stayed."""
        given = _inputs(was.gm)
        extra = _inputs(now.gm)[len(given) :]
        weights = [given[at] for at in now.weights]
        copies: dict[str, str | None] = dict(zip(extra, weights, strict=True))
        may = May(kinds.USES, copies, fold=True)
        differences(was.gm, now.gm, may)

    def gathered(self, was: Work, now: Work) -> None:
        """Gathers in the low dtype stand for a gather and its casts, nothing else."""
        if now.gm is not was.gm:
            check_low_gathers(was.gm, now.gm)

    def edge(self, was: Work, now: Work) -> None:
        """Only gradients changed, and their units agree."""
        if now.gm is was.gm:
            return
        extra = _inputs(now.gm)[len(_inputs(was.gm)) :]
        if len(extra) != 3 * len(now.edge.devices):
            raise VerificationError(f"the edge has the extra inputs {extra}")
        rename = {low_weight: (low_weight_unscaled,)}
        may = May(kinds.EDGE | kinds.COPIES, dict.fromkeys(extra), rename=rename)
        differences(was.gm, now.gm, may)
        check_scales(now.gm, extra)
        check_units(now.gm)

    def laid_out(self, was: Work, now: Work) -> None:
        """Only copies in another layout were added; every result lies as it did."""
        if now.gm is was.gm:
            return
        differences(was.gm, now.gm, May(kinds.LAYOUTS))
        given = len(_inputs(was.gm)) - len(now.layouts) - 3 * len(now.edge.devices)
        copies = _inputs(now.gm)[given:]
        pairs = zip(copies, now.layouts, strict=False)
        last = {name for name, layout in pairs if layout in FORMATS.values()}
        check_strides(now.gm, last, FORMATS)

    def together(self, was: Work, now: Work) -> None:
        """Uses of weights come from one call of several; all else stays."""
        if now.gm is not was.gm:
            check_together(was.gm, now.gm)

    def on_meshes(self, was: Work, now: Work) -> None:
        """Torch's calls on DTensors are back where the model makes them."""
        if now.gm is not was.gm:
            check_mesh_calls(was.gm, now.gm)

    def bound(self, was: Work, now: Work) -> None:
        """The code calls functions that call the graph's ops, on the same operands."""
        if now.code is not None:
            check_same_calls(was.gm, now.code)

    def for_compilers(self, was: Work, now: Work) -> None:
        """Functions were exchanged for their forms for compilers, and no others."""
        if now.code is was.code or now.code is was.gm:
            return
        assert now.code is not None
        may = May(kinds.USES | kinds.CASTS | kinds.RESHAPES, rename=_FORMS)
        differences(was.gm, now.code, may)


def _inputs(gm: fx.GraphModule) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op == "placeholder"]
