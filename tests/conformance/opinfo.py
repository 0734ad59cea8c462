"""Torch's own database of ops as cases: samples, modules that call an op, and runs."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

OPS = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]

SEED = 42
"""What the database seeds random ops with before each call, unseen by any graph."""


def title(op: Any) -> str:
    """The op's name with its variant: `linalg.norm.subgradients_at_zero`."""
    return f"{op.name}.{op.variant_test_name}".rstrip(".")


def seeded() -> None:
    """Every source of random numbers that samples and ops draw from, set back."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)


# -- cases -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One sample of an op: its tensors apart from all else that the op is called with.

    Attributes:
        call: the op.
        leaves, spec: what it is called with, flat; None where a tensor goes.
        tensors: the tensors by their place in `leaves`.
        finish: what turns the result into something a gradient is defined of.
    """

    call: Callable[..., Any]
    leaves: list[Any]
    spec: Any
    tensors: dict[int, Tensor]
    finish: Callable[..., Any]

    def inputs(self, rounded: torch.dtype | None = None) -> list[Tensor]:
        """Fresh copies of the tensors; fp32 ones such as `rounded` holds exactly."""
        given = [t.detach() for t in self.tensors.values()]
        strided = copy.deepcopy([t for t in given if _is_strided(t)])  # layouts stay
        fresh = iter(strided)
        copies = [next(fresh) if _is_strided(t) else t.clone() for t in given]
        if rounded is not None:
            copies = [_rounded(t, rounded) for t in copies]
        return [
            c.requires_grad_(t.requires_grad)
            for c, t in zip(copies, self.tensors.values(), strict=True)
        ]

    def with_tensors(self, tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        """The arguments of the call, `tensors` in their places."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensors, tensors, strict=True):
            leaves[i] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided


def _rounded(tensor: Tensor, low: torch.dtype) -> Tensor:
    if tensor.dtype != torch.float32 or not _is_strided(tensor):
        return tensor
    limit = torch.finfo(low).max
    rounded = tensor.clamp(-limit, limit).to(low).float()
    return torch.where(tensor.isfinite(), rounded, tensor)


def cases(
    op: Any, most: int, call: Callable[..., Any] | None = None, grad: bool = True
) -> Iterator[Case]:
    """At most `most` of the op's samples, evenly spread over the list torch makes.

    The database orders an op's samples by what they vary, so that an even spread holds
    the most different ones.
    """
    seeded()
    grad = grad and bool(op.supports_autograd)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=grad))
    step = max((len(samples) - 1) / max(most - 1, 1), 1.0)
    for i in sorted({round(i * step) for i in range(min(most, len(samples)))}):
        sample = samples[i]
        args, finish = (sample.input, *sample.args), sample.output_process_fn_grad
        yield case_called_with(
            call or op, args, sample.kwargs, finish or (lambda result: result)
        )


def case_called_with(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    finish: Callable[..., Any] = lambda result: result,
) -> Case:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    rest = [None if i in tensors else leaf for i, leaf in enumerate(leaves)]
    return Case(call, rest, spec, tensors, finish)


# -- modules ---------------------------------------------------------------------------


class Call(nn.Module):
    """Calls the op of a case on its tensors."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = self.case.with_tensors(tensors)
        return self.case.call(*args, **kwargs)


def plain(result: Any) -> Any:
    """`result` with tuples for `torch.return_types`, which no FX graph returns."""
    return pytree.tree_map(
        lambda r: tuple(r) if _is_named(r) else r, result, is_leaf=_is_named
    )


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and type(value).__module__ == "torch.return_types"


class InPlace(Call):
    """Calls an in-place op on a copy of its first tensor; returns both."""

    def forward(self, *tensors: Tensor) -> Any:
        written = tensors[0].clone()
        return super().forward(written, *tensors[1:]), written


class Out(Call):
    """Calls an op with `out=`, which the last `count` tensors are; returns both."""

    def __init__(self, case: Case, count: int, nested: bool) -> None:
        super().__init__(case)
        self.count, self.nested = count, nested

    def forward(self, *tensors: Tensor) -> Any:
        args, kwargs = self.case.with_tensors(tensors[: -self.count])
        out = tensors[-self.count :]
        result = self.case.call(*args, **kwargs, out=out if self.nested else out[0])
        return result, out


class Wrapped(nn.Module):
    """Calls a module, its fp32 results copied, and its fp32 inputs where asked."""

    def __init__(self, inner: nn.Module, inputs: bool) -> None:
        super().__init__()
        self.inner = inner
        self.inputs = inputs

    def forward(self, *tensors: Tensor) -> Any:
        given = [copied(t) for t in tensors] if self.inputs else tensors
        result = self.inner(*given)
        # Rebuilt by pytree a `torch.Size` is a tuple, but not where Dynamo traces that.
        sized = isinstance(result, torch.Size)
        return result if sized else pytree.tree_map(copied, result)


def copied(value: Any) -> Any:
    """A copy by `clone` of an fp32 tensor; anything else as it is."""
    copies = isinstance(value, Tensor) and _is_strided(value)
    return value.clone() if copies and value.dtype == torch.float32 else value


def traced(model: nn.Module, given: Sequence[Tensor]) -> fx.GraphModule | None:
    """Torch's own trace of the call, or None.

    It has none where sizes or control flow depend on data, and where its fake tensors
    refuse what its kernels do (`addbmm_` of a tensor with too few dimensions).
    """
    try:
        return make_fx(model, tracing_mode="fake", pre_dispatch=True)(*given)
    except Exception:  # noqa: BLE001 - torch's refusals are of every kind
        return None


def captured_by_dynamo(call: Callable[..., Any], case: Case) -> bool:
    """Whether plain `torch.compile` makes any graph of a case."""
    graphs: list[Any] = []

    def note(gm: fx.GraphModule, _: Any) -> Any:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with contextlib.suppress(Exception), torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(call, backend=note)(*case.inputs())
    torch._dynamo.reset()
    return bool(graphs)


# -- runs ------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What one run gave: results, the inputs after it, and their gradients.

    Attributes:
        gradients: None where nothing that was returned has a gradient.
        weighted: the largest product of a result and what entered the backward there.
        refused: what autograd said where it refused the backward.
        drew: whether random numbers were drawn.
    """

    result: Any
    given: list[Tensor]
    gradients: list[Tensor | None] | None = None
    weighted: float = 0.0
    refused: str = ""
    drew: bool = False

    def tensors(self) -> list[tuple[str, Any]]:
        """Everything there is to compare, under the name of what it is."""
        found = [("result", leaf) for leaf in pytree.tree_leaves(self.result)]
        found += [("input", tensor) for tensor in self.given]
        return found + [("gradient", g) for g in self.gradients or ()]


def run(
    call: Callable[..., Any],
    given: Sequence[Tensor],
    finish: Callable[..., Any] = lambda result: result,
) -> Outcome:
    """Calls forward, and backward where there is one, from one random state."""
    seeded()
    start = torch.get_rng_state()
    result = call(*given)
    drew = not torch.equal(torch.get_rng_state(), start)
    ends = [
        leaf
        for leaf in pytree.tree_leaves(finish(result))
        if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    outcome = Outcome(result, [t.detach() for t in given], drew=drew)
    if not ends:
        return outcome
    weights = [_weights(end) for end in ends]
    outcome.weighted = max(
        float((dense(w) * dense(e.detach())).abs().nan_to_num(0, 0, 0).max())
        if e.numel()
        else 0.0
        for w, e in zip(weights, ends, strict=True)
    )
    try:
        torch.autograd.backward(ends, weights)
    except RuntimeError as error:
        outcome.refused = str(error)
        return outcome
    outcome.gradients = [t.grad for t in given]
    return outcome


def runs(model: nn.Module, case: Case, **inputs: Any) -> bool:
    """Whether plain fp32 runs; torch's samples hold calls that only other modes run."""
    try:
        run(model, case.inputs(**inputs), case.finish)
    except Exception:  # noqa: BLE001 - whatever torch says, it is not ours
        return False
    return True


def dense(tensor: Tensor) -> Tensor:
    """A strided tensor of the same numbers."""
    return tensor if _is_strided(tensor) else tensor.to_dense()


def _weights(end: Tensor) -> Tensor:
    """What enters the backward at `end`: of both signs, and no two the same."""
    n = end.numel()
    values = torch.linspace(0.5, 1.5, n, dtype=torch.float64)
    values = values * (1 - 2 * (torch.arange(n) % 3 == 1).double())
    weights = values.reshape(end.shape).to(end.dtype)
    if _is_strided(end):
        return weights
    csr = end.layout is torch.sparse_csr
    return weights.sparse_mask(end.detach()) if csr else weights.to_sparse()
