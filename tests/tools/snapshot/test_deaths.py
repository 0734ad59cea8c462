"""Planted deaths: a snapshot is written, and its replay names the op and the line."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.training import snapshot_files as files
from autoamp_cli import main
from tests.says import says
from tests.small_models import BF16

FP16: dict[str, Any] = {**BF16, "precision": "fp16", "loss_scale": "off"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu())  # plain


class Attention(Net):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.first(x), self.second(x)
        scores = torch.matmul(q, k.t())
        return torch.softmax(scores, -1) @ x


class Labelled(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return (super().forward(x) - labels).square().mean()


class Dead(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * (x[:, :1] > 99)).relu())


class Root(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = (y * self.second.bias[0]).abs().sqrt()
        return self.second(y)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            y = self.first(x)
            y = torch.matmul(y, y.t())
            return torch.matmul(y / y.abs().amax(), x)

        return self.second(checkpoint(inside, x, use_reentrant=False))


class Square(Net):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y * y)


class Drawn(Net):
    """Divides by 0 where the generator gives a small number."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) / (torch.rand(()) > 0.5))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def only_first(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([model.first.weight], lr=1e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def without_eps(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), eps=0.0)


@torch.no_grad()
def grow(step: int, model: Any, *_: Any) -> None:
    for each in (model.first, model.second):
        each.weight.mul_(6)


def spoil_batch(step: int, _: Any, x: Tensor, *__: Any) -> None:
    if step == 3:
        x[2, 1] = torch.inf


def spoil_labels(step: int, _: Any, __: Any, labels: Tensor, *___: Any) -> None:
    if step == 3:
        labels[2, 1] = torch.nan


def raise_rate(step: int, *given: Any) -> None:
    given[-1].param_groups[0]["lr"] = 1e26 if step >= 3 else 1e-3


@torch.no_grad()
def flip(step: int, model: Any, *_: Any) -> None:
    if step == 3:
        model.second.weight[1, 2] = torch.inf


def zero_bias(step: int, model: Any, *_: Any) -> None:
    if step == 3:
        model.second.bias.data[0] = 0.0


@torch.no_grad()
def enlarge(step: int, model: Any, x: Tensor, *_: Any) -> None:
    if step == 3:
        x.mul_(1000)


@torch.no_grad()
def resume(step: int, model: Any, *_: Any) -> None:
    if step == 0:
        model.first.weight.mul_(1e3)


def nothing(*_: Any) -> None:
    pass


def by_log(out: Tensor, labels: Tensor, step: int) -> Tensor:
    return (out.abs().mean() * (0.0 if step == 3 else 1.0)).log()


def squares(out: Tensor, labels: Tensor, step: int) -> Tensor:
    return (out - labels).square().mean()


@dataclass(frozen=True)
class Death:
    model: type[Net]
    before: Any
    kind: str
    line: str
    status: int
    told: str = ""
    optimizer: Any = sgd
    options: dict[str, Any] = field(default_factory=lambda: BF16)
    loss: Any = squares


OWN = "self.second(self.first(x).relu())"
DEATHS = {
    "attention": Death(Attention, grow, "op", "scores = torch.", 0, options=FP16),
    "batch": Death(Net, spoil_batch, "input", "", 1, "input x "),
    "labels": Death(Labelled, spoil_labels, "input", "", 1, "input labels "),
    "rate": Death(Net, raise_rate, "op", OWN, 1, "1e+26"),
    "flipped": Death(
        Net, flip, "weight", "", 1, "written from outside", optimizer=adamw
    ),
    "optimizer": Death(
        Dead, nothing, "weight", "", 1, "optimizer.step()): its", without_eps
    ),
    "loss": Death(Net, nothing, "outside", ".backward()", 1, "LogB", loss=by_log),
    "backward": Death(
        Root, zero_bias, "op", "y = (y * self.second", 1, "skipped", only_first
    ),
    "checkpointed": Death(
        Checkpointed, enlarge, "op", "y = torch.matmul(y, y.t())", 0, options=FP16
    ),
    "resumed": Death(Square, resume, "op", "y", 0, options=FP16),
    "drawn": Death(Drawn, nothing, "op", "(torch.rand(()) > 0.5)", 1),
}


def train(death: Death, root: Path, steps: int = 7, **more: Any) -> nn.Module:
    model: Any = death.model()
    autoamp.convert(model, **{**death.options, **more}, record=root)
    optimizer = death.optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        labels = torch.zeros(8, 16)
        death.before(step, model, x, labels, optimizer)
        if isinstance(model, Labelled):
            loss = model(x, labels)
        else:
            loss = death.loss(model(x), labels, step)
        loss.backward()
        optimizer.step()
    return model  # type: ignore[no-any-return]


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", *arguments])


