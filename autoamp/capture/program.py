"""What Dynamo compiled a model to, shared by all models that are alike.

Of thirty models of one class the first is captured; the others run its graphs with
weights, weight copies, a loss scale and a record of their own.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import fx

from autoamp import compat
from autoamp.capture.engine import Engine


class _Running(threading.local):
    """`engine`: of the model whose call this thread is in."""

    engine: Engine | None = None


RUNNING = _Running()


class Backend:
    """The Dynamo backend of models that are alike.

    Dynamo keeps a backend as long as the code compiled with it, so that a backend must
    not hold that code.

    Attributes:
        runs_as_is: no compiler is handed the graphs in turn.
        left: code that was left to Python, and whether only past the recompile limit.
    """

    def __init__(self, engine: Engine) -> None:
        """Args: `engine` is that of the first model."""
        self.runs_as_is = engine.runs_as_is
        self.left: list[tuple[types.CodeType, bool]] = []
        self._first = weakref.ref(engine)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Prepares a graph for the model that is running, and runs it for any."""
        prepared = self._running().prepared(gm, example_inputs)

        def run(*args: Any) -> Any:
            engine = RUNNING.engine or self._running()
            call = engine.bound.get(prepared) or engine.bind(prepared, args)
            return call(*args)

        return run

    def leave(self, code: types.CodeType, at_limit: bool) -> None:
        """Notes what Dynamo leaves to Python."""
        self.left.append((code, at_limit))
        self._running().record.left_to_python(code, at_limit)

    def _running(self) -> Engine:
        engine = RUNNING.engine or self._first()
        assert engine is not None, "a graph is run outside a call of its model"
        return engine


class Program:
    """The compiled entry of models that are alike.

    Attributes:
        backend: what its graphs are handed to.
        call: the compiled entry, called with the model first.
        stepped_aside: Dynamo looks at some of its code no more; no model is to join.
        seen: kinds of calls that have been captured: recording, inference, training.
    """

    def __init__(
        self, entry: Callable[..., Any], engine: Engine, *, hooked: bool
    ) -> None:
        """Compiles nothing yet.

        Args:
            engine: that of the first model.
            hooked: modules inside have hooks, or have had some.
        """
        assert isinstance(entry, types.FunctionType)
        self.backend = Backend(engine)
        self.stepped_aside = False
        self.seen: set[tuple[bool, bool, bool]] = set()
        self.call = compat.CompiledEntry(
            entry, self.backend, self.backend.leave, hooked=hooked
        )

    @property
    def may_be_joined(self) -> bool:
        """Whether another model finds its graphs here, and nothing in their way."""
        return bool(self.seen) and self.call.is_captured and not self.stepped_aside

    def tell(self, engine: Engine) -> None:
        """Has a model report what of its code was left to Python before it came."""
        for code, at_limit in self.backend.left:
            engine.record.left_to_python(code, at_limit)


_PROGRAMS: weakref.WeakValueDictionary[Hashable, Program] = (
    weakref.WeakValueDictionary()
)
_LOCK = threading.Lock()


def program_for(
    what: Hashable,
    make: Callable[[], Callable[..., Any]],
    engine: Engine,
    *,
    hooked: bool,
) -> Program:
    """The program of models that are alike, once one was captured and while it lives.

    Args:
        what: a key, equal for models that are alike; None for a program of its own.
        make: gives the entry, with code objects of its own.
        hooked: as of a `Program`; those of models with hooks are not shared.
    """
    key = None if what is None else _with_options(what, engine)
    if key is None:
        return Program(make(), engine, hooked=hooked)
    with _LOCK:
        found = _PROGRAMS.get(key)
        if found is not None and found.may_be_joined:
            return found
        mine = Program(make(), engine, hooked=hooked)
        # One that another thread is capturing now is not waited for: that thread may
        # wait for this one in turn, as ranks do that are threads.
        if found is None or found.seen:
            _PROGRAMS[key] = mine
    return mine


def _with_options(what: Hashable, engine: Engine) -> Hashable | None:
    """`what`, and all else that a graph depends on; None if that cannot be compared."""
    options = engine.options
    if not isinstance(options.loss_scale, str):  # each model brings its own
        options = options.replace(loss_scale="auto")
    low, scales = engine.record.low, engine.record.scaling.enabled
    rules = options.resolve_rules(low)  # by name, they may be in a file
    key = (what, low, scales, engine.runs_as_is, rules, options)
    try:
        hash(key)
    except TypeError:
        return None
    return key
