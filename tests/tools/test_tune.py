"""`tune`: measured prices, a contest of ways, and times that are kept on disk."""

from __future__ import annotations

import io
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import autoamp
from autoamp import compat
from autoamp.errors import OptionError, UnsupportedModelError
from tests.passes.speeds.door import (
    AUTOCAST,
    FOLDER,
    FP32,
    MEASURED,
    PREDICTED,
    MeasuredPrices,
    Prices,
    Runner,
    Specimen,
    Store,
    Timed,
    Tuning,
    devices,
    engine_of,
    op_specimen,
    replaced,
    surely_less,
    told,
)
from tests.quick import each_with_one
from tests.says import says
from tests.small_models import BF16

LOW = torch.bfloat16
Ns = Callable[[Specimen], float]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Contests of five rounds on a device that pays, with a folder of their own."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr("autoamp.tools.tune._BUDGET", 0.0)
    units = {LOW: "avx512_bf16"}
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)
    return tmp_path / "cache"


class Net(nn.Module):
    """A convolution with batch statistics, a dropout, a written-out GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 5)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # a second graph reads the count as a variable
        x = self.drop(self.norm(self.conv(x))).mean((2, 3))
        x = 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
        return self.head(x)


def image(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Any]], list[str]]:
    """Has each way take so many seconds, or raise; gives the ways that ran."""

    def timed(seconds: dict[str, Any]) -> list[str]:
        ran: list[str] = []
        real = Runner.run

        def run(self: Runner) -> float:
            ran.append(self.way.name)
            took = seconds.get(self.way.name, 9.0)
            if isinstance(took, Exception):
                raise took
            real(self)
            return took * random.Random(len(ran)).uniform(1, 1.1)

        monkeypatch.setattr(Runner, "run", run)
        ns = {True: 1.0, False: 100.0}
        monkeypatch.setattr(Specimen, "nanoseconds", lambda s, _: ns[s.dtype is LOW])
        return ran

    return timed


# -- what is kept ----------------------------------------------------------------------

WITHOUT = f"{MEASURED}, without gelu_tanh"


@pytest.mark.parametrize("fastest", [PREDICTED, MEASURED, AUTOCAST, FP32, WITHOUT])
def test_the_fastest_way_is_kept(fastest: str, takes: Any) -> None:
    model, x = Net().train(fastest in (MEASURED, FP32)), image()
    ran = takes({fastest: 1.0})
    found = autoamp.tune(model, x)
    assert found.chosen == fastest
    assert found.share == pytest.approx(1 if fastest == FP32 else 1 / 9, rel=0.15)
    assert {FP32, AUTOCAST, PREDICTED, MEASURED, WITHOUT} <= {*ran}
    report = autoamp.report(model)
    assert model(x).dtype == torch.float32
    assert autoamp.is_converted(model) is (fastest != FP32)
    if fastest == AUTOCAST:
        says(str(report), "torch.autocast")
        model.eval().requires_grad_(False)
        plain = Net().eval()
        plain.load_state_dict(model.state_dict())
        with torch.autocast("cpu", LOW), torch.no_grad():
            assert torch.equal(model(x), plain(x).float())
    elif fastest != FP32:
        assert report.compute_dtype == "bf16"
        assert report.prediction is not None
        is_measured = report.prediction.device.endswith("measured")
        assert is_measured is (fastest != PREDICTED)
        if fastest == WITHOUT:
            assert not any(row.kernel for row in report.ops)


@pytest.mark.parametrize(
    ("times", "options", "kept", "why"),
    [
        # Where none is surely faster, graphs come before autocast.
        ({AUTOCAST: 1.0, PREDICTED: 1.001}, {}, PREDICTED, ""),
        # Autocast is not kept where it does not suffice.
        (
            {AUTOCAST: 1.0, PREDICTED: 2.0},
            {"precision": "fp16", "do_no_harm": False},
            PREDICTED,
            "scale",
        ),
        ({AUTOCAST: 1.0, PREDICTED: 2.0}, {"strict": True}, PREDICTED, "strict=True"),
        # A way that fails is told with its error.
        (
            {AUTOCAST: RuntimeError("no kernel"), MEASURED: 1.0},
            {},
            MEASURED,
            "no kernel",
        ),
    ],
)
def test_what_is_kept_and_why(
    times: Any, options: dict[str, Any], kept: str, why: str, takes: Any
) -> None:
    takes(times)
    model = Net().train(why == "scale")
    found = autoamp.tune(model, image(), **options)
    assert found.chosen == kept
    assert why in str(found)


@pytest.mark.parametrize(
    ("mine", "other", "surely"),
    [
        ([1] * 5, [2] * 5, True),
        ([1] * 4, [2] * 4, False),  # chance does this once in 16
        ([1, 1, 1, 1, 3], [2] * 5, False),
        ([1] * 9 + [3], [2] * 10, True),
        ([1] * 8 + [3] * 2, [2] * 10, False),
        ([1] * 9, [1] * 9, False),
    ],
)
def test_surely_is_a_sign_test(
    mine: list[float], other: list[float], surely: bool
) -> None:
    assert surely_less(mine, other) is surely


def test_a_device_without_units_is_measured_too(takes: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    ran = takes({MEASURED: 1.0})
    assert autoamp.tune(Net().eval(), image()).chosen == MEASURED
    assert PREDICTED not in ran  # convert() would leave the model as it is


# -- the model and its surroundings ----------------------------------------------------


@pytest.mark.parametrize(
    ("fastest", "training"), each_with_one([MEASURED, AUTOCAST, FP32], [True, False])
)
def test_nothing_is_changed_but_the_call_path(
    fastest: str, training: bool, takes: Any
) -> None:
    model, x = Net().train(training), image()
    model(x).sum().backward()
    hooks: list[int] = []
    model.conv.weight.register_post_accumulate_grad_hook(lambda _: hooks.append(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    versions = [compat.version(p) for p in model.parameters()]
    calls, seen = model.calls, x.clone()
    torch.manual_seed(5)
    states = torch.get_rng_state(), random.getstate()
    takes({fastest: 1.0})
    assert autoamp.tune(model, x).training is training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(x, seen)
    assert (model.calls, model.training, hooks) == (calls, training, [])
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for p, grad, version in zip(model.parameters(), grads, versions, strict=True):
        assert torch.equal(p.grad, grad)
        assert compat.version(p) == version


def test_a_call_of_another_size_is_placed_without_measuring(
    takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().eval()
    takes({MEASURED: 1.0})
    autoamp.tune(model, image())
    monkeypatch.setattr(Specimen, "nanoseconds", None)  # a call would raise
    for batch in (6, 7):
        assert model(image(batch)).isfinite().all()
    assert len(autoamp.report(model).graphs) > 1


def test_a_model_that_raises_is_left_as_it_was() -> None:
    class Raises(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    model = Raises()
    attributes = dict(vars(model))
    with pytest.raises(KeyError):
        autoamp.tune(model, image())
    assert vars(model) == attributes
    assert not autoamp.is_converted(model)


@pytest.mark.parametrize(
    "options",
    [
        {"backend": "inductor"},
        {"placement": "forced"},
        {"objective": "memory"},
        {"no_such": 1},
    ],
)
def test_options_that_leave_nothing_to_choose(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as raised:
        autoamp.tune(Net(), image(), **options)
    says(raised, option=[*options])


def test_what_cannot_be_tuned() -> None:
    with pytest.raises(UnsupportedModelError):
        autoamp.tune(torch.relu, image())
    with pytest.raises(UnsupportedModelError) as raised:
        autoamp.tune(Net().double(), image().double())
    says(raised, "float64")
    with pytest.raises(OptionError) as refused:
        autoamp.tune(Net(), image(), loss_fn=lambda y: y, **BF16)
    says(refused, option="loss_fn")


# -- measured prices -------------------------------------------------------------------


@pytest.fixture
def spied(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What measuring saw and found: roofline prices and measured ones, and graphs."""
    seen: dict[str, list[Any]] = {"prices": [], "graphs": []}
    module = "autoamp.passes.speeds.prices."
    wanted = MeasuredPrices._wanted

    def prices(roofline: Prices, found: Any) -> Prices:
        seen["prices"].append((roofline, replaced(roofline, found)))
        return seen["prices"][-1][1]

    def graphs(self: Any, gm: Any, classified: Any, prices: Any) -> Any:
        seen["graphs"].append((gm, classified))
        return wanted(self, gm, classified, prices)

    monkeypatch.setattr(f"{module}_replaced", prices)
    monkeypatch.setattr(MeasuredPrices, "_wanted", graphs)
    return seen


