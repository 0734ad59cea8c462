"""Runs both sides of a change on stand-in values, for every graph of the tests.

A kernel is recognised by its spelling (`kernels/spelled.py` of the passes), and the
recognition of a mask is a proof by positions.  Here neither is known: the calls that
are gone and the calls in their place run on random numbers, and results, gradients and
bytes kept for the backward are compared.  A conversion of a user's does not do so:
`proved` takes the place of the comparison of graphs while tests run.

The truth is the old side in float64.  The new side may be off by `ROUNDINGS` times as
much as the old side is, or as one rounding of the coarsest dtype of the region is: a
wrong kernel is off by far more.

A region is run once in a process for each kind of region, on few numbers: sizes become
small, with the literals that repeat them.  Where that shows a difference, or where the
calls do not run so, the real sizes decide.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import VerificationError
from tests.passes.check.door import (
    BINDINGS,
    KERNELS,
    May,
    Region,
    bytes_held,
    differences,
    flowing_in,
    storage_key,
    tensors_of,
    tensors_saved,
    where,
)

MOST = 2**22
"""A region of more numbers than this is not run, since the suite has large models."""

ROUNDINGS = 16.0
"""How many times the old side's own error, or one rounding, the new side may be off."""

_KNOWN: dict[Any, str | None] = {}
"""For each kind of region that has run, the fault that was found, or None."""

_KNOWN_CALLS: dict[Any, bool] = {}
"""Whether a function calls the same ops, by the op, the function and the operands."""

_KNOWN_AT_MOST = 4096

_RANDOM = frozenset({"aten::dropout"})
"""Calls that draw: each gives its operand here, since the two sides draw otherwise."""

_DROPOUT = "dropout_p"

FOUND: list[VerificationError] = []
"""The faults that were found in the test that runs."""


def proved(before: fx.GraphModule, after: fx.GraphModule, may: May) -> list[Region]:
    """The differences of two graphs; those of kernels and bindings are run as well.

    Raises:
        VerificationError: the graphs differ in more, or compute something else.
    """
    regions = differences(before, after, may)
    try:
        if may is KERNELS:
            check_alike(regions)
        elif may is BINDINGS:
            check_same_calls(before, after)
    except VerificationError as error:
        # Without `strict` a conversion would go on, without these calls.
        FOUND.append(error)
        raise
    return regions


def check_alike(regions: Sequence[Region]) -> None:
    """Raises where the new side of a region gives other numbers than the old side.

    Raises:
        VerificationError: the message says which result or gradient differs, by what.
    """
    flowing: dict[fx.Graph, set[fx.Node]] = {}
    for region in regions:
        graph = region.old[0].graph
        if graph not in flowing:
            flowing[graph] = flowing_in(graph)
        trained = [one in flowing[graph] for one, _ in region.inputs]
        key = (*trained, _kind(region))
        if key not in _KNOWN:
            if len(_KNOWN) >= _KNOWN_AT_MOST:
                _KNOWN.clear()
            _KNOWN[key] = _difference(region, trained)
        problem = _KNOWN[key]
        if problem is not None:
            raise VerificationError(
                f"{where(region.new[-1])} in the place of {where(region.old[-1])}: "
                f"{problem}",
                nodes=[n.name for n in region.old],
            )


def _kind(region: Region) -> Any:
    """The properties of a region on which its numbers depend."""
    numbers: dict[str, int] = {}
    for one, other in region.inputs:
        numbers.setdefault(one.name, len(numbers))
        numbers.setdefault(other.name, numbers[one.name])

    def calls(nodes: Sequence[fx.Node]) -> Iterator[Any]:
        names = dict(numbers)
        for node in nodes:
            read = fx.map_arg(
                (node.args, node.kwargs),
                lambda n, names=names: f"%{names.get(n.name, -1)}",  # type: ignore[misc]
            )
            yield node.target, repr(read)
            names[node.name] = len(names)

    inputs = [
        (t.dtype, str(t.shape), str(t.stride()))
        for one, _ in region.inputs
        for t in tensors_of(one.meta.get("val"))
    ]
    return (*calls(region.old), None, *calls(region.new), None, *inputs)


def _difference(region: Region, trained: Sequence[bool]) -> str | None:
    """The fault of the new side; None where none is found.

    A difference counts where it shows at the real sizes too.  A region that runs at no
    size is one of which nothing is known, and that is wrong as well.
    """
    told = ""
    for sizes in (_small_sizes(region), {}):
        values = _Values(region, trained, sizes)
        if values.count > MOST and not told:
            return None
        try:
            found = _compared(region, values)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError):
            continue  # the calls do not run on tensors of another size
        if found is None:
            return None
        told = found
    return told or "cannot be run, and so cannot be compared"


