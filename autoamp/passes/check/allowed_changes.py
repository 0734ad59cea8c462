"""The changes that each pass may make to a graph: a row for each kind of pass.

A row says which calls may be added, which inputs, and how a call of the graph after may
be written that is a call of the graph before.  `compare.py` proves that a graph differs
from the graph before in nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from autoamp import compat
from autoamp.errors import VerificationError
from autoamp.passes.check.standin import dtypes_of, where
from autoamp.passes.functions import (
    FOR_COMPILERS,
    WITH_FP32_STATE,
    checkpointed,
    laid_out,
    low_uses,
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
    made_again,
    noted,
    saturating_cast,
    scale_grad,
    scaled_result,
    traced_scale_grad_,
    traced_scale_grad_apart,
    unscale_grad,
    unscale_grad_,
    unscale_half,
    unscaled_weights,
    with_dtypes,
)
from autoamp.passes.functions.dtensor_crossings import gather_low, gathered_low
from autoamp.passes.functions.made_again import function_of
from autoamp.passes.see.dtensors_as_whole import MESH_CALL

_ATEN = torch.ops.aten

CASTS = frozenset({_ATEN._to_copy.default, saturating_cast})
USES = frozenset({low_weight, low_uses})
OF_A_COPY = frozenset({*USES, low_weight_unscaled})
"""Calls whose first operand is a value, and whose second is a low copy of it."""

EDGE = frozenset(
    {
        low_weight_unscaled,
        scale_grad,
        scaled_result,
        unscale_grad,
        unscale_grad_,
        unscale_half,
        traced_scale_grad_,
        traced_scale_grad_apart,
        *FOR_COMPILERS.values(),
    }
)
SCALED_CASTS = frozenset({scaled_result, FOR_COMPILERS[scaled_result]})
RESHAPES = frozenset({_ATEN.unsqueeze.default, _ATEN.squeeze.dim})
COPIES = frozenset({_ATEN.clone.default})

OWN_MEMORY = CASTS | COPIES | {laid_out, with_dtypes}
"""Added calls whose result does not follow later writes to the operand."""

GROUPS: dict[Any, tuple[Any, int, int]] = {
    low_weights: (low_weight, 0, 2),
    low_weights_unscaled: (low_weight_unscaled, 2, 2),
    unscaled_weights: (unscale_grad, 2, 1),
}
"""For a call of several weights the call of one, the number of leading operands, and
the number of operands for each weight."""


class Call(NamedTuple):
    """A call, as a node has it or as another graph would write it."""

    target: Any
    args: Any
    kwargs: Any


def call_of(node: fx.Node) -> Call:
    return Call(node.target, node.args, node.kwargs)


Rewrite = Callable[[fx.Node, fx.Node], tuple[Call, Call]]
"""Takes the nodes of one name in both graphs, which have different targets; gives the
two calls as one graph would write them."""


@dataclass(frozen=True)
class May:
    """The changes that a pass may make.

    Attributes:
        add: targets of calls that stand for their first operand.
        copies: for each input that is added, the input that it is a copy of; None for
            an input that the added calls alone read.
        fold: whether casts of the graph's constants may be made once, as constants.
        replace: whether calls may be replaced by calls that give the same numbers.
        once: whether a call on the mesh may be left out that was made before.
        groups: whether uses of weights may be results of one call.
        retype: whether calls may compute in other dtypes, which are checked elsewhere.
        redtyped: names of nodes that are recorded with other dtypes than before, and
            that a cast follows.
        rename: the functions that may be called in the place of a function, on the
            same operands; what they compute is checked elsewhere.
        rewrite: how a call may be written otherwise; None where it may not be.
    """

    add: frozenset[Any] = frozenset()
    copies: Mapping[str, str | None] = field(default_factory=dict)
    fold: bool = False
    replace: bool = False
    once: bool = False
    groups: bool = False
    retype: bool = False
    redtyped: Collection[str] = frozenset()
    rename: Mapping[Any, Collection[Any]] = field(default_factory=dict)
    rewrite: Rewrite | None = None

    def calls(self, old: fx.Node, new: fx.Node) -> tuple[Call, Call]:
        """The calls of two nodes of one name, as one graph would write them."""
        if old.target is new.target or old.op != "call_function":
            return call_of(old), call_of(new)
        if new.target in self.rename.get(old.target, ()):
            return call_of(old)._replace(target=new.target), call_of(new)
        if self.rewrite is not None:
            return self.rewrite(old, new)
        return call_of(old), call_of(new)


# -- calls written otherwise -----------------------------------------------------------


def _out_of_a_group(old: fx.Node, new: fx.Node) -> tuple[Call, Call]:
    """A result of a call of several weights, as the call of its one weight."""
    group = new.args[0] if new.target is operator.getitem else None
    if not isinstance(group, fx.Node) or group.target not in GROUPS:
        return call_of(old), call_of(new)
    single, leading, each = GROUPS[group.target]
    several, at = group.args[leading:], new.args[1]
    count = len(several) // each
    if not isinstance(at, int) or not 0 <= at < count:
        return call_of(old), call_of(new)
    # The operands lie by kind: all weights, then all copies.
    own = (several[at + which * count] for which in range(each))
    return call_of(old), Call(single, (*own, *group.args[:leading]), {})


def _copied_once(old: fx.Node, new: fx.Node) -> tuple[Call, Call]:
    """The cast of an input of a body that is given the input low, which copies none."""
    inputs = [n for n in new.all_input_nodes if n.op == "placeholder"]
    # Whatever else read the input would read it low now.
    if (
        new.target is _ATEN.to.dtype
        and inputs
        and all(user.target is _ATEN.to.dtype for user in inputs[0].users)
    ):
        cast = _ATEN._to_copy.default
        return call_of(old), Call(cast, (inputs[0],), {"dtype": new.args[1]})
    return call_of(old), call_of(new)


def _gathered_low(old: fx.Node, new: fx.Node) -> tuple[Call, Call]:
    """A gather whose readers all read it low, as one gather in the low dtype."""
    if new.target is not gathered_low:
        return call_of(old), call_of(new)
    _, dtype, uses = new.args
    gather = next((n for n in old.all_input_nodes if MESH_CALL in n.meta), old)
    call = gather.meta.get(MESH_CALL)
    # Any reader in fp32 would get rounded numbers.
    readers = [user for user in gather.users if user is not old]
    if not (
        call is not None
        and call.gathers
        and new.meta.get(MESH_CALL) is call
        and dtypes_of(old.meta["val"]) == [dtype] * int(str(uses))
        and all(set(user.users) == {old} for user in readers)
        and all(dtypes_of(user.meta["val"]) == [dtype] for user in readers)
    ):
        raise VerificationError(
            f"{where(new)} is not a gather whose readers all read {dtype}",
            nodes=[old.name],
        )
    return Call(gathered_low, (gather.args[0], dtype, uses), {}), call_of(new)


def crosses(node: fx.Node) -> bool:
    """Whether a node stands for a call of the model's on DTensors."""
    ours = getattr(node.target, "namespace", "") == "autoamp"
    return MESH_CALL in node.meta and (ours or node.target is gathered_low)


