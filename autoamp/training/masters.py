"""Masters: the fp32 master weights of parameters that arrived in half precision.

The user's parameters stay the half-precision tensors that the model computes with.
While the optimizer steps, the fp32 master of each parameter stands in the parameter's
place, in `param_groups` and as the key of its state, with the parameter's gradient: so
any optimizer computes in fp32 with fp32 state.  After the step the masters are rounded
into the parameters.

A bf16 parameter's master is made for the time of the step alone, of the parameter and
of 16 bits beside it, where the optimizer steps each parameter by itself
(`training/split.py`).  Chunks of such parameters are stepped one after the other.

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
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, has_masters
from autoamp.errors import CheckpointError
from autoamp.messages import class_name
from autoamp.training.separable import body_of, is_elementwise, part_of
from autoamp.training.split import Chunk, can_split, chunks_of, follow, in_order

logger = logging.getLogger(__name__)

KEY = "autoamp_masters"
"""The entry of an optimizer's saved state: the masters by parameter name."""

KEY_BESIDE = "autoamp_master"
"""The entry of one parameter's saved state, for tools that keep no other entries."""

_UNNAMED = "unnamed_parameter_"
"""A parameter in no converted model is saved by this name with its index after it."""

_shared = WeakIdKeyDictionary()
"""Each parameter with a weak reference to its master, which all its optimizers step."""

_splitter = WeakIdKeyDictionary()
"""Each parameter with a weak reference to the `Masters` that hold its split master."""

_whole = WeakIdKeyDictionary()
"""The parameters whose masters stay whole: several optimizers step them, or they are
large and have sparse gradients, which cannot be cut in pieces."""

_Given = list[tuple[torch.Tensor | None, int]]
"""The gradient that each master was given, and the master's version then."""


def has_half(params: Iterable[torch.Tensor]) -> bool:
    """Whether any of `params` is trained in half precision."""
    return any(has_masters(p.dtype) and p.requires_grad for p in params)


