"""`backend="auto"`: a graph runs at once, and is compiled by inductor once it repeats.

The design, in the order in which it happens:

1. The graph is captured and runs as with `backend="eager"`.  Nothing else is made.
2. Its calls are counted.  When the work of these calls, as predicted by the prices of
   the placement, is as long as inductor is expected to take, inductor starts.  Until
   then eager has cost as much as the compilation costs; so in all a program takes at
   most twice the time of the better choice, however many calls follow (the rule for
   renting or buying).  Both sides are computed from the graph and the device: no clock
   is read, so that all ranks, and all runs of a program, start at the same call.
3. The graph is made ready for inductor on the calling thread, and *another process*
   compiles it into inductor's cache on disk; `compat/apart.py` says why no thread does.
4. Once that process is done, the calling thread compiles the graph from the cache and
   runs it in the place of the eager graph from that call on.  A call is the first to
   do so only *between steps*: where no gradient is recorded, or where the weights have
   changed since the model's call before.  All calls between two steps of the optimizer,
   among them micro-batches and the calls that a checkpoint repeats in the backward,
   therefore run one form of the graph.  A forward that ran before has its backward with
   it, since the autograd graph holds the eager ops.
5. Where anything fails, the graph runs eager for good; one log line and the report say
   why.

What inductor proves about the inputs of a graph while Dynamo captures becomes a guard
of the captured code; here the capture is over.  So only graphs without symbolic sizes
are compiled, and none that writes to an argument of the call, which might share memory
with another one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import fx

from autoamp import compat
from autoamp.capture.record import Record
from autoamp.inspect.costs import costs_of
from autoamp.messages import log_once
from autoamp.options import Options
from autoamp.pipeline.prepared import Prepared
from autoamp.pipeline.run import Uncompiled, uncompiled
from autoamp.pipeline.work import Setting
from autoamp.place.cost import UNIT_NS
from autoamp.printable import printable_line
from autoamp.rewrite.compiled_casts import casts_to_read, note_casts
from autoamp.rewrite.compiled_later import COMPILED, COMPILING, EAGER, note_state
from autoamp.weights.shards import SHARDED

logger = logging.getLogger(__name__)

LEAST_CALLS = 16
"""No graph is compiled for fewer calls: a validation of a few batches is no loop."""

SECONDS_A_NODE = 0.05
"""How long inductor is expected to take for a node: an order of magnitude, since a
transformer of 500 nodes takes half a minute on CPUs and GPUs alike."""


class Runs(Protocol):
    """What is asked of the engine of a model whose calls run the graph.

    Attributes:
        options, record, bound, differentiated_twice: as for `Engine`.
    """

    options: Options
    record: Record
    bound: dict[Prepared, Callable[..., Any]]
    differentiated_twice: bool


class Background:
    """One captured graph that runs eager, and is compiled once it repeats.

    Attributes:
        eager: the graph as it runs at first.
        state: `EAGER`, `COMPILING`, `COMPILED`, or why the graph stays eager.
        calls: the number of calls so far, of all models that run the graph, until the
            compilation starts.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        eager: Prepared,
        low: torch.dtype,
        *,
        scaled: bool,
        setting: Setting,
    ) -> None:
        """Args: as for `prepare`; `eager` is what `prepare` has made of `gm`."""
        self.eager = eager
        self.calls = 0
        self._captured: fx.GraphModule | None = gm
        self._ran = eager.gm
        self._low, self._scaled, self._setting = low, scaled, setting
        self._wanted = calls_until(eager)
        self._ready: Uncompiled | None = None
        self._reading = compat.CastReading(())
        self._compilation: compat.Compilation | None = None
        self._compiled: Prepared | None = None
        self._steps: weakref.WeakKeyDictionary[Runs, list[int]]
        self._steps = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()
        self._become(EAGER)
        why = _refused(gm, eager)
        if why:
            self._become(why)

    def form(self, engine: Runs, args: Sequence[Any]) -> Prepared:
        """The form of the graph that a call of one model runs.

        Args:
            args: the inputs of the call.
        """
        if engine.differentiated_twice:
            return self.eager
        compiled = self._compiled
        if compiled is not None:
            fits = compiled in engine.bound or self._is_between_steps(engine, args)
            return compiled if fits else self.eager
        if self.state == EAGER:
            self.calls += 1
            if self.calls >= self._wanted:
                self._alone(engine, self._start)
            return self.eager
        compilation = self._compilation
        is_over = compilation is not None and compilation.is_over
        if is_over and self._is_between_steps(engine, args):
            self._alone(engine, self._finish)
        return self._compiled or self.eager

    def _is_between_steps(self, engine: Runs, args: Sequence[Any]) -> bool:
        """Whether no backward, and no sum of gradients, is under way for this model."""
        if not torch.is_grad_enabled():
            return True
        trained = [
            a
            for a in args
            if isinstance(a, torch.Tensor) and a.is_leaf and a.requires_grad
        ]
        if not trained:
            return True
        now = [compat.version(each) for each in trained]
        before = self._steps.get(engine)
        self._steps[engine] = now
        return before is not None and before != now

    def _alone(self, engine: Runs, do: Callable[[Runs], None]) -> None:
        """Does the next thing unless another thread does it; a failure ends it all."""
        if not self._lock.acquire(blocking=False):
            return
        modes, drawn = compat.Modes(), compat.Generators()
        captured = self._captured
        try:
            with (
                compat.capture_lock(),
                compat.autocast_off(),
                compat.saved_tensors_hooks_off(),
            ):
                do(engine)
        except Exception as error:  # noqa: BLE001 (eager runs on)
            self._leave(
                engine, f"{type(error).__name__}: {compat.said_in_a_line(error)}"
            )
        finally:
            modes.restore()
            drawn.restore()
            if captured is not None:
                compat.forget_inputs(captured)
            self._lock.release()

    def _start(self, engine: Runs) -> None:
        """Has another process compile the graph."""
        if self.state != EAGER:
            return
        why = self._unfit()
        if why:
            self._leave(engine, why)
            return
        assert self._captured is not None
        options = engine.options.replace(backend="inductor")
        fakes = compat.inputs_of(self._captured)
        self._ready = uncompiled(
            self._captured,
            fakes,
            options,
            self._low,
            scaled=self._scaled,
            setting=self._setting,
        )
        self._reading = casts_to_read(self._ready.work.gm)
        job = compat.job_for(
            self._ready.code,
            self._ready.given(),
            exact_casts=options.exact_casts,
            names=self._reading.names,
        )
        self._compilation = compat.Compilation(job)
        self._become(COMPILING)

    def _finish(self, engine: Runs) -> None:
        """Takes the code from inductor's cache, once the other process is done."""
        if self._compilation is None:
            return
        # The compilation is forgotten last: after the user's interrupt a later call
        # does this again.
        why = self._compilation.result() or self._unfit()
        if why:
            self._leave(engine, why)
            return
        assert self._ready is not None
        ready, exact = self._ready, engine.options.exact_casts
        run = compat.compile_like_there(
            ready.code, ready.given(), exact_casts=exact, reading=self._reading
        )
        note_casts(ready.work.gm, self._reading)
        compiled = replace(
            ready.prepared(run),
            instead_of=self.eager,
            own_autocast=self.eager.own_autocast,
        )
        note_state(compiled.gm, COMPILED)
        self.state = COMPILED
        self._ready = self._captured = self._compilation = None
        self._compiled = compiled

    def _unfit(self) -> str:
        """Why inductor does not compile this graph as it runs now, or ""."""
        if self.eager.gm is not self._ran:
            return "a kernel in it returns another dtype than promised"
        if compat.active_ddp() is not None:
            return (
                "DistributedDataParallel sends gradients while an eager backward runs, "
                "and could not with a compiled one"
            )
        return "FSDP hands its weights in" if SHARDED else ""

    def _leave(self, engine: Runs, why: str) -> None:
        why = printable_line(why)
        self._become(why)
        self._ready = self._captured = self._compilation = None
        told = f"autoamp: a graph of {engine.record.label} stays eager: {why}"
        log_once(logger, logging.WARNING, told)

    def _become(self, state: str) -> None:
        self.state = state
        note_state(self.eager.gm, state)


