"""What a model case is: a seeded model, seeded inputs and a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Args = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One row of the table: everything needed to train a small model for a step.

    `build` draws the weights from the global generator and `inputs` draws one batch
    from a generator seeded by its argument, so both are functions of a seed alone.
    Tags say what a test must know beforehand: "dropout" (compare under one seed),
    "breaks" (several graphs), "dynamic" (sizes vary with the seed), "checkpoint",
    "returns_features" (output is `(loss_input, feature)`), "stateful" (buffers move),
    "hf" (needs transformers).
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Args]
    loss: Callable[[Any], Tensor]
    tags: frozenset[str] = field(default_factory=frozenset)

    def model(self, seed: int = 0) -> nn.Module:
        """The model in training mode, its weights drawn from `seed`."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().train()


def distance(output: Any) -> Tensor:
    """Mean squared distance of each float tensor of `output` from fixed random targets.

    Not from zero: the mean square of a LayerNorm's output is constant, so its gradient
    is rounding noise and compares nothing.
    """
    leaves = [t for t in pytree.tree_leaves(output) if _is_float(t)]
    targets = generator(-1)
    terms = [
        (t.float() - torch.randn(t.shape, generator=targets).to(t.device)).square()
        for t in leaves
    ]
    return torch.stack([term.mean() for term in terms]).sum()


def itself(output: Tensor) -> Tensor:
    """The output, of a model that returns its loss."""
    return output.float()


def labelled(output: Mapping[str, Tensor]) -> Tensor:
    """The loss a transformers model computed from its labels."""
    return output["loss"].float()


def generator(seed: int) -> torch.Generator:
    """A generator for one batch; batches of different seeds are independent."""
    return torch.Generator(torch.get_default_device()).manual_seed(1000 + seed)


def normal(*shape: int) -> Callable[[int], Args]:
    """Inputs: one standard normal tensor of `shape`."""
    return lambda seed: ((torch.randn(*shape, generator=generator(seed)),), {})


def tokens(seed: int, *shape: int, vocab: int) -> Tensor:
    """Token ids drawn uniformly from `vocab`."""
    return torch.randint(0, vocab, shape, generator=generator(seed))


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
