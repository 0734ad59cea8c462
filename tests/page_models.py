"""Models for the tests of the page, one of which is hostile to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.inspect.report import Report

EVIL = "</script><img src=x onerror=hacked=1>"
"""A module name that runs a script if it is ever read as markup."""


class Block(nn.Module):
    """Two products, with an op between them that the options below deny."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.exp(self.up(x)) * 2)


class Layers(nn.Module):
    """Blocks in a list, a module with a hostile name, and a checkpointed region."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.named = nn.ModuleDict({EVIL: nn.Linear(16, 16)})
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.named[EVIL](x)  # </script><script>hacked=2</script><!-- <script>
        return checkpoint(self.last, x, use_reentrant=False)


Layers.__name__ = "</title><script>hacked=3</script>&{{data}}"


def explained(model: nn.Module, *args: Tensor, **options: object) -> Report:
    """The report of `explain` with everything converted that may be, but `exp`."""
    given = {"precision": "bf16", "do_no_harm": False, "deny": ["exp"], **options}
    return autoamp.explain(model, *args, options=given)


def layers_report(blocks: int = 2) -> Report:
    """The report of `Layers`."""
    return explained(Layers(blocks), torch.randn(4, 16))
