"""Has inductor compile a graph in another process, which fills inductor's cache.

Two facts of torch 2.13 keep such a compilation out of a thread of the process that
trains.  AOT autograd puts the process's random generator back as it was when its trace
ends (`preserve_rng_state` in `create_aot_state`), so that the numbers which another
thread has drawn meanwhile come again.  And a trace of `torch.fx` sets a flag, and
patches `torch.nn.Module.__call__`, for all threads (`Tracer.trace`), so that Dynamo
raises in a thread that only runs a model.  A process of its own shares nothing but the
cache.
"""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autoamp.compat.capture import compile_with
from autoamp.compat.dynamo.frames import lock
from autoamp.compat.inductor_casts import CastReading
from autoamp.compat.pickled_graphs import dump_graph

_BACKENDS: Any = torch.backends

COMPILED, FAILED, UNCACHED = 0, 1, 3
"""Exit statuses of the process: all code is in the cache; the compilation failed; some
code cannot be cached."""

_CHILD = "autoamp.compat.apart_main"
_GRAPH, _SAID = "graph", "said"
_WITH_BACKWARD = "force_non_lazy_backward_lowering"
"""The setting by which the backward is compiled with the forward, not at its first
call."""

_DONATED = "collect_bw_donated_buffer_idxs"
"""The function that finds the saved tensors whose memory a backward may write to.

Such a backward raises under `retain_graph=True`, where eager does not.  torch's setting
`donated_buffer=False` raises as well (torch 2.13: `bw_donated_idxs` is None then, and
is compared with an empty list)."""

_MAY_WRITE = (
    "in this torch the backward that inductor compiles may write to saved tensors, so "
    "that it could not run twice (retain_graph=True), as eager can"
)

_KEY = "autoamp keeps saved tensors"
"""A part of the keys of inductor's caches, which do not tell whether a backward writes
to saved tensors."""


_SWITCHES = (
    "mkldnn.enabled",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "fp32_precision",
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.conv.fp32_precision",
    "cudnn.rnn.fp32_precision",
    "mkldnn.matmul.fp32_precision",
    "mkldnn.conv.fp32_precision",
)
"""Names in `torch.backends` of what kernels, or inductor's choice of kernels, read."""


@dataclass(frozen=True)
class Job:
    """One compilation as the other process gets it, pickled.

    Attributes:
        graph: the graph and its inputs, pickled (`pickled_graphs.py`).
        names: the names of the casts to read about.
        exact_casts: whether the kernels of inductor round at each cast.
        settings: the settings of the process that the code depends on.
    """

    graph: bytes
    names: tuple[str, ...]
    exact_casts: bool
    settings: Mapping[str, Any]


