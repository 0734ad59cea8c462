"""How far rounding may move a result: Monte Carlo arithmetic in float64.

The ATen graph that a rewritten one was made from is run in float64 as it is, which is
the exact answer, and again with every rounding of the rewritten graph replaced by a
random relative error of the low dtype's unit roundoff u, forward and backward (Parker,
"Monte Carlo Arithmetic", 1997), and once by that rounding itself.  The largest
deviation from the exact answer is the yardstick: it follows from u, the depth of the
graph and the condition of its ops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from autoamp.passes.graph_record import Rewritten
from autoamp.passes.see.nodes import written_values
from tests.conformance.opinfo import Outcome, dense, run

DRAWS = 5

KERNEL = 2
"""Roundings inside one kernel, or one backward formula, for each that is modelled."""

CHANCE = 2
"""What the worst of `DRAWS` random deviations may fall short of the true rounding's."""

_WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}


def unit_roundoff(low: torch.dtype) -> float:
    """The largest relative error of one rounding to `low`."""
    return torch.finfo(low).eps / 2


class Noise:
    """Errors of the size of one rounding to `low`; what is out of range overflows.

    Seed 0 rounds in earnest, which may meet a pole that random errors miss.
    """

    def __init__(self, low: torch.dtype, seed: int) -> None:
        self.low, self.seed = low, seed
        self.info = torch.finfo(low)
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, value: Tensor) -> Tensor:
        if not self.seed:
            return value.to(self.low).to(value.dtype)
        drawn = torch.rand(value.shape, generator=self.generator, dtype=torch.float64)
        errors = self.info.eps * (drawn - 0.5)
        errors = errors + self.info.eps / 4 * errors.sign()  # u/2 to 3u/2: never none
        least = self.info.smallest_normal
        noisy = value * (1 + errors) + least * errors
        return torch.where(noisy.abs() > self.info.max, noisy * torch.inf, noisy)


