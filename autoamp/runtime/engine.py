"""The record of one conversion, and what its models run; deep copies share both.

Given a captured graph, the engine has the pass run and returns what is called instead.
"""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autoamp import compat
from autoamp.dtypes import short_name
from autoamp.errors import AutoampError
from autoamp.options import Options
from autoamp.pipeline import Rewritten
from autoamp.plain import plain, plain_line
from autoamp.runtime.captured import CapturedGraph, Prepared, Skipped, Tally
from autoamp.runtime.prepare import as_it_is, prepare
from autoamp.runtime.running import Local, counted, counting_sizes, scaled, unscaled
from autoamp.runtime.saying import say_once
from autoamp.runtime.scaling import ModelScaling
from autoamp.runtime.watch import can_watch
from autoamp.runtime.weights import WeightCopies

logger = logging.getLogger(__name__)


_LEFT = (
    "Dynamo leaves it to Python, after a graph break it cannot go on from (in a loop, "
    "a `with`, a `try`); what it calls is captured by itself, and operations written "
    "in it run in fp32. TORCH_LOGS=graph_breaks tells more"
)


_AT_THE_LIMIT = (
    "some calls of it run in fp32: each kind of call needs a graph of its own, and "
    "Dynamo makes no more of them than torch._dynamo.config.recompile_limit; "
    "TORCH_LOGS=recompiles tells what differs"
)


_SWITCHED_OFF = (
    "the model calls it where it has switched autocast off (`torch.autocast(..., "
    "enabled=False)`), in a function that Dynamo leaves to Python: it stays fp32"
)