def background(
    gm: fx.GraphModule,
    prepared: Prepared,
    low: torch.dtype,
    *,
    scaled: bool,
    setting: Setting,
) -> Background | None:
    """What compiles a captured graph later; None where the pass failed on the graph."""
    rewritten = prepared.rewritten
    if rewritten is None or not rewritten.sums.ops:
        return None
    return Background(gm, prepared, low, scaled=scaled, setting=setting)


def calls_until(prepared: Prepared) -> int:
    """The number of calls after which a graph is compiled: its loop repeats."""
    assert prepared.rewritten is not None
    every = list(prepared.rewritten.with_bodies())
    costs = [costs_of(each) for each in every]
    if any(each.in_bytes for each in costs):
        return LEAST_CALLS  # bytes were counted, not time
    work = sum(each.ours.estimate for each in costs) * UNIT_NS * 1e-9
    nodes = sum(len(each.gm.graph.nodes) for each in every)
    return max(LEAST_CALLS, round(nodes * SECONDS_A_NODE / max(work, 1e-9)))


def _refused(gm: fx.GraphModule, eager: Prepared) -> str:
    """Why a captured graph is never compiled in the background, or ""."""
    assert eager.rewritten is not None
    if any(isinstance(each, torch.SymInt) for each in compat.inputs_of(gm)):
        return "its sizes change from call to call"
    written = eager.rewritten.facts.mutated
    traced = eager.rewritten.before.graph.find_nodes(op="placeholder")
    for source, node in zip(compat.placeholder_sources(gm), traced, strict=True):
        if "._parameters[" in source or "._buffers[" in source:
            continue
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and compat.storage_id(value) in written:
            return "it writes to an argument of the call"
    return ""
