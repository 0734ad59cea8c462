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
from torch import Tensor, fx, nn

import autoamp
from autoamp import compat
from autoamp.analyse.verdict import Classified
from autoamp.ask.progress import told
from autoamp.calibrate import prices as prices_module
from autoamp.calibrate.clock import surely_less
from autoamp.calibrate.prices import MeasuredPrices, Specimen, op_specimen
from autoamp.calibrate.store import FOLDER, Store
from autoamp.calibrate.tune import (
    AUTOCAST,
    FP32,
    MEASURED,
    PREDICTED,
    Runner,
    Timed,
    Tuning,
)
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.place.cost import Prices
from tests.metrics import relative_error
from tests.quick import each_with_one
from tests.small_models import BF16

LOW = torch.bfloat16


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contests of five rounds."""
    monkeypatch.setattr("autoamp.calibrate.tune._BUDGET", 0.0)


@pytest.fixture
def on_a_device_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    units = {LOW: "avx512_bf16"}
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)


class Net(nn.Module):
    """A convolution with batch statistics, a dropout, a written-out GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.conv(x))).mean((2, 3))
        x = 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3)))
        return self.head(x)


class Counting(Net):
    """A model that each call changes; a second graph reads the count as a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def image(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def timed(monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]) -> list[str]:
    """Has each way take so many seconds, whatever it really took; the ways that ran."""
    ran: list[str] = []
    real = Runner.run

    def run(self: Runner) -> float:
        ran.append(self.way.name)
        real(self)
        return seconds.get(self.way.name, 9.0) * random.Random(len(ran)).uniform(1, 1.1)

    monkeypatch.setattr(Runner, "run", run)
    monkeypatch.setattr(
        Specimen, "nanoseconds", lambda self, _: 1.0 if self.dtype is LOW else 100.0
    )
    return ran


# -- what is kept ------------------------------------------------------------------


@pytest.mark.thorough(but=["torch.autocast"])
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
@pytest.mark.parametrize("fastest", [PREDICTED, MEASURED, AUTOCAST, FP32])
def test_the_fastest_way_is_kept(fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Net().train(fastest in (MEASURED, FP32)), image()
    ran = timed(monkeypatch, {fastest: 1.0})
    found = autoamp.tune(model, x)
    assert found.chosen == fastest
    assert found.share == pytest.approx(1 if fastest == FP32 else 1 / 9, rel=0.15)
    assert {FP32, AUTOCAST, PREDICTED, MEASURED} < {*ran}  # and kernels left out
    assert f"{MEASURED}, without gelu_tanh" in ran
    report = autoamp.report(model)
    assert model(x).dtype == torch.float32
    if fastest == FP32:
        assert "kept fp32" in str(report)
        assert not autoamp.is_converted(model)
    elif fastest == AUTOCAST:
        assert "faster under torch.autocast" in str(report)
        model.eval().requires_grad_(False)
        plain = Net().eval()
        plain.load_state_dict(model.state_dict())
        with torch.autocast("cpu", LOW), torch.no_grad():
            theirs = plain(x).float()
        assert torch.equal(model(x), theirs)
    else:
        assert report.compute_dtype == "bf16"
        assert report.prediction is not None
        is_measured = report.prediction.device.endswith("measured")
        assert is_measured is (fastest == MEASURED)


@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
def test_a_kernel_that_loses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net().eval()
    timed(monkeypatch, {f"{MEASURED}, without gelu_tanh": 1.0})
    found = autoamp.tune(model, image())
    assert found.chosen == f"{MEASURED}, without gelu_tanh"
    report = autoamp.report(model)
    assert not any(row.kernel for row in report.ops)
    assert "without gelu_tanh" in str(found)


@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
def test_where_none_is_surely_faster_graphs_come_before_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net().eval()
    timed(monkeypatch, {AUTOCAST: 1.0, PREDICTED: 1.001})
    assert autoamp.tune(model, image()).chosen == PREDICTED


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


@pytest.mark.thorough(but=["options1-strict=True requires rewritten graphs"])
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"precision": "fp16", "do_no_harm": False}, "nothing would scale its loss"),
        ({"strict": True}, "strict=True requires rewritten graphs"),
    ],
)
def test_autocast_is_not_kept_where_it_does_not_suffice(
    options: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net().train("scale" in why)
    timed(monkeypatch, {AUTOCAST: 1.0, PREDICTED: 2.0})
    found = autoamp.tune(model, image(), options=options)
    assert found.chosen == PREDICTED
    assert why in str(found)
    assert "no way that can be kept is faster" in str(found).replace("\n", " ")


@pytest.mark.usefixtures("quick")
def test_a_device_without_units_is_measured_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    ran = timed(monkeypatch, {MEASURED: 1.0})
    found = autoamp.tune(Net().eval(), image())
    assert found.chosen == MEASURED
    assert PREDICTED not in ran  # convert() would leave the model as it is


# -- the model and its surroundings ------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
@pytest.mark.parametrize(
    ("fastest", "training"), each_with_one([MEASURED, AUTOCAST, FP32], [True, False])
)
def test_nothing_is_changed_but_the_call_path(
    fastest: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Counting().train(training), image()
    model(x).sum().backward()
    hooks: list[int] = []
    model.conv.weight.register_post_accumulate_grad_hook(lambda _: hooks.append(1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    grads = [p.grad.clone() for p in model.parameters()]
    versions = [compat.version(p) for p in model.parameters()]
    calls, seen = model.calls, x.clone()
    torch.manual_seed(5)
    states = torch.get_rng_state(), random.getstate()
    timed(monkeypatch, {fastest: 1.0})
    assert autoamp.tune(model, x).training is training
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(x, seen)
    assert model.calls == calls
    assert model.training is training
    assert not hooks
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    for p, grad, version in zip(model.parameters(), grads, versions, strict=True):
        assert torch.equal(p.grad, grad)
        assert compat.version(p) == version


@pytest.mark.thorough
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
def test_a_tuned_model_trains_as_truly_as_a_converted_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = Net()
    model.drop.p = 0.0
    plain = Net()
    plain.drop.p = 0.0
    plain.load_state_dict(model.state_dict())
    timed(monkeypatch, {MEASURED: 1.0})
    autoamp.tune(model, image())
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            each(image()).square().mean().backward()
            optimizer.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert relative_error(mine, theirs) < 0.02


@pytest.mark.thorough
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
def test_a_call_of_another_size_is_placed_without_measuring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Net().eval()
    timed(monkeypatch, {MEASURED: 1.0})
    autoamp.tune(model, image())
    monkeypatch.setattr(Specimen, "nanoseconds", None)  # a call would raise
    for batch in (6, 7):
        assert model(image(batch)).isfinite().all()
    assert len(autoamp.report(model).graphs) > 1


@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
def test_a_model_that_raises_is_left_as_it_was() -> None:
    class Raises(Net):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

    model = Raises()
    attributes = dict(vars(model))
    with pytest.raises(KeyError, match="mine"):
        autoamp.tune(model, image())
    assert vars(model) == attributes
    assert not autoamp.is_converted(model)


@pytest.mark.thorough
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
def test_a_way_that_fails_is_said_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real = Net().eval(), Runner.run

    def run(self: Runner) -> float:
        if self.way.name == AUTOCAST:
            raise RuntimeError("expected scalar type Float but found BFloat16")
        real(self)
        return 1.0 if self.way.name == MEASURED else 2.0

    monkeypatch.setattr(Runner, "run", run)
    found = autoamp.tune(model, image())
    assert found.chosen == MEASURED
    assert "RuntimeError: expected scalar type Float but found BFloat16" in str(found)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"backend": "inductor"}, OptionError, "backend='inductor'"),
        ({"placement": "forced"}, OptionError, "placement='forced'"),
        ({"objective": "memory"}, OptionError, "objective='memory'"),
        ({"no_such": 1}, OptionError, "unknown option"),
    ],
)
def test_options_that_leave_nothing_to_choose(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        autoamp.tune(Net(), image(), options=options)


def test_what_cannot_be_tuned() -> None:
    with pytest.raises(UnsupportedModelError):
        autoamp.tune(torch.relu, image())
    with pytest.raises(UnsupportedModelError, match="float64"):
        autoamp.tune(Net().double(), image().double())
    with pytest.raises(OptionError, match="a tensor of one element, but it returns"):
        autoamp.tune(Net(), image(), loss_fn=lambda y: y, options=BF16)


# -- measured prices ---------------------------------------------------------------


def placed(model: nn.Module, x: Tensor, ns: Callable[[Specimen], float]) -> list[str]:
    """The precisions of a model's products, placed by the times `ns` gives."""
    options = {**BF16, "strict": True}
    converted = autoamp.convert(model, **options)
    state = compat_engine(converted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Specimen, "nanoseconds", lambda self, _: ns(self))
        state.price = MeasuredPrices(LOW, Store("test"))
        converted(x)
    rows = autoamp.report(converted).ops
    return [row.precision for row in rows if "linear" in row.op]


