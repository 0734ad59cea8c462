"""Ten packages' own training loops: only `make packages` runs this file.

Each script here trains on random data, in fp32, under torch's autocast, with its model
converted, and under `autoamp run`.  Its losses are those of each step.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
PYTHON = os.environ["PACKAGES_PYTHON"]
SCRIPTS = sorted(path.stem for path in HERE.glob("[a-z]*_*.py"))
RUN = ["run", "--precision=bf16", "--convert-anyway", "--hot=0", "--report-dir"]
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


@dataclass
class Trained:
    """What a script showed: its losses, reports of its models, and text on stderr."""

    losses: torch.Tensor
    reports: list[dict[str, Any]]
    said: str

    @property
    def low_flops(self) -> int:
        return sum((r["coverage"] or {}).get("low_flops", 0) for r in self.reports)


def trained(name: str, way: str, folder: Path) -> Trained:
    """Runs a script one way, in a process of its own."""
    command = [str(HERE / f"{name}.py"), way]
    if way == "run":
        command = ["-m", "autoamp", *RUN, str(folder), command[0], "fp32"]
    plain = {k: v for k, v in os.environ.items() if not k.startswith("AUTOAMP_")}
    done = subprocess.run(
        [PYTHON, *command],
        env=plain | {"AUTOAMP_CALIBRATE": "0"},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{name}, {way}: {done.stderr[-3000:]}"
    shown = json.loads(done.stdout.splitlines()[-1])
    written = [json.loads(p.read_text()) for p in folder.glob("*/report.json")]
    losses = torch.tensor(shown["losses"], dtype=torch.float64)
    return Trained(losses, shown["reports"] or written, done.stderr)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", SCRIPTS)
def test_trains_as_truly_as_under_autocast(name: str, tmp_path: Path) -> None:
    """Up to half as far again from fp32, and one rounding of what the losses read.

    That rounding moves losses by about the same share of themselves; autocast may do
    without it by luck.  `autoamp run` converts losses that are modules, too.
    """
    fp32 = trained(name, "fp32", tmp_path).losses
    for way, peer in (("explicit", "autocast"), ("run", "everywhere")):
        theirs = (trained(name, peer, tmp_path).losses - fp32).norm()
        bound = 1.5 * theirs + ROUNDING * fp32.norm()
        ours = trained(name, way, tmp_path)
        distance = (ours.losses - fp32).norm()
        assert distance <= bound, f"{way}: {distance / bound:.2f} of the bound"
        assert ours.low_flops > 0, f"{way}: nothing ran low\n{ours.said}"
        assert "please report" not in ours.said, f"{way}: {ours.said}"
