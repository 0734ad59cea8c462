"""Calls of a converted model that run no rewritten graph: why, and how they run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.runtime.eligible import parameters_of
from autoamp.runtime.program import Program


@dataclass(frozen=True)
class Aside:
    """The reason why calls stand aside from rewritten graphs, and how they run.

    Attributes:
        why: the reason.
        some: whether other calls have graphs.
        as_written: whether the calls run in fp32, and not under `torch.autocast`.
        of_parts: whether calls of the modules inside stand aside too.
        while_hooked: whether calls stand aside only while modules have hooks.
    """

    why: str
    some: bool = False
    as_written: bool = False
    of_parts: bool = False
    while_hooked: bool = False

    @property
    def said(self) -> str:
        """The sentence about the calls."""
        calls = "some calls" if self.some else "calls"
        until = "; a call without hooks is captured" if self.while_hooked else ""
        if self.as_written:
            instead = "in fp32, as they are written"
        else:
            instead = "under torch.autocast instead of rewritten graphs"
        return f"{calls} run {instead}, because {self.why}{until}"


TRANSFORMED = Aside("of vmap or torch.func")
"""Calls that functions of `torch.func` transform."""


def why_no_graph(program: Program | None, has_many: bool) -> str:
    """Why a call ran no rewritten graph, and so ran in fp32.

    Args:
        program: the compiled `forward` during the call.
        has_many: whether Dynamo makes no more graphs of `forward`.
    """
    called_so = _in_the_callers_hands()
    if called_so:
        return called_so
    if compat.dynamo_disabled():
        return "Dynamo is switched off (TORCHDYNAMO_DISABLE, torch._dynamo.config)"
    if has_many:
        return (
            "Dynamo is at the recompile limit (torch._dynamo.config.recompile_limit), "
            "because each kind of call needs a graph of its own; TORCH_LOGS=recompiles "
            "shows how the calls differ"
        )
    frames = program.skipped if program is not None else []
    error = next((each.error for each in frames if each.error), "")
    if error:
        return f"Dynamo failed to trace the method: {error}"
    broken = next((each for each in frames if each.is_broken), None)
    if broken is not None:
        return (
            "Dynamo cannot go on after a graph break in the method "
            f"({broken.broke_at or 'in a loop, a `with`, a `try`'}); "
            "TORCH_LOGS=graph_breaks tells where"
        )
    if any(each.is_empty for each in frames):
        return "Dynamo met no tensor op to capture"
    return "Dynamo captured nothing; TORCH_LOGS=graph_breaks,recompiles tells why"


def _in_the_callers_hands() -> str:
    if compat.transforms_active():
        return "vmap, torch.func or forward-mode AD transforms the call"
    if torch.compiler.is_exporting():
        return (
            "torch.export records the model's own code; autoamp.export(model, args) "
            "exports what a converted model runs"
        )
    if compat.jit_tracing():
        return "torch.jit.trace traces the call"
    mode = compat.dispatch_mode()
    if mode:
        return f"it was called in the dispatch mode {mode}, where Dynamo steps aside"
    return "a dispatch mode is active" if compat.hides_calls() else ""


_MOST_OF_A_CLASS = 4
"""How many models of one class may be captured round the same weight."""

_CAPTURED: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""For the first weight of models, how many were captured, by their class's name."""


def captured_often(model: nn.Module) -> str:
    """Notes that `model` is captured; why it should not be, where many like it were."""
    weight = next(iter(parameters_of(model)), None)
    if weight is None:
        return ""
    counts = _CAPTURED.setdefault(weight, Counter())
    owner = f"{type(model).__module__}.{type(model).__qualname__}"
    counts[owner] += 1
    if counts[owner] <= _MOST_OF_A_CLASS:
        return ""
    return (
        f"{_MOST_OF_A_CLASS} other modules of its class were captured round the same "
        "weights: make one, and call it each time"
    )


_LARGER = 4
"""A call with this many times the elements is captured: low precision may pay in it."""

_LONGEST = 1023
"""The size of a call is looked at after at most this many calls."""


class Rest:
    """One mode of a model, after a capture in which all ops stayed fp32.

    Calls then run the model's own code, without the guards of a graph.  Only at calls
    1, 3, 7, 15, … after the capture the size of the arguments is looked at.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Args: the arguments of the call that was captured."""
        self._size = _elements((args, kwargs))
        self._left = self._since = 0

    def is_over(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments should be captured anew."""
        if self._left:
            self._left -= 1
            return False
        # Looks become rarer, so that small calls cost nothing in the long run.
        self._left = self._since = min(2 * self._since + 1, _LONGEST)
        return _elements((args, kwargs)) >= _LARGER * max(self._size, 1)


def _elements(given: Any) -> int:
    """The elements of all tensors in arguments, which may be nested."""
    if isinstance(given, torch.Tensor):
        return given.numel()
    if isinstance(given, dict):
        given = [*given.values()]
    if isinstance(given, tuple | list):
        return sum(map(_elements, given))
    return 0
