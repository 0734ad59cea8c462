"""DDP and FSDP under torchrun, in a script that knows nothing of autoamp."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.trainers.harness import FOLDER, bound, run_apart

pytestmark = pytest.mark.slow

BAD = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Any:
    """Runs `distributed.py` under torchrun; once for each set of arguments."""
    known: dict[Any, Any] = {}

    def launch(wrap: str, precision: str = "", **more: Any) -> Any:
        key = (wrap, precision, *more.items())
        if key not in known:
            folder = tmp_path_factory.mktemp(wrap)
            torchrun = "-m torch.distributed.run --standalone --nproc-per-node 2"
            arguments = [f"{k}={v}" for k, v in {"wrap": wrap, **more}.items()]
            script = str(FOLDER / "distributed.py")
            said, reports = run_apart(
                folder, precision, *torchrun.split(), script, *arguments
            )
            results = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
            known[key] = results, reports, said
        return known[key]

    return launch


def losses(results: list[Any]) -> torch.Tensor:
    return torch.tensor([r["losses"] for r in results], dtype=torch.float64)


SHARDED = ["ddp", "fsdp1", "fsdp1_orig", "fsdp2", "fsdp2_blocks"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("wrap", SHARDED)
def test_two_processes_train_as_in_fp32(wrap: str, precision: str, ranks: Any) -> None:
    plain, autocast = losses(ranks(wrap)[0]), losses(ranks(wrap, mixed="bf16")[0])
    results, reports, said = ranks(wrap, precision)
    deviation = float((losses(results) - plain).abs().max())
    print(f"deviation {deviation:.2e}, allowed {bound(plain, autocast):.2e}")
    assert 0 < deviation <= bound(plain, autocast)
    assert all(r["dtypes"] == ["torch.float32"] for r in results)
    assert results[0]["weights"] == results[1]["weights"]
    if wrap == "fsdp1":  # Dynamo has no support for it with use_orig_params=False
        assert said.count("calls run under torch.autocast") == 2
        return
    assert said.count("is converted to") == 1  # the first rank speaks for all
    coverage = [r["coverage"] for r in reports]
    assert [c["share_of_calls"] for c in coverage] == [1, 1]
    assert [c["share_of_flops"] for c in coverage] == [1, 1]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1_orig", "fsdp2", "fsdp2_blocks"])
def test_an_overflow_on_one_rank_skips_one_step_on_both(wrap: str, ranks: Any) -> None:
    results, reports, _ = ranks(wrap, "fp16", bad=BAD)
    for result in results:
        sums = result["weights"]
        moved = [a != b for a, b in itertools.pairwise(sums)]
        assert moved == [step != BAD for step in range(10)]
        assert all(torch.tensor(result["losses"]).isfinite())
    assert [r["loss_scale"]["skipped_steps"] for r in reports] == [1, 1]
