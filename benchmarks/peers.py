"""The ways to run a model that the tables set side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import Batch, Loss
from .workloads import Workload

BASELINE = "fp32"


@dataclass(frozen=True)
class Peer:
    """A way to run a model: how it is prepared, called, and what its inputs become."""

    name: str
    prepare: Callable[[nn.Module], Callable[..., Any]] = lambda model: model
    autocast: bool = False
    inputs: Callable[[Batch], Batch] = lambda batch: batch
    fused: bool = False
    """Whether casts vanish into generated kernels, where they cannot be counted."""


@dataclass(frozen=True)
class Prepared:
    """A workload ready to run one peer's way."""

    peer: Peer
    model: nn.Module
    forward: Callable[[], Any]
    loss: Loss
    step: Callable[[], None]


def _compile(model: nn.Module) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(model)
    return compiled


def _to_bfloat16(batch: Batch) -> Batch:
    changed: Batch = pytree.tree_map_only(
        Tensor, lambda t: t.bfloat16() if t.is_floating_point() else t, batch
    )
    return changed


def _convert(backend: str) -> Callable[[nn.Module], Callable[..., Any]]:
    def prepare(model: nn.Module) -> Callable[..., Any]:
        import autoamp

        converted: nn.Module = autoamp.convert(
            model, precision="bf16", backend=backend, do_no_harm=False, strict=True
        )
        return converted

    return prepare


def peers() -> list[Peer]:
    """Every peer, the baseline first."""
    return [
        Peer(BASELINE),
        Peer("autocast", autocast=True),
        Peer("compile", _compile, fused=True),
        Peer("compile + autocast", _compile, autocast=True, fused=True),
        Peer("model.bfloat16()", lambda m: m.bfloat16(), inputs=_to_bfloat16),
        Peer("autoamp", _convert("eager")),
        Peer("autoamp inductor", _convert("inductor"), fused=True),
    ]


def ready(workload: Workload, original: nn.Module, peer: Peer, device: str) -> Prepared:
    """A copy of `original`, prepared, with the step that is timed.

    A training step zeroes the gradients, runs each micro-batch forward and backward and
    makes one SGD step; an inference step is one forward without gradients.
    """
    training = workload.kind != "inference"
    model = copy.deepcopy(original).train(training)
    call = peer.prepare(model)
    batch: Batch = pytree.tree_map_only(
        Tensor, lambda t: t.to(device), workload.batch()
    )
    args, kwargs = peer.inputs(batch)

    def context() -> AbstractContextManager[Any]:
        if not peer.autocast:
            return nullcontext()
        return torch.autocast(device, torch.bfloat16)

    def forward() -> Any:
        with context():
            return call(*args, **kwargs)

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def train() -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(workload.steps):
            workload.loss(forward()).backward()
        optimizer.step()

    def infer() -> None:
        with torch.no_grad():
            forward()

    return Prepared(peer, model, forward, workload.loss, train if training else infer)