@dataclass(eq=False)
class Engine:
    """Compiles captured graphs for one conversion and keeps the record of them.

    Attributes:
        options: what the user asked for.
        low: the compute dtype.
        label: the model's class name, for messages.
        scaling: its loss scaling.
        graphs: every captured graph, in order of capture.
        skipped: what was not converted.
        differentiated_twice: somebody asked for that of a compiled graph, so the model
            is to be captured again and run as it is.
        tally: of its calls.
        bound: what runs each graph, which other models may run as well.
    """

    options: Options
    low: torch.dtype
    label: str
    scaling: ModelScaling
    graphs: list[CapturedGraph] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    differentiated_twice: bool = False
    tally: Tally = field(default_factory=Tally)
    local: Local = field(default_factory=Local)
    bound: dict[Prepared, Callable[..., Any]] = field(default_factory=dict)
    _binding: Any = field(default_factory=threading.RLock)

    @property
    def runs(self) -> int:
        """Executions of rewritten graphs so far, in all threads."""
        return sum(g.runs for g in self.graphs if g.rewritten is not None)

    def compiled_by(self, backend: Callable[..., Any]) -> Engine:
        """One for the same model, with the same record, whose graphs `backend` gets."""
        return Engine(
            self.options.replace(backend=backend),
            self.low,
            self.label,
            self.scaling,
            self.graphs,
            self.skipped,
            tally=self.tally,
        )

    def note(self, why: str) -> None:
        """Says, once, why something is not converted, and keeps it for the report."""
        if not any(s.why == why for s in self.skipped):
            self.skipped.append(Skipped(self.label, why))
            say_once(logger, logging.WARNING, f"autoamp: {self.label}: {why}")

    def left(self, code: types.CodeType, at_limit: bool) -> None:
        """Keeps for the report that Dynamo leaves a function to Python.

        Args:
            at_limit: only those calls that would need more graphs than the limit.
        """
        place = plain_line(f"{code.co_filename}:{code.co_firstlineno}: {code.co_name}")
        if at_limit:
            self.note(f"{place}: {_AT_THE_LIMIT}")
            return
        found = Skipped(place, _LEFT)
        if found not in self.skipped:
            self.skipped.append(found)

    def announce(self) -> None:
        """One line, after the first call that captured anything."""
        if self.tally.announced or not logger.isEnabledFor(logging.INFO):
            return
        sums = [g.rewritten.sums for g in self.graphs if g.rewritten is not None]
        # The pass failed, which has been said, or there is nothing.
        if not any(each.ops for each in sums):
            return
        self.tally.announced = True
        scale = self.scaling.loss_scale.scale if self.scaling.enabled else "off"
        say_once(
            logger,
            logging.INFO,
            f"autoamp: {self.label} is converted to {short_name(self.low)}: "
            f"{sum(each.low for each in sums)} of {sum(each.ops for each in sums)} "
            f"float ops low, {sum(each.casts for each in sums)} casts, loss scale "
            + (f"{scale:g}" if isinstance(scale, float) else scale),
        )

    def tell_progress(self, seconds: float) -> None:
        """One line while a first call takes its time."""
        logger.info(
            "autoamp: the first call of %s has taken %.0f s: it is being captured, "
            "and has %d graphs so far",
            self.label,
            seconds,
            len(self.graphs),
        )

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """The Dynamo backend of one model: the callable to run instead of `gm`."""
        return self.bind(self.prepared(gm, example_inputs), example_inputs)

    def prepared(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Prepared:
        """What is run for `gm`, by this model too: as it is where a stage fails."""
        options = self._options
        if not compat.any_autocast() and compat.autocast_nesting() > self.local.regions:
            return self._as_it_is(gm, example_inputs, _SWITCHED_OFF)
        try:
            with compat.autocast_off(), compat.saved_tensors_hooks_off():
                found = prepare(gm, example_inputs, options, self.low, self.scaling)
                self.bind(found, example_inputs)
            return found
        except Exception as error:
            if options.strict:
                self.local.error = self._strict_error(error)
                raise self.local.error from error
            problem = plain(f"{type(error).__name__}: {error}")
            say_once(
                logger,
                logging.WARNING,
                f"autoamp: a graph of {self.label} runs in fp32, because the pass "
                f"failed on it: {problem}",
            )
            return self._as_it_is(gm, example_inputs, problem)
        finally:
            compat.forget_inputs(gm)

    def _as_it_is(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], problem: str
    ) -> Prepared:
        try:
            found = as_it_is(gm, example_inputs, self._options, problem)
        except Exception:  # the compiler's, on this graph too: Dynamo runs the model
            self.skipped.append(Skipped(f"graph {len(self.graphs)}", problem))
            raise
        self.bind(found, example_inputs)
        return found

    @property
    def _options(self) -> Options:
        """What graphs captured now are compiled with."""
        as_is = self.runs_as_is and self.options.backend != "eager"
        return self.options.replace(backend="eager") if as_is else self.options

    def _strict_error(self, error: Exception) -> AutoampError:
        if isinstance(error, AutoampError):
            return error
        return AutoampError(
            f"the pass failed on {self.label}: {type(error).__name__}: {error}"
        )

    def bind(self, prepared: Prepared, inputs: Sequence[Any]) -> Callable[..., Any]:
        """What this model's calls run for a graph: it counts, brings weight copies.

        Args:
            inputs: of this model, those the graph was captured with or those of a call.
        """
        with self._binding:
            if prepared not in self.bound:
                self.bound[prepared] = self._bind(prepared, inputs)
        return self.bound[prepared]

    def _bind(self, prepared: Prepared, inputs: Sequence[Any]) -> Callable[..., Any]:
        kept = self.options.weight_copies == "kept"
        copies = WeightCopies(self.low, kept=kept) if prepared.weights else None
        captured = CapturedGraph(prepared, copies)
        for why in prepared.notes:
            self.note(why)
        if prepared.rewritten is None:
            chosen = counted(self.local, prepared.run)
        elif prepared.boundary.devices:
            in_fp16 = self.low == torch.float16 and self.runs_as_is
            watches = in_fp16 and can_watch(captured.gm)
            chosen = scaled(self.local, self.scaling, captured, inputs, watches=watches)
        else:
            chosen = unscaled(self.local, captured)
        self.graphs.append(captured)
        self._note_what_it_is(captured)
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
        """`call`, with an eye on backwards that record a graph of their own.

        What AOT autograd compiles can be differentiated once only.
        """

        def look(_: torch.Tensor) -> None:
            if torch.is_grad_enabled() and not self.differentiated_twice:
                self.differentiated_twice = True
                logger.warning(
                    "autoamp: a backward of %s has create_graph=True. What %s compiles "
                    "cannot be differentiated twice: if this loss is, torch will say "
                    "so now. From the next call on the model runs with "
                    "backend='eager', which can",
                    self.label,
                    self.options.backend,
                )

        def call_watched(*args: Any) -> Any:
            results = call(*args)
            if not self.differentiated_twice:
                for value in results:
                    if isinstance(value, torch.Tensor) and value.requires_grad:
                        compat.hook_gradient(value, look)
            return results

        return call_watched

    def _note_what_it_is(self, captured: CapturedGraph) -> None:
        """Keeps what is low in a graph new to this model, and where nothing is, why."""
        rewritten, why = captured.rewritten, captured.problem
        if rewritten is not None:
            low, every, _ = rewritten.sums
            if low:
                self.tally.lowers = True
            elif every:
                why = f"all of its {every} float ops stay fp32"
            else:
                why = "it has no float op"
            if logger.isEnabledFor(logging.DEBUG):
                self._log(rewritten)
        if why:
            self.skipped.append(Skipped(f"graph {len(self.graphs) - 1}", why))

    def _log(self, rewritten: Rewritten) -> None:
        decisions = rewritten.assignment.decisions
        kinds = [c.kind for c in rewritten.casts]
        logger.debug(
            "autoamp: %s graph %d: %d of %d float ops in %s; casts: %d down, %d up, "
            "%d weight copies",
            self.label,
            len(self.graphs) - 1,
            sum(d.low for d in decisions.values()),
            len(decisions),
            short_name(self.low),
            kinds.count("down"),
            kinds.count("up"),
            kinds.count("weight"),
        )
