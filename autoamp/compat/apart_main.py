"""The process that `apart.py` starts: inductor compiles one graph into its cache."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path

from autoamp.compat.apart import (
    COMPILED,
    FAILED,
    UNCACHED,
    Job,
    all_cached,
    compile_like_there,
    settings_of,
)
from autoamp.compat.inductor_casts import CastReading
from autoamp.compat.pickled_graphs import load_graph

_NICE = 10
"""How much the process lets others go first."""


def main(path: str) -> int:
    """Compiles the job in a file; the exit status of the process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(AttributeError, OSError):  # no such thing as on Unix
        os.nice(_NICE)
    job = pickle.loads(Path(path).read_bytes())
    assert isinstance(job, Job)
    with settings_of(job):
        gm, inputs = load_graph(job.graph)
        reading = CastReading(job.names)
        compile_like_there(gm, inputs, exact_casts=job.exact_casts, reading=reading)
    return COMPILED if all_cached() else UNCACHED


def _end_with_parent() -> None:
    """Ends this process when the process that started it closes the pipe, or ends."""
    while os.read(0, 1):
        pass
    os._exit(FAILED)


if __name__ == "__main__":
    status = FAILED
    try:
        status = main(sys.argv[1])
    except Exception as error:  # noqa: BLE001 (the other process is told)
        traceback.print_exc()
        first, *_ = [*filter(None, map(str.strip, str(error).splitlines())), ""]
        sys.stderr.write(f"{type(error).__name__}: {first}\n")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # inductor's pools of workers would be waited for
