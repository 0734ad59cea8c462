"""Records the values and gradients of a run: of graphs, and of Python code between."""

from __future__ import annotations

import linecache
import operator
import re
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, LOW_DTYPES
from autoamp.passes.functions import checkpointed
from autoamp.passes.node_by_node import UNROLLED, Observer
from autoamp.passes.ops import base_name
from autoamp.passes.see.nodes import read_operands, written_values
from autoamp.passes.write.dtensor_calls import stands_in
from autoamp.training.blame.trail import (
    OUTSIDE,
    Location,
    Step,
    Trail,
    floats_in,
    given_location,
    largest_in,
)


class Recorder(Observer):
    """Adds the values of one run, and their gradients, to a trail."""

    unrolls = True

    def __init__(
        self,
        trail: Trail,
        names: Mapping[int, Location] | None = None,
        *,
        exact: bool = False,
        here: str = "",
    ) -> None:
        """Makes a recorder.

        Args:
            names: better names for weights and inputs than the graph has, by the `id`
                of the tensor.
            exact: whether a value that leaves its range is computed in fp32 as well,
                from the same operands; this waits for the device at each node.
            here: the path of the module around the code that runs.
        """
        self.here = here
        self.trail, self.names, self.exact = trail, names or {}, exact
        self.latest: dict[fx.Node, Step] = {}
        self._unwritten: tuple[Any, Any] | None = None

    def of_body(self, *_: object) -> Recorder:
        """A recorder that adds to the same trail."""
        return Recorder(self.trail, self.names, exact=self.exact, here=self.here)

    def ended(self, results: Any) -> None:
        """Notes which steps made the results."""
        if not compat.inside_backward():
            makers = map(self.trail.maker, floats_in(results))
            self.trail.outputs += [step for step in makers if step is not None]
        self.trail.let_go()

    def before(self, run: fx.Interpreter, n: fx.Node) -> None:
        """Keeps copies of the operands if the node may write to them."""
        may_write = self.exact and n.op == "call_function" and bool(written_values(n))
        self._unwritten = None
        if may_write and not compat.inside_backward():
            self._unwritten = _operands_in_fp32(run, n)

    def after(self, run: fx.Interpreter, n: fx.Node, value: Any) -> Any:
        """Notes how large the value is."""
        tensors = floats_in(value)
        # A backward runs a checkpointed region again, whose values are known already.
        if n.op == "output" or not tensors or compat.inside_backward():
            return value
        # The results of a call of a body were noted at the body's own nodes.
        noted = (operator.getitem, checkpointed, *UNROLLED)
        maker = self.trail.maker(tensors[0]) if n.target in noted else None
        if n.op in ("placeholder", "get_attr"):
            self._note_given(n, value)
        elif maker is not None:
            self.latest[n] = maker
        else:
            self._note(run, n, tensors)
        return value

    def cut(self, part: Any, whole: Any) -> None:
        """Notes that `part` was made by the step that made `whole`."""
        self.trail.renew(part, self.trail.maker(whole))

    def joined(self, whole: Any, parts: Sequence[Any]) -> None:
        """Notes that `whole` was made by the step of its first part that overflowed.

        Where no part overflowed, the step of the first part counts.
        """
        makers = [self.trail.maker(part) for part in parts]
        worst = [m for m in makers if m is not None and not m.is_finite]
        self.trail.renew(whole, (worst or makers)[0])

    def _note_given(self, n: fx.Node, value: Any) -> None:
        maker = self.trail.maker(value)
        if maker is not None:  # a value of another graph, or of the graph around
            self.latest[n] = maker
            return
        location = _line_that_made(value) if self.exact else None
        if location is not None:  # Python code between graphs
            step = Step(n, largest_in([value]), value.dtype, place=location)
            self.latest[n] = self.trail.add(step, [value])
            self.trail.claim(step, [value])
            return
        self.trail.begins(value)
        weight = n.op == "get_attr" or isinstance(value, nn.Parameter)
        location = self.names.get(id(value)) or given_location(
            n, is_weight=weight, here=self.here
        )
        dtype, size = value.dtype, largest_in([value])
        step = Step(n, size, dtype, place=location, here=self.here)
        self.latest[n] = self.trail.add(step)

    def _note(
        self, run: fx.Interpreter, n: fx.Node, tensors: list[torch.Tensor]
    ) -> None:
        operands = [self.latest[o] for o in read_operands(n) if o in self.latest]
        of_torch = isinstance(n.target, compat.OpOverload)
        # Memory that is allocated and not written to yet holds no number.
        unset = of_torch and "empty" in base_name(n.target)
        size = largest_in([] if unset else tensors)
        step = Step(n, size, tensors[0].dtype, operands, here=self.here)
        self.trail.add(step, tensors)
        self.trail.claim(step, tensors)
        self.latest[n] = step
        for written in written_values(n):
            self._renew(run, written, step)
        if self.exact and not step.is_finite and all(o.is_finite for o in operands):
            step.wide = self._in_fp32(run, n, step)

    def _renew(self, run: fx.Interpreter, written: fx.Node, step: Step) -> None:
        """Makes `step` the maker of every value in the memory of `written`."""
        memory = run.env.get(written)
        if not isinstance(memory, torch.Tensor):
            return
        # Views alias their base: a write to one changes the values of all.
        where = compat.storage_id(memory)
        for node, value in run.env.items():
            if isinstance(value, torch.Tensor) and compat.storage_id(value) == where:
                self.latest[node] = step
                self.trail.renew(value, step)

    def _in_fp32(self, run: fx.Interpreter, n: fx.Node, step: Step) -> float | None:
        """The magnitude of the result in fp32; None where fp32 cannot be computed."""
        of_torch = isinstance(n.target, compat.OpOverload)
        if step.is_cast or (of_torch and stands_in(n)):  # moved, not computed
            return max((o.largest for o in step.operands), default=None)
        if not of_torch:
            return None
        # An op that wrote to its operands has changed them by now.
        args, kwargs = self._unwritten or _operands_in_fp32(run, n)
        # A dropout that is computed once more must not draw from the training's
        # generator.
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                result = n.target(*args, **kwargs)  # type: ignore[operator]
                return float(largest_in(floats_in(result)))
            except RuntimeError:  # the kernel takes one dtype only
                return None


