"""Model zoo: transformers, timm and torchvision, training and inference, bf16 and fp16.

timm and torchvision live beside the environment (tests/zoo/site.py), so the models are
made and measured in a process of their own, which nobody else meets.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from benchmarks import zoo
from tests.conformance.table import Figures
from tests.zoo import BY_NAME

SECONDS = 280
"""Under pytest's own limit of 300, after which the whole worker would be killed."""


@pytest.fixture(scope="module")
def keeper() -> Iterator[ProcessPoolExecutor]:
    """The process the models live in."""
    fresh = multiprocessing.get_context("spawn")
    threads = (torch.get_num_threads(),)
    with ProcessPoolExecutor(1, fresh, torch.set_num_threads, threads) as pool:
        yield pool


@pytest.mark.parametrize("name", BY_NAME)
def test_trains_and_infers_no_worse_than_under_autocast(
    name: str, keeper: ProcessPoolExecutor, figures: Figures
) -> None:
    row = keeper.submit(zoo.measure_named, name).result(SECONDS)
    print(zoo.table([row]), *zoo.notes([row]), sep="\n")
    figures.count("models")
    figures.count("casts", row.casts[0])
    figures.count("casts under autocast", row.casts[1])
    figures.worst("error over limit", zoo.worst(row))
    assert not zoo.unknown_shortfalls(row), "\n".join(zoo.unknown_shortfalls(row))


def test_the_zoo_is_as_large_as_promised() -> None:
    assert len(BY_NAME) >= 60


def test_every_known_shortfall_is_of_a_model_in_the_zoo() -> None:
    assert {name for name, _ in zoo.KNOWN} <= set(BY_NAME)
