"""`autoamp.Monitor` in a plain loop, in Hugging Face's Trainer and in Lightning's.

Each trainer is imported in the tests that need it: every worker of pytest imports this
file to list its tests, and Lightning takes seconds.
"""

import json
import pickle
import struct
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import autoamp
from tests.says import says

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:pytorch_lightning",
    "ignore:.*LeafSpec.*:FutureWarning",
)

SCALE = 1024.0
OPTIONS = {"precision": "fp16", "loss_scale": SCALE, "do_no_harm": False}
BAD = 2
"""The batch, counted from 0, whose gradients overflow."""


class Curves:
    """A writer that keeps all it is given."""

    def __init__(self) -> None:
        self.scalars: dict[str, list[tuple[int, float]]] = {}
        self.texts: list[tuple[str, str, int]] = []

    def add_scalar(self, tag, scalar_value, global_step) -> None:
        self.scalars.setdefault(tag, []).append((global_step, float(scalar_value)))

    def add_text(self, tag, text, global_step) -> None:
        self.texts.append((tag, text, global_step))


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


def expect(curves: Curves, group: str = "autoamp", steps=(1, 2, 3, 4, 5)) -> None:
    skipped = [float(step > BAD) for step in steps]
    assert curves.scalars[f"{group}/skipped_steps"] == list(
        zip(steps, skipped, strict=True)
    )
    assert curves.scalars[f"{group}/loss_scale"] == [(step, SCALE) for step in steps]
    assert {graphs for _, graphs in curves.scalars[f"{group}/captured_graphs"]} == {1}


def plain(monitor, model=None, **numbers) -> nn.Module:
    model = model or Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = autoamp.convert(model, optimizer, **OPTIONS)
    monitor.model = model
    for batch in DataLoader(Batches()):
        model(**batch)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(**numbers)
    return model


def test_a_plain_loop() -> None:
    curves = Curves()
    model = plain(autoamp.Monitor(curves))
    expect(curves)
    assert {tag for tag, _, _ in curves.texts} == {"autoamp/skipped"}
    assert curves.texts[0][2] == BAD + 1
    assert curves.texts[-1][1] == autoamp.report(model).loss_scale.skips[-1]


def test_every_so_many_steps() -> None:
    curves = Curves()
    plain(autoamp.Monitor(curves, every=2))
    expect(curves, steps=(2, 4))


def test_steps_by_their_own_number() -> None:
    curves = Curves()
    plain(autoamp.Monitor(curves), step=70)
    assert {step for step, _ in curves.scalars["autoamp/loss_scale"]} == {70}


def test_bf16_has_no_loss_scale_to_write() -> None:
    curves = Curves()
    model = autoamp.convert(Regression(), precision="bf16", do_no_harm=False)
    monitor = autoamp.Monitor(curves, model)
    model(torch.ones(1, 4), torch.ones(1))
    monitor.step()
    assert curves.scalars == {"autoamp/captured_graphs": [(1, 1.0)]}


def test_a_converted_module_inside_a_model() -> None:
    curves = Curves()
    inner = autoamp.convert(Regression(), **OPTIONS)
    inner(torch.ones(1, 4), torch.ones(1))
    autoamp.Monitor(curves, nn.ModuleDict({"head": inner})).step()
    assert curves.scalars["autoamp/head/loss_scale"] == [(1, SCALE)]


def trained_by_hugging_face(folder, callbacks, model) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder,
        max_steps=5,
        per_device_train_batch_size=1,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    data = Batches()
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.get_train_dataloader = lambda: DataLoader(data)
    trainer.train()


def test_hugging_face(tmp_path) -> None:
    curves = Curves()
    model = autoamp.convert(Regression(), **OPTIONS)
    trained_by_hugging_face(tmp_path, [autoamp.Monitor(curves)], model)
    expect(curves)
    assert curves.texts


def test_hugging_face_lends_no_writer(tmp_path) -> None:
    model = autoamp.convert(Regression(), **OPTIONS)
    with pytest.raises(autoamp.OptionError):
        trained_by_hugging_face(tmp_path, [autoamp.Monitor()], model)


def test_every_event_of_both_trainers_is_answered() -> None:
    from pytorch_lightning import Callback
    from transformers import TrainerCallback

    monitor = autoamp.Monitor(Curves())
    for parent in (TrainerCallback, Callback):
        for event in vars(parent):
            if not event.startswith("_"):
                assert hasattr(monitor, event), event
    assert not hasattr(monitor, "no_event")
    assert pickle.loads(pickle.dumps(autoamp.Monitor(every=3))).every == 3


def logger_to(curves: Curves):
    """A logger of Lightning that writes the metrics to `curves`."""
    from pytorch_lightning.loggers.logger import Logger

    class Kept(Logger):
        name, version = "kept", 0

        @property
        def experiment(self):
            return curves

        def log_hyperparams(self, *args, **kwargs) -> None:
            """There is nothing to keep of these."""

        def log_metrics(self, metrics, step=None) -> None:
            for tag, value in metrics.items():
                curves.add_scalar(tag, value, step)

    return Kept()


def trained_by_lightning(folder, callback, logger, **kwargs) -> None:
    """Trains a module of Lightning round a converted model, two batches to a step."""
    import pytorch_lightning as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = autoamp.convert(Regression(), **OPTIONS)

        def training_step(self, batch, _):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    trainer = pl.Trainer(
        max_epochs=1,
        log_every_n_steps=1,
        accelerator="cpu",
        logger=logger,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **kwargs,
    )
    trainer.fit(Lit(), DataLoader(Batches()))


