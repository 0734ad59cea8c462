"""When a snapshot is written: in loops, with scalers, on ranks, and only once."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from autoamp.compat import gradients
from autoamp.training import snapshot as write
from autoamp.training import snapshot_files as files
from tests.distributed.ranks import Ranks
from tests.logs import warned
from tests.processes import run_script
from tests.says import says
from tests.small_models import BF16

FP16: dict[str, Any] = {**BF16, "precision": "fp16"}


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(model: nn.Module, steps: int, bad: int = -1) -> list[Tensor]:
    """Trains; from step `bad` on the loss is infinite."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        x, labels = batch(step)
        loss = (model(x) - labels).square().mean()
        (loss * math.inf if step >= bad >= 0 else loss).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def snapshots(root: Path) -> list[files.Snapshot]:
    there = any(root.iterdir()) if root.is_dir() else False
    return [files.read(each) for each in files.found_in(root)] if there else []


def test_a_training_that_lives_computes_the_same_numbers(tmp_path: Path) -> None:
    recorded = train(autoamp.convert(net(), **BF16, record=tmp_path), 5)
    assert all(map(torch.equal, recorded, train(autoamp.convert(net(), **BF16), 5)))
    assert not [*tmp_path.iterdir()]


def test_one_snapshot_of_the_first_infinite_loss(tmp_path: Path) -> None:
    model = autoamp.convert(net(), **BF16, record=tmp_path)
    before = train(autoamp.convert(net(), **BF16), 2)
    train(model, 6, bad=2)
    (found,) = snapshots(tmp_path)
    facts = found.facts
    assert (facts["cause"], facts["step"], facts["loss"]["value"]) == ("loss", 3, "inf")
    assert facts["weights_of"] == "before the step"
    named = found.beginning("model.")
    assert [*named] == sorted(dict(model.named_parameters()))
    after = dict(zip(dict(model.named_parameters()), before, strict=True))
    assert all(torch.equal(named[name], after[name]) for name in named)
    assert torch.equal(found.tensors["args.0"], batch(2)[0])
    (optimizer,) = facts["optimizers"]
    assert optimizer["class"] == "AdamW"
    assert optimizer["params"] == [*after]
    assert "optimizer.step()" in optimizer["line"]
    assert found.beginning("optimizer.0.")


def test_the_third_skipped_step_in_a_row(tmp_path: Path) -> None:
    """The loss is finite, and its gradient is not; the scale is that of the call."""
    model = autoamp.convert(net(), **FP16, loss_scale=1024.0, record=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(6):
        optimizer.zero_grad()
        # The root of 0 is 0, and its slope is infinite.
        (model(batch(step)[0]) * 0).square().sum().sqrt().backward()
        optimizer.step()
    (found,) = snapshots(tmp_path)
    assert (found.facts["cause"], found.facts["step"]) == ("skips", 3)
    assert found.facts["scale"] == 1024.0
    assert "not finite" in found.facts["why"]
    assert not bool(found.tensors["gradient.0"].isfinite().all())


def test_a_grad_scaler(tmp_path: Path) -> None:
    """Steps that it skips never reach the optimizer; the loss is seen all the same."""
    model = autoamp.convert(net(), **FP16, record=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(4):
        optimizer.zero_grad()
        x, labels = batch(step)
        loss = (model(x) - labels).square().mean()
        scaler.scale(loss * math.inf if step == 2 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    (found,) = snapshots(tmp_path)
    assert (found.facts["cause"], found.facts["step"]) == ("loss", 3)


def test_a_flag_that_only_a_kernel_knows_is_read_a_call_later(tmp_path: Path) -> None:
    options = autoamp.training.options.Options(record=tmp_path)
    writer = write.SnapshotWriter(tmp_path, options)
    model = autoamp.convert(net(), **BF16)
    writer.scaling = model._autoamp.engine.record.scaling
    for step in range(4):
        writer.begin(model, batch(step)[:1], {})
        writer.stepped(torch.ones(()))
    (found,) = snapshots(tmp_path)
    assert found.facts["cause"] == "skips"
    assert found.facts["weights_of"] == "before the step"
    assert torch.equal(found.tensors["args.0"], batch(2)[0])


@pytest.mark.parametrize("way", ["converted again", "reverted"])
def test_a_conversion_that_is_over_writes_nothing(way: str, tmp_path: Path) -> None:
    model = autoamp.convert(net(), **BF16, record=tmp_path / "a")
    train(model, 1)
    if way == "reverted":
        autoamp.revert(model)
    else:
        autoamp.convert(model, **BF16, record=tmp_path / "b")
    train(model, 1, bad=0)
    assert not snapshots(tmp_path / "a")
    assert len(snapshots(tmp_path / "b")) == (way != "reverted")


def test_an_error_ends_the_watch_and_never_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("no space left")

    model = autoamp.convert(net(), **BF16, record=tmp_path)
    monkeypatch.setattr(files, "_safetensors", full)
    train(model, 3, bad=1)
    assert not [*tmp_path.iterdir()], "whole or not at all"
    assert len([line for line in warned(caplog) if "no space left" in line]) == 1


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.convert(net(), **BF16, record=tmp_path / "file")
    says(raised, "file", option="a folder that can be written")


def test_a_torch_whose_backward_tells_no_loss(tmp_path: Path, monkeypatch) -> None:
    """Its frames name their locals otherwise; three skipped steps are seen still."""
    monkeypatch.setattr(gradients, "_HOLDERS", {})
    train(autoamp.convert(net(), **BF16, record=tmp_path), 6, bad=2)
    (found,) = snapshots(tmp_path)
    assert (found.facts["cause"], found.facts["step"]) == ("skips", 5)


SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(4):
    x = torch.full((8, 64), float("inf") if step == 2 else 1.0)
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_automatic_mode(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    variables = {"ENABLE": "1", "RECORD_DIR": str(tmp_path / "found")}
    variables |= {"PRECISION": "bf16", "DO_NO_HARM": "0"}
    environ = {f"AUTOAMP_{name}": value for name, value in variables.items()}
    done = run_script(tmp_path / "train.py", cwd=tmp_path, **environ)
    assert done.returncode == 0, done.stderr
    (found,) = snapshots(tmp_path / "found")
    assert (found.facts["label"], found.facts["step"]) == ("Sequential", 3)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def trained_by_ranks(rank: int, root: str) -> None:
    """Trains with DDP; the loss of rank 1 alone is infinite."""
    model = autoamp.convert(net(), **BF16, record=root)
    train(DistributedDataParallel(model), 3, bad=2 if rank == 1 else -1)
    autoamp.revert(model)


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no process groups")
def test_the_rank_that_dies_writes(tmp_path: Path, two: Ranks) -> None:
    two.run(trained_by_ranks, str(tmp_path))
    (found,) = snapshots(tmp_path)
    assert (found.facts["rank"], found.facts["world"]) == (1, 2)
    assert "rank-1-step-3" in found.path.name


def test_a_backward_in_another_thread_is_found() -> None:
    """As on a GPU, whose hooks run in a thread of torch's own."""
    found = []

    def look(_: Tensor) -> None:
        there = threading.Thread(
            target=lambda: found.append(gradients.running_losses())
        )
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
    assert gradients.running_losses() == ([], None)
