"""The meter of updates: which share of them moves half weights without masters."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autoamp
from autoamp.training import meter
from autoamp.training.meter import METERS, UpdateMeter, UpdateShare, shares_of
from tests.logs import warned
from tests.says import says

BF16, FP16 = torch.bfloat16, torch.float16
RATE = 1e-4


def net(dtype: torch.dtype = BF16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(50, 32),
        nn.Linear(32, 64),
        nn.LayerNorm(64),
        nn.Tanh(),
        nn.Linear(64, 50),
    ).to(dtype)


def train(
    model: nn.Module, optimizer: Any, steps: int = 12, scaler: Any = None
) -> list[Tensor]:
    """Trains, and gives the weights after each step."""
    seen = []
    for step in range(steps):
        x = torch.randint(0, 50, (16,), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(x).float(), x)
        optimizer.zero_grad()
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        seen.append(
            torch.cat([p.detach().float().flatten() for p in model.parameters()])
        )
    return seen


def each_step(optimizer: Any) -> UpdateMeter:
    return UpdateMeter(optimizer, at_most=float("inf"))


def by_kind(model: nn.Module) -> dict[str, UpdateShare]:
    return {each.kind: each for each in shares_of(model)}


def test_it_is_the_share_of_numbers_with_a_gradient_that_move() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=1.0)
    each_step(optimizer)
    counts: dict[str, list[int]] = {}
    for step in range(6):
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        train(model, optimizer, 1)
        for name, param in model.named_parameters():
            assert param.grad is not None
            meant = param.grad != 0
            if step:  # the first step is not looked at
                sums = counts.setdefault(name, [0, 0])
                sums[0] += int((meant & (param != before[name])).sum())
                sums[1] += int(meant.sum())
    found = by_kind(model)
    for kind, name in (("norm", "2.weight"), ("embedding", "0.weight")):
        moved, meant_ = counts[name]
        assert found[kind].share == moved / meant_
    assert 0 < found["norm"].share < 1


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_each_kind_of_weights(dtype: torch.dtype) -> None:
    model = net(dtype)
    # In fp16 an eps of 1e-8 is 0.
    optimizer = optim.AdamW(model.parameters(), lr=RATE, eps=1e-4)
    each_step(optimizer)
    train(model, optimizer)
    found = by_kind(model)
    counts = {kind: each.weights for kind, each in found.items()}
    assert counts == {"norm": 1, "embedding": 1, "other": 2, "bias": 3}
    assert {each.dtype for each in found.values()} == {
        "bf16" if dtype == BF16 else "fp16"
    }
    if dtype == BF16:  # the steps are of 1e-4 at most, and bf16 at 1 moves by 0.004
        assert found["norm"].share < 0.01 < found["bias"].share


@pytest.mark.parametrize("masters", ["split", "off"])
def test_only_weights_without_masters_are_measured(masters: Any) -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=RATE)
    autoamp.convert(model, optimizer, masters=masters)
    assert (optimizer in METERS) == (masters == "off")


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, lr=RATE, fused=True),
        lambda p: optim.AdamW(p, lr=RATE, foreach=True),
        lambda p: optim.SGD(p, lr=RATE, momentum=0.9),
        lambda p: optim.Adafactor(p, lr=RATE),
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_a_look_changes_nothing(make: Any, scaled: bool) -> None:
    runs = []
    for looks in (False, True):
        model = net()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0) if scaled else None
        if looks:
            each_step(optimizer)
        runs.append(train(model, optimizer, scaler=scaler))
        if looks:
            assert shares_of(model)
        state = optimizer.state_dict()["state"]
        runs.append([v for s in state.values() for v in s.values()])
    for a, b in zip(runs[0] + runs[1], runs[2] + runs[3], strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))


def test_weights_of_other_dtypes_are_not_measured() -> None:
    model = net(torch.float32)
    optimizer = optim.AdamW(model.parameters())
    each_step(optimizer)
    train(model, optimizer, 4)
    assert not shares_of(model)


def test_large_weights_are_cut_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_CUT", 64)
    monkeypatch.setattr(meter, "_MOST", 200)
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=RATE)
    looks = each_step(optimizer)
    train(model, optimizer, 2)
    first = {p for p in model.parameters() if looks.sums(p) is not None}
    assert 0 < len(first) < 6
    train(model, optimizer, 6)
    assert all(looks.sums(p) is not None for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_other_layouts_do_not_stop_a_step(sparse: bool) -> None:
    model = nn.Embedding(2000, 64, sparse=sparse).to(BF16)
    optimizer = optim.SGD(model.parameters(), lr=RATE, momentum=0.0 if sparse else 0.9)
    each_step(optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.arange(8)).float().sum().backward()
        if not sparse:  # as large as is cut, and laid out across
            model.weight.grad = torch.ones(64, 2000, dtype=BF16).t()
        optimizer.step()
    assert not shares_of(model)


def test_looks_take_one_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    looked: list[float] = []

    def look(self: UpdateMeter, *_: Any) -> list[Tensor]:
        looked.append(now[0])
        now[0] += 3.0
        return []

    monkeypatch.setattr(UpdateMeter, "_chosen", look)
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=RATE)
    UpdateMeter(optimizer)
    for _ in range(3000):
        optimizer.step()
        now[0] += 1.0
    assert len(looked) == pytest.approx(0.01 * now[0] / 3.0, abs=2)


def test_a_meter_goes_with_its_optimizer() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=RATE)
    each_step(optimizer)
    train(model, optimizer, 3)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
    assert not any(each.optimizer is None for each in METERS.values())


def test_a_compiled_step_is_left_alone() -> None:
    model = net()
    optimizer = optim.SGD(model.parameters(), lr=RATE)
    each_step(optimizer)
    compiled = torch.compile(optimizer.step, backend="eager")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    for _ in range(3):
        compiled()
    assert not shares_of(model)


# -- who says so -----------------------------------------------------------------------


@pytest.fixture
def at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpdateMeter.__init__, "__defaults__", (float("inf"),))


@pytest.mark.usefixtures("at_each_step")
@pytest.mark.parametrize("masters", ["split", "off", None])
def test_the_report_says_it(masters: Any) -> None:
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=RATE)
    if masters is not None:
        autoamp.convert(model, optimizer, masters=masters)
    else:
        each_step(optimizer)
    train(model, optimizer, 6)
    report = autoamp.report(model)
    if masters == "split":
        assert not report.updates
        return
    assert (report.updates[0].kind, report.updates[0].share) == ("norm", 0)
    text = " ".join(str(report).split())
    says(text, "100% of the updates of 1 norm weight", option="AUTOAMP_MASTERS=split")


def test_bench_says_what_half_weights_lose() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 8))
    found = autoamp.bench(model, torch.randn(16, 32), ways=["half"], precision="bf16")
    half = next(row for row in found.rows if row.kind == "half")
    assert half.updates[0].share < 0.01
    assert ".bfloat16(): bf16 rounds away" in " ".join(str(found).split())
    assert not next(row for row in found.rows if row.kind == "fp32").updates


def test_a_look_that_fails_ends_the_meter_and_no_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("of a look")

    plain, model = net(), net()
    seen = train(plain, optim.AdamW(plain.parameters()), 4)
    optimizer = optim.AdamW(model.parameters())
    each_step(optimizer)
    monkeypatch.setattr(UpdateMeter, "_chosen", fails)
    assert all(map(torch.equal, train(model, optimizer, 4), seen))
    (line,) = warned(caplog)
    says(line, "AdamW", "ZeroDivisionError: of a look")
