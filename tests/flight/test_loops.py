"""Other loops: a GradScaler, Trainer, two ranks, and models converted twice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import autoamp
from autoamp.flight import folder, ring
from tests.distributed.ranks import Ranks
from tests.small_models import BF16

FP16: dict[str, Any] = {**BF16, "precision": "fp16"}


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(model: nn.Module, steps: int, bad: int = -1) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        x, labels = batch(step)
        loss = (model(x) - labels).square().mean()
        (loss * math.inf if step == bad else loss).backward()
        optimizer.step()


def steps_of(records: ring.Records) -> list[dict[str, Any]]:
    return [r for r in records.records if r["kind"] == "step"]


def deaths_of(root: Path) -> list[dict[str, Any]]:
    return [
        folder.read_death(each)
        for home in folder.homes(root)
        for each in folder.deaths(home)
    ]


# -- a model that is converted again, or reverted --------------------------------------


def test_a_second_conversion_ends_the_first_recorder(tmp_path: Path) -> None:
    model = autoamp.convert(net(), **BF16, record=tmp_path / "a")
    train(model, 2)
    first = model._autoamp.call.told
    autoamp.convert(model, **BF16, record=tmp_path / "b")
    assert first.off
    assert first._ring._file == -1
    train(model, 3)
    (a,), (b,) = folder.rings(tmp_path / "a"), folder.rings(tmp_path / "b")
    assert [r["step"] for r in steps_of(a)] == [1, 2]
    assert [r["step"] for r in steps_of(b)] == [1, 2, 3]


def test_a_second_conversion_without_a_recorder_ends_it(tmp_path: Path) -> None:
    model = autoamp.convert(net(), **BF16, record=tmp_path)
    train(model, 2)
    first = model._autoamp.call.told
    autoamp.convert(model, **BF16)
    train(model, 2)
    assert first.off
    assert len(steps_of(folder.rings(tmp_path)[0])) == 2


def test_a_conversion_that_fails_leaves_the_recorder(tmp_path: Path) -> None:
    model = autoamp.convert(net(), **BF16, record=tmp_path)
    train(model, 1)
    with pytest.raises(Exception, match="mat1"):
        autoamp.convert(model, **BF16, example_inputs=(torch.ones(2, 3),))
    train(model, 1)
    assert len(steps_of(folder.rings(tmp_path)[0])) == 2


def test_revert_closes_the_ring(tmp_path: Path) -> None:
    model = autoamp.convert(net(), **BF16, record=tmp_path)
    train(model, 1)
    recorder = model._autoamp.call.told
    autoamp.revert(model)
    assert recorder.off
    assert recorder._ring._file == -1


# -- a GradScaler ----------------------------------------------------------------------


def test_a_grad_scaler_steps(tmp_path: Path) -> None:
    """Steps that it skips never reach the optimizer; the loss is seen all the same."""
    model = autoamp.convert(net(), **FP16, record=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        x, labels = batch(step)
        loss = (model(x) - labels).square().mean()
        loss = loss * math.inf if step == 2 else loss
        losses.append(64 * loss.item())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    (found,) = folder.rings(tmp_path)
    seen = steps_of(found)
    assert [r["loss"] for r in seen[:2]] == losses[:2]
    assert [r["taken"] for r in seen] == [True] * 3
    (death,) = deaths_of(tmp_path)
    assert (death["cause"], death["step"]) == ("loss", 3)


# -- Trainer ---------------------------------------------------------------------------


class Words(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = (torch.arange(12) + 7 * i) % 60
        return {"input_ids": ids, "labels": ids}


@pytest.mark.thorough
def test_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=48, n_layer=1, n_head=4, n_positions=32
    )
    model = transformers.GPT2LMHeadModel(config)
    autoamp.convert(model, **BF16, record=tmp_path / "flight")
    losses: list[float] = []

    class Own(transformers.Trainer):  # type: ignore[misc, name-defined]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            loss = loss * math.inf if self.state.global_step == 2 else loss
            losses.append(loss.item())
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        max_steps=3,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    Own(model, arguments, train_dataset=Words()).train()
    (found,) = folder.rings(tmp_path / "flight")
    assert [r["loss"] for r in steps_of(found)] == [*losses[:2], "inf"]
    assert [r["taken"] for r in steps_of(found)] == [True, True, False]
    (death,) = deaths_of(tmp_path / "flight")
    assert (death["cause"], death["step"]) == ("loss", 3)
    names = {name for frame in death["caller"] for name in frame["locals"]}
    assert "inputs" in names
    (call,) = death["calls"]
    assert {key for key, _ in call["kwargs"]["dict"]} >= {"input_ids", "labels"}


# -- two ranks -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def trained_by_ranks(rank: int, root: str) -> str:
    """Trains with DDP; the loss of rank 1 alone is infinite in the third step."""
    model = autoamp.convert(net(), **BF16, record=root)
    train(DistributedDataParallel(model), 4, bad=2 if rank == 1 else -1)
    home = model._autoamp.call.told.home
    autoamp.revert(model)
    return str(home)


@pytest.mark.thorough
@pytest.mark.skipif(not torch.distributed.is_available(), reason="no process groups")
def test_ranks_have_rings_of_one_run(tmp_path: Path, two: Ranks) -> None:
    homes = [Path(each) for each in two.run(trained_by_ranks, str(tmp_path))]
    assert homes[0].parent == homes[1].parent
    assert [each.name for each in homes] == ["rank-00000", "rank-00001"]
    rings = [ring.read(home / folder.RING) for home in homes]
    headers = [(r.header["rank"], r.header["world"]) for r in rings]
    assert headers == [(0, 2), (1, 2)]
    for each in rings:
        assert [r["step"] for r in steps_of(each)][:3] == [1, 2, 3]
        taken = [r["taken"] for r in steps_of(each)]
        assert taken == [True, True, False, True]
    assert [r["loss"] for r in steps_of(rings[1])][2] == "inf"
    assert math.isfinite([r["loss"] for r in steps_of(rings[0])][2])
    assert folder.deaths(homes[0]) == []
    (death,) = folder.deaths(homes[1])
    assert folder.read_death(death)["rank"] == 1


@pytest.mark.thorough
def test_a_skipped_step_and_its_death_have_one_number(tmp_path: Path) -> None:
    """Each step of each optimizer of a model counts."""
    model = autoamp.convert(net(), **BF16, record=tmp_path)
    parts = [model[0].parameters(), model[2].parameters()]
    optimizers = [torch.optim.SGD(each, 1e-3) for each in parts]
    for step in range(3):
        model.zero_grad()
        x, labels = batch(step)
        loss = nn.functional.mse_loss(model(x * torch.nan if step == 2 else x), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    skips = autoamp.report(model).loss_scale.skips
    assert [why.partition(":")[0] for why in skips] == ["step 5", "step 6"]
    assert [death["step"] for death in deaths_of(tmp_path)] == [5]
