"""Prices of ops and casts that were measured on the device at hand.

Each op is timed by itself.  Its operands have the shapes, strides and dtypes of the
graph, and arbitrary numbers: floats between 0.5 and 1.5, zeros for integers and
booleans.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.messages import told
from autoamp.passes.decide.cost import UNIT_NS, Prices, price_graph
from autoamp.passes.decide.devices import device_of, kind_of, main_device
from autoamp.passes.decide.verdict import Classified
from autoamp.passes.kernels.norms import own_norm
from autoamp.passes.speeds.clock import least_seconds
from autoamp.passes.speeds.store import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)  # pytree would take a named tuple apart
class Operand:
    """A tensor that a specimen reads.

    Attributes:
        grad: whether a gradient flows to it.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    grad: bool

    def made(self, device: torch.device) -> torch.Tensor:
        """A tensor with this shape, strides and dtype."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        # Strides may leave gaps or show one number twice; memory to the last element
        # does.
        size = 1 + last if all(self.shape) else 0
        flat = torch.zeros(size, dtype=torch.float32, device=device)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            # Away from 0: logarithms, roots and quotients of these are finite.
            flat.uniform_(0.5, 1.5)
        tensor = flat.to(self.dtype).as_strided(self.shape, self.strides)
        return tensor.requires_grad_(self.grad)


@dataclass(frozen=True)
class Specimen:
    """A call of an op, forward and, if an operand has a gradient, backward.

    Attributes:
        target: the op.
        args, kwargs: its arguments, with an `Operand` for each tensor.
        dtype: the dtype that the op computes in.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype

    @property
    def key(self) -> str:
        """A key that is equal for specimens that take equally long on one device."""
        own = getattr(self.target, "__qualname__", "autoamp")
        name = str(self.target) if isinstance(self.target, compat.OpOverload) else own
        text = repr((name, self.args, sorted(self.kwargs.items())))
        digest = hashlib.sha256(text.encode()).hexdigest()[:20]
        return f"{name}:{short_name(self.dtype)}:{digest}"[-200:]

    def nanoseconds(self, device: torch.device) -> float:
        """The time of the call and its backward.

        Raises:
            Exception: any error that the op raises on these operands.
        """
        writes = isinstance(self.target, compat.OpOverload) and (
            compat.schema(self.target).is_mutable
        )
        made = pytree.tree_map_only(
            Operand, lambda operand: operand.made(device), (self.args, self.kwargs)
        )
        inputs = [t for t in _tensors(made) if t.requires_grad]
        grads: list[torch.Tensor] = []

        def call() -> None:
            given = made
            if writes:  # a leaf must not be written to
                given = pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, made)
            args, kwargs = given
            results = _tensors(self.target(*args, **kwargs))
            results = [t for t in results if t.requires_grad]
            if not inputs or not results:
                return
            if not grads:
                grads.extend(map(torch.ones_like, results))
            torch.autograd.grad(results, inputs, grads, allow_unused=True)

        with torch.set_grad_enabled(bool(inputs)):
            return 1e9 * least_seconds(call, device)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor)]


def op_specimen(
    node: fx.Node, classified: Classified, low: torch.dtype | None
) -> Specimen | None:
    """A call like the call of `node`; None if `node` is no single op of torch.

    Args:
        low: the dtype of a low call; None for a call in fp32.
    """
    if not isinstance(node.target, compat.OpOverload):
        return None
    reads = classified.reads(node.name)

    def operand(leaf: fx.Node) -> Any:
        value = leaf.meta.get("val")
        if isinstance(value, torch.SymInt):
            return compat.hint(value)
        if not isinstance(value, torch.Tensor):
            return value
        wanted = value.dtype
        if wanted == HIGH_DTYPE:
            _, mode = next(reads)
            if low is not None and mode not in ("high", "any"):
                wanted = low
        grad = classified.facts.nodes[leaf.name].requires_grad
        return _operand(value, wanted, grad=grad and wanted.is_floating_point)

    args = map_arg(node.args, operand)
    kwargs = map_arg(node.kwargs, operand)
    if low is not None:  # an argument that names fp32 names the precision
        args, kwargs = pytree.tree_map_only(
            torch.dtype, lambda d: low if d is HIGH_DTYPE else d, (args, kwargs)
        )
    dtype, target = low or HIGH_DTYPE, node.target
    result = node.meta.get("val")
    if classified.facts.own_kernels and isinstance(result, torch.Tensor):
        target = own_norm(node, dtype, result.device)
    return Specimen(target, tuple(args), dict(kwargs), dtype)


def _operand(value: torch.Tensor, dtype: torch.dtype, *, grad: bool) -> Operand:
    shape = tuple(compat.hint(size) for size in value.shape)
    strides = tuple(compat.hint(stride) for stride in value.stride())
    return Operand(shape, strides, dtype, grad)


