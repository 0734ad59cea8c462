"""The samples of torch's `module_db` as models: one module, called with its tensors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

MODULES: list[ModuleInfo] = module_db
MOST = 8
"""Samples of a module in one mode, spread evenly over what torch has."""


TENSOR = "<a tensor>"


class Call(nn.Module):
    """A module with its arguments that are no tensors; it is called with those."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.module = module
        self.arguments = pytree.tree_map_only(Tensor, lambda _: TENSOR, arguments)

    def forward(self, *tensors: Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = pytree.tree_map(
            lambda leaf: next(given) if leaf == TENSOR else leaf, self.arguments
        )
        return self.module(*args, **kwargs)


@dataclass(frozen=True)
class Sample:
    """One sample: a model, whose weights are materialised, and what to call it with."""

    name: str
    model: Call
    tensors: tuple[Tensor, ...]

    def given(self) -> tuple[Tensor, ...]:
        """The tensors, as leaves of their own."""
        return tuple(
            t.detach().clone().requires_grad_(t.requires_grad) for t in self.tensors
        )


def samples(info: ModuleInfo, training: bool, most: int = MOST) -> Iterator[Sample]:
    """Samples that run in fp32, forward and backward; the others torch refuses."""
    torch.manual_seed(0)
    every = list(
        info.module_inputs_func(
            info,
            device="cpu",
            dtype=torch.float32,
            requires_grad=True,
            training=training,
        )
    )
    for index in range(0, len(every), -(-len(every) // most)):
        constructor, forward = (
            every[index].constructor_input,
            every[index].forward_input,
        )
        args, kwargs = pytree.tree_map(_fp32, (constructor.args, constructor.kwargs))
        torch.manual_seed(1)
        module = info.module_cls(*args, **kwargs).train(training)
        arguments = (forward.args, forward.kwargs)
        tensors = tuple(
            t for t in pytree.tree_leaves(arguments) if isinstance(t, Tensor)
        )
        model = Call(module, arguments)
        mode = "train" if training else "eval"
        sample = Sample(f"{info.name} {index} {mode}", model, tensors)
        if info.is_lazy:
            model(*sample.given())
        yield sample


def refused(sample: Sample) -> bool:
    """Whether plain torch cannot run a sample in fp32."""
    try:
        copy.deepcopy(sample.model)(*sample.given())
    except RuntimeError:
        return True
    return False


def _fp32(value: Any) -> Any:
    """Tensors in float64, which some samples are built with, as the model's dtype."""
    return (
        value.float()
        if isinstance(value, Tensor) and value.dtype == torch.float64
        else value
    )
