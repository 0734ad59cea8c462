"""Compiles graphs with Dynamo backends, and tells which tracer traces the caller."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch._dynamo
from torch import fx
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import InvalidBackend, RestartAnalysis
from torch._dynamo.variables import higher_order_ops
from torch.autograd import forward_ad

from autoamp.compat.distributed import active_ddp, in_buckets, splits_for_ddp
from autoamp.compat.inductor import CastReading, inductor_backend, reading_casts
from autoamp.errors import OptionError


def compile_with(
    backend: str | Callable[..., Any],
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    exact_casts: bool = False,
    reading: CastReading | None = None,
) -> Callable[..., Any]:
    """`gm` compiled by a backend, for a caller that is inside a backend itself.

    Args:
        backend: "eager" (`gm` as it is), or any Dynamo backend or its name.
        exact_casts: whether the kernels of inductor round at each cast.
        reading: filled in with what inductor makes of casts.
    """
    if backend == "eager":
        return gm.forward
    if is_inductor(backend):
        plain = unwrapped_backend(backend)
        backend = inductor_backend(plain, exact_casts=exact_casts, reading=reading)
    function = named_backend(backend) if isinstance(backend, str) else backend
    assert function is not None, "Options refuses names that torch does not know"
    ddp = active_ddp()
    with reading_casts(reading):
        if ddp is not None and splits_for_ddp() and torch.is_grad_enabled():
            return in_buckets(function, gm, example_inputs, ddp)
        compiled: Callable[..., Any] = cast(Any, function(gm, list(example_inputs)))
    if not callable(compiled):
        raise OptionError(
            f"back end {getattr(function, '__name__', function)} returned "
            f"{compiled!r} for a graph; a back end returns a function that runs the "
            "graph, such as gm.forward"
        )
    return compiled


def named_backend(name: str) -> Callable[..., Any] | None:
    """The Dynamo backend that torch has under a name; None where it has none."""
    try:
        return cast(Any, lookup_backend(name))  # type: ignore[no-any-return]
    except InvalidBackend:
        return None


BEGUN_AGAIN = RestartAnalysis
"""The error by which a backend has Dynamo trace a frame again: inductor raises it where
the graph computes with a float that it can only take as a constant."""


def resolved_backend(
    backend: str | Callable[..., Any] | None,
    mode: str | None,
    options: dict[str, Any] | None,
    dynamic: bool | None,
) -> Callable[..., Any] | None:
    """The function `torch.compile` would call with each graph.

    Raises:
        RuntimeError: torch's own, where the arguments contradict each other.
    """
    if backend not in (None, "inductor"):
        return torch._TorchCompileWrapper(backend, mode, options, dynamic)
    if mode is None and options is None:
        mode = "default"
    return torch._TorchCompileInductorWrapper(mode, options, dynamic)


def is_inductor(backend: str | Callable[..., Any]) -> bool:
    """Whether a backend is inductor, by name or as `torch.compile` wraps it."""
    wrapper = torch._TorchCompileInductorWrapper
    return backend == "inductor" or isinstance(unwrapped_backend(backend), wrapper)


def inductor_permutes() -> bool:
    """Whether inductor lays convolutions on CPUs with the channels last.

    `GraphLowering.decide_layout_opt` of torch/_inductor/graph.py does.
    """
    from torch._inductor import config

    mkldnn = torch.backends.mkldnn
    return bool(config.layout_optimization and mkldnn.is_available() and mkldnn.enabled)


def tracing_backend() -> tuple[Callable[..., Any] | None, bool]:
    """The backend of the compilation that is tracing now; None where it is unknown.

    The second result is whether the graph may be broken: False under `fullgraph=True`,
    and in a branch of `torch.cond` or the body of a loop of torch's.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx: Any = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is being traced
        return None, False
    around = tx.output.current_tracer.source_fn_stack
    is_whole = any(_fallback.get(name) is False for name, _ in around)
    may_break = not (tx.one_graph or tx.error_on_graph_break or is_whole)
    return tx.output.compiler_fn, may_break


_fallback: dict[str, bool | None] = {
    name: getattr(kind, "_ALLOW_FALLBACK_TO_EAGER", None)
    for name, kind in higher_order_ops._hop_name_to_variable_class.items()
}
"""Whether Dynamo leaves an op that has graphs of its own to Python at a graph break."""


def as_dynamo_gave(ready: fx.GraphModule, captured: fx.GraphModule) -> None:
    """Gives a graph the attributes of the graphs that Dynamo hands to a backend.

    A backend may read why the graph ends where it does (`compile_subgraph_reason`).
    """
    reason = captured.__dict__.get("compile_subgraph_reason")
    if reason is not None:
        ready.compile_subgraph_reason = reason
    for key, value in captured.meta.items():
        ready.meta.setdefault(key, value)


