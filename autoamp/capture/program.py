"""The compiled graphs of a model, shared by all models that are alike.

If there are thirty models of one class, the first is captured; the others run the
first one's graphs with weights, weight copies, a loss scale and a record of their own.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.capture.alike import STATE
from autoamp.capture.engine import Engine
from autoamp.capture.thread import THREAD

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
        """How much is captured of the running model."""
        return self.running().amount

    def stop(self) -> None:
        """Has the running model's call find that no more is to be captured."""
        self.running().is_new = True

    def dtype_in(self, modules: list[str]) -> torch.dtype | None:
        """The dtype in which the running model's Functions follow their authors."""
        return self.running().dtype_in(modules)

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
    key = _with_options(what, engine)
    with _LOCK:
        try:
            found = _PROGRAMS.get(key)
        except TypeError:  # an option, such as a backend, has no hash
            return Program(function, engine, hooked=hooked)
        if found is not None and found.may_be_joined:
            return found
        mine = Program(function, engine, hooked=hooked)
        # This thread does not wait for a program that another thread is capturing: the
        # other may wait for this one in turn, as it does where ranks are threads.
        if found is None or found.captured_modes:
            _PROGRAMS[key] = mine
    return mine


def _with_options(what: Hashable, engine: Engine) -> tuple[Any, ...]:
    """`what` with all else that a graph depends on."""
    options = engine.options
    if not isinstance(options.loss_scale, str):  # each model has its own scale
        options = options.replace(loss_scale="auto")
    low, scales = engine.record.low, engine.record.scaling.enabled
    rules = options.resolve_rules(low)  # `rules` may name a file
    return what, low, scales, engine.runs_as_is, rules, options, engine.price
