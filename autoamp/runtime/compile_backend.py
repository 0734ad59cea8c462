"""Models and functions in compilations of the user's own.

A Dynamo backend rewrites each graph and hands it to another backend.  It serves
`torch.compile(model, backend="autoamp")`, and functions that a script compiles itself
while the automatic mode is on.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.errors import CaptureError
from autoamp.messages import log_left_to_autocast, log_once, printable_line
from autoamp.runtime.conversion_record import Record, announce
from autoamp.runtime.eligible import choose_device_precision
from autoamp.runtime.engine import Engine
from autoamp.runtime.program import THREAD, inside_a_call
from autoamp.training.attach import new_scaling
from autoamp.training.options import ConvertOptions, Options
from autoamp.training.scale import resolve_loss_scale
from autoamp.training.uncalled import expect_no_calls
from autoamp_said import logger_of

logger = logger_of(__name__)


class GraphBackend:
    """The backend Dynamo calls with each graph of a function the user compiles.

    Attributes:
        options: the options of `convert`; `options.backend` compiles the result.
        label: the compiled function's name, for messages.
        frames_left: Dynamo's answer on each function that it leaves to Python.
        given: the options as they were given, where a table needs their `id`.
        engine: rewrites the graphs; None before the first graph, or where the function
            stays in fp32.
    """

    def __init__(
        self,
        options: Options,
        label: str = "a compiled function",
        on_capture: Callable[[Engine], None] | None = None,
    ) -> None:
        """Args: `on_capture` is called with the engine after every capture."""
        self.options = options
        self.label = label
        self.on_capture = on_capture
        self.engine: Engine | None = None
        self.frames_left: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )
        self.given: object = None
        self._asked = False
        self._lock = threading.Lock()
        compat.watch_frames(hearing)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """The callable to run instead of `gm`."""
        # A step that the user compiles must not be rounded: small updates would vanish
        # in a low-precision sum.
        if updates_weights(gm):
            logger.debug("autoamp: %s updates weights: it is not changed", self.label)
            return compat.compile_with(self.options.backend, gm, example_inputs)
        with self._lock:
            # Whether to convert is decided for the function, not for each of its
            # graphs, which share one loss scale.
            if not self._asked:
                self.engine, self._asked = self._made(example_inputs), True
        own_autocast = compat.any_autocast()
        if own_autocast and self.engine is not None:
            log_left_to_autocast(logger, self.label, of=self)
        if own_autocast or self.engine is None:
            return compat.compile_with(self.options.backend, gm, example_inputs)
        engine = self.engine
        if self.options.backend != "eager" and compat.is_recurrent(gm):
            # A compiler would take the steps apart; the LSTM that inductor compiles
            # raises (torch 2.13).
            engine.record.note(_RECURRENT)
            engine = engine.compiled_by("eager")
        run = engine(gm, example_inputs)
        announce(self.engine.record)
        self.engine.tell()
        return run

    def tell_of_left(self, left: compat.Left) -> None:
        """Says that Dynamo left code to Python.

        Raises:
            CaptureError: the code computes in fp32, and `strict` is set.
        """
        if _in_a_step_of_an_optimizer():
            return
        code = left.code
        text = f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}: "
        if left.at_limit:
            text += "calls beyond torch._dynamo.config.recompile_limit run in fp32"
        elif left.is_broken:
            why = left.broke_at or "a graph break in a loop, a `with` or a `try`"
            text += (
                "Dynamo leaves this function to Python, and its own operations run in "
                f"fp32: {why}; TORCH_LOGS=graph_breaks tells where"
            )
        else:
            text = "calls in a dispatch mode, in which Dynamo steps aside, run in fp32"
        text = printable_line(text)
        if self.options.strict:
            raise CaptureError(f"{self.label}: {text}")
        log_once(logger, logging.WARNING, f"autoamp: {self.label}: {text}", of=self)

    def _made(self, example_inputs: Sequence[Any]) -> Engine | None:
        device = next(
            (v.device for v in example_inputs if isinstance(v, torch.Tensor)),
            torch.device("cpu"),
        )
        low, why_not = choose_device_precision(device, self.options)
        if low is None:
            logger.warning("autoamp: %s is left as it is: %s", self.label, why_not)
            return None
        scale = resolve_loss_scale(self.options.loss_scale, low)
        scaling = new_scaling(self.options, scale, self.label, low=low)
        record = Record(self.label, low, scaling)
        engine = Engine(self.options, record, on_capture=self.on_capture)
        engine.then_runs = _CAPTURED_LATER
        return engine


# Dynamo keeps its graphs, and asks a backend about new ones alone.
_CAPTURED_LATER = (
    "Graphs captured from now on, and all after torch._dynamo.reset(), run with"
)

_RECURRENT = (
    "a graph with an LSTM, a GRU or an RNN runs as it is, because no compiler takes one"
)


def is_ours(backend: Any) -> bool:
    """Whether a backend of `torch.compile` rewrites the graphs it is given."""
    return isinstance(backend, GraphBackend) or backend is _rewriting


def hearing(backend: Any) -> GraphBackend | None:
    """The backend of ours inside what `torch.compile` made of it, or None."""
    found = compat.unwrapped_backend(backend)
    if isinstance(found, GraphBackend):
        return found
    return (
        _known(cast(Any, compat.options_beside(backend)))
        if found is _rewriting
        else None
    )


def __getattr__(name: str) -> Any:
    """`autoamp_backend`, which torch looks up where a script first names it."""
    if name != "autoamp_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Dynamo hands in graphs alone, and frames that have none must be heard of: not
    # before somebody asks for the backend is anything of Dynamo's replaced.
    compat.watch_frames(hearing)
    return _rewriting


_BACKENDS: dict[Any, GraphBackend] = {}


def _rewriting(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: ConvertOptions | None = None,
    **_: Any,
) -> Callable[..., Any]:
    """Rewrites a graph for `torch.compile(model, backend="autoamp", options={...})`.

    Inductor compiles the result unless `options` name another backend.  Models that are
    compiled with equal options share one loss scale.

    Args:
        options: keyword arguments of `convert`; "eager" as `backend` runs the rewritten
            graph as it is.

    Raises:
        AutoampError: an option cannot be used.
    """
    return _known(options or {})(gm, example_inputs)


def _known(options: ConvertOptions) -> GraphBackend:
    """The backend that rewrites for all models compiled with equal options."""
    given: dict[str, Any] = {"backend": "inductor", **options}
    chosen = Options().replace(**given)
    try:
        # Dynamo calls `_rewriting` anew for each graph: the table holds the engine, and
        # with it the loss scale, between the calls.
        return _BACKENDS.setdefault(chosen, GraphBackend(chosen))
    except TypeError:  # an option has no hash, such as a loss scale of the user's
        known = _BACKENDS.setdefault(id(options), GraphBackend(chosen))
        known.given = options  # as long as it lives, no other object has its `id`
        return known


_WRITES = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ipow,
    operator.imatmul,
}


def updates_weights(gm: fx.GraphModule) -> bool:
    """Whether a graph that is being captured updates weights.

    A graph updates weights if it writes to a parameter, or if it is captured inside an
    optimizer's step without gradients recorded.  (A closure that an optimizer calls
    records gradients: it computes a loss.)
    """
    weights = {
        compat.storage_id(value)
        for node in gm.graph.nodes
        if node.op in {"placeholder", "get_attr"}
        and isinstance(value := _value(node), torch.Tensor)
        and (isinstance(value, nn.Parameter) or (value.is_leaf and value.requires_grad))
    }
    writes = bool(weights) and any(
        compat.storage_id(value) in weights
        for node in gm.graph.nodes
        for written in _written(node)
        if isinstance(value := _value(written), torch.Tensor)
    )
    return writes or (not torch.is_grad_enabled() and _in_a_step_of_an_optimizer())


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes whose values a call writes to."""
    targets: list[Any] = [node.kwargs.get("out")]
    if isinstance(node.target, torch._ops.OpOverload):
        written = compat.written_arguments(node.target)
        for position, name in enumerate(compat.argument_names(node.target)):
            if name in written:
                positional = node.args[position : position + 1]
                targets.append(positional or node.kwargs.get(name))
    else:
        # `+=`, or a name such as `add_`; the target of a method is its name.
        name = str(getattr(node.target, "__name__", node.target))
        by_name = name.endswith("_") and not name.endswith("__")
        if by_name or (node.op == "call_function" and node.target in _WRITES):
            targets.append(node.args[:1] or node.kwargs.get("self"))
    return (each for each in pytree.tree_leaves(targets) if isinstance(each, fx.Node))


