"""Another torch: a flight recorder that finds no loss of a running backward.

The frames of torch's functions hold the losses, in locals that another torch may name
otherwise; the training goes on, and the records have no loss.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.compat import losses
from autoamp.flight import folder, recorder
from tests.conformance.table import Figures
from tests.small_models import BF16


def losses_of(root: Path) -> tuple[list[Any], list[Tensor], int]:
    """The losses in the ring, the weights, and how many deaths there are."""
    torch.manual_seed(0)
    model = autoamp.convert(nn.Linear(4, 4), **BF16, record=root)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        (loss * math.inf if step > 2 else loss).backward()
        optimizer.step()
    (found,) = folder.rings(root)
    noted = [r["loss"] for r in found.records if r["kind"] == "step"]
    deaths = sum(len(folder.deaths(home)) for home in folder.homes(root))
    return noted, [p.detach() for p in model.parameters()], deaths


@pytest.mark.parametrize("names", ["none", "others"])
def test_a_backward_whose_frames_tell_nothing(
    names: str, tmp_path: Path, monkeypatch, figures: Figures
) -> None:
    monkeypatch.setenv(recorder.EVERY, "1")
    known, weights, _ = losses_of(tmp_path / "known")
    assert known[:3] == [each for each in known if isinstance(each, float)]
    holders = {} if names == "none" else dict.fromkeys(losses._HOLDERS, "roots")
    monkeypatch.setattr(losses, "_HOLDERS", holders)
    noted, found, deaths = losses_of(tmp_path / "unknown")
    assert noted == [None] * 6
    assert all(map(torch.equal, found, weights))
    assert deaths == 1  # the third skipped step in a row
    figures.count("names taken away")


def test_a_backward_in_another_thread_is_found() -> None:
    """As on a GPU, whose hooks run in a thread of torch's own."""
    found = []

    def look(_: Tensor) -> None:
        there = threading.Thread(target=lambda: found.append(losses.running_losses()))
        there.start()
        there.join()

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(look)
    loss = y.sum()
    loss.backward()
    ((given, frame),) = found
    assert given[0] is loss
    assert frame is not None
    assert losses.running_losses() == ([], None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_largest_magnitudes(elsewhere: bool, dtype: torch.dtype, monkeypatch) -> None:
    """On a CPU as on other devices."""
    if elsewhere:
        monkeypatch.setattr(losses, "_largest_on_cpu", None)
        monkeypatch.setattr(losses, "_ON_CPU", "nowhere")
    parts = [torch.tensor([1.0, -7.0, 2.0]), torch.zeros(0), torch.full((2, 2), 3.0)]
    parts = [part.to(dtype) for part in parts]
    for bad, wanted in ((0.0, 7.0), (-math.inf, math.inf), (math.nan, math.nan)):
        given = [*parts, torch.tensor([[0.5, bad]], dtype=dtype).t()]
        for each in (given, given[::-1], [*given, torch.ones(2, dtype=torch.float64)]):
            found = losses.largest_magnitude(each)
            assert found is not None
            assert found.dtype == torch.float32
            assert repr(found.item()) == repr(wanted)
    assert losses.largest_magnitude([torch.ones(2, dtype=torch.int64)]) is None
