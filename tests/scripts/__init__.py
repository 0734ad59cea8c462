"""Scripts that know nothing of autoamp, and how a test runs one and looks at it.

A script leaves in `RESULT` what it noted at every step, and the parameters it trained.
Those in `tests/trainers` take their arguments as `name=value`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import logging
import os
import re
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp.tools.count_flops import flops_of
from tests.processes import run_script

FOLDER = Path(__file__).resolve().parent
TRAINERS = FOLDER.parent / "trainers"
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


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
    "soft_prompt": Script(4, learns=False),
    "in_backward": Script(3, learns=False),
    "offloaded": Script(2, learns=False),
}


@dataclass
class Seen:
    """What a run of a script showed.

    Attributes:
        result: its `RESULT`.
        warned: the warnings that it gave.
        said: what autoamp logged at INFO and above, as (level, message).
        reports: of each model that was converted, as JSON, at the end.
        models: those of them that were alive then.
        boundaries: which of its "optimizer" and the trainer's "wrapper" of that had a
            boundary of ours at the end.
    """

    result: dict[str, Any]
    warned: set[str]
    said: list[tuple[int, str]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)
    boundaries: list[str] = field(default_factory=list)

    @property
    def curves(self) -> dict[str, list[float]]:
        """The losses, and whatever else was noted at every step."""
        kinds = {k: v for k, v in self.result.items() if isinstance(v, list)}
        return {k: v for k, v in kinds.items() if isinstance(v[0], float)}

    @property
    def losses(self) -> torch.Tensor:
        return torch.tensor(self.result["losses"], dtype=torch.float64)

    @property
    def logged(self) -> list[str]:
        """The warnings among what autoamp said."""
        return [text for level, text in self.said if level >= logging.WARNING]

    @property
    def low_flops(self) -> int:
        """Those of compiled functions too, which belong to no model."""
        return sum((r["coverage"] or {}).get("low_flops", 0) for r in self.reports)

    @property
    def skips(self) -> set[str]:
        """The steps that were skipped, with the op whose gradient overflowed."""
        scales = [report["loss_scale"] for report in self.reports]
        return {skip for scale in scales if scale for skip in scale["skips"]}

    @property
    def skipped(self) -> frozenset[int]:
        """The places of those steps, which the report counts from 1."""
        places = [re.match(r"step (\d+): ", skip) for skip in self.skips]
        return frozenset(int(place[1]) - 1 for place in places if place)

    @property
    def moved(self) -> list[bool]:
        """For each step of the optimizer, whether any weight moved."""
        return [a != b for a, b in itertools.pairwise(self.result["weights"])]


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


# -- in this process -------------------------------------------------------------------


def run(
    name: str,
    *positional: str,
    precision: str = "",
    around: AbstractContextManager[Any] | None = None,
    **named: Any,
) -> Seen:
    """Runs a script; in the automatic mode, where a precision is given."""
    path = FOLDER / f"{name}.py"
    if not path.exists():
        path = TRAINERS / f"{name}.py"
        named.setdefault("folder", tempfile.mkdtemp())
    _forget_what_is_global()
    root = Path(tempfile.mkdtemp())
    listener = _Listener()
    argv = [str(path), *positional, *(f"{k}={v}" for k, v in named.items())]
    with (
        mock.patch("sys.argv", argv),
        warnings.catch_warnings(record=True) as caught,
        listener,
        around or nullcontext(),
    ):
        warnings.simplefilter("always")
        if precision:
            autoamp.enable(precision=precision, do_no_harm=False, report_dir=root)
        try:
            result = runpy.run_path(str(path), run_name="__main__")["RESULT"]
            seen = Seen(result, set(), listener.said, models=_converted())
            both = ("optimizer", "wrapper")
            seen.boundaries = [
                k for k in both if "_autoamp" in vars(result.get(k, object))
            ]
        finally:
            autoamp.disable()
            torch._dynamo.reset()
    seen.warned = {f"{w.category.__name__}: {w.message}" for w in caught}
    seen.reports = _reports(root)
    return seen


def _converted() -> list[nn.Module]:
    modules = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    return [m for m in modules if "_modules" in vars(m) and autoamp.is_converted(m)]


def _reports(root: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(root.glob("*/report.json"))]


def _forget_what_is_global() -> None:
    torch._dynamo.reset()
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


class _Listener(logging.Handler):
    """Keeps what is logged at INFO and above meanwhile."""

    def __enter__(self) -> None:
        self.said: list[tuple[int, str]] = []
        self.logger = logging.getLogger("autoamp")
        self.before = self.logger.level
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append((record.levelno, record.getMessage()))

    def __exit__(self, *_: object) -> None:
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)


# -- what a run is held against --------------------------------------------------------


@functools.cache
def reference(name: str, *positional: str, **named: Any) -> Seen:
    """The same in fp32, or with what the arguments ask for; run once."""
    return run(name, *positional, **named)


@functools.cache
def plain(name: str, left_out: frozenset[int] = frozenset()) -> Seen:
    """The script in fp32, some steps of its optimizers left out."""
    with contextlib.ExitStack() as stack:
        for owner in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            stack.enter_context(_steps_left_out(owner, left_out))
        return run(name, *SCRIPTS[name].arguments)


@contextlib.contextmanager
def _steps_left_out(owner: Any, places: frozenset[int]) -> Iterator[None]:
    """A region in which these steps of a class of optimizers do nothing.

    What a loss scale does with those it is too high for.
    """
    original, calls = owner.step, itertools.count()

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        left_out = next(calls) in places
        return None if left_out else original(self, *args, **kwargs)

    with mock.patch.object(owner, "step", step):
        yield


@functools.cache
def autocast(name: str) -> Seen:
    """Plain autocast in bf16 around the whole script.

    Its cache of weights in low precision ends with the region: left on, no step would
    have an effect.
    """
    region = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
    try:
        return run(name, *SCRIPTS[name].arguments, around=region)
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"torch.autocast cannot run {name} on this CPU: {error}")


@functools.cache
def flops_needed(name: str) -> int:
    count = Forward()
    run(name, *SCRIPTS[name].arguments, around=count)
    return count.flops * (1 + SCRIPTS[name].missed)


@functools.cache
def ours(name: str, precision: str) -> Seen:
    return run(name, *SCRIPTS[name].arguments, precision=precision)


def bound(plain: torch.Tensor, autocast: torch.Tensor) -> float:
    """How far losses may be from fp32's: three times as far as under autocast.

    Which may be near by luck.  Outputs rounded once move a loss by about the same share
    of itself as they are moved by.
    """
    deviation = float((autocast - plain).abs().max())
    return max(3 * deviation, ROUNDING * float(plain.abs().max()))


# -- in processes of their own, with nothing but the environment -----------------------

_DRIVER = """
import json, runpy, sys
del sys.argv[0]
names = runpy.run_path(sys.argv[0], run_name="__main__")
result = names["RESULT"]
lists = {k: v for k, v in result.items() if isinstance(v, list)}
curves = {k: v for k, v in lists.items() if isinstance(v[0], float)}
dtypes = {str(p.dtype) for p in result["params"]}
print(json.dumps({"dtypes": sorted(dtypes), "start": result.get("start"), **curves}))
"""


def _variables(precision: str, folder: Path) -> dict[str, str]:
    return {
        "AUTOAMP_ENABLE": "1",
        "AUTOAMP_PRECISION": precision,
        "AUTOAMP_DO_NO_HARM": "0",
        "AUTOAMP_REPORT_DIR": str(folder / "reports"),
    }


def in_a_process(
    name: str, arguments: tuple[str, ...], precision: str, folder: Path
) -> Seen:
    """What a script showed that was run by itself, and the reports it left."""
    script = str(FOLDER / f"{name}.py")
    variables = _variables(precision, folder)
    done = run_script(_DRIVER, script, *arguments, cwd=folder, **variables)
    assert done.returncode == 0, done.stderr
    # On stderr there is nothing that is not said by autoamp.
    lines = done.stderr.splitlines()
    warned = {line for line in lines if not line.startswith("autoamp: ")}
    reports = _reports(folder / "reports")
    return Seen(json.loads(done.stdout), warned, reports=reports)


def environment(precision: str, folder: Path) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    threads = {"OMP_NUM_THREADS": "1", "AUTOAMP_CALIBRATE": "0"}
    return plain | threads | (_variables(precision, folder) if precision else {})


def run_apart(folder: Path, precision: str, *command: str) -> tuple[str, list[Any]]:
    """What a process says on stderr, and the reports it leaves; it must succeed."""
    process = subprocess.Popen(
        [sys.executable, *command, f"folder={folder}"],
        env=environment(precision, folder),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.communicate(timeout=90)[1]
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun, killed, would leave its processes behind
        process.communicate()
        raise
    assert process.returncode == 0, said[-3000:]
    return said, _reports(folder / "reports")
