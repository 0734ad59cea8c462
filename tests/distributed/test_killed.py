"""A rank that is killed in the middle of a step ends the job, which then resumes.

(torchrun's own restarts fail with gloo in torch 2.13, in scripts without autoamp too:
the new ranks look for the old ones' addresses.)
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
DIES = 5


def launch(folder: Path, dies: int) -> tuple[int, str, float]:
    """Runs killed.py on two ranks: the exit status, what it printed, and seconds."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", str(HERE / "killed.py"), str(folder), str(dies)]
    root = str(HERE.parent.parent)
    start = time.monotonic()
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONPATH": root},
    )
    return done.returncode, done.stderr, time.monotonic() - start


def ends(folder: Path) -> list[object]:
    return [torch.load(folder / f"end-{rank}.pt") for rank in range(2)]


def test_a_killed_rank_ends_the_job_and_the_run_resumes_bit_for_bit(
    tmp_path: Path,
) -> None:
    status, said, _ = launch(tmp_path / "whole", -1)
    assert status == 0, said
    status, said, seconds = launch(tmp_path / "cut", DIES)
    assert status != 0
    assert "Signal 9 (SIGKILL) received by PID" in said
    assert seconds < 90
    assert not (tmp_path / "cut" / "end-0.pt").exists()
    status, said, _ = launch(tmp_path / "cut", -1)
    assert status == 0, said
    assert ends(tmp_path / "cut") == ends(tmp_path / "whole")
