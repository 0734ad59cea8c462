"""The compiled code of a model, shared by all models that are alike.

If there are thirty models of one class, the first is captured; the others run the
first one's graphs with weights, weight copies, a loss scale and a record of their own.

`likeness` takes a model and the arguments of a call, and gives a key that is equal for
models that are alike: each could be a deep copy of the other, but for weights.  A
difference that the key overlooks does no harm, because Dynamo guards all values that
it reads, and captures anew.  Models that need graphs of their own get different keys,
because they would fill each other's recompile limit.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.runtime.engine import Engine
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.shards import SHARDED

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.Size)
"""Types of the values that Dynamo takes for constants and guards by value."""

_EVERY = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes that every module has: its parameters, buffers, children and hooks."""

_MOST = 256
"""How many values of one list or dictionary are looked at; a look at more would cost
more than shared graphs may save."""


STATE = "_autoamp"
"""The attribute of a converted model that holds its `Conversion`."""


class _Unlike(Exception):  # noqa: N818 (found, not failed)
    """The model holds something (a hook, function or tensor) that no key describes."""


def likeness(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Hashable | None:
    """A key equal for models alike and called alike; None for a model like no other.

    The key keeps neither classes nor functions alive.

    Args:
        args, kwargs: the arguments of the call.
    """
    numbers: dict[int, int] = {}
    try:
        # Most calls have nothing but tensors, which need no search for leaves.
        flat = not kwargs and all(isinstance(each, torch.Tensor) for each in args)
        kept = (
            tuple(
                (name, *_of_module(module, module is model, numbers))
                for name, module in model.named_modules()
            ),
            tuple(map(_argument, args if flat else pytree.tree_leaves((args, kwargs)))),
            tuple(kwargs),
        )
    except (_Unlike, AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return kept


def _of_module(
    module: nn.Module, root: bool, numbers: dict[int, int]
) -> list[Hashable]:
    """The key of one module; `numbers` counts tensors, because they may be shared."""
    attributes = module.__dict__
    is_scripted = "_parameters" not in attributes
    if is_scripted or (STATE in attributes and not root):
        raise _Unlike
    key: list[Hashable] = [weakref.ref(type(module))]
    for kind in ("_parameters", "_buffers"):
        for name, value in attributes[kind].items():
            # A tied weight has the number of its first place, in each model that is
            # alike.
            number = numbers.setdefault(id(value), len(numbers))
            key.append((name, number, _value(value)))
    # A hook may hold anything: no key tells whether two of them are alike.
    if any(map(attributes.get, compat.HOOKS)):
        raise _Unlike
    for name in attributes:
        if name not in _EVERY:
            value = attributes[name]
            if not (root and (name == STATE or isinstance(value, types.MethodType))):
                key.append((name, _held(value)))
    return key


def _held(value: Any) -> Hashable:
    """A key for one attribute of a module: no parameter, buffer or child."""
    if value is None or type(value) in _PLAIN:
        return value  # type: ignore[no-any-return]
    if not isinstance(value, list | tuple | dict):
        return _value(value)
    if type(value) is tuple and all(type(each) in _PLAIN for each in value):
        return value
    # A generator stops at the limit: a vocabulary has a million entries.
    leaves = [*itertools.islice(pytree.tree_iter(value), _MOST + 1)]
    if len(leaves) > _MOST:
        raise _Unlike
    return str(pytree.tree_structure(value)), tuple(map(_value, leaves))


def _value(value: Any) -> Hashable:
    """A key for one value, different where Dynamo would need another graph."""
    if isinstance(value, torch.Tensor):  # a number may decide what stays fp32
        return _argument(value), compat.held_number(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    if callable(value) and not isinstance(value, nn.Module):
        if not isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
            raise _Unlike
        return weakref.ref(value)  # such as `functional.relu`: its identity
    inside = itertools.islice(pytree.tree_iter(getattr(value, "__dict__", {})), _MOST)
    if any(isinstance(each, torch.Tensor) for each in inside):
        raise _Unlike
    return weakref.ref(type(value))


def _argument(value: Any) -> Hashable:
    """A key for one argument of a call; the key of a tensor leaves its values out."""
    if not isinstance(value, torch.Tensor):
        return _value(value)
    kind = weakref.ref(type(value))
    return kind, value.shape, value.dtype, value.device, value.requires_grad


under_compilation = torch.compiler.is_dynamo_compiling


class _ThisThread(threading.local):
    """The call, and the regions, that this thread is in.

    Attributes:
        off: the depth of `disabled()` regions.
        engine: the engine of the converted model whose call the thread is in.
        as_written: whether no part of that call is captured.
    """

    off = 0
    engine: Engine | None = None
    as_written = False


THREAD = _ThisThread()


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """A region in which converted models called from this thread run in fp32."""
    THREAD.off += 1
    try:
        yield
    finally:
        THREAD.off -= 1


def inside_a_call() -> bool:
    """Whether this thread is in a call of a converted model."""
    return THREAD.engine is not None


def inside_captured_code(*, is_off: bool) -> bool:
    """Whether what is called now is part of a converted model's call as a whole.

    Where Dynamo is switched off in a captured call (in a checkpoint around a graph
    break, or by `torch.compiler.disable`), what is called there is called by itself.
    A backward calls what was checkpointed again, and not in the model's call.

    Args:
        is_off: whether Dynamo is switched off.
    """
    return THREAD.engine is not None and (THREAD.as_written or not is_off)


def tell_ranks(model: nn.Module, scaling: ModelScaling) -> None:
    """Tells ranks of a call: which code reduces gradients, which weights are shards.

    Ranks count the calls of a model, so that every call counts, whatever it runs.
    """
    scaling.ledger.note_call()
    if compat.uses_fsdp():
        SHARDED.note_call(model, inside_a_call)


_ENDS = ("placeholder", "get_attr", "output")


class Backend:
    """The Dynamo backend of models that are alike.

    A backend must not hold the code compiled with it, because Dynamo keeps the backend
    as long as that code.

    Attributes:
        runs_as_is: graphs run as they are, and no compiler gets them.
        computes: Dynamo has handed in a graph with a float op.
        nodes: how many nodes the graphs have that Dynamo has handed in.
    """

    def __init__(self, engine: Engine) -> None:
        """Args: `engine` is the first model's engine."""
        self.nodes = 0
        self.computes = False
        self.runs_as_is = engine.runs_as_is
        self._first = weakref.ref(engine)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Prepares a graph for the running model; the result runs it for any model."""
        self.nodes += sum(n.op not in _ENDS for n in gm.graph.nodes)
        first = self.running()
        prepared = first.prepared(gm, example_inputs)
        rewritten = prepared.rewritten
        self.computes = self.computes or rewritten is None or rewritten.sums.ops > 0

        def run(*args: Any) -> Any:
            engine = THREAD.engine or self.running()
            return engine.call_for(prepared, args)(*args)

        return run

    @property
    def amount(self) -> compat.Amount:
        """The amount of code captured of the running model so far."""
        return self.running().amount

    def stop(self) -> None:
        """Has the running model's call find that no more is to be captured."""
        self.running().is_new = True

    def dtype_in(self, modules: list[str]) -> torch.dtype | None:
        """The dtype in which the running model's Functions follow their authors."""
        return self.running().dtype_in(modules)

    def note(self, why: str) -> None:
        """Keeps for the running model's report why something is not converted."""
        self.running().record.note(why)

    def apart(self, path: str) -> Hashable:
        """The key of a module; modules with unequal keys share no graphs."""
        return self.running().apart(path)

    def running(self) -> Engine:
        """The engine of the model whose call this thread is in."""
        engine = THREAD.engine or self._first()
        assert engine is not None, "a graph is run outside a call of its model"
        return engine


class Program(compat.CompiledEntry):
    """The compiled code of models that are alike; its first argument is the model.

    Attributes:
        backend: the backend that gets the program's graphs.
        left: code that Dynamo left to Python.
        stepped_aside: Dynamo no longer looks at some code of the program, so no other
            model may join.
        captured_modes: grad mode, inference mode and training, as captured so far.
    """

    def __init__(
        self, function: Callable[..., Any], engine: Engine, *, hooked: bool
    ) -> None:
        """Compiles nothing yet.

        Args:
            engine: the first model's engine.
            hooked: modules of the model have hooks, or have had some.
        """
        assert isinstance(function, types.FunctionType)
        self.backend = Backend(engine)
        self.left: list[compat.Left] = []
        self.stepped_aside = False
        self.captured_modes: set[tuple[bool, bool, bool]] = set()
        strict = engine.options.strict
        super().__init__(function, self.backend, hooked=hooked, strict=strict)

    def root_of(self, model: torch.nn.Module) -> torch.nn.Module:
        """The converted model that `model` is a part of, or `model` itself."""
        root = getattr(model.__dict__.get(STATE), "root", None)
        return model if root is None else root

    def leave(self, left: compat.Left) -> None:
        self.left.append(left)
        self.backend.running().record.left_to_python(left)

    @property
    def may_be_joined(self) -> bool:
        """Whether another model may run the graphs of this program."""
        return bool(self.captured_modes) and self.is_captured and not self.stepped_aside

    @property
    def computes_nothing(self) -> bool:
        """Whether Dynamo has followed all calls so far, and met no float op."""
        return self.is_whole and not self.backend.computes

    def tell(self, engine: Engine) -> None:
        """Records for a model the code left to Python before the model joined."""
        for left in self.left:
            engine.record.left_to_python(left)


_PROGRAMS: weakref.WeakValueDictionary[Hashable, Program] = (
    weakref.WeakValueDictionary()
)
_LOCK = threading.Lock()


def program_for(
    what: Hashable,
    function: Callable[..., Any],
    engine: Engine,
    *,
    hooked: bool,
) -> Program:
    """The program of models that are alike, or a new one.

    A program is shared once a call was captured, and as long as the program lives.

    Args:
        what: a key, equal for models that are alike; None for a program of one model.
        function: the callable, with code objects of its own.
        hooked: as for `Program`; models with hooks share no program.
    """
    if what is None:
        return Program(function, engine, hooked=hooked)
    record, options = engine.record, engine.options
    if not isinstance(options.loss_scale, str):  # each model has its own scale
        options = options.replace(loss_scale="auto")
    rules = options.resolve_rules(record.low)  # `rules` may name a file
    own = record.low, record.scaling.enabled, engine.runs_as_is
    key = what, *own, rules, options
    with _LOCK:
        try:
            shared = _PROGRAMS.get(key)
        except TypeError:  # an option, such as a backend, has no hash
            return Program(function, engine, hooked=hooked)
        if shared is not None and shared.may_be_joined:
            return shared
        mine = Program(function, engine, hooked=hooked)
        # This thread does not wait for a program that another thread is capturing: the
        # other may wait for this one in turn, as it does where ranks are threads.
        if shared is None or shared.captured_modes:
            _PROGRAMS[key] = mine
    return mine
