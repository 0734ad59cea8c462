"""The words of a report: texts of a small model, kept beside this file.

`REWRITE_GOLDEN=1 pytest tests/inspect/test_golden.py` writes them anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoamp

GOLDEN = Path(__file__).parent / "golden"


class Net(nn.Module):
    """Layers that repeat, an op that is denied, a norm, sizes that miss multiples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(250, 250) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(250), nn.Linear(250, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.exp(layer(x)) * 2
        return torch.log_softmax(self.head(self.norm(x)), -1)


def report(**options: object) -> autoamp.Report:
    given = {"precision": "bf16", "do_no_harm": False, "deny": ["exp"], **options}
    x = torch.ones(4096, 250)
    return autoamp.explain(Net(), x, options=given, device="cuda:sm_80")


TEXTS: dict[str, Callable[[], str]] = {
    "summary": lambda: str(report()),
    "full": lambda: report().full(),
    "memory": lambda: report(objective="memory").full(),
    "kept": lambda: str(report(keep=["layers.0"])),
    "dot": lambda: report().to_dot(),
    "why": lambda: "\n".join(map(report().why, ("linear", "exp", "mul", "layer_norm"))),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_is_the_golden_one(name: str) -> None:
    said = re.sub(r"took .*?\)\.", "took T.", TEXTS[name](), flags=re.DOTALL) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("REWRITE_GOLDEN"):
        path.write_text(said, encoding="utf-8")
    assert said == path.read_text(encoding="utf-8")