@pytest.mark.parametrize("name", [*DEATHS])
def test_a_death(name: str, tmp_path: Path) -> None:
    death, root = DEATHS[name], tmp_path / "snapshots"
    train(death, root)
    (where,) = files.found_in(root)
    assert sorted(p.name for p in where.iterdir()) == [files.TEXT, files.TENSORS]
    made = f"{__name__}:{death.model.__name__}"
    rules = tmp_path / "cure.toml"
    options = ("--model", made, "--write", str(rules), "--json")
    done = command(str(root), *options)
    assert done.exit_code == death.status, done.output
    found = json.loads(done.stdout)
    text = found["headline"] + " ".join(found["notes"])
    assert found["kind"] == death.kind, done.output
    assert death.line in found["source"]
    assert death.told in text
    assert found["in_fp32"] == (death.status == 1)
    assert rules.exists() == (death.status == 0)
    if death.status == 0:
        assert found["dtype"] == "fp16"
        train(death, tmp_path / "cured", steps=found["step"], rules=str(rules))
        assert not [*(tmp_path / "cured").iterdir()]


def test_a_call_from_python_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    train(DEATHS["attention"], tmp_path)
    model = Attention().eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = torch.get_rng_state()
    found = autoamp.find_overflow(model, snapshot=tmp_path)
    assert "scores = torch." in found.source
    says(found, "the loss was")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(drawn, torch.get_rng_state())
    assert not model.training
    assert found.rule is not None
    cure = {"deny": found.rule.deny, "keep": found.rule.keep}
    assert not autoamp.find_overflow(model, snapshot=tmp_path, **cure)


# -- what cannot be replayed says why --------------------------------------------------


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)


HARMS = {
    "empty": "holds no snapshot",
    "gone": "is no folder",
    "json": "cannot be read",
    "field": "is damaged",
    "tensors": "cannot be read",
    "version": "format 99",
    "shapes": "first.bias is [32]",
    "no factory": "give --model",
    "no such factory": "has no Nowhere",
}


@pytest.mark.parametrize("harm", [*HARMS])
def test_errors_say_what_to_do(harm: str, tmp_path: Path) -> None:
    root, made = tmp_path / "snapshots", f"{__name__}:Net"
    train(DEATHS["batch"], root)
    (where,) = files.found_in(root)
    text = where / files.TEXT
    facts = json.loads(text.read_text())
    if harm in ("empty", "gone"):
        shutil.rmtree(where if harm == "empty" else root)
    elif harm == "json":
        text.write_text("{")
    elif harm == "field":
        del facts["args"]
        text.write_text(json.dumps(facts))
    elif harm == "tensors":
        data = (where / files.TENSORS).read_bytes()
        (where / files.TENSORS).write_bytes(data[: len(data) // 2])
    elif harm == "version":
        text.write_text(json.dumps({**facts, "format": 99}))
    elif harm == "shapes":
        made = f"{__name__}:Wider"
    elif harm == "no such factory":
        made = f"{__name__}:Nowhere"
    given = () if harm == "no factory" else ("--model", made)
    done = command(str(root), *given)
    assert done.exit_code == 2, done.output
    assert HARMS[harm] in done.output.replace("\n", " ")
    assert "Traceback" not in done.output


def test_what_does_not_die_again_says_so(tmp_path: Path) -> None:
    train(DEATHS["batch"], tmp_path)
    (where,) = files.found_in(tmp_path)
    snapshot = files.read(where)
    x = snapshot.tensors["args.0"].nan_to_num(0.0, 0.0, 0.0)
    facts = {**snapshot.facts, "loss": {**snapshot.facts["loss"], "own": True}}
    files.write(tmp_path, "mended", facts, {**snapshot.tensors, "args.0": x})
    shutil.rmtree(where)
    done = command(str(tmp_path), "--model", f"{__name__}:Net")
    assert done.exit_code == 3
    assert "does not die again" in done.output


def test_the_newest_of_several_is_taken(tmp_path: Path) -> None:
    train(DEATHS["batch"], tmp_path)
    train(DEATHS["flipped"], tmp_path)
    found = autoamp.find_overflow(Net(), snapshot=tmp_path)
    assert found.kind == "weight"
    says(found, "older snapshots")


def test_a_snapshot_without_weights(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("autoamp.training.snapshot.MOST_BYTES", 2000)
    train(DEATHS["batch"], tmp_path)
    facts = files.read(files.found_in(tmp_path)[0]).facts
    assert "more than 2000" in facts["weights"]
    assert facts["optimizer_state"] != "saved"
    found = autoamp.find_overflow(Net(), snapshot=tmp_path)
    assert found.name == "x"
    says(found, "no weights")


def test_an_argument_that_cannot_be_saved(tmp_path: Path) -> None:
    class Held:
        def __init__(self) -> None:
            self.x = torch.full((2, 16), torch.inf)

    class Takes(Net):
        def forward(self, held: Held) -> Tensor:  # type: ignore[override]
            return super().forward(held.x)

    model: Any = Takes()
    autoamp.convert(model, **BF16, record=tmp_path)
    model(Held()).sum().backward()
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.find_overflow(Takes(), snapshot=tmp_path)
    says(raised, "argument 0")
    assert autoamp.find_overflow(Takes(), Held(), snapshot=tmp_path).found
