"""The recorder of one conversion: what is noted at calls, backwards and steps.

The ring's header is an object with these fields:

* `format` 1; `rank`, `world` (how many ranks), `pid`, `host`, `argv`, `orig_argv`,
  `cwd`, `started` (seconds since 1970);
* `label` and `class` of the model; `parameters`: `{NAME: [SHAPE, DTYPE]}`, or
  `{"count": N, "hash": TEXT}` where that is long;
* `options`: those that differ from the defaults; `automatic`: whether the automatic
  mode found the model; `autoamp`, `torch`, `python`.

A record of `kind` "step" is one step of an optimizer:

* `step`: its number, from 1, among all steps of the model's optimizers; `time`;
  `optimizer`: its class;
* `every`: how many steps apart the records are: 1, or a power of two where the numbers
  of each step would take too long (see `stride.py`).  A skipped step has a record in
  any case;
* `loss`: of the last backward, and `losses`: how many backwards there were;
* `scale`: the loss scale at the model's last call; `taken`: a bool, and `why` it was
  not taken; `in_a_row`: how many steps were skipped in a row;
* `gradient`: the largest magnitude of the gradients as the step finds them; `inside`:
  the largest fp16 gradient inside of graphs, where the loss scale asks for it;
* `result`: the largest magnitude in the results of the model's calls; `calls`: how
  many; `batch` and `rng`: hashes of the last call's arguments and random generators;
* `ops`: `{NAME: [largest, mean]}` magnitudes, where `AUTOAMP_RECORD_OPS` asks for them.

A record of `kind` "death" has `step`, `cause`, and `folder`, the name of a folder in
`deaths` (see `death.py`).  A number that is not finite is "inf", "-inf" or "nan".
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import platform
import random
import socket
import sys
import threading
import time
import types
import weakref
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from autoamp import compat
from autoamp.flight import death, folder, ops
from autoamp.flight.ring import HEADER, Ring, encoded
from autoamp.flight.stride import Stride
from autoamp.flight.values import class_of, hash_of, held, sums_of, tensors_in
from autoamp.options import OPTION_NAMES, Options
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.step.boundary import OptimizerBoundary

logger = logging.getLogger(__name__)

EVERY = "AUTOAMP_RECORD_EVERY"
_ON_GPU = 10
"""How many steps of a model on a GPU are read at once: to read waits for the GPU."""

_HELD = 1 << 28
"""The bytes of the batches of one step that are kept, beside the last one."""

_MOST_CALLS = 256
"""The calls of one step that are kept: steps that are not seen forget none."""

_IN_A_ROW = 3
_MOST_DEATHS = 3
_HEADER_NAMES = HEADER // 2

_Result = TypeVar("_Result")


class Call:
    """One call of the model in which gradients are recorded.

    Attributes:
        drawn: torch's random generators before the call: on CPUs, and on GPUs in use.
        python: Python's generator before the call, or None where that takes too long.
        scale: the loss scale, or None.
        result: the largest magnitude in the result, where it is noted.
        backward: the number of the last backward that reached the call.
    """

    __slots__ = (
        "args",
        "backward",
        "bytes",
        "drawn",
        "kwargs",
        "python",
        "result",
        "scale",
        "training",
    )

    def __init__(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], *, python: bool
    ) -> None:
        self.drawn = [torch.get_rng_state()]
        if torch.cuda.is_initialized():
            self.drawn += torch.cuda.get_rng_state_all()
        self.python = random.getstate() if python else None
        self.args, self.kwargs = held(args), held(kwargs)
        self.training, self.backward, self.bytes = True, -1, -1
        self.scale: Any = None
        self.result: torch.Tensor | None = None

    @property
    def size(self) -> int:
        """The bytes of the arguments."""
        if self.bytes < 0:
            given = tensors_in((self.args, self.kwargs))
            self.bytes = sum(t.nbytes for t in given if t.layout is torch.strided)
        return self.bytes

    def numbers(self) -> dict[str, Any]:
        """What a record has of the call; tensors until they are read."""
        found: dict[str, Any] = {
            "batch": sums_of([*tensors_in((self.args, self.kwargs))]),
            "rng": _hash_of_generators(self.drawn),
        }
        return found if self.scale is None else {**found, "scale": self.scale}


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """`method`, whose errors end the recording and never the training."""

    @functools.wraps(method)
    def safe(self: FlightRecorder, *args: Any) -> None:
        if self.off or os.getpid() != self.pid:  # a forked process has no ring
            return
        start = time.perf_counter()
        try:
            with self.lock:
                method(self, *args)
                self.stride.own += time.perf_counter() - start
        except Exception as error:  # noqa: BLE001 (a recorder never ends a training)
            self.stop(error)

    return safe


class FlightRecorder:
    """Writes the ring and the deaths of one model.

    Attributes:
        root: the folder that the user has named.
        home: this model's own folder in it; None before its first training call.
        off: whether the recording has ended.
        calls: the calls since the last step, the last ones where they are large.
        step: how many steps have been seen.
        model: the model that was called last.
        scaling: the model's scaling, once it is known.
    """

    def __init__(self, root: Path, options: Options) -> None:
        self.root, self.options = root, options
        self.home: Path | None = None
        self.off, self.pid = False, os.getpid()
        self.calls: list[Call] = []
        self.step = self.in_a_row = self.deaths = 0
        self.model: Callable[[], nn.Module | None] = lambda: None
        self.scaling: ModelScaling | None = None
        self.lock = threading.RLock()
        self.watch = ops.from_environment(os.environ)
        self.frames: list[Any] | None = None
        self._ring: Ring | None = None
        self._pending: list[dict[str, Any]] = []
        given = os.environ.get(EVERY, "")
        self._every = int(given) if given.isdigit() else 0
        self.stride = Stride(fixed=self._every > 0)
        self._fine, self._losses, self._called = True, 0, 0
        self._loss: torch.Tensor | float | None = None
        self._on_cpu, self._held, self._noting = True, 0, False
        self._here = weakref.ref(self)
        self._last: weakref.finalize[Any, Any] | None = None

    @property
    def listeners(self) -> dict[str, Any]:
        """The arguments of `new_scaling` by which this recorder hears of a training."""
        watch = () if self.watch is None else (self.watch.observer,)
        return {"on_step": (self.stepped,), "observers": watch}

    # -- a call ----------------------------------------------------------------------

    @_safely
    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Notes a call before it runs."""
        if self._ring is None:
            self._open(model)
        if self.model() is not model:
            self.model = weakref.ref(model)
        call = Call(args, kwargs, python=self.stride.every == 1)
        call.training = model.training
        scaling = self.scaling
        if scaling is not None and scaling.enabled:
            scale = scaling.loss_scale.position[0]
            call.scale = float(scale) if scale.device.type == "cpu" else scale + 0
        self.calls.append(call)
        self._called += 1
        if len(self.calls) > 1:
            self._forget()
        if self.watch is not None:
            self.watch.begin()

    def _forget(self) -> None:
        """Forgets the first calls of a step that has many or large ones."""
        if len(self.calls) == 2:
            self._held = self.calls[0].size
        self._held += self.calls[-1].size
        while len(self.calls) > 1 and (
            self._held > _HELD or len(self.calls) > _MOST_CALLS
        ):
            self._held -= self.calls[0].size
            del self.calls[0]

    @_safely
    def end(self, result: Any) -> None:
        """Notes the result of a call, and has its backward noticed."""
        if not self.calls:
            return
        call = self.calls[-1]
        given = [result] if type(result) is torch.Tensor else tensors_in(result)
        found = [t for t in given if t.is_floating_point()]
        if self.stride.notes(self.step + 1):
            call.result = compat.largest_magnitude(found)
        hook = functools.partial(_reached, self._here, call)
        for each in found:
            if each.grad_fn is not None:
                compat.hook_gradient(each, hook)
                if self._on_cpu and each.numel() == 1:
                    self._look(each.item(), each, sys._getframe(2))

    @_safely
    def reached(self, call: Call) -> None:
        """Notes the loss of a backward that has reached the result of a call."""
        backward = compat.backward_id()
        if call.backward == backward:
            return
        call.backward = backward
        losses, frame = compat.running_losses()
        if not losses:
            return
        self._losses += 1
        loss = losses[0].detach()
        if loss.numel() != 1:
            loss = loss.float().mean()
        if self.in_a_row == _IN_A_ROW - 1:  # the third may be about to be skipped
            self.frames = death.frames_of(frame)
        if loss.device.type == "cpu":
            self._loss = loss.item()
            self._look(self._loss, losses[0], frame)
        else:
            self._loss = loss

    def _look(
        self, number: float, loss: torch.Tensor, frame: types.FrameType | None
    ) -> None:
        """Saves a death at the first loss that is not finite."""
        if math.isfinite(number):
            self._fine = True
        elif self._fine:
            self._fine = False
            about = {"value": number, "shape": [*loss.shape], "dtype": str(loss.dtype)}
            about["history"] = compat.history(loss)
            self._die("loss", self.step + 1, about, death.frames_of(frame))

    # -- a step ----------------------------------------------------------------------

    def stepped(
        self, boundary: OptimizerBoundary, skipped: Any, sizes: dict[int, Any]
    ) -> None:
        """Notes a step that is about to be taken, or is skipped."""
        self._noting = False
        self._stepped(boundary, skipped, sizes)
        self._measure()

    @_safely
    def _measure(self) -> None:
        self.stride.stepped(time.perf_counter(), noted=self._noting)

    @_safely
    def _stepped(
        self, boundary: OptimizerBoundary, skipped: Any, sizes: dict[int, Any]
    ) -> None:
        if self._ring is None:
            return
        self.step += 1
        self.in_a_row = self.in_a_row + 1 if skipped is True else 0
        self._noting = skipped is True or self.stride.notes(self.step)
        if self._noting:
            self._pending.append(self._noted(boundary, skipped, sizes))
        elif isinstance(self._loss, torch.Tensor):  # on a GPU it is looked at later
            self._pending.append({"step": self.step, "loss": self._loss})
        if self._pending and (skipped is True or len(self._pending) >= self._every):
            start = time.perf_counter()
            self.flush()
            if not self._on_cpu:  # while it waits, the GPU works
                self.stride.own -= time.perf_counter() - start
        if self.in_a_row == _IN_A_ROW:
            frames = self.frames or death.frames_of(sys._getframe(2))
            self._die("skips", self.step, {"why": self._why}, frames)
        self.frames = None
        self.calls = []
        self._losses = self._called = 0
        self._loss = None

    def _noted(
        self, boundary: OptimizerBoundary, skipped: Any, sizes: dict[int, Any]
    ) -> dict[str, Any]:
        """The record of a step; tensors until they are read."""
        noted: dict[str, Any] = {
            "kind": "step",
            "step": self.step,
            "every": self.stride.every,
            "time": round(time.time(), 3),
            "optimizer": type(boundary.optimizer).__name__,
            "loss": self._loss,
            "losses": self._losses,
            "taken": not skipped if isinstance(skipped, bool) else skipped,
            "calls": self._called,
            "gradient": compat.largest_magnitude(
                [p.grad for p in boundary.params if p.grad is not None]
            ),
        }
        if self.calls:
            noted |= self.calls[-1].numbers()
            results = [call.result for call in self.calls]
            noted["result"] = _largest([each for each in results if each is not None])
        inside = [each for each in sizes.values() if each is not None]
        if inside:
            noted["inside"] = inside[0]
        if skipped is True:
            noted["why"], noted["in_a_row"] = self._why, self.in_a_row
        if self.watch is not None:
            noted["ops"] = self.watch.end()
        return noted

    @property
    def _why(self) -> Any:
        """Why the last step was skipped."""
        skips = () if self.scaling is None else self.scaling.ledger.skips
        return skips[-1] if skips else ""

    def flush(self) -> None:
        """Reads what was noted, which may wait for a device, and writes it."""
        pending, self._pending = self._pending, []
        for noted in pending:
            record = {key: _read(each) for key, each in noted.items()}
            if isinstance(record.get("taken"), float):  # the flag of a kernel
                record["taken"] = record["taken"] == 0
            assert self._ring is not None
            if "kind" in record:
                self._ring.write(record)
            loss = record.get("loss")
            late = isinstance(loss, float) and not math.isfinite(loss)
            if late and self._fine:
                self._fine = False
                about = {"value": loss, "late": self.step - record["step"]}
                self._die("loss", record["step"], about, None)
            elif not late:
                self._fine = True

    def _die(
        self, cause: str, step: int, about: dict[str, Any], frames: list[Any] | None
    ) -> None:
        model = self.model()
        if self.deaths >= _MOST_DEATHS or model is None or self.home is None:
            return
        self.deaths += 1
        facts = {"cause": cause, "step": step, cause: about, **self._facts(model)}
        saved = death.save(self.home, model, facts, self.calls, frames or [])
        assert self._ring is not None
        self._ring.write(
            {"kind": "death", "step": step, "cause": cause, "folder": saved.name}
        )
        logger.warning(
            "autoamp: %s: %s at step %d: what a replay needs is in %s",
            facts["label"],
            "the loss is not finite" if cause == "loss" else "three steps were skipped",
            step,
            saved,
        )

    # -- beginning and end -----------------------------------------------------------

    def _open(self, model: nn.Module) -> None:
        rank = compat.own_rank()
        device = next((p.device.type for p in model.parameters()), "cpu")
        self._on_cpu = device == "cpu"
        self._every = self._every or (1 if self._on_cpu else _ON_GPU)
        self.home = folder.begin(self.root, rank)
        self._ring = Ring(self.home / folder.RING, self._facts(model))
        self._last = weakref.finalize(self, _finish, self._pending_of, self._ring)

    @property
    def _pending_of(self) -> Callable[[], None]:
        """`flush`, without what would keep this object alive."""
        this = self._here

        def last() -> None:
            recorder = this()
            if recorder is not None and recorder.pid == os.getpid():
                recorder.flush()

        return last

    def _facts(self, model: nn.Module) -> dict[str, Any]:
        several = compat.are_several()
        world = torch.distributed.get_world_size() if several else 1
        return {
            "format": 1,
            "rank": compat.own_rank() or 0,
            "world": world,
            "pid": self.pid,
            "host": socket.gethostname(),
            "argv": [*sys.argv],
            "orig_argv": [*getattr(sys, "orig_argv", ())],
            "cwd": str(Path.cwd()),
            "started": round(time.time(), 3),
            "label": type(model).__name__,
            "class": class_of(model),
            "parameters": parameters_in(model),
            "options": _given(self.options),
            "automatic": self.scaling is not None and self.scaling.automatic,
            "autoamp": folder.version(),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        }

    def finish(self) -> None:
        """Writes what is left; the model is reverted, say."""
        with self.lock:
            if not self.off and self._ring is not None and self.pid == os.getpid():
                self._finish_safely()
            self._end()

    @_safely
    def _finish_safely(self) -> None:
        self.flush()

    def stop(self, error: Exception) -> None:
        """Ends the recording with one warning; the training goes on."""
        if not self.off:
            logger.warning(
                "autoamp: the flight recorder in %s stops, and the training goes on: "
                "%s: %s",
                self.root,
                type(error).__name__,
                error,
            )
        self._end()

    def _end(self) -> None:
        self.off, self.calls, self.frames, self._loss = True, [], None, None
        self._pending = []
        if self._last is not None:
            self._last.detach()
        if self._ring is not None and self.pid == os.getpid():
            self._ring.close()


