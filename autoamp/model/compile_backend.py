"""A Dynamo backend that rewrites each graph and hands it to another backend.

The backend serves `torch.compile(model, backend="autoamp")`, and functions that a
script compiles itself while the automatic mode is on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.capture.announce import announce
from autoamp.capture.engine import Engine
from autoamp.capture.record import Record
from autoamp.messages import log_left_to_autocast
from autoamp.model.eligible import choose_device_precision
from autoamp.model.updates import updates_weights
from autoamp.options import Options
from autoamp.training.first_step import new_scaling
from autoamp.training.scale import resolve_loss_scale

logger = logging.getLogger(__name__)


class GraphBackend:
    """The backend Dynamo calls with each graph of a function the user compiles.

    Attributes:
        options: the options of `convert`; `options.backend` compiles the result.
        label: the compiled function's name, for messages.
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
        self._asked = False
        self._lock = threading.Lock()

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """The callable to run instead of `gm`."""
        if updates_weights(gm):
            logger.debug("autoamp: %s updates weights: it is not changed", self.label)
            return compat.compile_with(self.options.backend, gm, example_inputs)
        with self._lock:
            if not self._asked:
                self.engine, self._asked = self._made(example_inputs), True
        own_autocast = compat.any_autocast()
        if own_autocast and self.engine is not None:
            log_left_to_autocast(logger, self.label, of=self)
        if own_autocast or self.engine is None:
            return compat.compile_with(self.options.backend, gm, example_inputs)
        run = self.engine(gm, example_inputs)
        announce(self.engine.record)
        self.engine.tell()
        return run

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
        return Engine(self.options, record, on_capture=self.on_capture)


def is_ours(backend: Any) -> bool:
    """Whether a backend of `torch.compile` rewrites the graphs it is given."""
    return isinstance(backend, GraphBackend) or backend is autoamp_backend


_BACKENDS: dict[Any, GraphBackend] = {}


def autoamp_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: dict[str, Any] | None = None,
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
    given = {"backend": "inductor", **(options or {})}
    chosen = Options().replace(**given)
    try:
        known = _BACKENDS.setdefault(chosen, GraphBackend(chosen))
    except TypeError:  # an option has no hash, such as a loss scale of the user's
        known = GraphBackend(chosen)
    return known(gm, example_inputs)
