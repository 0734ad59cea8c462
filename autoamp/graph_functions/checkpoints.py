"""Checkpointed regions of a graph, run without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from autoamp import compat


def checkpointed(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`body(*args)` under activation checkpointing, for graphs run as they are.

    Run by itself outside AOT, torch's `tag_activation_checkpoint` op does not restore
    the random state, so dropout draws another mask in the recomputation and gradients
    are wrong by a third.

    What it is given `checkpoint` keeps for the backward, and then no one may write to
    it.  What the user's region closed over (batch-norm statistics, which it writes) is
    an operand here, so only what needs a gradient is given.
    """
    given = [torch.is_tensor(a) and a.requires_grad for a in args]

    def region(*needing: Any) -> Any:
        rest = iter(needing)
        return body(*(next(rest) if g else a for a, g in zip(args, given, strict=True)))

    return checkpoint(
        region,
        *(a for a, g in zip(args, given, strict=True) if g),
        use_reentrant=False,
        preserve_rng_state=options.get("preserve_rng_state", True),
        determinism_check=options.get("determinism_check", "default"),
    )


def checkpoint_as_python_does(gm: fx.GraphModule) -> None:
    """Makes the checkpointed regions of a captured graph ready to be run as they are.

    Changes `gm` and the graphs inside it, whose `tag_activation_checkpoint` is for
    AOT's eyes: run by itself it knows no other higher-order op inside a region either.
    """
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.find_nodes(
            op="call_function", target=compat.CHECKPOINT
        ):
            node.target = checkpointed
        module.recompile()
