"""`convert` and `revert`: mixed precision on a model's call path, in place.

The model stays the same object.  Its `forward` becomes an instance attribute that calls
a compiled entry *with the instance as an argument*, so deep copies run their own
weights; everything else about the model is untouched.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import CaptureError, OptionError, UnsupportedModelError
from autoamp.options import Options
from autoamp.runtime.eligible import choose_precision, unsupported
from autoamp.runtime.engine import Engine, Skipped
from autoamp.runtime.fallback import under_autocast

logger = logging.getLogger(__name__)

_STATE = "_autoamp"
_OFF = threading.local()


class Conversion:
    """What a converted model carries: the engine, and the forward it had.

    `previous` is the instance's own `forward` where somebody (accelerate, PEFT) had put
    one; it is called, not replaced.
    """

    def __init__(
        self,
        engine: Engine | None,
        options: Options,
        previous: Callable[..., Any] | None,
        skipped: list[Skipped],
    ) -> None:
        self.engine = engine
        self.options = options
        self.previous = previous
        self.skipped = skipped

    def __deepcopy__(self, memo: dict[int, Any]) -> Conversion:
        return Conversion(
            self.engine, self.options, copy.deepcopy(self.previous, memo), self.skipped
        )

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _loaded_unconverted, ()


def _loaded_unconverted() -> None:
    logger.warning(
        "autoamp: a model that was pickled while converted has been loaded; it runs in "
        "fp32 until you call autoamp.convert(model) again"
    )


def convert_model(
    model: nn.Module, options: Options, example_inputs: tuple[Any, ...] | None = None
) -> nn.Module:
    """Converts `model` in place; see `autoamp.convert`.

    Raises:
        UnsupportedModelError: not a module, or one that cannot be captured.
    """
    reason = unsupported(model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    previous = conversion_of(model)
    if previous is not None:
        revert_model(model)
    low, why_not = choose_precision(model, options)
    label = type(model).__name__
    if low is None:
        logger.warning("autoamp: %s stays in fp32: %s", label, why_not)
        model.__dict__[_STATE] = Conversion(
            None, options, None, [Skipped(label, why_not)]
        )
        return model
    engine = Engine(options, low, label)
    existing = model.__dict__.get("forward")
    model.__dict__[_STATE] = Conversion(engine, options, existing, engine.skipped)
    forward = _make_forward(type(model), existing, engine)
    model.__dict__["forward"] = types.MethodType(forward, model)
    if example_inputs is not None:
        try:
            _capture_now(model, example_inputs)
        except BaseException:
            revert_model(model)
            raise
    logger.info("autoamp: %s is converted to %s", label, short_name(low))
    return model


def revert_model(model: nn.Module) -> nn.Module:
    """Puts the call path back as it was; a model that is not converted is left alone."""
    state = model.__dict__.pop(_STATE, None)
    if isinstance(state, Conversion) and state.engine is not None:
        if state.previous is None:
            model.__dict__.pop("forward", None)
        else:
            model.__dict__["forward"] = state.previous
    return model


def conversion_of(model: Any) -> Conversion | None:
    """The conversion `model` carries, declined ones included, or None."""
    state = getattr(model, "__dict__", {}).get(_STATE)
    return state if isinstance(state, Conversion) else None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Inside, converted models called from this thread run in fp32."""
    before = getattr(_OFF, "depth", 0)
    _OFF.depth = before + 1
    try:
        yield
    finally:
        _OFF.depth = before


def _make_forward(
    owner: type[nn.Module], existing: Callable[..., Any] | None, engine: Engine
) -> Callable[..., Any]:
    """The instance's new `forward`; a plain function that takes the instance."""
    if existing is None:
        inner: Callable[..., Any] = owner.forward

        def entry(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return inner(mod, *args, **kwargs)
    else:

        def entry(mod: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # Looked up on the instance: a deep copy has a forward of its own.
            return mod.__dict__[_STATE].previous(*args, **kwargs)

    compiled = compat.compile_entry(entry, engine)
    seen: set[tuple[bool, bool, bool]] = set()
    lock = threading.RLock()
    local = engine.local

    def call(self: nn.Module, args: Any, kwargs: Any) -> Any:
        before = local.runs
        result = compiled(self, *args, **kwargs)
        if local.runs == before:
            _ran_nothing(engine)
        return result

    # `wraps` keeps the signature (Trainer and generate read it) and the name "forward",
    # by which bound methods are copied and pickled.
    @functools.wraps(existing if existing is not None else owner.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return under_autocast(self, entry, engine.low, args, kwargs)
        if getattr(_OFF, "depth", 0):
            return entry(self, *args, **kwargs)
        mode = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            self.training,
        )
        if mode in seen and not compat.any_autocast():
            return call(self, args, kwargs)
        with lock, compat.autocast_off():
            result = call(self, args, kwargs)
        seen.add(mode)
        return result

    forward.__name__ = "forward"
    return forward


def _ran_nothing(engine: Engine) -> None:
    """A converted call went past every rewritten graph: never silently."""
    why = (
        "a call ran no rewritten graph and so was fp32: Dynamo stepped aside (vmap, "
        "torch.func, an active TorchDispatchMode, the recompile limit, or code it "
        "cannot trace; TORCH_LOGS=graph_breaks,recompiles tells which)"
    )
    if engine.options.strict:
        raise CaptureError(f"{engine.label}: {why}")
    if not any(s.why == why for s in engine.skipped):
        engine.skipped.append(Skipped(engine.label, why))
        logger.warning("autoamp: %s: %s", engine.label, why)


def _capture_now(model: nn.Module, example_inputs: tuple[Any, ...]) -> None:
    """One call to capture by, which leaves buffers and the random state as they were."""
    if not isinstance(example_inputs, tuple):
        raise OptionError("example_inputs must be a tuple of the model's arguments")
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    devices = [d for d in {p.device for p in model.parameters()} if d.type == "cuda"]
    with torch.random.fork_rng(devices=devices), torch.set_grad_enabled(model.training):
        model(*example_inputs)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
