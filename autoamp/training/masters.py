"""Masters: the fp32 master weights of parameters that arrived in half precision.

The user's parameters stay the half-precision tensors that the model computes with.
While the optimizer steps, the fp32 master of each parameter stands in the parameter's
place, in `param_groups` and as the key of its state, with the parameter's gradient: so
any optimizer computes in fp32 with fp32 state.  After the step the masters are rounded
into the parameters.

(`param.data = master` would do without the exchange, but torch then drops the node that
accumulates the parameter's gradient, and with that node the hooks of code that reduces
gradients between ranks.)
"""

from __future__ import annotations

import copy
import logging
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, has_masters
from autoamp.errors import CheckpointError
from autoamp.messages import class_name

logger = logging.getLogger(__name__)

KEY = "autoamp_masters"
"""The entry of an optimizer's saved state: the masters by parameter name."""

KEY_BESIDE = "autoamp_master"
"""The entry of one parameter's saved state, for tools that keep no other entries."""

_UNNAMED = "unnamed_parameter_"
"""A parameter in no converted model is saved by this name with its index after it."""

_shared = WeakIdKeyDictionary()
"""Each parameter with a weak reference to its master, which all its optimizers step."""


def has_half(params: Iterable[torch.Tensor]) -> bool:
    """Whether any of `params` is trained in half precision."""
    return any(has_masters(p.dtype) and p.requires_grad for p in params)


