"""Each recipe of docs/recipes.md trains in its real tool, and converts the model.

A recipe is a diff: its lines with `+` are the recipe, and its lines with `-` the loop
before.  The other names in it are those of `namespace`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import autoamp
from autoamp import trainers
from tests.one_rank import one_rank
from tests.repository.pages import REPO, Block, blocks
from tests.repository.test_docs import run

DDP, LIGHTNING, ACCELERATE, TRAINER = blocks(REPO / "docs" / "recipes.md", "diff")
TOOLS = {"lightning": LIGHTNING, "accelerate": ACCELERATE, "trainer": TRAINER}

# The tools' own: what they deprecate, and advice on workers and epochs.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(nn.Module):
    """Its argument is called as the column of the dataset that Trainer keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x, labels=None):
        return self.layers(x)


def namespace(block: Block, converted: list[bool]) -> dict[str, Any]:
    """The names that a recipe takes for granted.

    Args:
        converted: gets for each step whether the model is converted then.
    """
    torch.manual_seed(0)
    model = Net()
    x = torch.randn(16, 64)
    loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=4)

    def loss_fn(out, y):
        whole = names.get("module", names["model"])  # by now inside of a wrapper
        converted.append(any(map(autoamp.is_converted, whole.modules())))
        return nn.functional.mse_loss(out, y)

    names: dict[str, Any] = {
        "autoamp": autoamp,
        "data": loader,
        "dataset": [{"x": one, "labels": one.flip(0)} for one in x],
        "DistributedDataParallel": DistributedDataParallel,
        "loader": loader,
        "loss_fn": loss_fn,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "torch": torch,
    }
    if block is LIGHTNING:
        names |= lightning(model, loss_fn)
    elif block is ACCELERATE:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
        names["Accelerator"] = partial(Accelerator, cpu=True)
    elif block is TRAINER:
        names |= transformers(loss_fn)
    return names


def lightning(model, loss_fn) -> dict[str, Any]:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch, _):
            return loss_fn(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    class Lightning:
        Trainer = partial(
            pl.Trainer,
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    return {"pl": Lightning, "module": Module()}


def transformers(loss_fn) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    class Watched(Trainer):
        def compute_loss(self, model, inputs, **_):
            return loss_fn(model(inputs["x"]), inputs["labels"])

    quick = {"max_steps": 4, "per_device_train_batch_size": 4, "disable_tqdm": True}
    arguments = partial(TrainingArguments, use_cpu=True, report_to=[], **quick)
    return {"Trainer": Watched, "TrainingArguments": arguments}


def trained(block: Block, sign: str) -> list[bool]:
    """Whether the model was converted at each step of one side of a recipe."""
    converted: list[bool] = []
    names = namespace(block, converted)
    model = names["model"]
    before = [weight.detach().clone() for weight in model.parameters()]
    lines = block.text.splitlines()
    kept = [line[1:] for line in lines if line[:1] in {" ", sign}]
    run(replace(block, text="\n".join(kept)), names)
    for weight, old in zip(model.parameters(), before, strict=True):
        assert weight.dtype == torch.float32
        assert not torch.equal(weight, old)
        assert weight.isfinite().all()
    return converted


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Both dtypes pay, a model of four steps counts as hot, files go to a folder."""
    units = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)
    monkeypatch.chdir(tmp_path)
    at_once = partial(trainers.lightning_precision, hot=False)
    monkeypatch.setattr(trainers, "lightning_precision", at_once)


def test_a_loop_under_ddp() -> None:
    with one_rank():
        assert trained(DDP, "+") == [True] * 4


@pytest.mark.parametrize("tool", TOOLS)
def test_a_trainer(tool: str) -> None:
    assert trained(TOOLS[tool], "-") == [False] * 4
    assert trained(TOOLS[tool], "+") == [True] * 4


@pytest.mark.parametrize("name", ["DDP", *TOOLS])
def test_a_recipe_is_five_lines_more_or_less(name: str) -> None:
    lines = TOOLS.get(name, DDP).text.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 5