def is_asked_by_dynamo() -> bool:
    """Whether the compilation that is tracing now only describes the user's code.

    `torch._dynamo.explain` and its like compile with a backend of Dynamo's own that
    counts graphs and runs them as they are.
    """
    backend, _ = tracing_backend()
    module = getattr(unwrapped_backend(backend), "__module__", "")
    return module == "torch._dynamo.eval_frame"


def unwrapped_backend(backend: Any) -> Any:
    """The `backend` given to `torch.compile`, taken out of torch's own wrappers."""
    *_, innermost = _wrappers(backend)
    return innermost


def options_beside(backend: Any) -> dict[str, Any]:
    """The `options` given to `torch.compile` with a backend, in torch's wrappers."""
    held = (getattr(each, "kwargs", None) for each in _wrappers(backend))
    return next((given.get("options", {}) for given in held if given), {})


def _wrappers(backend: Any) -> Iterator[Any]:
    """A backend, and all that is wrapped in it, inwards."""
    names = ("_torchdynamo_orig_backend", "compiler_fn", "__wrapped__")
    for _ in range(11):
        yield backend
        inner = [getattr(backend, n) for n in names if getattr(backend, n, None)]
        if not inner:
            return
        backend = inner[0]


def transforms_active() -> bool:
    """Whether the caller is inside a transform of `torch.func`, or forward-mode AD."""
    return torch._C._are_functorch_transforms_active() or forward_mode()


def forward_mode() -> bool:
    """Whether the caller is inside forward-mode AD, also that of `torch.func`."""
    return forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()


def is_batch(value: torch.Tensor) -> bool:
    """Whether `value` is a batch of gradients, taken with `is_grads_batched`."""
    return any_batch((value,))


def needs_plain_ops(grad: torch.Tensor) -> bool:
    """Whether a backward that got `grad` has to be made of torch's plain ops.

    Kernels of our own can neither be differentiated, which `create_graph=True` asks
    for, nor take what a transform of torch's gives them, such as a batch of gradients.
    """
    return torch.is_grad_enabled() or transforms_active() or is_batch(grad)


def any_batch(values: Sequence[torch.Tensor]) -> bool:
    """`is_batch` of any of `values`."""
    functorch = torch._C._functorch
    return any(map(functorch.is_legacy_batchedtensor, values)) or any(
        map(functorch.is_batchedtensor, values)
    )


def hides_calls() -> bool:
    """Whether a dispatch mode or a tracer keeps Dynamo from capturing anything."""
    return bool(torch._C._len_torch_dispatch_stack()) or other_tracing()


def dynamo_disabled() -> bool:
    """Whether Dynamo captures nothing at all in this process, as now configured."""
    return bool(torch._dynamo.config.disable)


def dispatch_mode() -> str:
    """The class of the innermost TorchDispatchMode that is active, or ""."""
    mode: Any = torch.utils._python_dispatch._get_current_dispatch_mode()
    return "" if mode is None else type(mode).__name__


jit_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]
"""Whether `torch.jit` traces the code that runs now."""


def other_tracing() -> bool:
    """Whether `torch.jit` or `torch.fx` traces the code that runs now."""
    return jit_tracing() or fx_tracing()


def inside_jit_trace() -> bool:
    """Whether `torch.jit.trace` makes the call, also between the traces it compares."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.jit._trace":
            return True
        frame = frame.f_back
    return False


fx_tracing = fx._symbolic_trace.is_fx_symbolic_tracing
"""Whether `torch.fx` records the code that runs now: `symbolic_trace`, `make_fx`.

Dynamo raises where it is called during such a trace.
"""


def uncompiled(module: Any) -> Any:
    """The module that `torch.compile` has made `module` of; any other as it is."""
    is_compiled = isinstance(module, torch._dynamo.OptimizedModule)
    return module._orig_mod if is_compiled else module


def eagerly(function: Any) -> contextlib.AbstractContextManager[Any]:
    """A region in which `function` runs as written, if `torch.compile` is in it."""
    # `functools.wraps` copies the attribute to the wrappers of a compiled function.
    if not hasattr(function, "_torchdynamo_orig_callable"):
        return contextlib.nullcontext()
    region: Any = torch.compiler.set_stance("force_eager")
    return region  # type: ignore[no-any-return]


_COMPILERS = ("_dynamo", "_inductor", "_functorch")


def is_capture_error(error: BaseException) -> bool:
    """Whether Dynamo, or a backend it called, failed; not the model's own code."""
    if isinstance(error, torch._dynamo.exc.TorchDynamoException):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = "" if trace is None else trace.tb_frame.f_globals.get("__name__", "")
    return module.startswith(tuple(f"torch.{name}" for name in _COMPILERS))
