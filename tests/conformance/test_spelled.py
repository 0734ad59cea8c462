"""Spelled-out layers on hostile data: at most 1.1 times as far off as autocast.

AUTOAMP_SPELLED_CASES=5000  how many cases (default: 800)
AUTOAMP_FUZZ_SEED=7         other ones
"""

from __future__ import annotations

import os

import pytest

from tests.conformance.table import Figures
from tests.spelled import sweep

CASES = int(os.environ.get("AUTOAMP_SPELLED_CASES", "800"))
SEED = int(os.environ.get("AUTOAMP_FUZZ_SEED", "0"))
SHARDS = 8


@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_spelled_out_layers(shard: int, figures: Figures) -> None:
    results = list(sweep.swept(sweep.sampled(CASES, SEED)[shard::SHARDS]))
    failures = [result for result in results if result.verdict.fails]
    held = [result.verdict.worst() for result in results if not result.verdict.fails]
    figures.count("cases", len(results))
    figures.count("cases with a kernel", sum(bool(r.verdict.kernels) for r in results))
    figures.worst("our error / autocast's, on four draws", max(held, default=0.0))
    assert not failures, "\n" + sweep.table(failures)
