"""Checkpointed regions of a graph, run without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from autoamp import compat


def checkpointed(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """`body(*args)` under activation checkpointing, for graphs run without a compiler.

    Run outside AOT autograd, torch's `tag_activation_checkpoint` op does not restore
    the random state, so dropout draws another mask in the recomputation and gradients
    are wrong by a third.

    `checkpoint` keeps its arguments for the backward, and until then no one may write
    to these arguments.  Among `args` are tensors that the user's region closed over,
    such as batch-norm statistics, which the region writes.  `checkpoint` therefore gets
    only the arguments that need a gradient.

    A recomputation is broken off by an exception once it has made all that the backward
    needs.  The exception may come out of a region of autocast, which a graph enters and
    leaves by calls: so the modes are put back.
    """
    given = [torch.is_tensor(a) and a.requires_grad for a in args]

    def region(*needing: Any) -> Any:
        rest = iter(needing)
        modes = compat.Modes()
        every = [next(rest) if g else a for a, g in zip(args, given, strict=True)]
        try:
            with compat.past_transforms(every) or nullcontext():
                return body(*every)
        except BaseException:
            modes.restore()
            raise

    return checkpoint(
        region,
        *(a for a, g in zip(args, given, strict=True) if g),
        use_reentrant=False,
        preserve_rng_state=options.get("preserve_rng_state", True),
        determinism_check=options.get("determinism_check", "default"),
    )


def checkpoint_as_python_does(gm: fx.GraphModule) -> None:
    """Makes the checkpointed regions of captured graph `gm` run without a compiler.

    In `gm` and in the graphs inside `gm`, `checkpointed` replaces torch's
    `tag_activation_checkpoint`.  The torch op is meant for AOT autograd only: run
    outside it, the op does not support other higher-order ops inside a region either.
    """
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.find_nodes(
            op="call_function", target=compat.CHECKPOINT
        ):
            node.target = checkpointed
        module.recompile()
