"""Autocast's own lists: every row computes in the dtype it says.

The rows are those of torch's own tests of autocast, 55 for the CPU and 121 for CUDA.
Some are of ops it leaves to type promotion.  Each is run by autocast and by our pass.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conformance import autocast_rows
from tests.conformance.table import Figures

ROOT = Path(__file__).parents[2]
DTYPES = ("float16", "bfloat16")
LEAST = {"cpu": 55, "cuda": 115}
"""Rows that must run: on the CPU all; on CUDA those torch can trace without a GPU."""


def names(device: str) -> list[str]:
    """The rows of `device`, those it refuses aside; asking runs nothing on it."""
    of_cuda, of_cpu = (
        autocast_rows.autocast_test_lists.AutocastTestLists,
        autocast_rows.autocast_test_lists.AutocastCPUTestLists,
    )
    lists = vars((of_cuda if device == "cuda" else of_cpu)("cpu"))
    return [
        f"{kind}-{index}-{entry[0]}"
        for kind, entries in lists.items()
        for index, entry in enumerate(entries)
        if kind != autocast_rows.BANNED
    ]


@cache
def outcomes(device: str, dtype: str) -> dict[str, dict[str, Any]]:
    """What a process of its own found, row by row; as far as it came."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.conformance.autocast_rows", device, dtype],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=250,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found, done.stderr
    return {each["row"]: each for each in found}


def check(device: str, name: str, figures: Figures) -> None:
    for dtype in DTYPES:
        found = outcomes(device, dtype).get(name)
        assert found, f"the process died at or before {name}"
        if isinstance(found["autocast"], str):
            op = name.rpartition("-")[2]
            pytest.skip(
                f"torch cannot trace {op} without a GPU, nor run autocast on it"
            )
        assert found["autocast"] == [found["says"]], "not what autocast does"
        assert found["ours"] == [found["says"]]
    figures.count(f"{device.upper()} rows")


@pytest.mark.parametrize("name", names("cpu"))
def test_cpu(name: str, figures: Figures) -> None:
    check("cpu", name, figures)


@pytest.mark.parametrize("name", names("cuda"))
def test_cuda(name: str, figures: Figures) -> None:
    check("cuda", name, figures)


@pytest.mark.parametrize("device", LEAST)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_fewer_rows_ran_than_can(device: str, dtype: str) -> None:
    ran = [r for r in outcomes(device, dtype).values() if isinstance(r["ours"], list)]
    assert len([r for r in ran if r["says"] != "None"]) >= LEAST[device]


def test_what_autocast_refuses_is_fp32() -> None:
    """It raises on `binary_cross_entropy`; a pass that can keep it in fp32 need not."""
    (found,) = (r for r in outcomes("cuda", "float16").values() if r["says"] == "None")
    assert found["row"].endswith("binary_cross_entropy")
    assert "unsafe to autocast" in found["autocast"]
    assert found["ours"] == ["torch.float32"]


def test_a_row_can_fail() -> None:
    """An op in the wrong list computes in the wrong dtype."""
    rows = autocast_rows.rows("cpu", torch.bfloat16)
    row = next(r for r in rows if r.name.endswith("-mm"))
    for options, expected in (({}, row.says), ({"deny": ["mm"]}, torch.float32)):
        gm = autocast_rows.rewritten(row, **options)
        assert autocast_rows.computes_in(gm) == {expected}
    assert row.says != torch.float32