class Compilation:
    """A compilation that runs in another process, and ends with this object.

    The other process ends with this process as well, however this process ends: it
    reads a pipe that the system closes then.
    """

    def __init__(self, job: Job) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="autoamp-"))
        self._why: str | None = None
        try:
            self._process = self._begun(job)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._end = weakref.finalize(
            self, _end, self._process, self._folder, os.getpid()
        )

    def _begun(self, job: Job) -> subprocess.Popen[bytes]:
        (self._folder / _GRAPH).write_bytes(pickle.dumps(job))
        kept = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP")}
        path = os.pathsep.join(each or os.curdir for each in sys.path)
        with open(self._folder / _SAID, "wb") as said:
            return subprocess.Popen(
                [sys.executable, "-m", _CHILD, str(self._folder / _GRAPH)],
                env={**kept, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
            )

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> str:
        """Why there is no compiled code, in one line; "" where there is."""
        if self._why is None:
            status = self._process.wait()
            said = (self._folder / _SAID).read_text(errors="replace").strip()
            self._why = _why_not(status, said)
            self.end()
        return self._why

    def end(self) -> None:
        """Ends the process if it still runs, and removes its files."""
        self._end()


def job_for(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    exact_casts: bool,
    names: Sequence[str],
) -> Job:
    """The job of compiling `gm` for `inputs`, which are fake tensors.

    Raises:
        Exception: the graph cannot be pickled.
    """
    graph = dump_graph(gm, inputs)
    return Job(graph, tuple(names), exact_casts, _settings())


def compile_like_there(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    exact_casts: bool,
    reading: CastReading,
) -> Callable[..., Any]:
    """`gm` compiled by inductor on the calling thread, with settings as for a `Job`.

    After such a job, the code comes from inductor's cache.
    """
    with capture_lock(), _aot_settings(), _keys_of_any_process():
        return compile_with(
            "inductor", gm, inputs, exact_casts=exact_casts, reading=reading
        )


@contextlib.contextmanager
def settings_of(job: Job) -> Iterator[None]:
    """The settings of the process that made the job, in this process."""
    from torch._inductor import config

    given = job.settings
    torch.set_num_threads(given["threads"])
    torch.use_deterministic_algorithms(
        given["deterministic"], warn_only=given["warns_only"]
    )
    torch.set_default_dtype(given["dtype"])
    for path, value in given["switches"].items():
        if _switch(path) != value:
            at, _, name = path.rpartition(".")
            setattr(_switch(at), name, value)
    known = {k: v for k, v in given["inductor"].items() if hasattr(config, k)}
    with (
        config.patch(known),
        torch.inference_mode(given["inference"]),
        torch.set_grad_enabled(given["records"]),
    ):
        yield


def all_cached() -> bool:
    """Whether all graphs that inductor compiled in this process are in its cache."""
    from torch._dynamo.utils import counters

    found = counters["inductor"]
    seen = found["fxgraph_cache_miss"] + found["fxgraph_cache_hit"]
    return bool(seen) and not found["fxgraph_cache_bypass"]


def _why_not(status: int, said: str) -> str:
    """Why there is no compiled code, by how the other process ended; or ""."""
    if status == COMPILED:
        return ""
    if status == UNCACHED:
        return "inductor keeps no code of this graph in its cache on disk"
    last = said.splitlines()[-1] if said else ""
    return last or f"the process that compiled it ended with status {status}"


def _end(process: subprocess.Popen[bytes], folder: Path, owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that started it
        return
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()
    shutil.rmtree(folder, ignore_errors=True)


def _settings() -> dict[str, Any]:
    from torch._inductor import config

    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "switches": {path: _switch(path) for path in _SWITCHES},
        "records": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "inductor": _own_settings(config),
    }


def _switch(path: str) -> Any:
    """What stands at a path in `torch.backends`; None where this torch has no such."""
    parts = path.split(".") if path else []
    return reduce(lambda at, name: getattr(at, name, None), parts, _BACKENDS)


def _own_settings(config: Any) -> dict[str, Any]:
    """The settings of inductor that are not torch's defaults and can be pickled."""
    found = {}
    for name, value in config.get_config_copy().items():
        if config._is_default(name):
            continue
        with contextlib.suppress(Exception):
            pickle.dumps(value)
            found[name] = value
    return found


@contextlib.contextmanager
def _aot_settings() -> Iterator[None]:
    from torch._functorch import config
    from torch._functorch._aot_autograd import graph_compile

    keys: Any = torch.compiler.config

    known = {_WITH_BACKWARD: True} if hasattr(config, _WITH_BACKWARD) else {}
    find = getattr(graph_compile, _DONATED, None)
    if find is None:
        raise RuntimeError(_MAY_WRITE)
    with (
        config.patch(known),
        keys.patch(cache_key_tag=f"{keys.cache_key_tag} {_KEY}"),
    ):
        setattr(graph_compile, _DONATED, lambda *_: [])
        try:
            yield
        finally:
            setattr(graph_compile, _DONATED, find)


@contextlib.contextmanager
def _keys_of_any_process() -> Iterator[None]:
    """A region in which inductor's keys do not depend on what was imported first.

    A key holds pickled memory formats, which Python finds by the first module that has
    the attribute `torch`.
    """
    table, kind = copyreg.dispatch_table, torch.memory_format
    before = table.get(kind)
    table[kind] = _reduced
    try:
        yield
    finally:
        if before is None:
            del table[kind]
        else:
            table[kind] = before


def _reduced(layout: torch.memory_format) -> tuple[Any, ...]:
    return _layout, (str(layout).removeprefix("torch."),)


def _layout(name: str) -> Any:
    return getattr(torch, name)


@contextlib.contextmanager
def capture_lock() -> Iterator[None]:
    """A region in which Dynamo captures nothing in other threads.

    Tracers change the state of the process, and two at a time leave it broken.
    """
    with lock():
        yield