def _compared(region: Region, values: _Values) -> str | None:
    with compat.on_real_numbers(), torch.enable_grad():
        runs: list[dict[fx.Node, Any]] = []

        def forward(side: int, *, wide: bool) -> list[Any]:
            runs.append(_run(region, side, values, wide=wide))
            return [runs[-1][pair[side]] for pair in region.results]

        # Both sides round, so that neither is the truth for the other.
        forward(0, wide=True)
        saved = [
            tensors_saved(functools.partial(forward, side, wide=False))
            for side in (0, 1)
        ]
        truth, old, new = runs
        for side, (one, other) in enumerate(region.results):
            true, was, now = truth[one], old[one], new[other]
            values.expect(one, was)
            problem = _off(true, was, now, _coarsest(region))
            if problem is not None:
                return f"result {side + 1} {problem}"
        was_kept, kept = (
            _bytes_kept(region, side, runs[side + 1], saved[side]) for side in (0, 1)
        )
        if kept > was_kept:
            return f"keeps {kept} bytes for the backward, where {was_kept} were kept"
        return _gradients_differ(region, values, truth, old, new)


def _bytes_kept(
    region: Region, side: int, run: Mapping[fx.Node, Any], saved: Sequence[Tensor]
) -> int:
    """The bytes that one side keeps for the backward, beside what is held anyhow."""
    # Inputs of the graph, weights for the most part, live as long as the caller wants.
    ends = [pair[side] for pair in region.inputs if pair[side].op == "placeholder"]
    # The new side's results live as long as their readers: attention keeps its result
    # in the place of its weights.
    ends += [new for _, new in region.results] if side else []
    held = {storage_key(t) for t in tensors_of([run[n] for n in ends])}
    values = tensors_of([run[p[side]] for p in region.results])
    # Statistics, a number or less for each row, do not count: torch's norms keep none
    # where only the weight is trained and 16 bits of each elsewhere, and ours fp32.
    rows = max((t.numel() // max(t.shape[-1:], default=1) for t in values), default=0)
    return sum(
        bytes_held(t)
        for t in saved
        if storage_key(t) not in held and bytes_held(t) > rows * t.itemsize
    )


def _gradients_differ(
    region: Region,
    values: _Values,
    truth: Mapping[fx.Node, Any],
    old: Mapping[fx.Node, Any],
    new: Mapping[fx.Node, Any],
) -> str | None:
    """The first difference between the gradients of the inputs, or None."""
    found: list[list[Tensor | None]] = []
    for run, at in ((truth, 0), (old, 0), (new, 1)):
        roots, given = [], []
        for number, pair in enumerate(region.results):
            value = run[pair[at]]
            if isinstance(value, Tensor) and value.requires_grad:
                roots.append(value)
                given.append(values.cotangent(number, value))
        leaves = [
            run[pair[at]]
            for pair in region.inputs
            if isinstance(run.get(pair[at]), Tensor) and run[pair[at]].requires_grad
        ]
        if not roots or not leaves:
            found.append([])
            continue
        # An input may reach no result that needs a gradient.
        made = torch.autograd.grad(roots, leaves, given, allow_unused=True)
        found.append([*made])
    if len({len(each) for each in found}) > 1:
        return "lets no gradient through where one flowed, or lets one through"
    for number, (true, was, now) in enumerate(zip(*found, strict=True)):
        if was is None or now is None:
            # No gradient, and a gradient of zeros, are the same to autograd.
            if was is not now and bool((true if true is not None else now).any()):
                return f"gives no gradient to input {number + 1}"
            continue
        problem = _off(true, was, now, _coarsest(region))
        if problem is not None:
            return f"the gradient of input {number + 1} {problem}"
    return None


def _off(true: Any, was: Any, now: Any, coarsest: float) -> str | None:
    """How far a value is off, where that is too far."""
    if not isinstance(true, Tensor):
        if isinstance(true, (list, tuple)):
            parts = (_off(*each, coarsest) for each in zip(true, was, now, strict=True))
            return next((p for p in parts if p is not None), None)
        return None if was == now else f"is {now}, and was {was}"
    if true.shape != now.shape or was.dtype != now.dtype:
        return f"is {now.dtype} {[*now.shape]}, and was {was.dtype} {[*was.shape]}"
    if not true.dtype.is_floating_point:
        return None if torch.equal(was, now) else "differs"
    # Where the old side overflows, nothing is asked of the new one.
    finite = true.isfinite() & was.isfinite()
    if not bool(finite.any()):
        return None
    truth, one, other = (t.detach().double()[finite] for t in (true, was, now))
    if not bool(other.isfinite().all()):
        return "is not finite where it was"
    size = float(truth.abs().max())
    # Of the largest number: a sum's error is a share of its terms, not of their sum.
    allowed = ROUNDINGS * max(float((one - truth).abs().max()), coarsest * size)
    error = float((other - truth).abs().max())
    if error <= allowed:
        return None
    return f"is off by {error:.3g} of {size:.3g}, where rounding explains {allowed:.3g}"


def _coarsest(region: Region) -> float:
    """The step above 1 of the coarsest float dtype that the region computes in."""
    nodes = [*region.old, *region.new, *(n for pair in region.inputs for n in pair)]
    dtypes = {t.dtype for n in nodes for t in tensors_of(n.meta.get("val"))}
    steps = [torch.finfo(d).eps for d in dtypes if d.is_floating_point]
    return max(steps, default=torch.finfo(torch.float32).eps)


# -- running one side --------------------------------------------------------------


def _run(
    region: Region, side: int, values: _Values, *, wide: bool
) -> dict[fx.Node, Any]:
    """The value of each node and input of a side; in float64 where `wide`."""
    found: dict[fx.Node, Any] = {}
    for pair in region.inputs:
        found[pair[side]] = values.of(pair[0], wide=wide)
        found[pair[1 - side]] = found[pair[side]]
    found |= {n: found[first] for n, first in region.again.items() if first in found}
    for node in (region.old, region.new)[side]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), found.__getitem__)
        args, kwargs = values.fitted(args, wide), values.fitted(kwargs, wide)
        found[node] = _called(node, args, kwargs)
    return found


