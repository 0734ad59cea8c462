"""Scripts that know nothing of autoamp, and how a test runs one and looks at it.

A script leaves in `RESULT` what it noted at every step, and the parameters it trained.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.auto import switch
from autoamp.counted.flops import flops_of
from autoamp.inspect.report import Report
from autoamp.model.children import inside
from autoamp.model.reporting import report_of
from tests.processes import run_script

FOLDER = Path(__file__).resolve().parent
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Script:
    """What is to be known of a script to judge it.

    Attributes:
        depth: layers in low precision one after another, from the input to the loss.
        arguments: of its command line.
        missed: what it does in threads, which the flop counter does not see, as a part
            of what it does in the main one.
        learns: its losses are those of training.
        expected: part of the one message that autoamp logs as a warning.
    """

    depth: int
    arguments: tuple[str, ...] = ()
    missed: int = 0
    learns: bool = True
    expected: str = ""


SCRIPTS = {
    "loader": Script(3),
    "gpt": Script(11),
    # Its head is called by itself: such a layer is converted only where it pays.
    "accumulation": Script(3),
    "gan": Script(4),
    "wgan_gp": Script(8),  # a penalty on a gradient: the critic's way back as well
    "lbfgs": Script(2),
    # Twelve steps.  There is no LSTM kernel in fp16 on a CPU, and none is needed: torch
    # takes the layer apart there into products and gates, which are in fp16.
    "lstm": Script(13),
    "ema": Script(3),
    "per_sample": Script(2, expected="because of vmap"),
    "threads": Script(3, missed=1, learns=False),
    "compiled": Script(3, ("aot_eager",)),
    "ragged": Script(2),
}


@dataclass
class Seen:
    """What a run of a script showed."""

    result: dict[str, Any]
    warned: set[str]
    models: list[tuple[nn.Module, Report]] = field(default_factory=list)
    low_flops: int = 0
    logged: list[str] = field(default_factory=list)

    @property
    def curves(self) -> dict[str, list[float]]:
        """The losses, and whatever else was noted at every step."""
        kinds = {k: v for k, v in self.result.items() if isinstance(v, list)}
        return {k: v for k, v in kinds.items() if isinstance(v[0], float)}

    @property
    def skips(self) -> set[str]:
        """The steps that were skipped, with the op whose gradient overflowed."""
        scales = [report.loss_scale for _, report in self.models]
        return {skip for scale in scales if scale for skip in scale.skips}

    @property
    def skipped(self) -> frozenset[int]:
        """The places of those steps, which the report counts from 1."""
        places = [re.match(r"step (\d+): ", skip) for skip in self.skips]
        return frozenset(int(place[1]) - 1 for place in places if place)


class Forward(TorchDispatchMode):
    """Counts the flops of what is called in this thread, outside any backward."""

    flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flops_of(func)
        # A dot product of vectors is LBFGS's own work, not the model's.
        counts = formula is not None and func is not torch.ops.aten.dot.default
        if counts and torch._C._current_graph_task_id() == -1:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def run(
    name: str, arguments: tuple[str, ...], around: AbstractContextManager[Any]
) -> tuple[dict[str, Any], set[str]]:
    """The names a script leaves, and the warnings it gave."""
    path, before = str(FOLDER / f"{name}.py"), sys.argv
    sys.argv = [path, *arguments]
    try:
        with warnings.catch_warnings(record=True) as caught, around:
            warnings.simplefilter("always")
            names = runpy.run_path(path, run_name="__main__")
    finally:
        sys.argv = before
        torch._dynamo.reset()
    return names, {f"{w.category.__name__}: {w.message}" for w in caught}


@functools.cache
def plain(name: str, left_out: frozenset[int] = frozenset()) -> Seen:
    """The script in fp32, some steps of its optimizers left out."""
    with contextlib.ExitStack() as stack:
        for owner in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            stack.enter_context(steps_left_out(owner, left_out))
        names, warned = run(name, SCRIPTS[name].arguments, nullcontext())
    return Seen(names["RESULT"], warned)


@contextlib.contextmanager
def steps_left_out(owner: Any, places: frozenset[int]) -> Iterator[None]:
    """A region in which these steps of a class of optimizers do nothing.

    What a loss scale does with those it is too high for.
    """
    original, calls = owner.step, itertools.count()

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        left_out = next(calls) in places
        return None if left_out else original(self, *args, **kwargs)

    owner.step = step
    try:
        yield
    finally:
        owner.step = original


@functools.cache
def autocast(name: str) -> Seen:
    """Plain autocast in bf16 around the whole script.

    Its cache of weights in low precision ends with the region: left on, no step would
    have an effect.
    """
    region = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    try:
        names, warned = run(name, SCRIPTS[name].arguments, region)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"torch.autocast cannot run {name} on this CPU: {error}")
    return Seen(names["RESULT"], warned)


@functools.cache
def flops_needed(name: str) -> int:
    with Forward() as count:
        run(name, SCRIPTS[name].arguments, nullcontext())
    return count.flops * (1 + SCRIPTS[name].missed)


class Listener(logging.Handler):
    """Keeps the warnings that are logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


def automatic(name: str, arguments: tuple[str, ...], precision: str) -> Seen:
    """The script in the automatic mode, and what the mode knows at its end."""
    listener = Listener()
    logging.getLogger("autoamp").addHandler(listener)
    autoamp.enable(precision=precision, do_no_harm=False)
    try:
        names, warned = run(name, arguments, nullcontext())
        seen = Seen(names["RESULT"], warned, logged=listener.heard)
        for known in switch._mode._known.values():
            module = inside(known.module())
            if known.converted:
                seen.models.append((module, autoamp.report(module)))
        # Those of compiled functions too, which belong to no model.
        compiled = (backend.engine for backend in switch._mode.backends)
        engines = {*switch._mode._engines, *filter(None, compiled)}
        seen.low_flops = sum(report_of(e.record).coverage.low_flops for e in engines)
    finally:
        autoamp.disable()
        logging.getLogger("autoamp").removeHandler(listener)
    return seen


@functools.cache
def ours(name: str, precision: str) -> Seen:
    return automatic(name, SCRIPTS[name].arguments, precision)


# -- a process of its own, with nothing but the environment ----------------------------

DRIVER = """
import json, runpy, sys
del sys.argv[0]
names = runpy.run_path(sys.argv[0], run_name="__main__")
result = names["RESULT"]
lists = {k: v for k, v in result.items() if isinstance(v, list)}
curves = {k: v for k, v in lists.items() if isinstance(v[0], float)}
dtypes = {str(p.dtype) for p in result["params"]}
print(json.dumps({"dtypes": sorted(dtypes), "start": result.get("start"), **curves}))
"""


def in_a_process(
    name: str, arguments: tuple[str, ...], precision: str, folder: Path
) -> tuple[Seen, list[dict[str, Any]]]:
    """What a script showed that was run by itself, and the reports it left."""
    environ = {"AUTOAMP_ENABLE": "1", "AUTOAMP_PRECISION": precision}
    environ |= {"AUTOAMP_DO_NO_HARM": "0", "AUTOAMP_REPORT_DIR": str(folder)}
    script = str(FOLDER / f"{name}.py")
    done = run_script(DRIVER, script, *arguments, cwd=folder, **environ)
    assert done.returncode == 0, done.stderr
    # On stderr there is nothing that is not said by autoamp.
    lines = done.stderr.splitlines()
    warned = {line for line in lines if not line.startswith("autoamp: ")}
    reports = [json.loads(p.read_text()) for p in folder.glob("*/report.json")]
    return Seen(json.loads(done.stdout), warned), reports