@dataclass(eq=False)
class MeasuredPrices:
    """A `PriceModel` whose prices are measured, on operands like the graph's.

    An op that cannot be called by itself gets the roofline's price, multiplied by the
    mean ratio of measured prices to the roofline's prices in the same precision.

    Attributes:
        low: the compute dtype.
        store: the times measured so far.
        measures: whether unknown times are measured; if not, they are estimated.
        measured, remembered: how many times were measured, and found in the store.
    """

    low: torch.dtype
    store: Store
    measures: bool = True
    measured: int = 0
    remembered: int = 0
    _met: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(
        self,
        gm: fx.GraphModule,
        classified: Classified,
        *,
        objective: str,
        do_no_harm: bool,
        free_weights: bool,
    ) -> Prices:
        """The prices of a graph; no op has a reward, because its gain is measured.

        Args:
            gm, classified, free_weights: as for `price_graph`.
            objective: "time".
            do_no_harm: ignored.
        """
        del do_no_harm
        device = main_device(gm)
        roofline = price_graph(
            gm,
            classified,
            device_of(device, self.low),
            objective=objective,
            do_no_harm=True,
            free_weights=free_weights,
        )
        wanted = self._wanted(gm, classified, roofline)
        with self._lock:
            if self.measures:
                self._measure(wanted.values(), device)
            found = {
                at: self.store.known[each.key] / UNIT_NS
                for at, each in wanted.items()
                if each.key in self.store.known
            }
        return _replaced(roofline, found)

    def _wanted(
        self, gm: fx.GraphModule, classified: Classified, roofline: Prices
    ) -> dict[tuple[str, str], Specimen]:
        """The ops and casts of a graph that have a price, by side and node."""
        found: dict[tuple[str, str], Specimen] = {}
        for node in gm.graph.nodes:
            name = node.name
            if any(roofline.ops.get(name, ())):
                for side, low in (("high", None), ("low", self.low)):
                    specimen = op_specimen(node, classified, low)
                    if specimen is not None:
                        found[side, name] = specimen
            casts = {"down": (HIGH_DTYPE, self.low), "up": (self.low, HIGH_DTYPE)}
            if node.op == "placeholder":
                del casts["up"]  # an input is fp32
            for side, (before, after) in casts.items():
                if getattr(roofline, side).get(name):
                    grad = classified.facts.nodes[name].requires_grad
                    read = _operand(node.meta["val"], before, grad=grad)
                    cast = torch.ops.aten._to_copy.default
                    found[side, name] = Specimen(cast, (read,), {"dtype": after}, after)
        return found

    def _measure(self, specimens: Iterable[Specimen], device: torch.device) -> None:
        """Measures the unknown times, and stores them."""
        new = {each.key: each for each in specimens if each.key not in self._met}
        self._met.update(new)
        missing = {k: v for k, v in new.items() if k not in self.store.known}
        self.remembered += len(new) - len(missing)
        found = {}
        own = [device] if kind_of(device).is_asynchronous else []
        # Operands and random ops draw numbers, and the user's generators must not move.
        forked = torch.random.fork_rng(own, device_type=device.type)
        with forked, compat.on_real_numbers():
            for key, specimen in told(missing.items(), "measuring ops and casts"):
                try:
                    found[key] = specimen.nanoseconds(device)
                except Exception as error:  # noqa: BLE001 (an op may refuse zeros)
                    logger.debug("autoamp: %s is not measured: %s", key, error)
        self.measured += len(found)
        self.store.add(found)


def _replaced(roofline: Prices, found: Mapping[tuple[str, str], float]) -> Prices:
    """A roofline's prices, each replaced by a measured price or scaled to fit them."""
    tables = {
        "high": {name: pair[0] for name, pair in roofline.ops.items()},
        "low": {name: pair[1] for name, pair in roofline.ops.items()},
        "down": roofline.down,
        "up": roofline.up,
    }
    off = defaultdict[str, list[float]](list)
    for (side, name), measured in found.items():
        if tables[side].get(name):
            off[side].append(math.log(measured / tables[side][name]))

    def price(side: str, name: str) -> int:
        before = tables[side][name]
        if not before:
            return 0  # a view, or a weight whose copy is kept
        known = found.get((side, name))
        if known is None:
            logs = off[side]
            # The geometric mean, since a roofline is wrong by a factor.
            known = before * math.exp(sum(logs) / len(logs)) if logs else before
        return max(1, round(known))

    ops = {}
    for name, (high, low) in roofline.ops.items():
        ops[name] = price("high", name), price("low", name)
        if high == low:  # the call is the same with either label
            ops[name] = (ops[name][0],) * 2
    up = {name: price("up", name) for name in roofline.up}
    return replace(
        roofline,
        ops=ops,
        down={name: price("down", name) for name in roofline.down},
        up=up,
        # As much off as the cast whose place it takes.
        wide={
            name: max(1, round(wide * up[name] / roofline.up[name]))
            for name, wide in roofline.wide.items()
        },
        device=replace(roofline.device, name=f"{roofline.device.name}, measured"),
    )
