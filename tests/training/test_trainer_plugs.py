"""The callback, the precision plugin and the hook, each in its real trainer.

Each trainer is imported in the tests that need it: every worker of pytest imports this
file to list its tests, and Lightning takes seconds.
"""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autoamp
from autoamp import trainers
from tests.says import says

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:pytorch_lightning",
    "ignore:.*LeafSpec.*:FutureWarning",
    "ignore:You defined a `validation_step`",
)

OPTIONS = {"precision": "fp16", "loss_scale": 1024.0, "do_no_harm": False}
BAD = 2
"""The batch, counted from 0, whose gradients overflow."""


class Regression(nn.Module):
    """One linear layer that gives its loss; the batch `BAD` has a huge one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 1)

    def forward(self, x, weight, return_loss=True):
        return {"loss": (self.fc(x).mean(1) * weight).sum()}


class Batches(Dataset):
    """Five samples."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i):
        return {"x": torch.ones(4), "weight": torch.tensor(1e30 if i == BAD else 1.0)}


def arguments(folder, **others):
    from transformers import TrainingArguments

    return TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=1,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        **others,
    )


@pytest.mark.parametrize("late", [False, True])
def test_hugging_face(late, tmp_path) -> None:
    from transformers import Trainer

    made = {"model_init": Regression} if late else {"model": Regression()}
    callback = trainers.transformers_callback(**OPTIONS)
    data = Batches()
    trainer = Trainer(
        args=arguments(tmp_path), train_dataset=data, callbacks=[callback], **made
    )
    assert autoamp.is_converted(trainer.model)
    trainer.get_train_dataloader = lambda: DataLoader(data)
    trainer.train()
    report = autoamp.report(trainer.model)
    assert report.loss_scale.skipped_steps == 1
    assert {row.precision for row in report.ops if "linear" in row.op} == {"fp16"}
    runs = report.runs
    assert runs == 5
    trainer.predict(data)
    assert autoamp.report(trainer.model).runs > runs


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_hugging_faces_own_autocast_is_refused(name, tmp_path) -> None:
    asked = arguments(tmp_path)
    setattr(asked, name, True)  # which a Trainer on a GPU may have
    callback = trainers.transformers_callback()
    with pytest.raises(autoamp.OptionError) as raised:
        callback.on_init_end(asked, None, None, Regression())
    says(raised, option=name)


def lightning(whole: bool, seen: list[bool]):
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        """Calls itself, or the model that it holds."""

        def __init__(self) -> None:
            super().__init__()
            self.model = Regression()

        def forward(self, **batch):
            return self.model(**batch)

        def training_step(self, batch, _):
            loss = (self if whole else self.model)(**batch)["loss"]
            seen.append(any(map(autoamp.is_converted, (self, self.model))))
            return loss

        def validation_step(self, batch, _):
            self.training_step(batch, _)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    return Lit()


def fit(folder, plugin, module, data=None, **options):
    import pytorch_lightning as pl

    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        plugins=[plugin],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, DataLoader(data or Batches()))
    return trainer


@pytest.mark.parametrize("whole", [True, False])
def test_lightning(whole, tmp_path) -> None:
    from pytorch_lightning import Callback

    seen: list[bool] = []
    skipped: list[int] = []

    class Reads(Callback):
        def on_train_batch_end(self, trainer, module, *_) -> None:
            model, *_ = filter(autoamp.is_converted, module.modules())
            skipped.append(autoamp.report(model).loss_scale.skipped_steps)

    module = lightning(whole, seen)
    plugin = trainers.lightning_precision(**OPTIONS)
    trainer = fit(tmp_path, plugin, module, callbacks=[Reads()])
    assert seen == [True] * 5
    assert skipped == [int(step >= BAD) for step in range(5)]
    # All is as it was, until the trainer is asked for more.
    assert not any(map(autoamp.is_converted, module.modules()))
    seen.clear()
    trainer.validate(module, DataLoader(Batches()), verbose=False)
    assert seen == [True] * 5
    assert not any(map(autoamp.is_converted, module.modules()))


def test_lightning_keeps_a_mode_that_is_on(tmp_path) -> None:
    autoamp.enable(**OPTIONS)
    try:
        seen: list[bool] = []
        module = lightning(False, seen)
        fit(tmp_path, trainers.lightning_precision(precision="bf16"), module)
        assert seen == [True] * 5
        assert autoamp.report(module.model).compute_dtype == "fp16"
    finally:
        autoamp.disable()


def test_lightning_ends_the_mode_after_an_error(tmp_path) -> None:
    class Broken(Batches):
        def __getitem__(self, i):
            raise ZeroDivisionError

    plugin = trainers.lightning_precision(**OPTIONS)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, plugin, lightning(True, []), data=Broken())
    call = nn.Module.__call__
    autoamp.disable()
    assert nn.Module.__call__ is call


def test_accelerate() -> None:
    from accelerate import Accelerator
    from accelerate.hooks import add_hook_to_module, remove_hook_from_module

    model = add_hook_to_module(Regression(), trainers.accelerate_hook(**OPTIONS))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model, optimizer, DataLoader(Batches()))
    model, optimizer, loader = prepared
    weights = [model.fc.weight.detach().clone()]
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        weights.append(model.fc.weight.detach().clone())
    moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert moved == [step != BAD for step in range(5)]
    report = autoamp.report(model)
    assert (report.runs, len(report.graphs)) == (5, 1)
    x, weight = torch.ones(1, 4), torch.ones(1)
    exact = nn.functional.linear(x, model.fc.weight, model.fc.bias).sum()
    assert not torch.equal(model(x, weight)["loss"], exact)
    remove_hook_from_module(model)
    assert not autoamp.is_converted(model)
    assert torch.equal(model(x, weight)["loss"], exact)


ALL = [
    trainers.transformers_callback,
    trainers.lightning_precision,
    trainers.accelerate_hook,
]


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_wrong_options_are_refused_at_once(make) -> None:
    with pytest.raises(autoamp.OptionError) as raised:
        make(precision="bf61")
    says(raised, option="precision")


@pytest.mark.parametrize("make", ALL, ids=lambda make: make.__name__)
def test_each_travels_to_other_processes(make) -> None:
    plug = make(precision="bf16")
    for other in (copy.deepcopy(plug), pickle.loads(pickle.dumps(plug))):
        # Its class is made anew.
        assert type(other).__name__ == type(plug).__name__
        assert other.__reduce__()[0].keywords == plug.__reduce__()[0].keywords


def test_no_trainer_is_imported_before_it_is_asked_for() -> None:
    code = (
        "import sys, autoamp, autoamp.trainers\n"
        "names = {'transformers', 'accelerate', 'pytorch_lightning', 'lightning'}\n"
        "sys.exit(len(names & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