class _Rounded(torch.autograd.Function):
    """A value with the errors of one rounding, and its gradient with others."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, noise: Noise, exact: bool) -> Tensor:
        ctx.noise = noise
        return value.clone() if exact else noise(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.noise(grad), None, None


class Exact(fx.Interpreter):
    """Runs the graph before the rewrite in float64; with noise, rounds as it does."""

    def __init__(
        self, found: Rewritten, noise: Noise | None, exact_inputs: bool
    ) -> None:
        super().__init__(found.before, garbage_collect_values=False)
        self.low = found.assignment.low
        self.facts = found.facts
        self.noise = noise
        self.exact_inputs = exact_inputs
        self.casts: dict[tuple[fx.Node, int], Tensor] = {}
        self.epoch = 0

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return widened([value])[0] if isinstance(value, Tensor) else value

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        written = written_values(n)
        self.epoch += bool(written)
        if self.noise is None or n.op != "call_function" or n.name not in self.low:
            return result
        held = {_storage(self.env[i]) for i in n.all_input_nodes}
        if written:
            _round_in_place([self.env[w] for w in written], self.noise)
            return result
        return pytree.tree_map_only(
            Tensor, lambda t: t if _storage(t) in held else self._round(t), result
        )

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        if self.noise is not None and n.name in self.low:
            written = set(written_values(n))
            args, kwargs = fx.map_arg(
                (n.args, n.kwargs), lambda o: self._operand(o, o in written)
            )
        return pytree.tree_map(_widened, (args, kwargs))

    def _operand(self, node: fx.Node, written: bool) -> Any:
        """An operand as a low op reads it: a cast rounds what was made in fp32."""
        value = self.env[node]
        maker = self.facts.producer(node.name)
        if not _is_wide(value) or maker in self.low or written:
            return value
        key = (node, self.epoch)
        if key not in self.casts:
            exact = self.exact_inputs and node.op == "placeholder"
            self.casts[key] = self._round(value, exact)
        return self.casts[key]

    def _round(self, value: Tensor, exact: bool = False) -> Tensor:
        if not _is_wide(value):
            return value
        return _Rounded.apply(value, self.noise, exact)


def _round_in_place(values: Sequence[Any], noise: Noise) -> None:
    with torch.no_grad():
        for value in values:
            if _is_wide(value):
                value.data.copy_(noise(value))


def _is_wide(value: Any) -> bool:
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return strided and value.dtype == torch.float64


def _storage(value: Any) -> int:
    strided = isinstance(value, Tensor) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if strided else 0


def _widened(value: Any) -> Any:
    return _WIDER.get(value, value) if isinstance(value, torch.dtype) else value


def widened(given: Sequence[Tensor]) -> list[Tensor]:
    """Copies of fp32 tensors as float64, of complex64 as complex128."""
    return [_wide_copy(t.detach()).requires_grad_(t.requires_grad) for t in given]


def _wide_copy(tensor: Tensor) -> Tensor:
    dtype = _WIDER.get(tensor.dtype, tensor.dtype)
    if tensor.layout is not torch.strided:
        return tensor.clone().to(dtype)
    # The whole storage, for `as_strided` to read beyond the tensor as it did.
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((size,), (1,), 0).to(dtype, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def exact_and_drawn(
    found: Rewritten,
    given: Sequence[Tensor],
    finish: Callable[..., Any],
    exact_inputs: bool,
) -> tuple[Outcome, list[Outcome]]:
    """The exact outcome, and some with random roundings, on the inputs `given`."""

    def outcome(noise: Noise | None) -> Outcome:
        graph = Exact(found, noise, exact_inputs)
        return run(graph.run, widened(given), finish)

    drawn = [outcome(Noise(found.low, 0))]
    for seed in range(1, DRAWS):
        # A random error may leave the domain of an op: a target below 1, for one.
        with contextlib.suppress(RuntimeError):
            drawn.append(outcome(Noise(found.low, seed)))
    return outcome(None), drawn


def error_over_bound(
    ours: Outcome,
    expected: Outcome,
    exact: Outcome,
    drawn: Sequence[Outcome],
    low: torch.dtype,
) -> tuple[float, str]:
    """The largest error of ours from the exact answer over its bound, and where.

    Errors and bounds are those of whole tensors (largest element).  The bound is
    `KERNEL * CHANCE` times the largest drawn deviation and one rounding of the tensor,
    and fp32's own error.  A gradient is granted the condition of a plain product too:
    one rounding of (what entered the backward) x (result) / (input).  Where an answer
    overflows in a draw it may overflow in ours.
    """
    unit = unit_roundoff(low)
    worst, where = 0.0, ""
    columns = [each.tensors() for each in (ours, expected, exact, *drawn)]
    inputs = [dense(t) for what, t in exact.tensors() if what == "input"]
    for i, (what, got) in enumerate(columns[0]):
        if not (isinstance(got, Tensor) and got.dtype == torch.float32):
            continue
        a, b, e, *ds = (
            dense(c[i][1].detach()).double() for c in (columns[0], *columns[1:])
        )
        usable = b.isfinite() & e.isfinite()
        for d in ds:
            usable &= d.isfinite()
        if not a[usable].isfinite().all():
            return float("inf"), f"{what} {i} is not finite"
        deviation = max(_largest((d - e)[usable]) for d in ds)
        scale = unit * _largest(e[usable])
        if what == "gradient":
            of = inputs[i - (len(columns[0]) - len(inputs))]
            size = _largest(of[of.isfinite()]) if of.is_floating_point() else 1.0
            scale += unit * exact.weighted / max(size, 1e-30) if size else 0.0
        bound = KERNEL * CHANCE * (deviation + scale) + 2 * _largest((b - e)[usable])
        error = _largest((a - e)[usable])
        if error > worst * bound:
            worst = error / bound if bound else float("inf")
            where = (
                f"{what} {i}: error {error:.3g}, bound {bound:.3g}, ({deviation=:.3g})"
            )
    return worst, where


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