def _value(node: fx.Node) -> Any:
    """The stand-in that Dynamo has computed for a node's value, or None."""
    return node.meta.get("example_value")


def _in_a_step_of_an_optimizer() -> bool:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if isinstance(compat.first_argument(frame), torch.optim.Optimizer):
            return True
        frame = frame.f_back
    return False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced_for_us() -> bool:
    """Whether Dynamo traces for a converted model now, and not for the user.

    True under `torch._dynamo.explain` too, with which users ask about the model's own
    code.  The answer can be a constant, because only we call the code that we compile.
    (Whether autoamp is switched off here is no constant: the user's code may be called
    again elsewhere.)
    """
    return inside_a_call() or compat.is_asked_by_dynamo()


USERS_BACKENDS: list[Callable[..., Any]] = []
"""The backends of the user's own compilations in which a converted model was met."""


ONE_GRAPH, AS_WRITTEN = -1, -2
"""Answers in place of a position in `USERS_BACKENDS`.

`ONE_GRAPH`: the graph must not be broken.  `AS_WRITTEN`: the backend runs our pass
anyway, or autoamp is switched off for a graph that must not be broken.
"""


_IN_ONE_GRAPH = (
    "a converted model is called in a compilation with fullgraph=True, or in a branch "
    "or loop of torch's, where its rewritten graphs cannot run{}; "
)

_STANDS_IN = (
    ": torch.autocast stands in, in bf16 where gradients are recorded, or fp32 where "
    "keep=, deny=, infer=, clear= or rules= ask for what autocast cannot do"
)

_INSTEAD = 'drop fullgraph=True, or use torch.compile(..., backend="autoamp")'


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def users_backend(strict: bool) -> int:
    """The position in `USERS_BACKENDS` of the backend that Dynamo traces for now.

    The answer may also be `ONE_GRAPH` or `AS_WRITTEN`.

    Raises:
        CaptureError: the graph must not be broken, and the model is `strict`.
    """
    backend, may_break = compat.tracing_backend()
    backend = compat.without_buckets(backend)
    if is_ours(compat.unwrapped_backend(backend)):
        expect_no_calls()
        return AS_WRITTEN
    if backend is None or not may_break:
        expect_no_calls()
        if THREAD.off:
            return AS_WRITTEN
        if strict:
            raise CaptureError(_IN_ONE_GRAPH.format("") + _INSTEAD)
        warning = f"autoamp: {_IN_ONE_GRAPH.format(_STANDS_IN)}{_INSTEAD}"
        # One graph may hold the calls of many modules, and one line is enough.
        log_once(logger, logging.WARNING, warning, of=backend)
        return ONE_GRAPH
    for index, known in enumerate(USERS_BACKENDS):
        if known is backend:
            return index
    USERS_BACKENDS.append(backend)
    return len(USERS_BACKENDS) - 1
