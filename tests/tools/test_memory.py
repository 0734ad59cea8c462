"""What is alive in a training step, against numbers worked out by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from benchmarks.memory import count_step
from benchmarks.setting import Setting
from tests.models.case import Case, distance, normal

SIZE, ROWS = 300, 10
WEIGHT = 4 * SIZE * SIZE
CASE = Case(
    "linears",
    lambda: nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(2))),
    normal(ROWS, SIZE),
    distance,
)


@pytest.mark.parametrize(
    ("way", "weights", "in_graph"),
    [
        ("fp32", 2 * WEIGHT, 0),
        # The first weight's copy is not saved: the batch needs no gradient.
        ("autocast", 2 * WEIGHT, WEIGHT // 2),
        ("autoamp", 2 * WEIGHT, WEIGHT // 2),
        ("bfloat16", WEIGHT, 0),
    ],
)
def test_each_kind_is_counted(way: str, weights: int, in_graph: int) -> None:
    moments = count_step(CASE, way)
    for found in moments.values():
        assert found["weights"] == weights
        assert found["state"] == 2 * weights + 2 * 4  # each weight's number of steps
    for moment in ("before", "end", "step"):
        assert moments[moment]["copies"] == 0
    assert moments["loss"]["copies"] == in_graph
    assert moments["loss"]["gradients"] == moments["before"]["saved"] == 0
    assert moments["end"]["gradients"] == moments["step"]["gradients"] == weights
    assert moments["middle"]["gradients"] == weights // 2
    # The second product's operand, and the distance of the result from its target.
    product = ROWS * SIZE * (4 if way == "fp32" else 2)
    assert moments["loss"]["saved"] >= product + ROWS * SIZE * 4
    assert moments["end"]["saved"] == 0
    totals = [found.total() for found in moments.values()]
    assert moments["peak"].total() == max(totals)
    assert moments["step"].total() > moments["end"].total()


CONVOLUTIONS = Case(
    "convolutions",
    lambda: nn.Sequential(
        *(nn.Conv2d(3, 8, 3, bias=False), nn.GELU(), nn.Conv2d(8, 8, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1152, 30)),
    ),
    normal(4, 3, 16, 16),
    distance,
)


@pytest.mark.parametrize(
    ("case", "way"),
    [
        *((CASE, way) for way in ("fp32", "autocast", "autoamp", "bfloat16")),
        *((CONVOLUTIONS, way) for way in ("autocast", "autoamp")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_fake_tensors_have_the_memory_of_true_ones(case: Case, way: str) -> None:
    found = count_step(case, way, Setting(fake=True))
    for moment, kinds in count_step(case, way).items():
        if moment in ("before", "forward", "loss", "end"):
            assert found[moment] == kinds, moment
        # The temporaries inside of kernels are not seen.
        assert found[moment].total() <= kinds.total()


ON_A_GPU = """
import json
from benchmarks.memory import count_step
from benchmarks.setting import Setting
from tests.tools.test_memory import CASE
gpu = Setting("cuda", fake=True)
print(json.dumps([count_step(CASE, way, gpu) for way in ("autocast", "autoamp")]))
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a true CUDA")
@pytest.mark.skipif(shutil.which("c++") is None, reason="the GPU needs a compiler")
def test_each_kind_is_counted_on_a_gpu_that_is_not_there() -> None:
    # In a process of its own, whose torch takes that GPU for a true one.
    command = [sys.executable, "-c", ON_A_GPU]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    weights = 2 * _on_gpu(WEIGHT)
    for moments in json.loads(done.stdout.splitlines()[-1]):
        for found in moments.values():
            assert found["weights"] == weights
            assert found["state"] == 2 * weights  # the numbers of steps are on the CPU
        assert moments["loss"]["copies"] == _on_gpu(WEIGHT // 2)
        assert moments["end"]["gradients"] == moments["step"]["gradients"] == weights
        # `foreach`: the square roots of all second moments are there at once.
        assert moments["step"]["temporaries"] >= weights


def _on_gpu(size: int) -> int:
    return -(-size // 512) * 512