def _called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    target: Any = node.target
    if isinstance(target, compat.OpOverload):
        if compat.schema(target).name in _RANDOM:
            # A copy, as a dropout makes one: a write to its result leaves the operand
            # alone.
            return args[0].clone()
        order = [a.name for a in compat.schema(target).arguments]
    elif node.op == "get_attr":
        return operator.attrgetter(str(target))(node.graph.owning_module)
    else:
        order = _parameters(target)
    at = order.index(_DROPOUT) if _DROPOUT in order else len(args)
    if at < len(args):
        args = (*args[:at], 0.0, *args[at + 1 :])
    elif _DROPOUT in kwargs:
        kwargs = {**kwargs, _DROPOUT: 0.0}
    return target(*args, **kwargs)


@functools.cache
def _parameters(function: Any) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # a built-in function
        return []


class _Values:
    """Random values for the inputs of a region, the same for each run.

    Attributes:
        count: how many numbers the inputs and the old side's values have together.
    """

    def __init__(
        self, region: Region, trained: Sequence[bool], sizes: Mapping[int, int]
    ) -> None:
        self.sizes = sizes
        self._values: dict[fx.Node, Any] = {}
        self._generator = torch.Generator("cpu").manual_seed(0)
        self._cotangents: dict[int, Tensor] = {}
        given = zip(region.inputs, trained, strict=True)
        self._trained = {one for (one, _), is_trained in given if is_trained}
        self._known = {one: one.meta.get("val") for one, _ in region.inputs}
        every = [*self._known.values(), *(n.meta.get("val") for n in region.old)]
        self.count = sum(
            math.prod(self._size(s) for s in t.shape)
            for value in every
            for t in tensors_of(value)
        )

    def _size(self, size: Any) -> int:
        size = compat.hint(size)
        return self.sizes.get(size, size)

    def of(self, node: fx.Node, *, wide: bool) -> Any:
        """A new copy of an input's value, which is a leaf."""
        if node not in self._values:
            self._values[node] = self._made(self._known.get(node))
        return self._fresh(self._values[node], wide, node in self._trained)

    def _fresh(self, value: Any, wide: bool, trained: bool) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._fresh(each, wide, trained) for each in value)
        if not isinstance(value, Tensor):
            return value
        if not value.dtype.is_floating_point:
            return value.clone()
        fresh = value.double() if wide else value.clone()
        return fresh.detach().requires_grad_(trained)

    def _made(self, known: Any) -> Any:
        if isinstance(known, (list, tuple)):
            return type(known)(self._made(each) for each in known)
        if isinstance(known, torch.SymInt):
            return self._size(known)
        if not isinstance(known, Tensor):
            return known
        sizes = [self._size(s) for s in known.shape]
        strides = [compat.hint(s) for s in known.stride()]
        order = sorted(range(len(sizes)), key=lambda d: -strides[d])
        # A stride of 0 is an expanded dimension: one number, shown many times.
        dense = [1 if not strides[d] else sizes[d] for d in order]
        made = self._drawn(dense, known.dtype)
        back = [order.index(d) for d in range(len(sizes))]
        return made.permute(back).expand(sizes)

    def _drawn(self, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        drawn = torch.randn(
            sizes, generator=self._generator, dtype=torch.float64, device="cpu"
        )
        if dtype == torch.bool:
            return drawn > -0.5
        if not dtype.is_floating_point:
            # 0 or 1: an index has to lie within its dimension.
            return (drawn > 0).to(dtype)
        return drawn.to(dtype)

    def expect(self, node: fx.Node, value: Any) -> None:
        """Checks that a result has its recorded shape, in the small sizes."""
        for known, made in zip(
            tensors_of(node.meta.get("val")), tensors_of(value), strict=True
        ):
            if [self._size(s) for s in known.shape] != [*made.shape]:
                raise ValueError(f"{node.name} has another shape in small")

    def cotangent(self, number: int, like: Tensor) -> Tensor:
        """A random gradient of a result; every low dtype has its numbers exactly."""
        if number not in self._cotangents:
            drawn = self._drawn([*like.shape], torch.float64)
            self._cotangents[number] = (drawn * 8).round() / 8
        return self._cotangents[number].to(like.dtype)

    def fitted(self, value: Any, wide: bool) -> Any:
        """Arguments in which sizes are the small ones, and dtypes the wide one."""
        if isinstance(value, dict):
            return {k: self.fitted(v, wide) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.fitted(each, wide) for each in value)
        floats = (torch.float32, *LOW_DTYPES.values())
        if wide and isinstance(value, torch.dtype) and value in floats:
            return torch.float64
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if type(value) is int:
            return self.sizes.get(value, value)
        return value


def _small_sizes(region: Region) -> dict[int, int]:
    """Each size to a smaller one, as which every literal of that size is told too."""
    nodes = [*region.old, *region.new, *(one for one, _ in region.inputs)]
    tensors = (t for n in nodes for t in tensors_of(n.meta.get("val")))
    sizes = {compat.hint(size) for t in tensors for size in t.shape}
    free = sorted(size for size in sizes if size > 8)
    taken = {size for size in sizes if size <= 8}
    # Even, so that a row can be halved; each another one, so that no two are mixed up.
    small = (n for n in range(2, 10_000, 2) if n not in taken)
    return {
        size: chosen for size, chosen in zip(free, small, strict=False) if chosen < size
    }


# -- functions in the place of ops -------------------------------------------------


def check_same_calls(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Raises where a function of `after` calls other ops than the op of `before`.

    Raises:
        VerificationError: names the call.
    """
    for old, new in zip(before.graph.nodes, after.graph.nodes, strict=True):
        if old.target is new.target or old.op != "call_function":
            continue
        read = [_operand_kind(n.meta.get("val")) for n in old.all_input_nodes]
        shown = repr(fx.map_arg((old.args, old.kwargs), lambda _: "%"))
        key = (old.target, new.target, shown, *read)
        if key not in _KNOWN_CALLS:
            made = _calls(new)
            _KNOWN_CALLS[key] = made is not None and made == _calls(old)
        if not _KNOWN_CALLS[key]:
            raise VerificationError(
                f"{where(new)} does not call {old.target}", nodes=[old.name]
            )


def _operand_kind(value: Any) -> Any:
    return (value.dtype, value.dim()) if isinstance(value, Tensor) else type(value)


class _Heard(compat.CountingDispatch):
    """Notes each op that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.ops.append((func, repr([a for a in args if not isinstance(a, Tensor)])))
        return func(*args, **(kwargs or {}))


def _calls(node: fx.Node) -> list[Any] | None:
    """The ops that a call comes to on meta tensors; None where it cannot be made."""

    def empty(operand: fx.Node) -> Any:
        return compat.like(operand.meta.get("val"), device="meta")

    try:
        # In inference mode and under autocast a function calls other ops.
        with (
            compat.on_real_numbers(),
            torch.inference_mode(False),
            compat.autocast_off(),
        ):
            args, kwargs = fx.map_arg((node.args, node.kwargs), empty)
            heard = _Heard()
            with heard:
                made = node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    kinds = [(t.dtype, t.shape, t.stride()) for t in tensors_of(made)]
    return [*heard.ops, kinds]
