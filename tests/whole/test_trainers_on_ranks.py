"""Trainers of two processes: accelerate's own scripts, and Lightning's DDP."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainers.harness import FOLDER, bound, environment, run_apart

pytestmark = pytest.mark.slow

BAD = 3
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Any:
    """Runs a script on two ranks; once for each set of arguments."""
    known: dict[Any, Any] = {}

    def launch(script: str, precision: str = "", **more: Any) -> Any:
        key = (script, precision, *more.items())
        if key not in known:
            folder = tmp_path_factory.mktemp(script)
            # Lightning's Trainer starts the second process itself.
            starter = [] if script.startswith("lightning") else TORCHRUN
            arguments = [f"{k}={v}" for k, v in more.items()]
            command = [*starter, str(FOLDER / f"{script}.py"), *arguments]
            said, reports = run_apart(folder, precision, *command)
            results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
            known[key] = results, reports, said
        return known[key]

    return launch


def losses(results: list[Any]) -> torch.Tensor:
    return torch.tensor([r["losses"] for r in results], dtype=torch.float64)


def moved(result: dict[str, Any]) -> list[bool]:
    return [a != b for a, b in itertools.pairwise(result["weights"])]


SCRIPTS = {"lightning_ddp": "bf16-mixed", "accelerate_ddp": "bf16"}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_two_ranks_train_as_in_fp32(script: str, precision: str, ranks: Any) -> None:
    plain = losses(ranks(script)[0])
    autocast = losses(ranks(script, mixed=SCRIPTS[script])[0])
    results, reports, said = ranks(script, precision)
    deviation = float((losses(results) - plain).abs().max())
    print(f"deviation {deviation:.2e}, allowed {bound(plain, autocast):.2e}")
    assert 0 < deviation <= bound(plain, autocast)
    assert all(r["dtypes"] == ["torch.float32"] for r in results)
    assert results[0]["weights"] == results[1]["weights"]
    assert said.count("is converted to") == 1  # the first rank speaks for all
    assert [r["coverage"]["share_of_calls"] for r in reports] == [1, 1]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_overflow_on_one_rank_skips_one_step_on_both(
    script: str, ranks: Any
) -> None:
    results, reports, _ = ranks(script, "fp16", bad=BAD)
    for result in results:
        assert moved(result) == [step != BAD for step in range(10)]
    assert [r["loss_scale"]["skipped_steps"] for r in reports] == [1, 1]


def test_the_scheduler_of_both_ranks_holds_at_a_skipped_step(ranks: Any) -> None:
    rates = ranks("accelerate_ddp")[0][0]["rates"]
    for result in ranks("accelerate_ddp", "fp16", bad=BAD)[0]:
        assert result["skipped"] == [step == BAD for step in range(10)]
        assert result["rates"] == [*rates[:BAD], *rates[BAD - 1 : -1]]


@pytest.mark.parametrize("precision", ["", "bf16", "fp16"])
@pytest.mark.parametrize("name", ["test_script", "test_sync", "test_ops"])
def test_accelerate_s_own_scripts_pass(
    name: str, precision: str, tmp_path: Path
) -> None:
    process = subprocess.run(
        [sys.executable, *TORCHRUN, "-m", f"accelerate.test_utils.scripts.{name}"],
        env={**environment(precision, tmp_path), "ACCELERATE_USE_CPU": "true"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
