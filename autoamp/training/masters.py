"""Masters: the fp32 master weights of parameters that arrived in half precision.

The user's parameters stay the half-precision tensors that the model computes with.
While the optimizer steps, each parameter *is* its fp32 master, with its gradient in
fp32 (`training/exchange.py`): so any optimizer computes in fp32 with fp32 state, in
whichever way it holds its parameters.  After the step the masters are rounded into the
parameters.

A bf16 parameter's master is made for the time of the step alone, of the parameter and
of 16 bits beside it, where the optimizer is known to step each parameter by itself
(`training/elementwise_optimizers.py`, `training/split.py`).  Chunks of such parameters
are stepped one after the other.

A step never ends worse than it would have without masters: an optimizer that they do
not serve keeps its half-precision weights, as it would have had them, and a line says
so.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, has_masters
from autoamp.messages import class_name
from autoamp.training.elementwise_optimizers import body_of, is_elementwise
from autoamp.training.exchange import (
    DifferentiatesError,
    Exchange,
    methods_of,
    own_tensors,
    shares_memory,
)
from autoamp.training.split import Chunk, can_split, chunks_of, follow
from autoamp.training.step_chunks import step_chunk, step_cut
from autoamp_said import logger_of

logger = logger_of(__name__)

KEY_BESIDE = "autoamp_master"
"""The entry of one parameter's saved state, for tools that keep no other entries."""

KEY_CARRIED = "autoamp_fp32"
"""The entry of the first saved parameter group with masters, and state in fp32, by the
parameters' positions: torch carries it along uncast where no masters are yet."""

_UNNAMED = "unnamed_parameter_"
"""A parameter in no converted model is saved by this name with its index after it."""

_WRITES = (
    "its step writes to their memory itself, not to its parameters; the half-precision "
    "weights are what it wrote"
)
_DIFFERENTIATES = (
    "its step runs or differentiates the model, whose graphs know no masters. Have the "
    "closure do so, step(closure)"
)

_shared = WeakIdKeyDictionary()
"""Each parameter with a weak reference to its master, which all its optimizers step."""

_splitter = WeakIdKeyDictionary()
"""Each parameter with a weak reference to the `Masters` that hold its split master."""

_whole = WeakIdKeyDictionary()
"""The parameters whose masters stay whole: several optimizers step them, or they are
large and have sparse gradients, which cannot be cut in pieces."""


def has_half(params: Iterable[torch.Tensor]) -> bool:
    """Whether any of `params` is trained in half precision."""
    return any(has_masters(p.dtype) and p.requires_grad for p in params)


def have_masters(params: Iterable[torch.Tensor]) -> bool:
    """Whether any of `params` has a master, which some optimizer steps."""
    return any(
        ref is not None and ref() is not None
        for p in params
        for ref in (_shared.get(p), _splitter.get(p))
    )


def given_out() -> int:
    """How many optimizers have been given masters so far."""
    return _given_out[0]


_given_out = [0]


