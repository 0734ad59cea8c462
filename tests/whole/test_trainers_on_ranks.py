"""Scripts on two processes: DDP, FSDP, accelerate, and Lightning's DDP."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scripts import TRAINERS, bound, environment, run_apart

pytestmark = pytest.mark.slow

BAD = 3
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WRAPS = ["ddp", "fsdp1", "fsdp1_orig", "fsdp2", "fsdp2_blocks"]

# script, its arguments, and the value of `mixed` with which it uses autocast.
SCRIPTS: dict[str, tuple[str, dict[str, Any], str]] = {
    **{wrap: ("distributed", {"wrap": wrap}, "bf16") for wrap in WRAPS},
    "accelerate": ("accelerate_loop", {"ranks": 2}, "bf16"),
    "lightning": ("lightning_fit", {"ranks": 2}, "bf16-mixed"),
}

Launch = Callable[..., tuple[list[dict[str, Any]], list[Any], str]]
"""Runs a script on two ranks: what they leave, the reports, and what they say."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Runs a script on two ranks; once for each set of arguments."""
    known: dict[Any, Any] = {}

    def launch(name: str, precision: str = "", **more: Any) -> Any:
        key = (name, precision, *more.items())
        if key not in known:
            folder = tmp_path_factory.mktemp(name)
            script, given, _ = SCRIPTS[name]
            # Lightning's Trainer starts the second process itself.
            starter = [] if name == "lightning" else TORCHRUN
            arguments = [f"{k}={v}" for k, v in {**given, **more}.items()]
            command = [*starter, str(TRAINERS / f"{script}.py"), *arguments]
            said, reports = run_apart(folder, precision, *command)
            results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
            known[key] = results, reports, said
        return known[key]

    return launch


def losses(results: list[Any]) -> torch.Tensor:
    return torch.tensor([r["losses"] for r in results], dtype=torch.float64)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_two_ranks_train_as_in_fp32(name: str, precision: str, ranks: Launch) -> None:
    plain = losses(ranks(name)[0])
    autocast = losses(ranks(name, mixed=SCRIPTS[name][2])[0])
    results, reports, said = ranks(name, precision)
    deviation = float((losses(results) - plain).abs().max())
    assert 0 < deviation <= bound(plain, autocast)
    assert all(r["dtypes"] == ["torch.float32"] for r in results)
    assert results[0]["weights"] == results[1]["weights"]
    if name == "fsdp1":  # Dynamo has no support for it with use_orig_params=False
        assert said.count("calls run under torch.autocast") == 2
        return
    assert said.count("is converted to") == 1  # the first rank speaks for all
    shares = [
        (report["coverage"]["share_of_calls"], report["coverage"]["share_of_flops"])
        for report in reports
    ]
    assert shares == [(1, 1), (1, 1)]


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "fsdp1"])
def test_an_overflow_on_one_rank_skips_one_step_on_both(
    name: str, ranks: Launch
) -> None:
    results, reports, _ = ranks(name, "fp16", bad=BAD)
    for result in results:
        moved = [a != b for a, b in itertools.pairwise(result["weights"])]
        assert moved == [step != BAD for step in range(10)]
        assert all(torch.tensor(result["losses"]).isfinite())
        if name == "accelerate":  # whose scheduler holds at a skipped step
            rates = ranks(name)[0][0]["rates"]
            assert result["skipped"] == [step == BAD for step in range(10)]
            assert result["rates"] == [*rates[:BAD], *rates[BAD - 1 : -1]]
    assert [r["loss_scale"]["skipped_steps"] for r in reports] == [1, 1]


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
