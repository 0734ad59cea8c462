"""One op with operands like a graph's, to be timed by itself.

Operands have the shapes, strides and dtypes of the graph, and arbitrary numbers: floats
between 0.5 and 1.5, zeros for integers and booleans.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.analyse.classified import Classified
from autoamp.calibrate.clock import least_seconds
from autoamp.dtypes import HIGH_DTYPE, short_name
from autoamp.kernels.cpu_norms.condition import own_norm


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
        many = 1 + last if all(self.shape) else 0
        if self.dtype.is_floating_point or self.dtype.is_complex:
            flat = torch.rand(many, dtype=torch.float32, device=device)
            flat = flat.add_(0.5).to(self.dtype)
        else:
            flat = torch.zeros(many, device=device, dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides).requires_grad_(self.grad)


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
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        made = [v.made(device) if isinstance(v, Operand) else v for v in leaves]
        inputs = [v for v in made if isinstance(v, torch.Tensor) and v.requires_grad]
        grads: list[torch.Tensor] = []

        def call() -> None:
            # A leaf must not be written to.
            given = [_written_to(v) for v in made] if writes else made
            args, kwargs = pytree.tree_unflatten(given, spec)
            results = [*_with_gradient(self.target(*args, **kwargs))]
            if not inputs or not results:
                return
            if not grads:
                grads.extend(map(torch.ones_like, results))
            torch.autograd.grad(results, inputs, grads, allow_unused=True)

        with torch.set_grad_enabled(bool(inputs)):
            return 1e9 * least_seconds(call, device)


def _written_to(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _with_gradient(results: Any) -> Iterator[torch.Tensor]:
    for value in pytree.tree_leaves(results):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            yield value


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
        return _like(value, wanted, grad=grad and wanted.is_floating_point)

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


def cast_specimen(
    value: torch.Tensor, before: torch.dtype, after: torch.dtype, *, grad: bool
) -> Specimen:
    """A cast of a tensor laid out as `value` is, and the cast of its gradient."""
    operand = _like(value, before, grad=grad)
    return Specimen(
        torch.ops.aten._to_copy.default, (operand,), {"dtype": after}, after
    )


def _like(value: torch.Tensor, dtype: torch.dtype, *, grad: bool) -> Operand:
    shape = tuple(compat.hint(size) for size in value.shape)
    strides = tuple(compat.hint(stride) for stride in value.stride())
    return Operand(shape, strides, dtype, grad)
