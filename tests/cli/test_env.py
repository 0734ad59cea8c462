"""`autoamp env`: the versions, what pays on each device, the variables that are set."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch

from autoamp import compat
from tests.cli.calls import call
from tests.says import says

pytestmark = pytest.mark.usefixtures("nothing_asked_for")


def sections(output: str) -> dict[str, list[str]]:
    """Heading to its lines; what comes first has none."""
    found: dict[str, list[str]] = {}
    for block in output.split("\n\n"):
        head, *lines = block.splitlines()
        found[head.partition("  ")[0]] = [line.strip() for line in lines]
    return found


def test_versions() -> None:
    lines = call("env").output.split("\n\n")[0].splitlines()
    found = dict(re.split(r":\s+", line, maxsplit=1) for line in lines)
    assert found["torch"] == torch.__version__
    assert found["python"].endswith(f"({sys.executable})")
    assert {"autoamp", "system", "networkx", "rich", "CUDA"} <= set(found)
    assert "timm" not in found, "only what is installed"


AMX = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}
UNITS: list[tuple[dict[torch.dtype, str], str, str]] = [
    ({}, "no units", "no units"),
    ({torch.bfloat16: "avx512_bf16"}, "no units", "vector instructions, avx512_bf16"),
    (AMX, "fp16 pays", "matrix tiles, amx_bf16"),
]


@pytest.mark.parametrize(("units", "fp16", "bf16"), UNITS, ids=["none", "avx", "amx"])
def test_what_pays_on_this_cpu(
    units: dict[torch.dtype, str], fp16: str, bf16: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "cpu_low_precision_units", lambda: units)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = call("env")
    assert told.exit_code == 0
    found = sections(told.output)
    for line, name, needed in zip(
        found["cpu"], ("fp16", "bf16"), (fp16, bf16), strict=True
    ):
        says(line, name, needed)
        assert ("pays" in line) == (needed != "no units")
    assert found["environment"] == ["no AUTOAMP_ variable is set"]


CAPABILITIES = {"6.1": (False, False), "7.5": (True, False), "9.0": (True, True)}
"""Compute capability to whether fp16 and bf16 pay there."""


def test_what_pays_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_index(device: Any) -> tuple[int, ...]:
        number = device if isinstance(device, int) else device.index
        return tuple(map(int, [*CAPABILITIES][number].split(".")))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(CAPABILITIES))
    monkeypatch.setattr(torch.cuda, "get_device_capability", by_index)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    output = call("env").output
    for index, (capability, pays) in enumerate(CAPABILITIES.items()):
        says(output, f"cuda:{index}  GPU {index}, compute capability {capability}")
        lines = sections(output)[f"cuda:{index}"]
        for line, name, here, needed in zip(
            lines, ("fp16", "bf16"), pays, ("7.0", "8.0"), strict=True
        ):
            says(line, name, "tensor cores" if here else needed)


def test_a_broken_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: unknown error\nCompile with ...")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", fail)
    told = call("env")
    assert told.exit_code == 0
    (line,) = sections(told.output)["cuda:0"]
    says(line, "RuntimeError: CUDA error: unknown error")


def test_variables_are_shown_with_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"ENABLE": "yes", "PRECISON": "bf16", "STRICT": "a\nb\x1b[31m"}
    for name, value in given.items():
        monkeypatch.setenv(f"AUTOAMP_{name}", value)
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    lines = sections(call("env").output)["environment"]
    assert lines[:3] == [
        "AUTOAMP_ENABLE='yes'",
        "AUTOAMP_PRECISON='bf16'",
        "AUTOAMP_STRICT='a\\nb\\x1b[31m'",
    ]
    stays_off, enable, precision, autoload = lines[3:]
    says(stays_off, "stays off", "AUTOAMP_STRICT='a\\nb")
    says(enable, "AUTOAMP_ENABLE='yes'", option=["1", "true", "on"])
    says(precision, option="did you mean AUTOAMP_PRECISION")
    says(autoload, "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "AUTOAMP_ENABLE")