def compat_engine(model: nn.Module) -> Any:
    from autoamp.model.conversion import conversion_of

    state = conversion_of(model)
    assert state is not None
    assert state.engine is not None
    return state.engine


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("low", "cast", "expected"),
    [(1.0, 1.0, "bf16"), (2000.0, 1.0, "fp32"), (900.0, 500.0, "fp32")],
)
def test_ops_are_placed_by_their_times(low: float, cast: float, expected: str) -> None:
    def ns(specimen: Specimen) -> float:
        if "_to_copy" in specimen.key:
            return cast
        return low if specimen.dtype is LOW else 1000.0

    assert placed(mlp(), torch.randn(4, 16), ns) == [expected] * 2


def test_a_price_is_that_of_the_specimen_in_tenths_of_a_nanosecond() -> None:
    seen: list[Prices] = []
    real = prices_module._replaced

    def spy(*args: Any) -> Prices:
        seen.append(real(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prices_module, "_replaced", spy)
        placed(mlp(), torch.randn(4, 16), lambda s: 40.0 if s.dtype is LOW else 70.0)
    (prices,) = seen
    assert prices.ops["linear"] == (700, 400)
    assert prices.down["input_0"] == 400
    assert prices.down["_0_weight"] == 0  # its copy is kept
    assert prices.up["linear_1"] == 700
    assert prices.reward == 0
    assert prices.device.name.endswith("measured")


def test_what_cannot_be_measured_is_estimated_by_what_can() -> None:
    def ns(specimen: Specimen) -> float:
        if "relu" in specimen.key:
            raise RuntimeError("not on such operands")
        return 1e6

    seen: list[tuple[Prices, Prices]] = []
    real = prices_module._replaced

    def spy(roofline: Prices, found: Any) -> Prices:
        seen.append((roofline, real(roofline, found)))
        return seen[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prices_module, "_replaced", spy)
        placed(mlp(), torch.randn(4, 16), ns)
    ((roofline, prices),) = seen
    for side in (0, 1):
        off = prices.ops["linear"][side] / roofline.ops["linear"][side]
        estimated = prices.ops["relu"][side] / roofline.ops["relu"][side]
        assert estimated == pytest.approx(off, rel=1e-3)


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


def specimens_of(model: nn.Module, *args: Any) -> list[tuple[fx.Node, Specimen, Any]]:
    """Each node of a graph, as emitted, with the specimen of the precision it has."""
    found: list[tuple[fx.Node, Specimen, Any]] = []
    kept: list[tuple[fx.GraphModule, Classified]] = []
    real = MeasuredPrices._wanted

    def spy(self: Any, gm: fx.GraphModule, classified: Classified, prices: Any) -> Any:
        kept.append((gm, classified))
        return real(self, gm, classified, prices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MeasuredPrices, "_wanted", spy)
        patch.setattr(Specimen, "nanoseconds", lambda s, _: 1.0 + (s.dtype != LOW))
        converted = autoamp.convert(model, **BF16, fuse=False)
        compat_engine(converted).price = MeasuredPrices(LOW, Store("test"))
        converted(*args)
    (record,) = autoamp.report(converted).rewritten
    emitted = {n.name: n for n in record.gm.graph.nodes}
    gm, classified = kept[-1]
    for node in gm.graph.nodes:
        if node.name in record.assignment.decisions:
            low = LOW if record.assignment.decisions[node.name].low else None
            specimen = op_specimen(node, classified, low)
            if specimen is not None:
                found.append((emitted[node.name], specimen, node))
    return found


def test_specimens_read_what_the_emitted_ops_read() -> None:
    pairs = specimens_of(Odd(), torch.randint(0, 11, (2, 6)))
    assert len(pairs) > 8
    for emitted, specimen, node in pairs:
        leaves = torch.utils._pytree.tree_leaves((specimen.args, specimen.kwargs))
        mine = [each for each in leaves if hasattr(each, "strides")]
        theirs = [n.meta["val"] for n in emitted.all_input_nodes]
        theirs = [v for v in theirs if isinstance(v, Tensor)]
        if len(mine) != len(theirs) or node.name == "new_zeros":
            continue  # one operand twice; an operand that is read as it comes
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype, emitted
            assert one.shape == tuple(other.shape), emitted


def test_specimens_run_as_they_are() -> None:
    device = torch.device("cpu")
    for _, specimen, node in specimens_of(Odd(), torch.randint(0, 11, (2, 6))):
        assert 0 < specimen.nanoseconds(device) < 1e9, node


def test_a_specimen_with_a_gradient_takes_its_backward_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grads: list[int] = []
    real = torch.autograd.grad

    def spy(*args: Any, **kwargs: Any) -> Any:
        grads.append(1)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", spy)
    pairs = specimens_of(mlp(), torch.randn(4, 16))
    linear = next(s for n, s, _ in pairs if n.name == "linear_1")
    linear.nanoseconds(torch.device("cpu"))
    assert grads


@pytest.mark.thorough
def test_keys_tell_apart_whatever_takes_another_time() -> None:
    def keys(batch: int, training: bool) -> set[str]:
        model = Odd().requires_grad_(training)
        pairs = specimens_of(model, torch.randint(0, 11, (batch, 6)))
        return {specimen.key for _, specimen, _ in pairs}

    assert keys(2, True) == keys(2, True)
    assert not keys(2, True) & keys(3, True)
    assert keys(2, True) != keys(2, False)


# -- the times on disk -------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
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


def test_milliseconds_are_written_without_exponents() -> None:
    way = Timed("fp32", 2.63, 1.0)
    tuning = Tuning("M", torch.bfloat16, "cpu", True, "fp32", (way,), 0, 0, 1.0)
    assert "2630" in str(tuning)
    assert "e+" not in str(tuning)


# -- what is said ------------------------------------------------------------------


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
    assert "5 rounds could not tell which is faster" in said
    assert f"{PREDICTED} (36 ms, from 30 to 90)" in said
    assert f"{FP32} ({36 / gap:.3g} ms" in said
    assert "no way is faster" not in said


def test_a_way_that_won_every_round_is_said_to_be_the_fastest() -> None:
    said = told_of(PREDICTED, {FP32: [3.0] * 5, PREDICTED: [1.0] * 5})
    assert "no way is faster. Its time is 0.33 of fp32" in said
    assert "could not tell" not in said


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a terminal is shown of the progress of work, from 0.05 seconds on."""
    shown = io.StringIO()
    console = partial(Console, file=shown, force_terminal=True, width=100)
    monkeypatch.setattr("autoamp.ask.progress.Console", lambda **_: console())
    monkeypatch.setattr("autoamp.ask.progress.QUIET", 0.05)
    return shown


def test_a_first_item_that_takes_long_is_shown_before_its_end(
    terminal: io.StringIO,
) -> None:
    for _ in told(["one"], "waiting"):
        begun = time.monotonic()
        while "waiting" not in terminal.getvalue():
            assert time.monotonic() - begun < 60
            time.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.usefixtures("quick", "on_a_device_that_pays")
def test_the_ways_are_set_up_under_a_bar(
    terminal: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, {MEASURED: 1.0})
    autoamp.tune(Net(), image())
    shown = terminal.getvalue()
    assert "setting up the ways to run the model" in shown
    assert "setting up autoamp, measured prices" in shown