def _operands_in_fp32(run: fx.Interpreter, n: fx.Node) -> tuple[Any, Any]:
    """The arguments of a call, with tensors copied, and widened as named dtypes are."""

    def copied(node: fx.Node) -> Any:
        value = run.env[node]
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().clone()
        return value.float() if value.is_floating_point() else value

    def widened(value: Any) -> Any:
        is_low = isinstance(value, torch.dtype) and value in LOW_DTYPES.values()
        return HIGH_DTYPE if is_low else value

    return fx.node.map_aggregate(fx.map_arg((n.args, n.kwargs), copied), widened)


# -- Python code outside of graphs -----------------------------------------------------

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent.parent)


class Listening(TorchFunctionMode):
    """A region in which each call of a function of torch becomes a step of a trail."""

    def __init__(self, trail: Trail) -> None:
        super().__init__()
        self.trail = trail

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        values = [a for a in pytree.tree_leaves((args, kwargs)) if floats_in(a)]
        operands = [self._maker(value) for value in values]
        result = func(*args, **(kwargs or {}))
        # Some calls return no tensor, such as `tensor.backward()`.
        tensors = [t for t in pytree.tree_leaves(result) if floats_in(t)]
        if tensors and not any(t is value for t in tensors for value in values):
            op = str(resolve_name(func) or getattr(func, "__name__", func))
            location = Location(OUTSIDE, op=op, source=line_outside())
            size, dtype = largest_in(tensors), tensors[0].dtype
            step = Step(None, size, dtype, operands, place=location)
            self.trail.add(step, tensors)
            self.trail.claim(step, tensors)
        return result

    def _maker(self, value: torch.Tensor) -> Step:
        maker = self.trail.maker(value)
        if maker is not None:
            return maker
        self.trail.begins(value)
        location = Location(OUTSIDE, name="a tensor of the loss function")
        step = Step(None, largest_in([value]), value.dtype, place=location)
        return self.trail.add(step, [value])


def _line_that_made(value: torch.Tensor) -> Location | None:
    """The Python line that made `value`, where autograd has recorded one."""
    calls = compat.written_in(value.grad_fn) if value.grad_fn is not None else []
    # The innermost call comes last; calls inside torch and inside autoamp tell the user
    # nothing.
    for call in reversed(calls):
        where, _, code = call.strip().partition("\n")
        file, _, rest = where.removeprefix('File "').partition('", line ')
        if rest and not file.startswith((_TORCH, _OURS)):
            line = rest.partition(",")[0]
            op = re.sub(r"Backward\d*$", "", value.grad_fn.name())  # type: ignore[union-attr]
            code = code.strip().partition("\n")[0]
            return Location(OUTSIDE, op=op, source=f"{file}:{line}: {code}")
    return None


def line_outside() -> str:
    """`train.py:12: loss = ...`: the innermost line outside of torch and autoamp."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OURS)):
            code = linecache.getline(file, frame.f_lineno).strip()
            return f"{file}:{frame.f_lineno}: {code}"
        frame = frame.f_back
    return ""