def placed(model: nn.Module, x: Tensor, ns: Ns, **options: Any) -> Any:
    """The report of a model placed by the times that `ns` gives."""
    converted = autoamp.convert(model, **BF16, strict=True, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Specimen, "nanoseconds", lambda self, _: ns(self))
        engine_of(converted).price = MeasuredPrices(LOW, Store("test"))
        converted(x)
    return autoamp.report(converted)


@pytest.mark.parametrize(
    ("low", "cast", "expected"),
    [(1.0, 1.0, "bf16"), (2000.0, 1.0, "fp32"), (900.0, 500.0, "fp32")],
)
def test_ops_are_placed_by_their_times(low: float, cast: float, expected: str) -> None:
    def ns(specimen: Specimen) -> float:
        if "_to_copy" in specimen.key:
            return cast
        return low if specimen.dtype is LOW else 1000.0

    rows = placed(mlp(), torch.randn(4, 16), ns).ops
    assert [row.precision for row in rows if "linear" in row.op] == [expected] * 2


def test_a_price_is_that_of_the_specimen_in_tenths_of_a_nanosecond(spied: Any) -> None:
    placed(mlp(), torch.randn(4, 16), lambda s: 40.0 if s.dtype is LOW else 70.0)
    ((_, prices),) = spied["prices"]
    assert prices.ops["linear"] == (700, 400)
    assert prices.down["input_0"] == 400
    assert prices.down["_0_weight"] == 0  # its copy is kept
    assert prices.up["linear_1"] == 700
    assert prices.reward == 0
    assert prices.device.name.endswith("measured")