class Masters:
    """The masters of one optimizer's half-precision parameters.

    Attributes:
        of: each parameter that has a whole fp32 master, with that master.
        chunks: the parameters whose masters are split.
        cannot: why the optimizer's weights have no masters; "" where they have.
    """

    def __init__(self, optimizer: Optimizer, *, split: bool = True) -> None:
        """Args: `split` is whether masters are split where they can be."""
        _given_out[0] += 1
        self._optimizer = weakref.ref(optimizer)
        # Other code may hold a boundary, and so these masters, for longer.  (A weak
        # reference's own callback runs as Python ends, too, when torch 2.13 aborts:
        # "self->cdata.use_count() == 1 INTERNAL ASSERT FAILED".)
        weakref.finalize(optimizer, _end, weakref.ref(self)).atexit = False
        self._outer: list[weakref.ref[Optimizer]] = []
        self.of: dict[torch.Tensor, torch.Tensor] = {}
        self.chunks: list[Chunk] = []
        self._split = split
        # Torch's own optimizers write to nothing but the parameters, and differentiate
        # nothing.
        package = type(optimizer).__module__.partition(".")[0]
        self._doubt = body_of(optimizer) is None and package != "torch"
        self._ids: list[int] = []
        self._lists: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._models: list[weakref.ref[nn.Module]] = []
        self._reduced: set[int] = set()
        self._hooks: dict[torch.Tensor, RemovableHandle] = {}
        self._own: list[tuple[torch.Tensor, torch.dtype]] = []
        self._set: list[tuple[weakref.ref[Optimizer], str, Any]] = []
        self._plain: set[str] = set()
        self._said = False
        self._depth = 0
        self._open: Exchange | None = None
        self._runs = self._calls = self._is_as_it_was = False
        self._frame: types.FrameType | None = None
        self.cannot = ""
        self._before = optimizer.register_step_pre_hook(self._enter)
        self._after = optimizer.register_step_post_hook(self._exit)
        self._order_hooks()
        self._surround(optimizer, methods_of(optimizer))
        if self._doubt:
            tensors = own_tensors(optimizer)
            if shares_memory(tensors, self.in_order()):
                self._give_up(_WRITES)
            elif has_half(self.in_order()):
                self._own = [(each, each.dtype) for each in tensors]
                for each in tensors:
                    each.data = each.data.float()
        if any(group.get("differentiable") for group in optimizer.param_groups):
            self._give_up(_DIFFERENTIATES)

    @property
    def optimizer(self) -> Any:
        """The optimizer, which must be alive: nothing of ours keeps it so."""
        return self._optimizer()

    def name_after(self, *models: nn.Module) -> None:
        """Makes masters, saved by the names that `models` have for the parameters."""
        for model in models:
            if all(known() is not model for known in self._models):
                self._models.append(weakref.ref(model))
            self._reduced |= {id(p) for p in compat.reduced_by_ddp(model)}
        self.refresh()

    def serve(self, outer: Optimizer) -> None:
        """Has an optimizer round this one compute with masters, too: Lookahead."""
        if all(known() is not outer for known in self._outer):
            self._outer.append(weakref.ref(outer))
            self._surround(outer, ["step", *methods_of(outer)])
            for param in self.params:
                _cast_state(outer, param, torch.float32)

    def keep_half(self, params: Iterable[torch.Tensor]) -> None:
        """Leaves the gradients of `params` in their own dtype until a step."""
        self._reduced |= {id(p) for p in params}

    def widen(self) -> None:
        """Casts gradients that are in half precision to fp32.

        A GradScaler takes no others, and unscaled ones may be too small for fp16.
        """
        for param in self.params:
            grad = param.grad
            if grad is not None and has_masters(grad.dtype):
                param.grad = grad.float()

    def narrow(self) -> None:
        """Undoes `widen`, before gradients are reduced again."""
        for param in self.params if self._reduced else ():
            if id(param) in self._reduced and param.grad is not None:
                param.grad = param.grad.to(param.dtype)

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
        self.settle()
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
        if self._open is not None or self.cannot:
            return step(*args, **kwargs)
        self.settle()
        self._order_hooks()
        try:
            with compat.eagerly(step), self._running(self._doubt):
                return step(*args, **kwargs)
        except DifferentiatesError:
            why = _DIFFERENTIATES
        except (RuntimeError, TypeError) as error:
            # A step that knows nothing of masters may compute with a weight's dtype.
            if not self._is_as_it_was:
                raise
            first = str(error).partition("\n")[0]
            why = f"its step raised {first!r} with them"
        return self._without(why, step, args, kwargs)

    def _without(
        self,
        why: str,
        step: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Takes a step without masters, which are given up if the step succeeds."""
        kept, own = (dict(self.of), dict(self.optimizer.state)), self._own
        states = {p: dict(s) for p, s in kept[1].items() if isinstance(s, dict)}
        self._let_go()
        self.cannot = why
        try:
            result = step(*args, **kwargs)
        except BaseException:
            self.cannot = ""
            for param, state in states.items():
                kept[1][param].update(state)
            for param in kept[0]:
                self._prepare(param)
            self.of, self._own = kept[0], own
            for tensor, _ in own:
                tensor.data = tensor.data.float()
            raise
        finally:
            self._depth = 0
        self._give_up(why)
        return result

    @contextlib.contextmanager
    def _running(self, doubt: bool) -> Iterator[None]:
        """A region at whose end the parameters are put back, even if a step raises.

        Args:
            doubt: whether code in the region may differentiate.
        """
        self._runs, self._is_as_it_was = True, doubt
        try:
            yield
        except BaseException:
            if self._open is not None:
                self._is_as_it_was &= not self._open.written
                self._open.end(over=False)
            raise
        finally:
            self._runs = False
            self._depth = 0
            self._take_out()

    # -- which parameters have masters ---------------------------------------------

    def refresh(self) -> None:
        """Makes masters for trained parameters that have none; other masters follow.

        Where a parameter is no longer its master rounded, other code has written to the
        parameter, and the master takes the parameter's value.  Elements are compared
        one by one, by their bits (a NaN is not equal to itself, and -0 is equal to 0),
        without a wait for the device.
        """
        if self.cannot:
            return
        params = self.in_order()
        splits = self._split and not self._calls and body_of(self.optimizer) is not None
        self._whole_where_changed(params, splits)
        split = {id(p) for chunk in self.chunks for p in chunk.params}
        params = [p for p in params if id(p) not in split]
        masters: dict[torch.Tensor, torch.Tensor] = {}
        new, bare = [], []
        carried = self._carried()
        try:
            for param in params:
                master: torch.Tensor | None = self.of.get(param)
                if master is not None and has_masters(master.dtype):
                    masters[param] = master  # a step round this one has exchanged them
                elif not has_masters(param.dtype):
                    _hand_over(master, param.detach())
                elif master is not None and master.shape == param.shape:
                    follow(master, param.detach())
                    masters[param] = master
                elif param.requires_grad and param.is_leaf:
                    new.append(param)
                    self._prepare(param)
                    can = splits and can_split(param) and id(param) not in carried
                    if can and not self._is_shared(param):
                        bare.append(param)
                    else:
                        masters[param] = self._made(param, carried.get(id(param), {}))
            whole = [p for p in masters if p not in _whole and can_split(p)]
            cut = splits and is_elementwise(self.optimizer)
            chunks = [Chunk(each, cut=cut) for each in chunks_of(bare)]
            for each in chunks_of(whole if splits else []):
                values = [masters[p].detach() for p in each]
                chunks.append(Chunk(each, values, cut=cut))
        except BaseException:  # such as no memory: nothing is left half done
            for param in new:
                self._put_back(param)
            raise
        self.chunks += chunks
        for param in [p for chunk in chunks for p in chunk.params]:
            masters.pop(param, None)
            _shared.pop(param, None)
            _splitter[param] = weakref.ref(self)
        gone, self.of = self.of.keys() - masters.keys(), masters
        for param in gone.difference(self.params) if gone else ():
            self._unhook(param)

    def _whole_where_changed(self, params: list[torch.Tensor], splits: bool) -> None:
        """Gives whole masters to chunks whose parameters are others than they were."""
        ids = [*map(id, params)]
        if ids != self._ids or not splits:
            self._ids, held = ids, set(ids)
            for chunk in [*self.chunks]:
                if not splits or any(id(p) not in held for p in chunk.params):
                    self._make_whole(chunk)
        for chunk in [each for each in self.chunks if not each.fits()]:
            self._make_whole(chunk)

    def make_whole(self) -> None:
        """Gives all parameters whole fp32 masters, at least until a step."""
        for chunk in [*self.chunks]:
            self._make_whole(chunk)

    def _make_whole(self, chunk: Chunk) -> None:
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

    def _made(
        self, param: torch.Tensor, carried: Mapping[Any, torch.Tensor]
    ) -> torch.Tensor:
        """A whole master for `param`, or the one that another optimizer steps.

        Args:
            carried: what a checkpoint had of the parameter in fp32, with its state.
        """
        shared = _shared.get(param)
        master: torch.Tensor | None = None if shared is None else shared()
        if master is None or master.shape != param.shape:
            value = param.detach().float()
            digits = carried.get(KEY_BESIDE)
            if digits is not None and digits.shape == value.shape:
                value = digits.to(value.device, torch.float32, copy=True)
            master = nn.Parameter(value)
        follow(master, param.detach())
        state = self.optimizer.state.get(param, {})
        for key, value in carried.items():
            now = state.get(key)
            if isinstance(now, torch.Tensor) and now.shape == value.shape:
                state[key] = value.to(now.device, copy=True)
                # It was rounded when it was loaded; what has changed since, stays.
                follow(state[key], now.to(param.dtype))
        _shared[param] = weakref.ref(master)
        return master

    def _carried(self) -> dict[int, dict[Any, torch.Tensor]]:
        """What was loaded before there were masters, by the parameters' ids."""
        group = self.optimizer.param_groups[0] if self.optimizer.param_groups else {}
        kept = group.pop(KEY_CARRIED, None)
        if not kept:  # as at nearly every step
            return {}
        params = self.in_order()
        return {id(params[at]): kept[at] for at in kept if at < len(params)}

    def release(self) -> None:
        """Takes the masters away.  The parameters stay in half precision."""
        self.settle()
        self._before.remove()
        self._after.remove()
        for holder, name, value in self._set:
            own = vars(holder() or self)
            if own.get(name) is value:
                del own[name]
        count = len(self.params)
        self._let_go()
        if count:
            logger.info(
                "autoamp: the fp32 masters of %d parameters are gone; the weights stay "
                "what they were rounded to",
                count,
            )

    def _let_go(self) -> None:
        params = self.params
        for chunk in self.chunks:
            chunk.let_go()
        self.of, self.chunks = {}, []
        for param in params:
            _splitter.pop(param, None)
            self._put_back(param)
        for tensor, dtype in self._own:
            tensor.data = tensor.data.to(dtype)
        self._own = []

    def _give_up(self, why: str) -> None:
        """Leaves the optimizer its half-precision weights, for a reason that is said.

        The hooks stay: torch may be going through them.
        """
        self.cannot = why
        self._let_go()
        logger.warning(
            "autoamp: the half-precision weights of %s have no fp32 masters, and small "
            "updates are rounded away: %s",
            class_name(self.optimizer),
            why,
        )

    def _prepare(self, param: torch.Tensor) -> None:
        """Has a parameter's gradients and state be fp32 from now on."""
        # With a `grad_dtype` of fp32 torch would refuse `p.grad = torch.zeros_like(p)`.
        compat.take_any_gradient(param)
        if id(param) in self._reduced:
            self._say_half("DistributedDataParallel reduces them in that")
        elif compat.is_distributed(param) or compat.is_flattened(param):
            self._say_half("FSDP reduces them, and gives them in that")
        else:
            self._hooks[param] = compat.widen_gradients(param)
        for each in (self._optimizer, *self._outer):
            _cast_state(each(), param, torch.float32)

    def _put_back(self, param: torch.Tensor) -> None:
        """Has a parameter without a master hold gradients and state of its dtype."""
        self._unhook(param)
        compat.keep_gradients_narrow(param)
        for each in (self._optimizer, *self._outer):
            _cast_state(each(), param, param.dtype)

    def _unhook(self, param: torch.Tensor) -> None:
        handle = self._hooks.pop(param, None)
        if handle is not None:
            handle.remove()

    def _say_half(self, why: str) -> None:
        if not self._said:
            self._said = True
            logger.warning(
                "autoamp: gradients of half-precision parameters of the %s stay in "
                "their own dtype until it steps: %s",
                class_name(self.optimizer),
                why,
            )

    # -- round a step --------------------------------------------------------------

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Torch's hook before a step, with the optimizer itself as `args[0]`."""
        self.settle()
        self._depth += 1
        # The `super().step()` of a step, or the step of a method of the optimizer's.
        if self._depth > 1 or self._open is not None:
            return None
        grads = [p.grad for p in self.params] if self._doubt else []
        if any(grad is not None and grad.requires_grad for grad in grads):
            self._give_up(_DIFFERENTIATES)
        if self.cannot:
            return None
        if not self._runs:  # the step began before its optimizer was met
            # Torch fires no hook after a step that raises: `settle` looks whether this
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
        if self._depth <= 0 and not self._runs:
            self._end()

    def _end(self) -> None:
        """Ends a step for which `run` does not stand."""
        self._depth, self._frame = 0, None
        if self.optimizer.__dict__.get("zero_grad") == self._zero_grad:
            del self.optimizer.__dict__["zero_grad"]
        self._take_out()

    def settle(self) -> None:
        """Ends a step that has raised, and for which `run` did not stand."""
        frame: types.FrameType | None = sys._getframe(1)
        while self._frame is not None and frame is not self._frame:
            if frame is None:
                self._end()
                return
            frame = frame.f_back

    def _zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        type(self.optimizer).zero_grad(self.optimizer, *args, **kwargs)

    def _order_hooks(self) -> None:
        """Puts our hooks next to the step: all others see the parameters."""
        before, after = compat.step_hooks(self.optimizer)
        before.move_to_end(self._before.id)
        after.move_to_end(self._after.id, last=False)

    def _outside(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps `closure`: its forward and backward need the parameters in place."""

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self._is_as_it_was = False
            if self._open is None:
                return closure(*args, **kwargs)
            self._take_out(over=False)
            try:
                return closure(*args, **kwargs)
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
                    (step_cut if chunk.is_cut else step_chunk)(
                        self.optimizer, chunk, body
                    )
                finally:
                    chunk.end()
        split = {id(p) for chunk in self.chunks for p in chunk.params}
        for group in self.optimizer.param_groups if split else ():
            params = group["params"]
            self._lists.append((params, [*params]))
            params[:] = [p for p in params if id(p) not in split]

    def _put_in(self) -> None:
        if self.cannot:
            return
        try:
            # The function that looks stays on torch's stack until it is taken off,
            # which nobody does for a step that has raised.
            watched = self._is_as_it_was
            self._open = Exchange(
                self.of.items(),
                doubt=self._doubt,
                differentiates=self._differentiates if watched else None,
            )
        except RuntimeError as error:
            self._give_up(str(error).partition("\n")[0])

    def _differentiates(self) -> None:
        """Ends a step, or at least the exchange, that is about to differentiate."""
        assert self._open is not None, "only an exchange looks"
        if self._is_as_it_was and not self._open.written:
            raise DifferentiatesError
        self._open.end(over=False)

    def _take_out(self, over: bool = True) -> None:
        """Puts the parameters back, with the masters' values rounded into them.

        Args:
            over: whether the step has ended, not just its closure begun.
        """
        opened, self._open = self._open, None
        if opened is not None:
            opened.end(over)
            if opened.overwritten:
                self._give_up(_WRITES)
            elif opened.accumulated:
                self._give_up(_DIFFERENTIATES)
        if over:
            lists, self._lists = self._lists, []
            for params, before in lists:
                params[:] = before

    # -- methods of the optimizer that compute with its parameters -----------------

    def _surround(self, holder: Optimizer, names: Iterable[str]) -> None:
        """Has methods of an optimizer run with the masters in the parameters' places.

        A method that an instance has of its own is left alone.
        """
        for name in names:
            if name not in vars(holder):
                method = _surrounded(self, holder, name)
                holder.__dict__[name] = method
                self._set.append((weakref.ref(holder), name, method))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def call(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of the optimizer that may compute with the parameters."""
        plain = method.__name__ in self._plain or self.cannot
        if self._open is not None or self._depth or plain:
            return method(*args, **kwargs)
        self.settle()
        self._calls = True  # all masters are whole meanwhile
        self.refresh()
        positional = tuple(self._outside(a) if _is_closure(a) else a for a in args)
        named = {
            k: self._outside(v) if _is_closure(v) else v for k, v in kwargs.items()
        }
        try:
            with self._running(True):
                self._put_in()
                result = method(*positional, **named)
                # No more is written to than torch has counted, as in a plain call.
                self._take_out(over=False)
                return result
        except DifferentiatesError:
            self._plain.add(method.__name__)
        except (RuntimeError, TypeError):
            if not self._is_as_it_was:
                raise
            self._plain.add(method.__name__)
        finally:
            self._calls = False
            self.refresh()
        return method(*args, **kwargs)

    # -- helpers -------------------------------------------------------------------

    def in_order(self) -> list[torch.Tensor]:
        """The optimizer's parameters, by their positions in its saved state."""
        return [p for g in self.optimizer.param_groups for p in g["params"]]

    def named(self, of: Mapping[torch.Tensor, Any]) -> dict[str, torch.Tensor]:
        """The values `of` by the names of the parameters that are their keys.

        Wrappers add nothing to a name.  A name in two models means the first model's
        parameter.
        """
        named: dict[str, torch.Tensor] = {}
        without = dict.fromkeys(of)
        for known in self._models:
            model = known()
            for name, param in () if model is None else compat.own_names(model):
                if param in without and name not in named:
                    del without[param]
                    named[name] = of[param]
        for index, held in enumerate(self.in_order()):
            if held in without:
                named[f"{_UNNAMED}{index}"] = of[held]
        return named


def _end(known: weakref.ref[Masters]) -> None:
    masters = known()
    if masters is not None:
        masters._let_go()


def _is_closure(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


def _surrounded(masters: Masters, holder: Optimizer, name: str) -> Callable[..., Any]:
    """The method of an optimizer's class, called with the masters in place."""
    function = getattr(type(holder), name)
    known, own = weakref.ref(masters), weakref.ref(holder)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        bound = types.MethodType(function, own())
        now = known()
        return bound(*args, **kwargs) if now is None else now.call(bound, args, kwargs)

    return method


def _hand_over(master: torch.Tensor | None, value: torch.Tensor) -> None:
    """Gives a weight that was made fp32 or fp64 the master's digits.

    A weight that other code has written to stays as it is.
    """
    if master is None or value.shape != master.shape or not value.is_floating_point():
        return
    digits, value = compat.local_part(master.detach()), compat.local_part(value)
    digits = digits.to(value.device)
    # Nobody remembers in which of the half dtypes the weight was.
    for half in LOW_DTYPES.values():
        rounded = digits.to(half).to(value.dtype)
        if torch.equal(rounded, value):
            value.copy_(digits)


def _cast_state(optimizer: Any, param: torch.Tensor, dtype: torch.dtype) -> None:
    """Casts an optimizer's state of one parameter."""
    state = getattr(optimizer, "state", {}).get(param)
    if isinstance(state, dict):
        # A checkpoint's master, which was rounded when there was no master here.
        state.pop(KEY_BESIDE, None)
        state.update(in_dtype(state, dtype))
    elif state is not None:
        optimizer.state[param] = in_dtype(state, dtype)


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
