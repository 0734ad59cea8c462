"""How far one training step is from another: outputs, gradients, buffers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Loss = Callable[[Any], Tensor]
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def float_leaves(tree: Any) -> list[Tensor]:
    """The floating-point and complex tensors of `tree`, in pytree order."""
    leaves = pytree.tree_leaves(tree)
    return [
        t
        for t in leaves
        if isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex())
    ]


def relative_error(actual: Any, expected: Any) -> float:
    """`||actual - expected|| / ||expected||` in float64 over all leaves of a pytree.

    Raises:
        ValueError: The two hold different numbers of tensors or other shapes.
    """
    ours, theirs = float_leaves(actual), float_leaves(expected)
    if [t.shape for t in ours] != [t.shape for t in theirs]:
        message = f"cannot compare {len(ours)} tensors with {len(theirs)}: other shapes"
        raise ValueError(message)
    if not ours:
        return 0.0
    a, b = _flat(ours), _flat(theirs)
    distance, size = (a - b).norm().item(), b.norm().item()
    if size == 0.0:
        return 0.0 if distance == 0.0 else math.inf
    return distance / size


@dataclass(frozen=True)
class Step:
    """What one forward and backward left behind, detached copies all."""

    output: Any
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    loss: float


def training_step(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seed: int = 0,
) -> Step:
    """Runs forward (within `context()`) and backward from zeroed gradients.

    The global generators are seeded before the forward, so that two models draw the
    same dropout masks.  Inputs are cloned: a model may write into them.
    """
    args, kwargs = copy.deepcopy(batch)
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    with context():
        output = model(*args, **kwargs)
    value = loss(output)
    value.backward()
    grads = {
        name: p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    kept = pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), output)
    return Step(kept, grads, buffers, value.item())


def scaled_step(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    scale: float,
    *,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    seed: int = 0,
) -> Step:
    """A step whose loss is multiplied by `scale` and whose gradients are divided by it.

    As `torch.amp.GradScaler` does; the gradients are fp32, whatever the model's are.
    """

    def scaled(output: Any) -> Tensor:
        return loss(output) * scale

    step = training_step(model, scaled, batch, context=context, seed=seed)
    grads = {name: _wide(grad) / scale for name, grad in step.grads.items()}
    return Step(step.output, grads, step.buffers, step.loss / scale)


def _wide(grad: Tensor) -> Tensor:
    """fp32, or complex64: of a half a quotient would underflow."""
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def has_finite_grads(step: Step) -> bool:
    """Whether no gradient of a step has overflowed."""
    return all(bool(grad.isfinite().all()) for grad in step.grads.values())


def output_and_grad_errors(
    steps: Sequence[Step], references: Sequence[Step]
) -> tuple[float, float]:
    """Root mean square over the steps of the output error and the gradient error.

    The gradient error is over all parameters together, as one long vector.  Several
    steps, because the error of a single batch varies by more than the differences that
    matter.
    """
    pairs = list(zip(steps, references, strict=True))
    output = [relative_error(s.output, r.output) for s, r in pairs]
    grads = []
    for step, reference in pairs:
        if step.grads.keys() != reference.grads.keys():
            missing = sorted(step.grads.keys() ^ reference.grads.keys())
            raise ValueError(f"gradients exist for one of the two only: {missing}")
        names = sorted(reference.grads)
        ours = [step.grads[name] for name in names]
        grads.append(relative_error(ours, [reference.grads[name] for name in names]))
    return _rms(output), _rms(grads)


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    def real(t: Tensor) -> Tensor:
        return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t

    return torch.cat([real(t.detach().cpu()).double().flatten() for t in tensors])
