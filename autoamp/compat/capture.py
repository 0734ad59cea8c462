"""Dynamo and inductor."""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch import fx
from torch.autograd import forward_ad

_COMPILE_TIME_CONFIG = {
    # Without it nn.LSTM, GRU and RNN give no graph at all, silently.
    "allow_rnn": True,
    # DDPOptimizer would call the backend once per bucket with fake tensors; the eager
    # back end has per-op autograd, so DDP overlaps without any splitting.
    "optimize_ddp": False,
    # By default a hook registered after the capture is never called.
    "skip_nnmodule_hook_guards": False,
}


def _configure_while_compiling(callback: Any) -> None:
    """Makes Dynamo's frame callback run under `_COMPILE_TIME_CONFIG`.

    The callback runs only when a frame is compiled, so a converted call pays nothing
    for it and torch's configuration is what the user set everywhere else.  (The class
    of this one object is replaced: the C side walks the object's own attributes, and a
    wrapping object crashes it.)
    """
    base = type(callback)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(_COMPILE_TIME_CONFIG), _quietly():
            return base.__call__(self, *args, **kwargs)

    callback.__class__ = type(base.__name__, (base,), {"__call__": call})


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keeps from the user what Dynamo says to people who asked for it."""
    with warnings.catch_warnings():
        # Dynamo looks at `.grad` of every input.  It hides the warning, but not from a
        # filter that makes it an error, and the error would end the capture.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")
        _ITEM_LOGGER.addFilter(_is_worth_saying)
        try:
            yield
        finally:
            _ITEM_LOGGER.removeFilter(_is_worth_saying)


_ITEM_LOGGER = logging.getLogger("torch._dynamo.variables.tensor")


def _is_worth_saying(record: logging.LogRecord) -> bool:
    """Not how to avoid a graph break at `.item()`, with a page of stack."""
    return "Graph break from `Tensor.item()`" not in str(record.msg)


def compile_entry(
    entry: types.FunctionType, backend: Callable[..., Any]
) -> Callable[..., Any]:
    """`entry` compiled by Dynamo with `backend` and recompile limits of its own.

    Dynamo counts recompiles per code object, shared by every function of one source:
    two dozen models converted through the same lambda would exhaust the limit of 8 and
    then run fp32 without a word.  `isolate_recompiles` (torch >= 2.13) gives each
    compiled entry its own count; a fresh code object does so for the entry itself on
    older versions.
    """
    fresh = types.FunctionType(
        entry.__code__.replace(co_name=entry.__code__.co_name),
        entry.__globals__,
        entry.__name__,
        entry.__defaults__,
        entry.__closure__,
    )
    optional: dict[str, Any] = {}
    # `torch._dynamo.optimize` takes whatever `torch.compile` does, unnamed.
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters:
        optional["isolate_recompiles"] = True
    context: Any = torch._dynamo.optimize(backend=backend, **optional)
    if hasattr(context, "callback"):  # absent where TORCHDYNAMO_DISABLE is set
        _configure_while_compiling(context.callback)
    compiled: Callable[..., Any] = context(fresh)
    return compiled


def compile_with(
    backend: str | Callable[..., Any], gm: fx.GraphModule, example_inputs: Sequence[Any]
) -> Callable[..., Any]:
    """`gm` compiled by a backend, as `torch.compile` would from inside one.

    Args:
        backend: "eager" (`gm` as it is), "inductor" or any Dynamo backend.
    """
    if backend == "eager":
        return gm.forward
    if backend == "inductor":
        from torch._inductor.compile_fx import compile_fx as backend
    assert callable(backend)
    compiled: Callable[..., Any] = cast(Any, backend(gm, list(example_inputs)))
    return compiled


def resolved_backend(
    backend: str | Callable[..., Any] | None,
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
) -> Callable[..., Any] | None:
    """What `torch.compile` would call with each graph; None where torch hides that.

    Raises:
        RuntimeError: torch's own, where the arguments contradict each other.
    """
    inductor = getattr(torch, "_TorchCompileInductorWrapper", None)
    other = getattr(torch, "_TorchCompileWrapper", None)
    if inductor is None or other is None:
        return None
    if backend in (None, "inductor"):
        if mode is None and options is None:
            mode = "default"
        found: Callable[..., Any] = inductor(mode, options, dynamic)
    else:
        found = other(backend, mode, options, dynamic)
    return found


def tracing_backend() -> tuple[Callable[..., Any] | None, bool]:
    """The backend of the compilation that is tracing now; None where it is unknown.

    And whether the graph may be broken: not so under `fullgraph=True`.
    """
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        tx: Any = InstructionTranslator.current_tx()
        whole = tx.one_graph or getattr(tx, "error_on_graph_break", False)
        return tx.output.compiler_fn, not whole
    except (ImportError, AttributeError):
        return None, False


def unwrapped_backend(backend: Any) -> Any:
    """What was given to `torch.compile` as `backend`, out of torch's own wrappers."""
    names = ("_torchdynamo_orig_backend", "compiler_fn", "__wrapped__")
    for _ in range(10):
        inner = [getattr(backend, n) for n in names if getattr(backend, n, None)]
        if not inner:
            break
        backend = inner[0]
    return backend


def transforms_active() -> bool:
    """Whether the caller is inside a transform of `torch.func`, or forward-mode AD."""
    return _transforms_active() or getattr(forward_ad, "_current_level", -1) >= 0


_transforms_active: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)


def is_batch(value: torch.Tensor) -> bool:
    """Whether `value` stands for several: gradients taken with `is_grads_batched`."""
    functorch = getattr(torch._C, "_functorch", None)
    for name in ("is_legacy_batchedtensor", "is_batchedtensor"):
        ask = getattr(functorch, name, None)
        if ask is not None and ask(value):
            return True
    return False


def hides_calls() -> bool:
    """Whether a dispatch mode or jit tracing keeps Dynamo from capturing anything."""
    modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
    tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]
    return bool(modes()) or bool(tracing())


def is_compiled_module(module: Any) -> bool:
    """Whether it is what `torch.compile` makes of a module, which is `_orig_mod`."""
    return isinstance(module, torch._dynamo.OptimizedModule)


_COMPILERS = ("_dynamo", "_inductor", "_functorch")


def is_capture_error(error: Exception) -> bool:
    """Whether Dynamo, or a backend it called, failed; not the model's own code."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return module.startswith(tuple(f"torch.{name}" for name in _COMPILERS))


def capture_errors_suppressed() -> contextlib.AbstractContextManager[None]:
    """A region in which Dynamo leaves frames it fails on to Python."""
    patched: contextlib.AbstractContextManager[None] = torch._dynamo.config.patch(
        suppress_errors=True
    )
    return patched
