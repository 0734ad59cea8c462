"""Each test of a command runs in a folder of its own, which holds factories."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

NETS = """
import torch
from torch import nn

print("the module is imported")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x, *, times=1):
        print("the model runs")
        for _ in range(times):
            x = self.fc(x)
        return x.exp()

    @staticmethod
    def example():
        return Net(), (torch.ones(64, 64),)

class Branches(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > 0 else -y

class Scaled(nn.Linear):
    def forward(self, x, *, scale):
        return super().forward(x) * scale

class TooLarge(nn.Linear):
    def forward(self, x):
        raise torch.OutOfMemoryError("out of memory: tried to allocate 9 PiB")

class Stops(nn.Linear):
    calls = most = 0

    def forward(self, x):
        Stops.calls += 1
        if Stops.calls > Stops.most:
            raise KeyboardInterrupt
        return super().forward(x)

def small():
    return Net.example()

def thrice():
    return Net(), (torch.ones(64, 64),), {"times": 3}

def layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return net.eval(), (torch.randn(4, 64),)

def scaled():
    return Scaled(64, 64).eval(), (torch.randn(4, 64),), {"scale": torch.randn(4, 1)}

def branches():
    return Branches(8, 8), (torch.ones(2, 8),)

def too_large():
    return TooLarge(8, 8), (torch.ones(4, 8),)

def stops():
    Stops.calls, Stops.most = 0, 20  # each of two ways is set up by 8 calls
    return Stops(8, 8), (torch.ones(4, 8),)

def stops_early():
    Stops.calls, Stops.most = 0, 3
    return Stops(8, 8), (torch.ones(4, 8),)

def raises():
    raise ValueError("no weights\\x1b[2J here")

def leaves():
    raise SystemExit(0)

def takes(size):
    return small()

def one():
    return Net()

def four():
    return Net(), (), {}, ()

def no_model():
    return Net, (torch.ones(64, 64),)

def no_tuple():
    return Net(), torch.ones(64, 64)

def no_dict():
    return Net(), (), [("times", 3)]

def no_names():
    return Net(), (torch.ones(64, 64),), {3: 1}

def bad_shape():
    return Net(), (torch.ones(3, 3),)

constant = 3
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "broken.py").write_text("import torch\n\nx = 1 / 0\n")
    (tmp_path / "no_python.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in ("nets", "broken"):
        sys.modules.pop(name, None)
