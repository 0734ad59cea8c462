"""The recorder: training is the same with it, and a death has what a replay needs."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from autoamp.errors import OptionError
from autoamp.flight import folder, recorder, ring
from autoamp.model.conversion import conversion_of

BF16: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
FP16: dict[str, Any] = {"precision": "fp16", "do_no_harm": False}


class Net(nn.Module):
    """A model with dropout and a buffer, whose results are in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.second(self.drop(self.norm(self.first(x)).relu()))}


def batch(step: int, bad: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x, y = torch.randn(6, 8, generator=draw), torch.randn(6, 4, generator=draw)
    if step in bad:
        y[0, 0] = torch.inf
    return x, y


def train(
    steps: int, bad: tuple[int, ...] = (), pieces: int = 1, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = autoamp.convert(Net(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    criterion = nn.MSELoss()
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(pieces):
            x, labels = batch(step, bad)
            loss = criterion(model(x)["out"], labels)
            loss.backward()
        optimizer.step()
    return model, optimizer


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [v for s in optimizer.state.values() for v in s.values()]
    tensors = [*model.state_dict().values(), *states, torch.get_rng_state()]
    return [each.clone() for each in tensors]


def one(root: Path) -> ring.Records:
    (found,) = folder.rings(root)
    return found


def steps_in(root: Path) -> list[dict[str, Any]]:
    return [r for r in one(root).records if r["kind"] == "step"]


# -- the training is what it was -------------------------------------------------------


@pytest.mark.thorough(but=["scaled-bad1"])
@pytest.mark.parametrize("bad", [(), (2, 3, 4, 5)])
@pytest.mark.parametrize(
    "options",
    [BF16, FP16, {**BF16, "guard": False}, {**BF16, "loss_scale": "dynamic"}],
    ids=["bf16", "fp16", "no guard", "scaled"],
)
def test_a_recorded_training_is_the_same_to_the_bit(
    options: dict[str, Any], bad: tuple[int, ...], tmp_path: Path, monkeypatch
) -> None:
    plain = state_of(*train(8, bad, 2, **options))
    recorded = state_of(*train(8, bad, 2, **options, record=tmp_path / "a"))
    monkeypatch.setenv("AUTOAMP_RECORD_OPS", "*")
    watched = state_of(*train(8, bad, 2, **options, record=tmp_path / "b"))
    for found in (recorded, watched):
        assert len(found) == len(plain)
        assert all(
            torch.equal(a.nan_to_num(), b.nan_to_num())
            for a, b in zip(plain, found, strict=True)
        )
    assert len(steps_in(tmp_path / "a")) == 8
    assert steps_in(tmp_path / "b")[-1]["ops"]


def test_without_record_there_is_nothing_of_it() -> None:
    model, optimizer = train(1, **BF16)
    state = conversion_of(model)
    assert type(state.call).__name__ == "Entry"
    assert state.engine.record.scaling.on_step == ()
    assert optimizer._autoamp.listeners == ()


def test_neither_model_nor_graph_is_kept_alive(tmp_path: Path) -> None:
    model, optimizer = train(2, record=tmp_path, **BF16)
    home = one(tmp_path).path
    loss = model(batch(9)[0])["out"].sum()
    node, there = loss.grad_fn, weakref.ref(model)
    del node, loss, model, optimizer
    gc.collect()
    assert there() is None
    assert len(ring.read(home).records) == 2


# -- what the ring says ----------------------------------------------------------------


def test_a_step_has_its_numbers(tmp_path: Path) -> None:
    model, _ = train(3, pieces=2, record=tmp_path, **BF16)
    found = steps_in(tmp_path)
    assert [r["step"] for r in found] == [1, 2, 3]
    last = found[-1]
    grads = [p.grad for p in model.parameters()]
    assert last["gradient"] == max(float(g.abs().max()) for g in grads)
    assert (last["calls"], last["losses"], last["taken"]) == (2, 2, True)
    assert last["optimizer"] == "AdamW"
    assert 0 < last["loss"] < 10
    assert 0 < last["result"] < 10
    header = one(tmp_path).header
    assert header["label"] == "Net"
    assert header["parameters"]["first.weight"] == [[16, 8], "float32"]
    assert header["options"] == {"do_no_harm": False, "precision": "bf16"}
    assert (header["rank"], header["world"]) == (0, 1)
    assert header["cwd"] == str(Path.cwd())


def test_the_loss_is_the_scripts_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = autoamp.convert(Net(), **FP16, record=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    given = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = (model(x)["out"] - y).square().mean()
        given.append(loss.item())
        loss.backward() if step else torch.autograd.backward([loss])
        optimizer.step()
    assert [r["loss"] for r in steps_in(tmp_path)] == given
    assert steps_in(tmp_path)[0]["scale"] == autoamp.report(model).loss_scale.scale


def test_hashes_tell_batches_and_generators_apart(tmp_path: Path) -> None:
    train(3, record=tmp_path / "a", **BF16)
    train(3, record=tmp_path / "b", **BF16)
    first, second = steps_in(tmp_path / "a"), steps_in(tmp_path / "b")
    for name in ("batch", "rng"):
        told = [r[name] for r in first]
        assert told == [r[name] for r in second]
        assert len({*told}) == 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_ops_that_match_are_noted(
    precision: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("AUTOAMP_RECORD_OPS", "second, relu")
    train(2, record=tmp_path, precision=precision, do_no_harm=False)
    for step in steps_in(tmp_path):
        found = step["ops"]
        assert {name.partition(":")[0] for name in found} == {"second", ""}
        assert any("relu" in name for name in found)
        assert all(largest >= mean > 0 for largest, mean in found.values())


# -- deaths ----------------------------------------------------------------------------


def deaths_in(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    (home,) = folder.homes(root)
    return [(each, folder.read_death(each)) for each in folder.deaths(home)]


@pytest.mark.parametrize("guard", [True, False])
def test_a_loss_that_is_not_finite_is_a_death(
    guard: bool, tmp_path: Path, caplog
) -> None:
    before = state_of(*train(3, **BF16, guard=guard))
    train(5, (3,), record=tmp_path, guard=guard, **BF16)
    (path, found), *_ = deaths_in(tmp_path)
    assert (found["cause"], found["step"]) == ("loss", 4)
    assert found["loss"]["value"] == "inf"
    assert found["loss"]["history"][0] == "MseLossBackward0"
    state = folder.read_tensors(path, "state")
    assert torch.equal(state["model.first.weight"], before[0])
    assert state["optimizer.0.first.weight.step"].item() == 3
    given, caller = (folder.read_tensors(path, n) for n in ("batch", "caller"))
    x, labels = batch(3, (3,))
    (call,) = found["calls"]
    (argument,) = call["args"]["tuple"]
    assert torch.equal(given[argument["tensor"]], x)
    assert given["rng.0.torch"].numel() == torch.get_rng_state().numel()
    frame = next(f for f in found["caller"] if f["function"] == "train")
    assert frame["file"] == __file__
    assert torch.equal(caller[frame["locals"]["labels"]["tensor"]], labels)
    assert frame["locals"]["x"] == {"batch": argument["tensor"]}
    assert found["not_finite"] == []
    assert str(path) in caplog.text
    assert f"{path.name}" in [
        r["folder"] for r in one(tmp_path).records if r["kind"] == "death"
    ]


def test_the_generators_are_those_before_the_call(tmp_path: Path) -> None:
    """The saved state runs the model's call, dropout included, once more."""
    train(5, (3,), record=tmp_path, **BF16)
    (path, found), *_ = deaths_in(tmp_path)
    state, given = (folder.read_tensors(path, n) for n in ("state", "batch"))
    frame = next(f for f in found["caller"] if f["function"] == "train")
    assert set(frame["locals"]) == {"x", "labels", "loss"}
    again = autoamp.convert(Net(), **BF16)
    again.load_state_dict({k[6:]: v for k, v in state.items() if k[:6] == "model."})
    torch.set_rng_state(given["rng.0.torch"])
    x, _ = batch(3)
    out = again(x)["out"]
    torch.manual_seed(0)  # the training, up to the same call
    model = autoamp.convert(Net(), **BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        nn.MSELoss()(model(batch(step)[0])["out"], batch(step)[1]).backward()
        optimizer.step()
    assert torch.equal(out, model(x)["out"])


@pytest.mark.parametrize("options", [BF16, FP16], ids=["bf16", "fp16"])
def test_three_skipped_steps_are_a_death(
    options: dict[str, Any], tmp_path: Path, monkeypatch
) -> None:
    """The weights overflow the gradients while each loss is finite."""

    class Blown(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * torch.inf

    torch.manual_seed(0)
    model = autoamp.convert(Net(), **options, record=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def train_step(step: int) -> None:
        """The labels are gone when the optimizer steps."""
        x, labels = batch(step)
        out = model(x)["out"]
        (
            (Blown.apply(out) if 2 <= step < 8 else out) - labels
        ).square().mean().backward()

    for step in range(8):
        optimizer.zero_grad()
        train_step(step)
        optimizer.step()
    ((path, found),) = deaths_in(tmp_path)
    assert (found["cause"], found["step"]) == ("skips", 5)
    assert found["skips"]["why"]
    assert [r["taken"] for r in steps_in(tmp_path)] == [True] * 2 + [False] * 6
    assert [r.get("in_a_row") for r in steps_in(tmp_path)][2:] == [1, 2, 3, 4, 5, 6]
    frame = next(f for f in found["caller"] if f["function"] == "train_step")
    caller = folder.read_tensors(path, "caller")
    assert torch.equal(caller[frame["locals"]["labels"]["tensor"]], batch(4)[1])


def test_a_run_has_at_most_three_deaths(tmp_path: Path) -> None:
    train(20, tuple(range(1, 20, 2)), record=tmp_path, **BF16)
    found = deaths_in(tmp_path)
    assert [each["step"] for _, each in found] == [2, 4, 6]


def test_a_model_that_returns_its_loss(tmp_path: Path) -> None:
    class Whole(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return (super().forward(x)["out"] - y).square().mean()

    model = autoamp.convert(Whole(), **BF16, record=tmp_path)
    for step in range(2):
        loss = model(*batch(step, (1,)))
    assert not loss.isfinite()  # a script that looks, and never calls `backward`
    ((_, found),) = deaths_in(tmp_path)
    assert found["cause"] == "loss"


def test_masters_are_saved(tmp_path: Path) -> None:
    model = Net().half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    autoamp.convert(model, optimizer, **FP16, record=tmp_path)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, (2,))
        nn.MSELoss()(model(x.half())["out"].float(), y).backward()
        optimizer.step()
    (path, _), *_ = deaths_in(tmp_path)
    state = folder.read_tensors(path, "state")
    assert state["model.first.weight"].dtype == torch.float16
    assert state["master.first.weight"].dtype == torch.float32
    assert "optimizer.0.first.weight.exp_avg" in state


def test_a_model_that_is_not_converted_is_not_recorded(tmp_path: Path, caplog) -> None:
    autoamp.convert(Net().bfloat16(), **BF16, record=tmp_path)
    assert "is not converted, and not recorded" in caplog.text


def test_above_a_size_only_what_is_not_finite_is_saved(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("AUTOAMP_RECORD_LIMIT", "1K")
    torch.manual_seed(0)
    model = autoamp.convert(Net(), **BF16, record=tmp_path)
    with torch.no_grad():
        model.second.bias[1] = torch.nan
    nn.MSELoss()(model(batch(0)[0])["out"], batch(0)[1]).backward()
    ((path, found),) = deaths_in(tmp_path)
    assert found["not_finite"] == ["model.second.bias"]
    assert "AUTOAMP_RECORD_LIMIT=1024" in found["state"]
    assert set(folder.read_tensors(path, "state")) == {"model.second.bias"}
    assert folder.read_tensors(path, "batch")


# -- what must not end a training ------------------------------------------------------


def test_a_full_disk_is_one_warning(tmp_path: Path, monkeypatch, caplog) -> None:
    plain = state_of(*train(6, **BF16))
    own, left = os.pwrite, [4]

    def pwrite(*args: Any) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return own(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    found = state_of(*train(6, record=tmp_path, **BF16))
    assert all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))
    warned = [r for r in caplog.records if "the flight recorder in" in r.getMessage()]
    assert len(warned) == 1
    assert "No space left on device" in warned[0].getMessage()
    assert len(steps_in(tmp_path)) == 3


def test_a_death_that_cannot_be_written_is_one_warning(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder, "write_tensors", full)
    train(6, (2, 3, 4), record=tmp_path, **BF16)
    assert deaths_in(tmp_path) == []
    warned = [r for r in caplog.records if "the flight recorder in" in r.getMessage()]
    assert len(warned) == 1


def test_a_folder_that_cannot_be_used_leaves_the_model(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    model = Net()
    before = dict(model.__dict__)
    for bad in (tmp_path / "file", 3):
        with pytest.raises(OptionError, match="record"):
            autoamp.convert(model, **BF16, record=bad)
    assert model.__dict__ == before
    with pytest.raises(OptionError, match="the flight recorder in"):
        autoamp.enable(record=tmp_path / "file")


def test_rewrite_and_export_have_no_recorder(tmp_path: Path) -> None:
    gm = torch.fx.symbolic_trace(nn.Linear(8, 8))
    with pytest.raises(OptionError, match="record"):
        autoamp.rewrite(gm, (torch.ones(2, 8),), record=tmp_path)
    with pytest.raises(OptionError, match="record"):
        autoamp.export(nn.Linear(8, 8), (torch.ones(2, 8),), record=tmp_path)


def test_questions_and_evaluations_are_not_recorded(tmp_path: Path) -> None:
    model = autoamp.convert(Net(), **BF16, record=tmp_path)
    with torch.no_grad():
        model(batch(0)[0])
    autoamp.explain(model, batch(0)[0])
    assert [*tmp_path.iterdir()] == []


def test_a_reverted_model_is_recorded_no_more(tmp_path: Path) -> None:
    model, optimizer = train(2, record=tmp_path, **BF16)
    autoamp.revert(model)
    model(batch(0)[0])["out"].sum().backward()
    optimizer.step()
    assert len(steps_in(tmp_path)) == 2


def test_copies_share_the_recorder(tmp_path: Path) -> None:
    model, _ = train(1, record=tmp_path, **BF16)
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(batch(0)[0])["out"].sum().backward()
    optimizer.step()
    assert len(steps_in(tmp_path)) == 2


SCRIPT = """
    import os, signal, sys, torch
    from torch import nn
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(30):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    {end}
"""


@pytest.mark.thorough
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_script_is_recorded_by_a_variable(end: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT.format(end=end)))
    variables = {
        "AUTOAMP_PRECISION": "bf16",
        "AUTOAMP_DO_NO_HARM": "0",
    }
    command = [
        sys.executable,
        "-m",
        "autoamp",
        "run",
        "--record",
        tmp_path / "d",
        script,
    ]
    done = subprocess.run(
        command,
        check=False,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
    found = steps_in(tmp_path / "d")
    assert [r["step"] for r in found] == [*range(1, len(found) + 1)]
    assert len(found) >= 29
    assert one(tmp_path / "d").header["argv"] == [str(script)]


def test_records_wait_where_reading_waits_for_a_device(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv(recorder.EVERY, "4")
    model, _ = train(6, record=tmp_path, **BF16)
    assert len(steps_in(tmp_path)) == 4
    autoamp.revert(model)
    assert len(steps_in(tmp_path)) == 6
