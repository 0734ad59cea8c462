"""Regions without gradients that a model makes before a graph break and enters later.

`region = torch.no_grad()` switches nothing off until `with region:`.  After a graph
break Dynamo makes the object again, by `torch.set_grad_enabled(False)`, which switches
gradients off at once (torch 2.13): what the model computes before `with region:` has no
gradients then, and where `region` is a decorator they stay off in the whole process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.variables import GradModeVariable


def region(enabled: bool) -> Any:
    """A region with gradients, or without, which begins where it is entered."""
    return torch.enable_grad() if enabled else torch.no_grad()


@contextmanager
def regions_begin_when_entered() -> Iterator[None]:
    """Has Dynamo make regions again by `region`.

    The caller holds Dynamo's lock, because methods of a class are replaced.
    """
    before = {name: vars(GradModeVariable)[name] for name in _HERE}
    for name, ours in _HERE.items():
        setattr(GradModeVariable, name, ours)
    try:
        yield
    finally:
        for name, theirs in before.items():
            setattr(GradModeVariable, name, theirs)


# Where Dynamo finds the function that makes a region again.
_HERE = {"module_name": lambda _: __name__, "fn_name": lambda _: region.__name__}
