"""Makes parameters be their fp32 masters while an optimizer steps.

A parameter and its master exchange their contents, and stay the same Python objects.
Whoever holds the parameter then holds the master: `param_groups`, the optimizer's
state, its own lists and dictionaries, the closures of hooks, and the optimizers that it
steps.  All else that belongs to the half-precision content is put aside with it: its
memory, its version, and the node that accumulates its gradient with the hooks of DDP.

(`param.data = master` would have torch drop that node, and DDP would reduce no more.)
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from autoamp import compat
from autoamp.dtypes import has_masters


class _Open(NamedTuple):
    """A parameter that is its master now.

    Attributes:
        param: the parameter, which has the master's content.
        master: the master, which has the parameter's.
        grad: the parameter's gradient, which is put aside.
        given: the gradient that the step is given, in fp32.
        version: of the master's content as the step began.
        before: a copy of the half-precision numbers, where others hold their memory.
    """

    param: Tensor
    master: Tensor
    grad: Tensor | None
    given: Tensor | None
    version: int | None
    before: Tensor | None


class Exchange:
    """Some parameters that are their masters until `end`.

    Attributes:
        overwritten: whether the step has written to half-precision memory itself.
        accumulated: whether a backward in the step has given parameters gradients.
    """

    def __init__(
        self,
        pairs: Iterable[tuple[Tensor, Tensor]],
        *,
        doubt: bool = False,
        differentiates: Callable[[], None] | None = None,
    ) -> None:
        """Exchanges the content of all pairs of a parameter and its master, or of none.

        Args:
            doubt: whether the step may write to the parameters' memory in a way of its
                own: through a flat buffer, or through `p.data` of an earlier time.
            differentiates: called before the step differentiates, which it cannot do
                with masters; by default nobody looks.

        Raises:
            RuntimeError: torch cannot exchange some of them.
        """
        self.overwritten = self.accumulated = False
        self._open: list[_Open] = []
        self._watch: _Watch | None = None
        try:
            for param, master in pairs:
                # A step round this one may have exchanged them already.
                if has_masters(param.dtype) and param.dtype != master.dtype:
                    self._open.append(_exchanged(param, master, doubt))
        except BaseException:
            self.end()
            raise
        if differentiates is not None and self._open:
            self._watch = _Watch(differentiates)
            self._watch.begin()

    @property
    def written(self) -> bool:
        """Whether the step was seen to write to some parameter."""
        return any(compat.version(e.param) != e.version for e in self._open)

    def end(self, over: bool = True, *, rounds: bool = True) -> None:
        """Exchanges the contents back, with the masters rounded into the parameters.

        Args:
            over: whether the step has ended, not just its closure begun.
            rounds: whether the masters are rounded here.
        """
        # Torch takes the mode off its stack while the mode's own code runs.
        if self._watch is not None and not self._watch.calls:
            watch, self._watch = self._watch, None
            watch.finish()
        pairs, self._open = self._open, []
        for each in pairs:
            param, master, given = each.param, each.master, each.given
            grad = param.grad
            written = compat.version(param) != each.version
            self.accumulated |= master.grad is not each.grad
            if grad is not None:
                param.grad = None
            compat.exchange(param, master)
            if grad is not given:  # the step has zeroed or replaced it
                param.grad = grad
            if written or (over and given is not None):
                # A write through `.data` moves no version counter, and a backward over
                # a graph that has saved the weight must raise, as after any other step.
                torch.autograd.graph.increment_version(param)
            if master.dtype != torch.float32:  # `p.data = ...` of another dtype
                master.data = master.data.float()
        with torch.no_grad():
            halves = [compat.local_part(each.param.data) for each in pairs]
            masters = [compat.local_part(each.master.data) for each in pairs]
            for each, half, master in zip(pairs, halves, masters, strict=True):
                if each.before is not None and _follow(half, each.before, master):
                    self.overwritten = True
            # All are copied: a write through `.data` leaves no trace.
            if pairs and rounds:
                compat.copy_all(halves, masters)


def _exchanged(param: Tensor, master: Tensor, doubt: bool) -> _Open:
    grad = given = param.grad
    if grad is not None and grad.dtype != torch.float32:
        given = grad.float()
    before = None
    if doubt and not compat.held_alone(compat.own_memory(param)):
        before = compat.local_part(param.detach()).clone()
    compat.exchange(param, master)
    opened = _Open(param, master, grad, given, compat.version(param), before)
    if given is not None:
        param.grad = given
    return opened


def _follow(half: Tensor, before: Tensor, master: Tensor) -> bool:
    """Has a master be what was written to the half-precision memory, if anything was.

    Bits are compared, because NaN is not equal to itself, and -0 is equal to 0.
    """
    written = half.view(torch.int16) != before.view(torch.int16)
    if not bool(written.any()):
        return False
    master.copy_(torch.where(written, half.float(), master))
    return True


# -- steps that differentiate ----------------------------------------------------------


class DifferentiatesError(BaseException):
    """Ends a step that is about to differentiate, before it has written anything.

    Only `Masters` catch it: an optimizer's own `except Exception` must not.
    """


class _Watch(TorchFunctionMode):
    """A region that calls `begun` before code in it differentiates.

    Attributes:
        calls: whether `begun` is being called.
    """

    def __init__(self, begun: Callable[[], None]) -> None:
        super().__init__()
        self._begun: Callable[[], None] | None = begun
        self._region: Any = self
        self.calls = False

    def begin(self) -> None:
        self._region.__enter__()

    def finish(self) -> None:
        self._region.__exit__(None, None, None)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._begun is not None and func in _DIFFERENTIATE:
            begun, self._begun = self._begun, None
            self.calls = True
            try:
                begun()
            finally:
                self.calls = False
        return func(*args, **(kwargs or {}))


_DIFFERENTIATE = {torch.autograd.grad, Tensor.backward}
"""What torch shows to a mode; `torch.autograd.backward` is seen by its gradients."""


# -- what an optimizer holds beside its parameters -------------------------------------


def own_tensors(optimizer: Optimizer) -> list[Tensor]:
    """The half-precision tensors in an optimizer's own attributes.

    Those in its parameter groups and state, and in objects that are no containers of
    Python's, are not among them; nor are parameters, which a model computes with, such
    as the frozen ones in an optimizer's own list of all.
    """
    tensors: dict[int, Tensor] = {}
    pending = [
        v for k, v in vars(optimizer).items() if k not in ("param_groups", "state")
    ]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            if has_masters(value.dtype) and not isinstance(value, nn.Parameter):
                tensors[id(value)] = value
        elif isinstance(value, (list, tuple, set, dict)) and id(value) not in seen:
            seen.add(id(value))
            pending += value.values() if isinstance(value, dict) else value
    return [*tensors.values()]


def shares_memory(tensors: Iterable[Tensor], params: Iterable[Tensor]) -> bool:
    """Whether some of `tensors` lie in the memory of some of `params`."""
    memories = [compat.memory_of(compat.own_memory(p))() for p in params]
    ids = {id(memory) for memory in memories}
    return any(id(compat.memory_of(compat.own_memory(t))()) in ids for t in tensors)


def methods_of(optimizer: Optimizer) -> list[str]:
    """The names of the public methods that the optimizer's own classes add to torch's.

    Such methods compute with the parameters, as `eval` and `train` of schedulefree do.
    """
    names: dict[str, None] = {}
    for kind in type(optimizer).__mro__:
        if kind is Optimizer or kind.__module__.partition(".")[0] == "torch":
            continue
        for name, value in vars(kind).items():
            public = isinstance(value, types.FunctionType) and name[0] != "_"
            if public and name not in vars(Optimizer):
                names[name] = None
    return [*names]