def _on_the_mesh(old: fx.Node, new: fx.Node) -> tuple[Call, Call]:
    """The op that stands for a call on DTensors, as the call that the model makes."""
    if not crosses(old):
        return call_of(old), call_of(new)
    call, low = old.meta[MESH_CALL], old.target is gathered_low
    inputs = old.graph.find_nodes(op="placeholder")

    def given(value: Any) -> Any:
        # An argument that is an input of the graph is noted by its position.
        position = getattr(value, "position", None)
        return value if position is None else inputs[position]

    args, kwargs = fx.node.map_aggregate((call.args, call.kwargs), given)
    own = old.args if low else old.args[:1]
    wanted = gather_low.__name__ if low else call.name
    is_back = getattr(new.target, "__name__", "") == wanted
    target = new.target if is_back else old.target
    return Call(target, (*own, *args), kwargs), call_of(new)


def _uncovered(node: fx.Node) -> Call:
    """The call that a node makes, without the notes of what is made again."""
    if node.target is not made_again:
        return call_of(node)
    called, _, *args = node.args
    return Call(function_of(called), tuple(args), node.kwargs)


def _without_notes(old: fx.Node, new: fx.Node) -> tuple[Call, Call]:
    """A call that keeps notes, as the call of the op; each note names the maker."""
    if new.target is not made_again:
        return call_of(old), call_of(new)

    def values(operands: Any) -> Any:
        each = lambda n: n.args[0] if n.target is noted else n  # noqa: E731
        return fx.map_arg(operands, each)

    pending: list[Any] = list(new.args[1])  # type: ignore[arg-type]
    while pending:
        note = pending.pop()
        is_note = isinstance(note, fx.Node) and note.target is noted
        value = note.args[0] if is_note else None
        if not isinstance(value, fx.Node):
            told = f"{where(new)} takes {note} for a note"
            raise VerificationError(told, nodes=[old.name])
        said = Call(function_of(note.args[1]), note.args[2:], note.kwargs)
        made = _uncovered(value)
        if said.target is not made.target or (
            values((said.args, said.kwargs)) != (tuple(made.args), made.kwargs)
        ):
            raise VerificationError(
                f"{where(new)} would make {value.name} otherwise than the graph does",
                nodes=[old.name],
            )
        pending += [n for n in note.all_input_nodes if n.target is noted]
    return call_of(old), _uncovered(new)


def _any_function(old: fx.Node, new: fx.Node) -> tuple[Call, Call]:
    return call_of(old)._replace(target=new.target), call_of(new)


# -- the rows --------------------------------------------------------------------------

KERNELS = May(replace=True)
MADE_ONCE = May(once=True)
INSERTED_CASTS = May(
    CASTS | USES | COPIES,
    retype=True,
    rename={op: (low,) for op, low in WITH_FP32_STATE.items()},
)
LOW_INPUTS = May(rewrite=_copied_once)
GATHERS = May(rewrite=_gathered_low)
LAYOUTS = May(frozenset({laid_out}))
TOGETHER = May(groups=True, rewrite=_out_of_a_group)
ON_MESHES = May(rewrite=_on_the_mesh)
MADE_AGAIN = May(frozenset({noted}), rewrite=_without_notes)
BINDINGS = May(rewrite=_any_function)
# Inductor gets a second cast of a result, of a view with another shape: `RESHAPES`.
COMPILERS = May(
    USES | CASTS | RESHAPES,
    rename={
        **{function: (traced,) for function, traced in FOR_COMPILERS.items()},
        scale_grad: (
            FOR_COMPILERS[scale_grad],
            traced_scale_grad_,
            traced_scale_grad_apart,
        ),
        checkpointed: (compat.CHECKPOINT,),
    },
)


def hoisted(copies: Mapping[str, str | None]) -> May:
    """Casts of weights became inputs, or constants."""
    return May(USES, copies, fold=True)


def scaled(extra: Collection[str]) -> May:
    """Gradients are scaled and unscaled by the inputs `extra`."""
    rename = {low_weight: (low_weight_unscaled,)}
    return May(EDGE | COPIES, dict.fromkeys(extra), rename=rename)


def held(names: Collection[str]) -> May:
    """The results of the nodes `names` are cast to the dtypes recorded before."""
    return May(frozenset({with_dtypes}), redtyped=names)
