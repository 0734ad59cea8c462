"""A script under the variable gets few lines: three where it converts, one if not."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import autoamp
from tests.processes import run_script

MODEL = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
x = torch.randn(8, 64)
for _ in range(3):
    with torch.autocast("cpu", torch.bfloat16, OWN):
        loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
for region in (torch.no_grad(), torch.inference_mode()):
    with region, torch.autocast("cpu", torch.bfloat16, OWN):
        model(x)
"""

CONVERTS = {"AUTOAMP_PRECISION": "bf16", "AUTOAMP_DO_NO_HARM": "0"}


@pytest.mark.thorough(but=["OWN = True-variables2-1-left to the script's own autocast"])
@pytest.mark.parametrize(
    ("script", "variables", "most", "text"),
    [
        ("OWN = False", CONVERTS, 3, "Sequential is converted to bf16"),
        ("OWN = False", {**CONVERTS, "AUTOAMP_BACKEND": "x"}, 1, "autoamp is off"),
        ("OWN = True", CONVERTS, 1, "left to the script's own autocast"),
    ],
)
def test_lines_on_stderr(
    script: str, variables: dict[str, str], most: int, text: str
) -> None:
    done = run_script(script + MODEL, AUTOAMP_ENABLE="1", **variables)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert 1 <= len(lines) <= most, done.stderr
    assert text in done.stderr


def test_that_a_model_is_not_converted_is_said_of_each(caplog) -> None:
    """No second model of a class is silent, and a hundred models are few lines."""
    caplog.set_level(logging.INFO, "autoamp")
    models = [nn.Linear(2, 2).double() for _ in range(100)]
    for model in models * 2:
        autoamp.convert(model)
    lines = [r.getMessage() for r in caplog.records if r.levelno > logging.DEBUG]
    assert len({*lines}) == len(lines)
    said = [line.partition("holds for ")[2].partition(" ")[0] for line in lines]
    assert said == ["", "2", "3", "4", "8", "16", "32", "64"]


def test_that_nothing_of_a_model_runs_low_is_said_of_each(caplog, off_again) -> None:
    caplog.set_level(logging.INFO, "autoamp")
    autoamp.enable(precision="bf16", do_no_harm=False, deny=["linear"])
    models = [nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2)]
    for model in models * 3:
        model(torch.ones(1, 2))
    assert caplog.text.count("Sequential stays in fp32") == 2
