"""Runs the recorded script again in this process, up to the end of one step."""

from __future__ import annotations

import contextlib
import gc
import os
import runpy
import site
import socket
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from autoamp.auto.switch import disable, enable
from autoamp.errors import AutoampError, OptionError
from autoamp.flight.instead import REPLAYS
from autoamp.overflow.remedy import Remedy
from autoamp.printable import printable_line
from autoamp.replay.recorded import Recorded
from autoamp.replay.session import Outcome, ReplayEnds, Session

_INSTALLED = (
    *site.getsitepackages(),
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
_OURS = str(Path(__file__).parents[1])


def rerun(recorded: Recorded, remedy: Remedy) -> Outcome:
    """Runs the script until the recorded step is over.

    Raises:
        OptionError: the script is not there, or it never trains such a model.
    """
    session = Session(recorded, remedy)
    with replaying(session), _as_recorded(recorded):
        error = _run(recorded)
        if not session.done:
            session.finish()
    if not session.outcome.reached:
        raise OptionError(_never_called(recorded, session.outcome, error))
    if error is not None and session.outcome.skipped is None:
        session.outcome.notes.append(f"the script itself raised {_told(error)}")
    return session.outcome


@contextlib.contextmanager
def replaying(session: Session) -> Iterator[None]:
    """A region in which models that are converted are in the session's hands."""
    REPLAYS.append(session)
    try:
        yield
    finally:
        session.done = True
        REPLAYS.remove(session)


def _run(recorded: Recorded) -> BaseException | None:
    """Runs the script; gives what it raised of its own."""
    script, module = _script(recorded)
    try:
        if recorded.facts.get("automatic"):
            enable(hot=False, **recorded.options)
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except ReplayEnds:
        pass
    except SystemExit as error:
        return error if error.code not in (None, 0) else None
    except AutoampError:
        raise
    except Exception as error:  # noqa: BLE001 (a user's script)
        return error
    finally:
        if recorded.facts.get("automatic"):
            disable()
    return None


def _script(recorded: Recorded) -> tuple[str, str]:
    """The path of the script, and the name of the module that `-m` was given, or "".

    Raises:
        OptionError: there is no script to run.
    """
    argv = [str(each) for each in recorded.facts.get("argv") or []]
    given = [str(each) for each in recorded.facts.get("orig_argv") or []]
    before = given[: len(given) - max(len(argv) - 1, 0)]
    if len(before) > 2 and before[-2] == "-m":
        return "", before[-1]
    if argv and Path(argv[0]).is_file():
        return argv[0], ""
    shown = printable_line(argv[0] if argv else "", 300)
    raise OptionError(
        f"the script {shown!r} is not there (in {os.getcwd()}): it is run again to "
        "replay its step; or give --model and --loss"
    )


@contextlib.contextmanager
def _as_recorded(recorded: Recorded) -> Iterator[None]:
    """A region with the script's arguments, folder and environment."""
    facts = recorded.facts
    cwd, argv, path = os.getcwd(), sys.argv, [*sys.path]
    environ, modules = dict(os.environ), {*sys.modules}
    try:
        os.chdir(str(facts.get("cwd")))
    except (OSError, ValueError) as error:
        raise OptionError(f"the folder of the script is not there: {error}") from None
    try:
        sys.argv = [str(each) for each in facts.get("argv") or [""]]
        script, module = _script(recorded)
        sys.path.insert(
            0, os.getcwd() if module else str(Path(script).resolve().parent)
        )
        for name in ("AUTOAMP_ENABLE", "AUTOAMP_RECORD_DIR"):
            os.environ.pop(name, None)
        if recorded.world > 1:
            os.environ.update(_alone())
        yield
    finally:
        os.chdir(cwd)
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environ)
        _forget(modules)


def _alone() -> dict[str, str]:
    """The environment that torchrun gives to the only process of a training."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    sizes = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, **sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _forget(before: set[str]) -> None:
    """Undoes what a script leaves in the process, so that it can be run once more."""
    for name in {*sys.modules} - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and not file.startswith((*_INSTALLED, _OURS)):
            del sys.modules[name]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.compiler.reset()
    gc.collect()


def _never_called(
    recorded: Recorded, outcome: Outcome, error: BaseException | None
) -> str:
    label = printable_line(recorded.label, 100)
    why = f"the script ended without a training call of {label} that autoamp converts"
    if error is not None:
        why = f"the script raised {_told(error)} before a training call of {label}"
    if recorded.world > 1:
        why += (
            f"; it ran in {recorded.world} processes, and is replayed in one, with a "
            "process group of one: a script that needs more of them cannot be replayed "
            "without --model"
        )
    return "; ".join(dict.fromkeys([why, *outcome.notes]))


def _told(error: BaseException) -> str:
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((*_INSTALLED, _OURS, "<"))]
    where = f" ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else ""
    return printable_line(f"{type(error).__name__}: {error}", 300) + where