class Masters:
    """The masters of one optimizer's half-precision parameters.

    Attributes:
        of: each parameter with its master.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer: Any = optimizer
        self.of: dict[torch.Tensor, torch.Tensor] = {}
        self._models: list[weakref.ref[nn.Module]] = []
        self._reduced: set[int] = set()
        self._said = False
        self._depth = 0
        self._given: list[tuple[torch.Tensor | None, int]] | None = None
        self._runs = False
        self._frame: types.FrameType | None = None
        self._before = optimizer.register_step_pre_hook(self._enter)
        self._after = optimizer.register_step_post_hook(self._exit)
        self._order_hooks()
        # A deep copy of an optimizer is made of its groups and state alone.
        optimizer.__dict__["__deepcopy__"] = self._deepcopy

    def name_after(self, *models: nn.Module) -> None:
        """Makes masters, saved by the names that `models` have for the parameters."""
        for model in models:
            if all(known() is not model for known in self._models):
                self._models.append(weakref.ref(model))
            self._reduced |= {id(p) for p in compat.reduced_by_ddp(model)}
        self.refresh()

    def keep_half(self, params: Iterable[torch.Tensor]) -> None:
        """Leaves the gradients of `params` in their own dtype until a step."""
        self._reduced |= {id(p) for p in params}

    @property
    def bytes(self) -> int:
        """The memory of this rank's masters."""
        local = [compat.local_part(master.detach()) for master in self.of.values()]
        return sum(part.numel() * part.element_size() for part in local)

    def run(
        self, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls `step(*args, **kwargs)` with the masters in the parameters' places.

        The user's own hooks round the step see the parameters.
        """
        self._settle()
        self._order_hooks()
        self._runs = True
        try:
            return step(*args, **kwargs)
        finally:
            self._runs = False
            self._depth = 0
            self._take_out()

    def refresh(self) -> None:
        """Makes masters for trained parameters that have none; other masters follow.

        Where a parameter is no longer its master rounded, other code has written to the
        parameter, and the master takes the parameter's value.  Elements are compared
        one by one, by their bits (a NaN is not equal to itself, and -0 is equal to 0),
        without a wait for the device.
        """
        made: dict[torch.Tensor, torch.Tensor] = {}
        try:
            for param in self._params():
                master: torch.Tensor | None = self.of.get(param)
                if not has_masters(param.dtype):
                    _hand_over(master, param.detach())
                    continue
                if master is not None and master.shape == param.shape:
                    _follow(master, param.detach())
                elif param.requires_grad:
                    master = self._made(param)
                if master is not None:
                    made[param] = master
        except BaseException:  # such as no memory: nothing is left half done
            for param in made.keys() - self.of.keys():
                self._put_back(param)
            raise
        self.of = made

    def release(self) -> None:
        """Takes the masters away.  The parameters stay in half precision."""
        self._before.remove()
        self._after.remove()
        self.optimizer.__dict__.pop("__deepcopy__", None)
        self._settle()
        for param in self.of:
            self._put_back(param)
        if self.of:
            logger.info(
                "autoamp: the fp32 masters of %d parameters are gone; the weights stay "
                "what they were rounded to",
                len(self.of),
            )
        self.of = {}

    def _put_back(self, param: torch.Tensor) -> None:
        """Has a parameter without a master hold gradients and state of its dtype."""
        compat.accumulate_in(param, param.dtype)
        state = self.optimizer.state.get(param)
        if state is not None:  # in the dtype of `Optimizer.load_state_dict`
            self.optimizer.state[param] = _in_dtype(state, param.dtype)

    # -- round a step --------------------------------------------------------------

    def _enter(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Torch's hook before a step, with the optimizer itself as `args[0]`."""
        self._settle()
        self._depth += 1
        if self._depth > 1:  # the `super().step()` of a step
            return None
        if not self._runs:  # the step began before its optimizer was met
            # Torch fires no hook after a step that raises: `_settle` looks whether this
            # frame is still on the stack.
            self._frame = sys._getframe(1)
            # A `zero_grad` after a step that has raised would zero the masters'
            # gradients, which stand in the parameters' places.
            self.optimizer.__dict__.setdefault("zero_grad", self._zero_grad)
        self._put_in()
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._outside(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, {**kwargs, "closure": self._outside(kwargs["closure"])}
        return None

    def _exit(self, *_: Any) -> None:
        self._depth -= 1
        if self._depth <= 0:
            self._end()

    def _end(self) -> None:
        """Ends a step for which `run` does not stand."""
        self._depth, self._frame = 0, None
        if self.optimizer.__dict__.get("zero_grad") == self._zero_grad:
            del self.optimizer.__dict__["zero_grad"]
        self._take_out()

    def _settle(self) -> None:
        """Ends a step that has raised, and for which `run` did not stand."""
        frame: types.FrameType | None = sys._getframe(1)
        while self._frame is not None and frame is not self._frame:
            if frame is None:
                self._end()
                return
            frame = frame.f_back

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        type(self.optimizer).zero_grad(self.optimizer, *args, **kwargs)

    def _order_hooks(self) -> None:
        """Puts our hooks next to the step: all others see the parameters."""
        before, after = compat.step_hooks(self.optimizer)
        before.move_to_end(self._before.id)
        after.move_to_end(self._after.id, last=False)

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps `closure`: its forward and backward need the parameters in place."""

        def evaluate() -> Any:
            if self._given is None:
                return closure()
            self._take_out(over=False)
            try:
                return closure()
            finally:
                self._put_in()

        return evaluate

    def _put_in(self) -> None:
        self.refresh()
        given = []
        for param, master in self.of.items():
            if param.__dict__:  # marks that some optimizers look for
                master.__dict__.update(param.__dict__)
            grad = param.grad
            # DDP and FSDP reduce gradients in the parameters' dtype.
            if grad is not None and grad.dtype != torch.float32:
                grad = grad.float()
            master.grad = grad
            given.append((grad, compat.version(master)))
        self._given = given
        self._exchange(self.of)

    def _take_out(self, over: bool = True) -> None:
        """Puts the parameters back, with the masters' values rounded into them.

        Args:
            over: whether the step has ended, not just its closure begun.
        """
        given, self._given = self._given, None
        if not given:
            return
        self._exchange({master: param for param, master in self.of.items()})
        with torch.no_grad():
            # All masters are copied, because a write through `.data` leaves no trace.
            halves = [compat.local_part(param.data) for param in self.of]
            masters = [compat.local_part(master) for master in self.of.values()]
            compat.copy_all(halves, masters)
        for (param, master), (grad, version) in zip(
            self.of.items(), given, strict=True
        ):
            if compat.version(master) != version or (over and grad is not None):
                # A write through `.data` moves no version counter, and a backward over
                # a graph that has saved the weight must raise, as after any other step.
                torch.autograd.graph.increment_version(param)
            if master.grad is not grad:
                param.grad = master.grad
            master.grad = None

    def _exchange(self, pairs: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Puts the second of each pair where the first is, in the same containers."""
        for group in self.optimizer.param_groups:
            # The list stays the same object, which other code may hold.
            group["params"][:] = [pairs.get(p, p) for p in group["params"]]
        state = self.optimizer.state
        items = [(pairs.get(key, key), value) for key, value in state.items()]
        state.clear()
        state.update(items)

    # -- saved state ---------------------------------------------------------------

    def save(self, state: dict[str, Any]) -> None:
        """Puts the masters into the optimizer's `state`, by the parameters' names.

        Each master is also put beside its parameter's state.  The tools of
        `torch.distributed.checkpoint` keep nothing else: they save, shard and name such
        an entry as they do a moment.
        """
        self._settle()
        self.refresh()
        named = self._named()
        state[KEY] = {name: master.detach() for name, master in named.items()}
        for index, param in self._saved_as(state):
            if param in self.of:
                own = {KEY_BESIDE: self.of[param].detach()}
                state["state"][index] = state["state"].get(index, {}) | own

    def check(self, saved: Any) -> None:
        """Raises CheckpointError where the masters in `saved` state do not fit."""
        self._settle()
        if saved.get(KEY) is not None:
            self.refresh()
            _check_masters(saved[KEY], self._named())

    def load(self, saved: Any) -> None:
        """Takes over the masters of `saved` state, and its optimizer state in fp32.

        Torch has just cast the optimizer state to the parameters' half dtype.
        """
        by_name, named = saved.get(KEY), self._named()
        with torch.no_grad():
            for name, value in (by_name or {}).items():
                named[name].data.copy_(value)
        for index, param in self._saved_as(saved):
            state, now = saved["state"].get(index), self.optimizer.state.get(param)
            if param not in self.of or state is None:
                continue
            if by_name is None and KEY_BESIDE in state:
                self.of[param].data.copy_(state[KEY_BESIDE])
            if now is not None:
                self.optimizer.state[param] = _restored(now, state)

    def _saved_as(self, saved: Mapping[str, Any]) -> list[tuple[Any, torch.Tensor]]:
        """Each parameter with the index of its state in `saved`."""
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        return [*zip(ids, self._params(), strict=True)]

    # -- helpers -------------------------------------------------------------------

    def _params(self) -> list[torch.Tensor]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def _made(self, param: torch.Tensor) -> torch.Tensor:
        """A master for `param`, whose gradients and state are fp32 from now on."""
        shared = _shared.get(param)
        master: torch.Tensor | None = None if shared is None else shared()
        if master is not None and master.shape == param.shape:
            _follow(master, param.detach())
        else:
            master = nn.Parameter(param.detach().float())
        if id(param) in self._reduced:
            self._say_half("DistributedDataParallel reduces them in that")
        elif compat.is_distributed(param):
            self._say_half("FSDP reduces them, and gives them in that")
        else:
            compat.accumulate_in(param, torch.float32)
        state = self.optimizer.state.get(param)
        if state is not None:
            # A checkpoint's master, which was rounded when there was no master here.
            state.pop(KEY_BESIDE, None)
            self.optimizer.state[param] = _in_dtype(state, torch.float32)
        _shared[param] = weakref.ref(master)
        return master

    def _say_half(self, why: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "autoamp: gradients of half-precision parameters of the %s stay in "
                "their own dtype until it steps: %s",
                class_name(self.optimizer),
                why,
            )

    def _named(self) -> dict[str, torch.Tensor]:
        """Masters by name; a name in two models means the first model's parameter."""
        named: dict[str, torch.Tensor] = {}
        without = dict.fromkeys(self.of)
        for known in self._models:
            model = known()
            for name, param in () if model is None else model.named_parameters():
                if param in without and name not in named:
                    del without[param]
                    named[name] = self.of[param]
        for index, held in enumerate(self._params()):
            if held in without:
                named[f"{_UNNAMED}{index}"] = self.of[held]
        return named

    def _deepcopy(self, memo: dict[int, Any]) -> Any:
        logger.info(
            "autoamp: a copy of an optimizer has no fp32 masters; "
            "autoamp.convert(model, optimizer) makes new ones, of the half weights"
        )
        own = self.optimizer.__dict__
        del own["__deepcopy__"]
        try:
            return copy.deepcopy(self.optimizer, memo)
        finally:
            own["__deepcopy__"] = self._deepcopy


def _follow(master: torch.Tensor, half: torch.Tensor) -> None:
    """Sets `master`, in place, where its elements do not round to those in `half`."""
    if master.device != half.device:
        master.data = master.data.to(half.device)
    value, half = compat.local_part(master.detach()), compat.local_part(half)
    # Bits are compared, because NaN is not equal to itself, and -0 is equal to 0.
    rounded, now = value.to(half.dtype).view(torch.int16), half.view(torch.int16)
    # On a CPU the answer is there, and saves a write to each master; on a GPU it would
    # cost a wait.
    if half.device.type == "cpu" and torch.equal(rounded, now):
        return
    value.copy_(torch.where(rounded == now, value, half.float()))


def _hand_over(master: torch.Tensor | None, value: torch.Tensor) -> None:
    """Gives a weight that was made fp32 the master's digits, where none wrote to it."""
    if master is None or value.dtype != master.dtype or value.shape != master.shape:
        return
    digits, value = compat.local_part(master.detach()), compat.local_part(value)
    digits = digits.to(value.device)
    # Nobody remembers in which of the half dtypes the weight was.
    for half in LOW_DTYPES.values():
        rounded = digits.to(half).float()
        if torch.equal(rounded, value):
            value.copy_(digits)


def _check_masters(saved: Any, named: Mapping[str, torch.Tensor]) -> None:
    """Raises CheckpointError where masters `saved` do not fit the masters `named`."""
    if not isinstance(saved, dict):
        raise CheckpointError(
            f"{KEY!r} of the saved optimizer state is a {type(saved).__name__}, not a "
            "dictionary of tensors by parameter name"
        )
    problems = [f"missing {name}" for name in named if name not in saved]
    problems += [f"extra {name}" for name in saved if name not in named]
    for name, value in saved.items():
        if not _is_dense_float(value):
            problems.append(f"{name} is no dense float tensor")
        elif name in named and value.shape != named[name].shape:
            shapes = tuple(value.shape), tuple(named[name].shape)
            problems.append(f"{name} is {shapes[0]}, here it is {shapes[1]}")
    if problems:
        raise CheckpointError(
            f"the fp32 masters in the saved optimizer state ({KEY!r}) do not fit: "
            f"{'; '.join(problems)}. Nothing was loaded. Load it into the optimizer of "
            f"the model it was saved with, or remove state[{KEY!r}] to begin with the "
            "half-precision weights"
        )


def _is_dense_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.layout == torch.strided
        and value.device.type != "meta"
    )


def _in_dtype(state: Any, dtype: torch.dtype, key: Any = None) -> Any:
    """An optimizer's state for one parameter with its float tensors in `dtype`.

    The count of steps keeps its dtype, as in `Optimizer.load_state_dict`.
    """
    if isinstance(state, dict):
        return {k: _in_dtype(v, dtype, k) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_in_dtype(v, dtype) for v in state)
    if isinstance(state, torch.Tensor) and state.is_floating_point() and key != "step":
        return state.to(dtype)
    return state


def _restored(now: Any, saved: Any, key: Any = None) -> Any:
    """State as it is `now`, its float tensors replaced by the `saved` ones in fp32."""
    if isinstance(now, dict) and isinstance(saved, dict):
        return {k: _restored(v, saved.get(k), k) for k, v in now.items()}
    if isinstance(now, (list, tuple)) and isinstance(saved, (list, tuple)):
        return type(now)(map(_restored, now, saved))
    if isinstance(saved, torch.Tensor) and saved.is_floating_point() and key != "step":
        return saved.to(now.device, torch.float32)
    return now


def without_masters(saved: Mapping[str, Any]) -> dict[Any, Any]:
    """The state of each parameter in `saved`, without the masters beside it."""
    found = {}
    for key, state in saved["state"].items():
        rest = state
        if isinstance(state, dict) and KEY_BESIDE in state:
            rest = {k: v for k, v in state.items() if k != KEY_BESIDE}
        if rest or not state:
            found[key] = rest
    return found