class Masters:
    """The masters of one optimizer's half-precision parameters.

    Attributes:
        of: each parameter that has a whole fp32 master, with that master.
        chunks: the parameters whose masters are split.
    """

    def __init__(self, optimizer: Optimizer, *, split: bool = True) -> None:
        """Args: `split` is whether masters are split where they can be."""
        self.optimizer: Any = optimizer
        self.of: dict[torch.Tensor, torch.Tensor] = {}
        self.chunks: list[Chunk] = []
        self._split = split
        self._ids: list[int] = []
        self._lists: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._reduced: set[int] = set()
        self._widened: list[torch.Tensor] = []
        self._said = False
        self._depth = 0
        self._given: _Given | None = None
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

    def widen(self) -> None:
        """Casts gradients that were reduced in half precision to fp32.

        A GradScaler takes no others, and unscaled ones may be too small for fp16.
        """
        grads = [(p, p.grad) for p in self.params]
        half = [p for p, grad in grads if grad is not None and has_masters(grad.dtype)]
        self._widened += half
        for param in half:
            compat.accumulate_in(param, torch.float32)

    def narrow(self) -> None:
        """Undoes `widen`, before gradients are reduced again."""
        for param in self._widened:
            compat.accumulate_in(param, param.dtype)
        self._widened.clear()

    @property
    def bytes(self) -> int:
        """The memory of this rank's masters, beside the parameters."""
        local = [compat.local_part(master.detach()) for master in self.of.values()]
        return sum(t.nbytes for t in local) + sum(c.nbytes for c in self.chunks)

    @property
    def params(self) -> list[torch.Tensor]:
        """The parameters that have masters."""
        return [*self.of, *(p for chunk in self.chunks for p in chunk.params)]

    def values(self) -> dict[torch.Tensor, torch.Tensor]:
        """Each parameter with its master, or with a copy of its split master."""
        self.refresh()
        found = dict(self.of)
        for chunk in self.chunks:
            found.update(zip(chunk.params, chunk.values(), strict=True))
        return found

    # The masters stand in the parameters' places for a step that no compiler records.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
            with compat.eagerly(step):
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
        params = self._params()
        splits = self._split and body_of(self.optimizer) is not None
        ids = [*map(id, params)]
        if ids != self._ids or not splits:
            self._ids, held = ids, set(ids)
            for chunk in [*self.chunks]:
                if not splits or any(id(p) not in held for p in chunk.params):
                    self._make_whole(chunk)
        for chunk in [each for each in self.chunks if not each.fits()]:
            self._make_whole(chunk)
        split = {id(p) for chunk in self.chunks for p in chunk.params}
        params = [p for p in params if id(p) not in split]
        made: dict[torch.Tensor, torch.Tensor] = {}
        new, bare = [], []
        try:
            for param in params:
                master: torch.Tensor | None = self.of.get(param)
                if not has_masters(param.dtype):
                    _hand_over(master, param.detach())
                elif master is not None and master.shape == param.shape:
                    follow(master, param.detach())
                    made[param] = master
                elif param.requires_grad:
                    new.append(param)
                    self._prepare(param)
                    if splits and can_split(param) and not self._is_shared(param):
                        bare.append(param)
                    else:
                        made[param] = self._made(param)
            whole = [p for p in made if p not in _whole and can_split(p)]
            cut = splits and is_elementwise(self.optimizer)
            chunks = [Chunk(each, cut=cut) for each in chunks_of(bare)]
            for each in chunks_of(whole if splits else []):
                values = [made[p].detach() for p in each]
                chunks.append(Chunk(each, values, cut=cut))
        except BaseException:  # such as no memory: nothing is left half done
            for param in new:
                self._put_back(param)
            raise
        self.chunks += chunks
        for param in [p for chunk in chunks for p in chunk.params]:
            made.pop(param, None)
            _shared.pop(param, None)
            _splitter[param] = weakref.ref(self)
        self.of = made

    def _make_whole(self, chunk: Chunk) -> None:
        """Gives the parameters of `chunk` whole fp32 masters, at least until a step."""
        values = chunk.values()
        self.chunks.remove(chunk)
        chunk.let_go()
        for param, master in zip(chunk.params, values, strict=True):
            self.of[param] = master
            _shared[param] = weakref.ref(master)
            _splitter.pop(param, None)

    def _is_shared(self, param: torch.Tensor) -> bool:
        """Whether another optimizer steps `param`; its master is whole from now on."""
        splitter = _splitter.get(param)
        other: Masters | None = None if splitter is None else splitter()
        if other is not None:
            chunks = [c for c in other.chunks if any(p is param for p in c.params)]
            for chunk in chunks:
                other._make_whole(chunk)
        shared = _shared.get(param)
        master: torch.Tensor | None = None if shared is None else shared()
        if master is None or master.shape != param.shape:
            return False
        _whole[param] = True
        return True

    def release(self) -> None:
        """Takes the masters away.  The parameters stay in half precision."""
        self._before.remove()
        self._after.remove()
        self.optimizer.__dict__.pop("__deepcopy__", None)
        self._settle()
        params = self.params
        for chunk in self.chunks:
            chunk.let_go()
        self.of, self.chunks = {}, []
        for param in params:
            _splitter.pop(param, None)
            self._put_back(param)
        if params:
            logger.info(
                "autoamp: the fp32 masters of %d parameters are gone; the weights stay "
                "what they were rounded to",
                len(params),
            )

    def _put_back(self, param: torch.Tensor) -> None:
        """Has a parameter without a master hold gradients and state of its dtype."""
        compat.accumulate_in(param, param.dtype)
        state = self.optimizer.state.get(param)
        if state is not None:  # in the dtype of `Optimizer.load_state_dict`
            self.optimizer.state[param] = in_dtype(state, param.dtype)

    # -- round a step --------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
        wrap = self._evaluated if self.chunks else self._outside
        changed = None
        if len(args) > 1 and callable(args[1]):
            changed = (args[0], wrap(args[1]), *args[2:]), kwargs
        elif callable(kwargs.get("closure")):
            changed = args, {**kwargs, "closure": wrap(kwargs["closure"])}
        self.refresh()
        self._step_chunks()
        self._put_in()
        return changed

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
                self.refresh()
                self._put_in()

        return evaluate

    def _evaluated(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Evaluates `closure` before any chunk is stepped; gives its result again."""
        with torch.enable_grad():
            loss = closure()
        return lambda: loss

    def _step_chunks(self) -> None:
        """Steps the parameters whose masters are split, and takes them out of a step.

        The step itself has the rest, and whatever a class does once in each step.
        """
        body = body_of(self.optimizer)
        for chunk in [each for each in self.chunks if each.is_cut]:
            grad = chunk.params[0].grad
            if grad is not None and grad.layout != torch.strided:
                _whole[chunk.params[0]] = True
                self._make_whole(chunk)
        for chunk in self.chunks:
            if body is not None and any(p.grad is not None for p in chunk.params):
                chunk.begin()
                try:
                    (self._step_cut if chunk.is_cut else self._step_chunk)(chunk, body)
                finally:
                    chunk.end()
        split = {id(p) for chunk in self.chunks for p in chunk.params}
        for group in self.optimizer.param_groups if split else ():
            params = group["params"]
            self._lists.append((params, [*params]))
            params[:] = [p for p in params if id(p) not in split]

    def _step_chunk(self, chunk: Chunk, body: Callable[..., Any]) -> None:
        """Steps one chunk, by an optimizer of the same class, settings and state."""
        chunk.open()
        pairs = [*zip(chunk.params, chunk.masters, strict=True)]
        given = _give(pairs)
        state = self.optimizer.state
        own = {master: state[param] for param, master in pairs if param in state}
        by_id = {id(param): master for param, master in pairs}
        part = part_of(self.optimizer, by_id, own)
        try:
            body(part)
        finally:
            chunk.close()
            _take(pairs, given)
            for param, master in pairs:
                if master in part.state:
                    state[param] = part.state[master]

    def _step_cut(self, chunk: Chunk, body: Callable[..., Any]) -> None:
        """Steps one large weight piece by piece, as an elementwise optimizer may."""
        (param,) = chunk.params
        state, grad = self.optimizer.state, param.grad
        before: dict[str, Any] = state.get(param, {})
        after = dict(before)
        assert grad is not None, "a weight without a gradient is not stepped"
        if grad.stride() != param.stride():
            grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
        for piece, (start, stop) in enumerate(chunk.pieces):
            chunk.open(piece)
            (master,) = chunk.masters
            master.grad = in_order(grad)[start:stop].float()
            own = {k: _cut(v, param, start, stop) for k, v in before.items()}
            part = part_of(
                self.optimizer, {id(param): master}, {master: own} if before else {}
            )
            try:
                body(part)
            finally:
                master.grad = None  # a view would hold the whole gradient
                chunk.close(piece)
                for key, value in part.state.get(master, {}).items():
                    after[key] = _put(value, after.get(key), param, start, stop)
        if after:
            state[param] = after
        torch.autograd.graph.increment_version(param)

    def _put_in(self) -> None:
        self._given = _give(self.of.items())
        self._exchange(self.of)

    def _take_out(self, over: bool = True) -> None:
        """Puts the parameters back, with the masters' values rounded into them.

        Args:
            over: whether the step has ended, not just its closure begun.
        """
        given, self._given = self._given, None
        if given:
            self._exchange({master: param for param, master in self.of.items()})
            with torch.no_grad():
                # All are copied: a write through `.data` leaves no trace.
                halves = [compat.local_part(param.data) for param in self.of]
                masters = [compat.local_part(master) for master in self.of.values()]
                compat.copy_all(halves, masters)
            _take(self.of.items(), given, over)
        if over:
            lists, self._lists = self._lists, []
            for params, before in lists:
                params[:] = before

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
        values = {p: value.detach() for p, value in self.values().items()}
        state[KEY] = self._named(values)
        for index, param in self._saved_as(state):
            if param in values:
                own = {KEY_BESIDE: values[param]}
                state["state"][index] = state["state"].get(index, {}) | own

    def check(self, saved: Any) -> None:
        """Raises CheckpointError where the masters in `saved` state do not fit."""
        self._settle()
        if saved.get(KEY) is not None:
            self.refresh()
            _check_masters(saved[KEY], self._named({p: p for p in self.params}))

    def load(self, saved: Any) -> None:
        """Takes over the masters of `saved` state, and its optimizer state in fp32.

        Torch has just cast the optimizer state to the parameters' half dtype.
        """
        # The masters are whole until the next step: the weights that they are rounded
        # to may be loaded after them.
        for chunk in [*self.chunks]:
            self._make_whole(chunk)
        by_name, named = saved.get(KEY), self._named(self.of)
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
        """A whole master for `param`, or the one that another optimizer steps."""
        shared = _shared.get(param)
        master: torch.Tensor | None = None if shared is None else shared()
        if master is not None and master.shape == param.shape:
            follow(master, param.detach())
        else:
            master = nn.Parameter(param.detach().float())
        _shared[param] = weakref.ref(master)
        return master

    def _prepare(self, param: torch.Tensor) -> None:
        """Has a parameter's gradients and state be fp32 from now on."""
        if id(param) in self._reduced:
            self._say_half("DistributedDataParallel reduces them in that")
        elif compat.is_distributed(param) or compat.is_flattened(param):
            self._say_half("FSDP reduces them, and gives them in that")
        else:
            compat.accumulate_in(param, torch.float32)
        state = self.optimizer.state.get(param)
        if state is not None:
            # A checkpoint's master, which was rounded when there was no master here.
            state.pop(KEY_BESIDE, None)
            self.optimizer.state[param] = in_dtype(state, torch.float32)

    def _say_half(self, why: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "autoamp: gradients of half-precision parameters of the %s stay in "
                "their own dtype until it steps: %s",
                class_name(self.optimizer),
                why,
            )

    def _named(self, of: Mapping[torch.Tensor, Any]) -> dict[str, torch.Tensor]:
        """The values `of` by the names of the parameters that are their keys.

        A name in two models means the first model's parameter.
        """
        named: dict[str, torch.Tensor] = {}
        without = dict.fromkeys(of)
        for known in self._models:
            model = known()
            for name, param in () if model is None else model.named_parameters():
                if param in without and name not in named:
                    del without[param]
                    named[name] = of[param]
        for index, held in enumerate(self._params()):
            if held in without:
                named[f"{_UNNAMED}{index}"] = of[held]
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


_Pairs = Collection[tuple[torch.Tensor, torch.Tensor]]
"""Parameters, each with its master."""


def _give(pairs: _Pairs) -> _Given:
    """Gives each parameter's marks and gradient, in fp32, to the master."""
    given: _Given = []
    for param, master in pairs:
        if param.__dict__:  # marks that some optimizers look for
            master.__dict__.update(param.__dict__)
        grad = param.grad
        # DDP and FSDP reduce gradients in the parameters' dtype.
        if grad is not None and grad.dtype != torch.float32:
            grad = grad.float()
        master.grad = grad
        given.append((grad, compat.version(master)))
    return given


def _take(pairs: _Pairs, given: _Given, over: bool = True) -> None:
    """Takes the gradients back, and counts writes to masters as the parameters'."""
    for (param, master), (grad, version) in zip(pairs, given, strict=True):
        if compat.version(master) != version or (over and grad is not None):
            # A write through `.data` moves no version counter, and a backward over a
            # graph that has saved the weight must raise, as after any other step.
            torch.autograd.graph.increment_version(param)
        if master.grad is not grad:
            param.grad = master.grad
        master.grad = None


def _cut(value: Any, param: torch.Tensor, start: int, stop: int) -> Any:
    """The elements of a piece of a weight in one entry of the weight's state."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != param.shape:  # the number of steps, which each piece counts
        return value.clone()
    if value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype).copy_(value)
    return in_order(value)[start:stop]


def _put(value: Any, whole: Any, param: torch.Tensor, start: int, stop: int) -> Any:
    """An entry of a weight's state, with the elements of a piece as in `value`."""
    if not isinstance(value, torch.Tensor) or value.shape != (stop - start,):
        return value
    if not isinstance(whole, torch.Tensor) or whole.stride() != param.stride():
        old = whole
        whole = torch.zeros_like(param, dtype=value.dtype)
        if isinstance(old, torch.Tensor):
            whole.copy_(old)
    kept = in_order(whole)[start:stop]
    if compat.data_address(kept) != compat.data_address(value):
        kept.copy_(value)
    return whole


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


def in_dtype(state: Any, dtype: torch.dtype, key: Any = None) -> Any:
    """An optimizer's state for one parameter with its float tensors in `dtype`.

    The count of steps keeps its dtype, as in `Optimizer.load_state_dict`.
    """
    if isinstance(state, dict):
        return {k: in_dtype(v, dtype, k) for k, v in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(in_dtype(v, dtype) for v in state)
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