def test_lightning_by_its_own_logger(tmp_path) -> None:
    curves = Curves()
    trained_by_lightning(tmp_path, autoamp.Monitor(), logger_to(curves))
    expect(curves, "autoamp/model")
    assert curves.texts


def test_lightning_by_a_writer_of_the_users(tmp_path) -> None:
    curves = Curves()
    trained_by_lightning(tmp_path, autoamp.Monitor(curves), False)
    expect(curves, "autoamp/model")


def test_a_step_of_several_batches_is_written_once(tmp_path) -> None:
    curves = Curves()
    monitor = autoamp.Monitor(curves)
    trained_by_lightning(tmp_path, monitor, False, accumulate_grad_batches=2)
    steps = [step for step, _ in curves.scalars["autoamp/model/loss_scale"]]
    assert steps == [1, 2, 3]


def test_tensorboard_reads_what_was_written(tmp_path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        plain(autoamp.Monitor(writer))
    read = EventAccumulator(str(tmp_path)).Reload()
    values = [(e.step, e.value) for e in read.Scalars("autoamp/skipped_steps")]
    assert values == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert "autoamp/skipped/text_summary" in read.Tags()["tensors"]


@pytest.mark.filterwarnings("ignore")  # of the libraries that MLflow imports
def test_mlflow_reads_what_was_written(tmp_path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/runs.db")
    mlflow.create_experiment("autoamp", artifact_location=str(tmp_path / "artifacts"))
    mlflow.set_experiment("autoamp")
    with mlflow.start_run() as run:
        model = plain(autoamp.Monitor(mlflow))
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "autoamp/skipped_steps")
    values = [(each.step, each.value) for each in history]
    assert values == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    tags = client.get_run(run.info.run_id).data.tags
    assert tags["autoamp/skipped"] == autoamp.report(model).loss_scale.skips[-1]


def records_of(data: bytes) -> Iterator[bytes]:
    """The records of a file of W&B: LevelDB's log, behind a header of seven bytes."""
    record, at, block = b"", 7, 2**15
    while at < len(data):
        if block - at % block < 7:  # no room for another head of a piece
            at += block - at % block
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        at += 7 + size
        record += data[at - size : at]
        if kind in (1, 4):  # the whole of a record, or its last piece
            yield record
            record = b""


def rows_of(folder) -> list[dict[str, object]]:
    """The rows of the one offline run of W&B in a folder."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = []
    for record in map(Record.FromString, records_of(file.read_bytes())):
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            keys = [item.key or "/".join(item.nested_key) for item in items]
            rows = [json.loads(item.value_json) for item in items]
            found.append(dict(zip(keys, rows, strict=True)))
    return found


@pytest.mark.filterwarnings("ignore")  # W&B's own
@pytest.mark.parametrize("own", [0, 1, 3], ids="{} own rows a step".format)
def test_wandb_reads_what_was_written(own, tmp_path, monkeypatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=tmp_path, project="autoamp") as run:

        class Loop(autoamp.Monitor):
            """Its script logs rows of its own before each step of the monitor."""

            def step(self, step=None) -> None:
                for number in range(own):
                    run.log({"loss": number})
                super().step(step)

        model = plain(Loop(run))
    wandb.teardown()  # the service that writes the file ends, and has written all
    rows = rows_of(tmp_path)
    skipped = [
        row["autoamp/skipped_steps"] for row in rows if "autoamp/loss_scale" in row
    ]
    assert skipped == [0, 0, 1, 1, 1]
    assert sum("loss" in row for row in rows) == 5 * own
    texts = [row["autoamp/skipped"] for row in rows if "autoamp/skipped" in row]
    assert texts[-1] == autoamp.report(model).loss_scale.skips[-1]


def test_an_accelerator_is_a_writer() -> None:
    class Kept:
        """The method of an `Accelerator` that hands figures to its trackers."""

        def __init__(self) -> None:
            self.rows = []

        def log(self, values, step=None, log_kwargs=None) -> None:
            self.rows.append((step, values))

    kept = Kept()
    plain(autoamp.Monitor(kept))
    steps = [step for step, row in kept.rows if "autoamp/loss_scale" in row]
    assert steps == [1, 2, 3, 4, 5]


def test_each_logger_of_lightning_gets_all(tmp_path) -> None:
    first, second = Curves(), Curves()
    loggers = [logger_to(first), logger_to(second)]
    trained_by_lightning(tmp_path, autoamp.Monitor(), loggers)
    assert first.scalars == second.scalars
    assert first.texts == second.texts != []


def test_what_cannot_be_written_is_said(caplog) -> None:
    for given in ({"writer": 3}, {"model": 3}, {"every": 0}, {"every": 1.5}):
        with pytest.raises(autoamp.OptionError) as raised:
            autoamp.Monitor(**given)
        says(raised, option=next(iter(given)))
    with pytest.raises(autoamp.OptionError):
        autoamp.Monitor(Curves()).step()
    with pytest.raises(autoamp.OptionError):
        autoamp.Monitor(model=Regression()).step()
    monitor = autoamp.Monitor(Curves(), Regression())
    for _ in range(2):
        monitor.step()
    said = [r for r in caplog.records if "no module of Regression" in r.getMessage()]
    assert len(said) == 1
