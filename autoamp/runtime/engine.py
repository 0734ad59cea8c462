"""The Dynamo backend of one conversion.

The engine takes a captured graph, has the pass rewrite it and returns the function that
is called in the graph's place.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import needs_loss_scale
from autoamp.errors import AutoampError
from autoamp.messages import log_once
from autoamp.passes.check.promised_dtypes import hold_first_run
from autoamp.passes.decide.devices import Device
from autoamp.passes.decide.pins import kept_by
from autoamp.passes.graph_record import Prepared, Setting
from autoamp.passes.node_by_node import runs_every_op
from autoamp.passes.run import as_it_is, prepare
from autoamp.passes.see.dtensors_as_whole import DTENSORS, NESTED, kind_of_tensors
from autoamp.passes.see.regions import switches_on
from autoamp.runtime.captured_graph import (
    Graph,
    Local,
    autocast_region,
    counting_runs,
    counting_sizes,
    graph_under_autocast,
    scaled,
    undone,
    unscaled,
)
from autoamp.runtime.conversion_record import Record
from autoamp.training.buffers import Written
from autoamp.training.options import Options
from autoamp.training.weight_copies import MeshedCopies, WeightCopies
from autoamp_said import logger_of

logger = logger_of(__name__)


_SWITCHED_OFF = (
    "the model calls it where it has switched autocast off (`torch.autocast(..., "
    "enabled=False)`), in a function that Dynamo leaves to Python: it stays fp32"
)


_BY_AUTOCAST = {
    kind: f"it computes on {kind}, and the passes failed on it: it runs under "
    "torch.autocast, in bf16 and unscaled where it is trained"
    for kind in (DTENSORS, NESTED)
}


_LEFT_TO_THE_SCRIPT = (
    ("*", "in a model in which autocast of the script's own chooses the precision"),
)
"""Nobody has named the model, and the script has said which part of it may be low."""


@dataclass(eq=False)
class Engine:
    """Compiles captured graphs for the models of one conversion.

    Attributes:
        options: the options the user gave.
        record: the record of the conversion, which another engine may share.
        differentiated_twice: a backward of a compiled graph had create_graph=True, so
            the model is to be captured again and its graphs run as they are.
        device: the device that graphs are made for; by default the one they are on.
        bound: for each graph, which other models may run as well, the function that
            this model's calls run.
        on_capture: a function called with the engine after each call that captured
            something, or None.
        is_new: graphs were captured since `on_capture` was last called, or no more are.
        amount: how much has been captured, of all callables of the models.
        computes_on_nested: a graph has a nested tensor.
    """

    options: Options
    record: Record
    differentiated_twice: bool = False
    device: Device | None = None
    local: Local = field(default_factory=Local)
    bound: dict[Prepared, Callable[..., Any]] = field(default_factory=dict)
    on_capture: Callable[[Engine], None] | None = None
    is_new: bool = False
    amount: compat.Amount = field(default_factory=compat.Amount)
    computes_on_nested: bool = False
    _binding: Any = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        compat.mend_batched_norms()

    shares_graphs: ClassVar[bool] = True
    """Whether models that are alike run the same graphs."""

    then_runs: str = "From the next call on the model runs with"
    """What a warning says of a model whose gradients are to be differentiated."""

    rests: ClassVar[bool] = True
    """Whether a model of which nothing runs low gets its own call path back."""

    def compiled_by(self, backend: str | Callable[..., Any]) -> Engine:
        """An engine with the same record that hands its graphs to `backend`."""
        options = self.options.compiled_by(backend)
        return Engine(options, self.record, on_capture=self.on_capture)

    def tell(self) -> None:
        """Tells the listener, if there is one, that new graphs have been run."""
        self.is_new = False
        if self.on_capture is not None:
            self.on_capture(self)

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """The Dynamo backend of one model: the callable to run instead of `gm`."""
        return self.bind(self.prepared(gm, example_inputs), example_inputs)

    def call_for(self, prepared: Prepared, args: Sequence[Any]) -> Callable[..., Any]:
        """The function that a call of this model runs for a graph."""
        return self.bound.get(prepared) or self.bind(prepared, args)

    def prepared(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Prepared:
        """`gm` made ready to run and bound to this model; as it is if a stage fails."""
        compat.note_paths(gm)
        options = self._options
        low, scaling = self.record.low, self.record.scaling
        if self._switched_off:
            return self._as_it_is(gm, example_inputs, _SWITCHED_OFF)
        # The passes run code of the model, on fake tensors and on real ones: it must
        # neither change a mode of the script nor draw from its generators.
        modes, drawn = compat.Modes(), compat.Generators()
        own_autocast = compat.any_autocast()  # a region entered inside this call
        if scaling.automatic and (own_autocast or _switches_autocast_on(gm)):
            self.record.leave_to_script()
        if self.record.left_to_script:
            options = replace(options, own_keep=_LEFT_TO_THE_SCRIPT)
        try:
            # An autocast region would cast inside the trace; the hooks of a checkpoint
            # round the call count saved tensors, and would count those of the trace.
            with compat.autocast_off(), compat.saved_tensors_hooks_off():
                on = Setting(
                    device=self.device,
                    makes_code=self.runs_code(),
                )
                prepared = prepare(
                    gm, example_inputs, options, low, scaled=scaling.enabled, setting=on
                )
                prepared = replace(prepared, own_autocast=own_autocast)
                # A kernel may give another dtype than its fake: only a run shows it.
                if options.backend == "eager" and _runs_low(prepared):
                    hold_first_run(prepared, options, self.record.note)
                self.bind(prepared, example_inputs)
            return prepared
        except compat.BEGUN_AGAIN:  # Dynamo hands in another graph, and nothing failed
            raise
        except Exception as error:
            if options.strict:
                # Dynamo wraps an error that a backend raises; `Entry._run` raises this
                # one itself.
                self.local.error = (
                    error
                    if isinstance(error, AutoampError)
                    else AutoampError(
                        f"the pass failed on {self.record.label}: "
                        f"{type(error).__name__}: {error}"
                    )
                )
                raise self.local.error from error
            problem = compat.said_in_a_line(error)
            logger.debug("autoamp: the pass failed on a graph", exc_info=True)
            kind = kind_of_tensors(gm, example_inputs)
            if kind:
                return self._by_autocast(gm, example_inputs, kind, problem)
            log_once(
                logger,
                logging.WARNING,
                f"autoamp: a graph of {self.record.label} runs in fp32, because the "
                f"pass failed on it: {problem}",
                of=self.record.scaling,
            )
            return self._as_it_is(gm, example_inputs, problem)
        finally:
            modes.restore()
            drawn.restore()
            # Fake modes hold weak references to the weights, and `swap_tensors` refuses
            # a tensor that has one.
            compat.forget_inputs(gm)

    def runs_code(self) -> bool:
        """Whether the code of rewritten graphs is run."""
        return True

    @property
    def _switched_off(self) -> bool:
        """Whether the model has switched autocast off around the code that runs now."""
        regions = self.local.regions
        return not compat.any_autocast() and compat.autocast_nesting() > regions

    def dtype_in(self, modules: Sequence[str]) -> torch.dtype | None:
        """The dtype of autocast for a Function under `torch.amp.custom_fwd`.

        The answer is None where the Function stays fp32: in a module that `keep=`
        names, or where the model has switched autocast off.

        Args:
            modules: the paths of the modules that the Function is called in.
        """
        if self._switched_off or kept_by(self._keep, modules) is not None:
            return None
        return self.record.low

    @functools.cached_property
    def _keep(self) -> tuple[str, ...]:
        """The patterns of the modules that stay fp32."""
        rules = self.options.resolve_rules(self.record.low)
        return (*self.options.kept, *rules.keep)

    def apart(self, path: str) -> Hashable:
        """The key of a module, by its path: modules with unequal keys share no graphs.

        The key is None for a module that the options do not name.
        """
        return kept_by(self._keep, (path,))

    def _by_autocast(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        kind: str,
        problem: str,
    ) -> Prepared:
        """A graph that the passes failed on, under autocast, which needs no graph.

        Args:
            kind: the kind of tensors in the graph.
        """
        label, low, why = self.record.label, self.record.low, _BY_AUTOCAST[kind]
        warning = f"autoamp: a graph of {label}: {why}: {problem}"
        log_once(logger, logging.WARNING, warning, of=self.record.scaling)
        with autocast_region(gm, low):  # a compiler looks at autocast as it traces
            prepared = as_it_is(gm, example_inputs, self._options, why)
        prepared = replace(prepared, run=graph_under_autocast(gm, prepared.run, low))
        self.bind(prepared, example_inputs)
        return prepared

    def _as_it_is(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], problem: str
    ) -> Prepared:
        try:
            prepared = as_it_is(gm, example_inputs, self._options, problem)
        except compat.BEGUN_AGAIN:
            raise
        except Exception:  # the compiler fails on this graph too: Dynamo runs the model
            self.record.leave_out(problem)
            raise
        self.bind(prepared, example_inputs)
        return prepared

    @property
    def _options(self) -> Options:
        """The options with which graphs captured now are compiled."""
        as_is = self.runs_as_is and self.options.backend != "eager"
        return self.options.replace(backend="eager") if as_is else self.options

    def bind(self, prepared: Prepared, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The function that this model's calls run for a graph.

        The function counts its runs and passes the weight copies to the graph.

        Args:
            inputs: this model's inputs of the capture, or of a call.
        """
        with self._binding:
            # Two threads must not make two sets of weight copies for one graph.
            if prepared not in self.bound:
                self.bound[prepared] = self._bind(prepared, inputs)
        return self.bound[prepared]

    def _bind(self, prepared: Prepared, inputs: Sequence[Any]) -> Callable[..., Any]:
        low, scaling = self.record.low, self.record.scaling
        kept = self.options.weight_copies == "kept"
        copies = None
        if prepared.weights:
            meshed = any(compat.is_distributed(inputs[i]) for i in prepared.weights)
            kind = MeshedCopies if meshed else WeightCopies
            copies = kind(low, kept=kept, layouts=prepared.layouts)
        captured = Graph(prepared, copies)
        self.computes_on_nested |= prepared.problem == _BY_AUTOCAST[NESTED]
        for why in prepared.notes:
            self.record.note(why)
        if prepared.edge.devices or _runs_low(prepared):
            scaling.ledger.note_low()
        if prepared.rewritten is None:
            chosen = counting_runs(self.local, captured)
        elif prepared.edge.devices:
            # Compiled code has no nodes between which gradients could be measured.
            is_scaled = needs_loss_scale(low) and self.runs_as_is
            watches = is_scaled and runs_every_op(captured.gm)
            chosen = scaled(self.local, scaling, captured, inputs, watches=watches)
        else:
            guards = scaling.ledger.guards
            watches = guards and self.runs_as_is and runs_every_op(captured.gm)
            chosen = unscaled(
                self.local,
                captured,
                scaling.ledger if guards else None,
                scaling.skip_watch if watches else None,
            )
        if prepared.edge.devices or scaling.ledger.guards:
            rewritten = prepared.rewritten
            positions = [] if rewritten is None else rewritten.written
            written = Written.of(scaling.models, inputs, positions)
            if written.positions:
                chosen = undone(chosen, scaling.ledger, written)
        self.record.add(captured)
        self.is_new = True
        if prepared.rewritten is None:
            return chosen
        if prepared.sizes:
            chosen = counting_sizes(chosen, prepared.sizes, captured.sizes)
        return chosen if self.runs_as_is else self._watched(chosen)

    @property
    def runs_as_is(self) -> bool:
        """Whether eager autograd differentiates the graphs, any number of times."""
        return self.options.backend == "eager" or self.differentiated_twice

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which also notices backwards that record a graph of their own.

        Code that AOT autograd compiled can be differentiated only once.
        """

        def look(_: torch.Tensor) -> None:
            # Inside a backward gradients are on only where it has `create_graph=True`.
            if torch.is_grad_enabled() and not self.differentiated_twice:
                self.differentiated_twice = True
                logger.warning(
                    "autoamp: a backward of %s has create_graph=True. What %s compiles "
                    "cannot be differentiated twice: if this loss is, torch will say "
                    "so now. %s %s, which can",
                    self.record.label,
                    self.options.backend,
                    self.then_runs,
                    self.options.advice("backend", "eager"),
                )

        def call_watched(*args: Any) -> Any:
            results = call(*args)
            if not self.differentiated_twice:
                for value in results:
                    if isinstance(value, torch.Tensor) and value.requires_grad:
                        compat.hook_gradient(value, look)
            return results

        return call_watched


def _switches_autocast_on(gm: fx.GraphModule) -> bool:
    """Whether the code of a graph enters autocast of its own for its own tensors."""
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    devices = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return switches_on(gm, devices)


def _runs_low(prepared: Prepared) -> bool:
    """Whether something in a graph runs low, by the pass or by autocast."""
    if prepared.rewritten is None:
        return prepared.problem in _BY_AUTOCAST.values()
    return prepared.rewritten.sums.low > 0
