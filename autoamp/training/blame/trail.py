"""The trail of one run: each value and gradient, its place and largest magnitude.

Adding to a trail never waits for a device: magnitudes are 0-dim tensors until one is
read.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.passes.ops import op_name
from autoamp.passes.see.nodes import source_line
from autoamp.passes.write.emitted import TOGETHER, is_inserted, parts_for, stands_for

OP, WEIGHT, INPUT, OUTSIDE = "op", "weight", "input", "outside"


@dataclass(frozen=True)
class Location:
    """A place in a model's code.

    Attributes:
        kind: "op", "weight", "input" or "outside" (code in no captured graph).
        op: the op's full name ("aten::exp.default"); "" for a weight or input.
        name: the name of the weight or input; "" for an op.
        module: the path of the innermost module; "" for the model itself.
        source: `model.py:12: x = self.fc(x)`, or "".
        modules: the paths of all modules around it, outermost first.
    """

    kind: str
    op: str = ""
    name: str = ""
    module: str = ""
    source: str = ""
    modules: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind in (WEIGHT, INPUT):
            return f"{self.kind} {self.name}"
        where = f" in {self.module}" if self.module else ""
        return f"{self.op}{where}{f' ({self.source})' if self.source else ''}"


def readers(node: fx.Node) -> list[fx.Node]:
    """The ops of the model that read `node`, through casts and uses of casts."""
    nodes: list[fx.Node] = []
    for user in node.users:
        if user.target in TOGETHER:
            nodes += [op for part in parts_for(user, node) for op in readers(part)]
        elif is_inserted(user):
            nodes += readers(user)
        elif user.op != "output":
            nodes.append(user)
    return nodes


def location_of(node: fx.Node, here: str = "") -> Location:
    """The place of the op that made the value of `node`.

    Args:
        here: the path of the module around the code that ran, where modules that are
            alike share the graph; "" for the module that it was captured in.
    """
    node = stands_for(node)
    while node.target is operator.getitem:
        node = stands_for(node.all_input_nodes[0])
    if node.op in ("placeholder", "get_attr"):
        return given_location(node, is_weight=node.op == "get_attr", here=here)
    paths = compat.paths_where_run(node.meta.get("nn_module_stack") or {}, here)
    op = node.name
    if isinstance(node.target, compat.OpOverload):
        op = op_name(node.target)
    elif node.op == "call_function":
        op = getattr(node.target, "__name__", str(node.target))
    return Location(
        OP,
        op=op,
        module=paths[-1] if paths else "",
        source=source_line(node),
        modules=paths,
    )


def given_location(node: fx.Node, *, is_weight: bool, here: str = "") -> Location:
    """An input of a graph, by its path in the model or the name of the argument.

    The low copy of a weight has the weight's name.

    Args:
        here: as for `location_of`.
    """
    # The extra input of a rewritten graph is named after the weight that it copies.
    copied = node.name.removesuffix("_copy")
    known = [n for n in node.graph.nodes if n.op == node.op and n.name == copied]
    of = known[0] if known else node
    name = of.name if of.op == "placeholder" else str(of.target)
    path = compat.path_where_run(of.meta.get("autoamp_path") or name, of.graph, here)
    return Location(WEIGHT if is_weight or of is not node else INPUT, name=path)


@dataclass(slots=True, eq=False)
class Step:
    """One value that was computed, or one gradient that an op's backward gave.

    Attributes:
        node: the node; None for code outside of graphs.
        size: the largest magnitude; `largest` reads it.
        dtype: the dtype of the value or gradient.
        operands: the steps that made the operands; for a backward, the step of the op's
            forward alone.
        entering: for a backward, the magnitude of the gradient that it was given.
        place: names the step; by default `node` and `here` do.
        here: the path of the module around the code that ran; "" for the root.
        literal: whether an infinity is written in the call, as in a mask.
        wide: the magnitude of the op's result in fp32, if it was computed; else None.
    """

    node: fx.Node | None
    size: torch.Tensor | float
    dtype: torch.dtype
    operands: Sequence[Step] = ()
    entering: torch.Tensor | None = None
    place: Location | None = None
    here: str = ""
    literal: bool = field(init=False)
    wide: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Looks for an infinity that the model itself writes."""
        node = self.node
        written = [] if node is None else pytree.tree_leaves((node.args, node.kwargs))
        self.literal = any(
            isinstance(v, float) and not math.isfinite(v) for v in written
        )

    @property
    def largest(self) -> float:
        """The largest magnitude, or NaN; waits for the device."""
        self.size = float(self.size)
        return self.size

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.largest)

    @property
    def is_backward(self) -> bool:
        return self.entering is not None

    @property
    def entered_bad(self) -> bool:
        """Whether a backward was given a gradient that was not finite already."""
        return self.entering is not None and not math.isfinite(float(self.entering))

    @property
    def is_cast(self) -> bool:
        """Whether the rewrite made the node."""
        return self.node is not None and is_inserted(self.node)

    @property
    def location(self) -> Location:
        """The place of the op that made the value; a cast shows another op's value."""
        if self.place is not None:
            return self.place
        if self.operands and (self.is_cast or self.is_backward):
            return self.operands[0].location
        assert self.node is not None
        return location_of(self.node, self.here)

    @property
    def is_given(self) -> bool:
        """Whether the value came from outside: a weight, or an input."""
        return self.location.kind in (WEIGHT, INPUT)

    @property
    def key(self) -> tuple[bool, Location]:
        """A name of the step that is the same in fp32 and in low precision."""
        return self.is_backward, self.location