@compat.never_captured
def _reached(
    recorder: weakref.ref[FlightRecorder], call: Call, _: torch.Tensor
) -> None:
    """A hook on a result; gives None, so that the gradient stays what it is."""
    found = recorder()
    if found is not None:
        found.reached(call)


def _finish(flush: Callable[[], None], ring: Ring) -> None:
    """At the end of the process, or of the recorder, which then is gone already."""
    try:
        flush()
        ring.close()
    except Exception as error:  # noqa: BLE001 (a recorder never ends a training)
        logger.debug("autoamp: the last records were not written: %s", error)


def _read(value: Any) -> Any:
    """A note as JSON has it."""
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, tuple):  # what `sums_of` gave
        kinds, sums = value
        return hash_of(kinds, [each.item() for each in sums])
    if isinstance(value, dict):
        return {k: [float(each) for each in pair] for k, pair in value.items()}
    return value


def _largest(values: Sequence[torch.Tensor]) -> torch.Tensor | None:
    return compat.largest_magnitude(values) if len(values) > 1 else (*values, None)[0]


def _hash_of_generators(states: Sequence[torch.Tensor]) -> str:
    """A hash of torch's generators: on CPUs, and on each GPU in use."""
    found = 0
    for each in states:
        found = zlib.crc32(ctypes.string_at(each.data_ptr(), each.numel()), found)
    return f"{found:08x}"


def parameters_in(model: nn.Module) -> dict[str, Any]:
    """The shapes and dtypes of parameters by name; a hash where that is long."""
    found = {
        name: [[*p.shape], str(p.dtype).removeprefix("torch.")]
        for name, p in model.named_parameters()
    }
    text = encoded(found)
    if len(text) <= _HEADER_NAMES:
        return found
    return {"count": len(found), "hash": f"{zlib.crc32(text):08x}"}


def _given(options: Options) -> dict[str, Any]:
    """The options that differ from the defaults, as text."""
    usual = Options()
    values = {name: getattr(options, name) for name in sorted(OPTION_NAMES)}
    return {
        name: value if isinstance(value, bool | str) else repr(value)[:500]
        for name, value in values.items()
        if name != "record" and value != getattr(usual, name)
    }
