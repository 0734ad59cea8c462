"""Runs a check on examples that a seed decides, so that shards see different ones."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st


def _seed() -> int:
    asked = os.environ.get("AUTOAMP_FUZZ_SEED", "0")
    return random.SystemRandom().randrange(2**31) if asked == "random" else int(asked)


SEED = _seed()
"""From AUTOAMP_FUZZ_SEED: a number, or `random`."""


def explore(
    check: Callable[..., None], seed: str, examples: int, *given: st.SearchStrategy[Any]
) -> None:
    """Runs `check` on `examples` drawn from `seed` and SEED; one that fails is shrunk.

    (Hypothesis's own `derandomize` goes by the source of the test, so that every shard
    would see the same examples.)
    """
    print(f"AUTOAMP_FUZZ_SEED={SEED}")
    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),  # examples are large, and meant to be
    )
    run = settings(hypothesis.given(*given)(check))
    hypothesis.seed(f"{SEED}/{seed}")(run)()