class Trail:
    """The steps of one call, or of one training step, in the order of time.

    Attributes:
        steps: the values and gradients so far.
        outputs: the steps that made the results of graphs.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.outputs: list[Step] = []
        self._made_by = WeakIdKeyDictionary()
        self._claimed: set[Any] = set()

    def add(self, step: Step, values: Iterable[torch.Tensor] = ()) -> Step:
        """Adds the step that made `values`."""
        self.steps.append(step)
        for value in values:
            self._made_by[value] = step
        return step

    def maker(self, value: Any) -> Step | None:
        """The step that made the tensor object `value`, if one of this trail did."""
        step = self._made_by.get(value) if isinstance(value, torch.Tensor) else None
        return step if isinstance(step, Step) else None

    def renew(self, value: Any, step: Step | None) -> None:
        """Makes `step` the step that made `value`, which was written to or cut out."""
        if step is not None and isinstance(value, torch.Tensor):
            self._made_by[value] = step

    def begins(self, value: Any) -> None:
        """Starts the trail at `value`: autograd nodes before it belong to no step."""
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            self._claimed.add(value.grad_fn)

    def claim(self, step: Step, values: Iterable[torch.Tensor]) -> None:
        """Hooks the autograd nodes behind `values` that no step has claimed yet.

        The hooks add the gradients of `step` to the trail.  One op may have several
        autograd nodes.
        """
        pending: list[Any] = [v.grad_fn for v in values if v.requires_grad]
        while pending:
            node = pending.pop()
            # An op may be several autograd nodes (`linear`: a product and a
            # transposition).  Those between it and the steps before it are its own.
            if node is None or node in self._claimed:
                continue
            # A node that adds to `.grad` is of no step: it lives as long as its leaf.
            if "AccumulateGrad" in node.name():
                continue
            self._claimed.add(node)
            compat.hook_after_node(node, functools.partial(self._flowed, step))
            pending += [before for before, _ in node.next_functions]

    def let_go(self) -> None:
        """Ends the run, and no longer keeps autograd's graph alive."""
        # Each node holds its predecessors, and all that they have saved.
        self._claimed.clear()

    @compat.never_captured
    def _flowed(self, step: Step, given: Any, entered: Any) -> None:
        found = [g for g in floats_in(given) if g.numel()]
        if not found:
            return
        self.steps.append(
            Step(
                step.node,
                largest_in(found),
                found[0].dtype,
                [step],
                entering=largest_in(floats_in(entered)),
            )
        )


def floats_in(value: Any) -> list[torch.Tensor]:
    """The float tensors in a value, or in a tuple or list of values."""
    if isinstance(value, torch.Tensor):
        is_float = value.is_floating_point() or value.is_complex()
        return [value] if is_float and not compat.is_batch(value) else []
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in floats_in(item)]
    return []


def largest_in(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The largest magnitude in `values`, 0-dim fp64; NaN if any value holds a NaN."""
    sizes = [_largest(value) for value in values]
    if not sizes:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    if len(sizes) == 1:
        return sizes[0]
    return torch.stack([each.to(sizes[0].device) for each in sizes]).amax()


@torch.no_grad()
def _largest(value: torch.Tensor) -> torch.Tensor:
    value = compat.own_memory(value)  # of a DTensor, what this rank holds
    if value.layout == torch.sparse_coo:
        # The values of an uncoalesced tensor may hold an index twice: only their sum is
        # the number.
        value = value.coalesce().values()
    elif value.layout != torch.strided:
        value = value.values()
    if not value.numel() or value.is_meta:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    # `amax` hands a NaN on, which `max` of Python would lose.
    return value.detach().abs().amax().double()