def test_what_cannot_be_measured_is_estimated_by_what_can(spied: Any) -> None:
    def ns(specimen: Specimen) -> float:
        if "relu" in specimen.key:
            raise RuntimeError("not on such operands")
        return 1e6

    placed(mlp(), torch.randn(4, 16), ns)
    ((roofline, prices),) = spied["prices"]
    for side in (0, 1):
        off = prices.ops["linear"][side] / roofline.ops["linear"][side]
        estimated = prices.ops["relu"][side] / roofline.ops["relu"][side]
        assert estimated == pytest.approx(off, rel=1e-3)


def test_a_wide_product_is_as_far_off_as_the_cast_in_whose_place_it_stands() -> None:
    ops = {"linear": (90, 50)}
    wide = {"linear": 8, "other": 1}
    casts = {"linear": 20, "other": 10}
    roofline = Prices(ops, casts, casts, 0, False, devices.NEUTRAL, wide)
    found = replaced(roofline, {("up", "linear"): 50.0, ("down", "linear"): 20.0})
    assert found.up == {"linear": 50, "other": 25}
    assert found.wide == {"linear": 20, "other": 2}


class Odd(nn.Module):
    """Views, an index, a write, a norm, a shared weight, a mask, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.same = nn.Embedding(11, 16), nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.register_buffer("mask", torch.ones(6, 6).tril().bool())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.same(self.table(ids))
        x = self.norm(self.same(x).relu_())
        scores = (x @ x.transpose(-1, -2)).masked_fill(~self.mask, -1e9)
        x = scores.softmax(-1) @ x
        return torch.cat((x, x.new_zeros(x.shape)), -1)[..., ::2].sum(1)


@pytest.fixture
def specimens(spied: Any) -> Callable[..., list[tuple[Any, Specimen]]]:
    """Each node of `Odd`, as emitted, with the specimen of the precision it has."""

    def of(batch: int = 2, *, grad: bool = True) -> list[tuple[Any, Specimen]]:
        model = Odd().requires_grad_(grad)
        ids = torch.randint(0, 11, (batch, 6))
        report = placed(model, ids, lambda s: 1.0 + (s.dtype != LOW), fuse=False)
        (record,) = report.rewritten
        emitted = {n.name: n for n in record.gm.graph.nodes}
        gm, classified = spied["graphs"][-1]
        decisions = record.assignment.decisions
        found = []
        for node in (n for n in gm.graph.nodes if n.name in decisions):
            low = LOW if decisions[node.name].low else None
            specimen = op_specimen(node, classified, low)
            if specimen is not None:
                found.append((emitted[node.name], specimen))
        return found

    return of


def test_specimens_read_what_the_emitted_ops_read(specimens: Any) -> None:
    pairs = specimens()
    assert len(pairs) > 8
    for emitted, specimen in pairs:
        leaves = torch.utils._pytree.tree_leaves((specimen.args, specimen.kwargs))
        mine = [each for each in leaves if hasattr(each, "strides")]
        theirs = [n.meta["val"] for n in emitted.all_input_nodes]
        theirs = [v for v in theirs if isinstance(v, Tensor)]
        if len(mine) != len(theirs) or "new_zeros" in emitted.name:
            continue  # one operand twice; an operand that is read as it comes
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype, emitted
            assert one.shape == tuple(other.shape), emitted


def test_specimens_run_as_they_are_with_their_backward(
    specimens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = specimens()
    grads: list[int] = []
    real = torch.autograd.grad

    def spy(*args: Any, **kwargs: Any) -> Any:
        grads.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    for emitted, specimen in pairs:
        assert 0 < specimen.nanoseconds(torch.device("cpu")) < 1e9, emitted
    assert grads


def test_keys_tell_apart_whatever_takes_another_time(specimens: Any) -> None:
    def keys(batch: int, grad: bool) -> set[str]:
        return {specimen.key for _, specimen in specimens(batch, grad=grad)}

    assert keys(2, True) == keys(2, True)
    assert not keys(2, True) & keys(3, True)
    assert keys(2, True) != keys(2, False)


def test_a_second_tuning_measures_nothing_anew(folder: Path) -> None:
    first = autoamp.tune(mlp(), torch.randn(8, 16))
    (file,) = folder.iterdir()
    size = file.stat().st_size
    second = autoamp.tune(mlp(), torch.randn(8, 16))
    assert first.measured > 3
    assert first.remembered == 0
    assert (second.measured, second.remembered) == (0, first.measured)
    assert file.stat().st_size == size
    assert autoamp.tune(mlp(), torch.randn(9, 16)).measured > 3


# -- what is said ----------------------------------------------------------------------


def told_of(chosen: str, times: dict[str, list[float]]) -> str:
    """What is said of ways with these times, of which `chosen` was kept."""
    ways = []
    for name, seconds in times.items():
        shares = [a / b for a, b in zip(seconds, times[FP32], strict=True)]
        middle, share = statistics.median(seconds), statistics.median(shares)
        ways.append(Timed(name, middle, share, "", tuple(seconds)))
    found = Tuning("M", LOW, "cpu", True, chosen, tuple(ways), 0, 0, 1.0)
    return " ".join(str(found).split())


@pytest.mark.parametrize("gap", [3.0, 1 / 3])
def test_a_gap_that_may_be_chance_is_said_with_its_times(gap: float) -> None:
    mine = [0.036, 0.036, 0.036, 0.030, 0.090]
    fp32 = [a / gap for a in mine[:4]] + [mine[4] * gap]
    said = told_of(PREDICTED, {FP32: fp32, PREDICTED: mine})
    says(said, "could not tell", f"{PREDICTED} (36 ms, from 30 to 90)")
    says(said, f"{FP32} ({36 / gap:.3g} ms")
    assert "no way is faster" not in said


def test_a_way_that_won_every_round_is_said_to_be_the_fastest() -> None:
    said = told_of(PREDICTED, {FP32: [3.0] * 5, PREDICTED: [1.0] * 5})
    says(said, "no way is faster", "0.33", "3000")
    assert "could not tell" not in said
    assert "e+" not in said


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal is shown of the progress of work, from 0.05 seconds on."""
    shown = io.StringIO()
    console = partial(Console, file=shown, force_terminal=True, width=100)
    monkeypatch.setattr("autoamp.messages.Console", lambda **_: console())
    monkeypatch.setattr("autoamp.messages.QUIET", 0.05)
    return shown


def test_a_first_item_that_takes_long_is_shown_before_its_end(
    terminal: io.StringIO,
) -> None:
    for _ in told(["one"], "waiting"):
        begun = time.monotonic()
        while "waiting" not in terminal.getvalue():
            assert time.monotonic() - begun < 60
            time.sleep(0.01)


def test_the_ways_are_set_up_under_a_bar(terminal: io.StringIO, takes: Any) -> None:
    takes({MEASURED: 1.0})
    autoamp.tune(Net(), image())
    says(terminal.getvalue(), "setting up", MEASURED)
