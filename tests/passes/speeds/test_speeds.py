"""The speeds of this machine: measured once, kept, shared; else those of a table."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoamp
from autoamp.passes.decide.devices import Device, roofline
from autoamp.passes.speeds import speeds
from autoamp.passes.speeds.clock import described
from autoamp.passes.speeds.speeds import (
    SIZES,
    SWITCH,
    NoTimeError,
    Probe,
    device_for,
    device_from,
    is_sane,
    measure_again,
    measured,
    probes,
    work_of,
)
from autoamp.passes.speeds.store import FOLDER

LOW, CPU = torch.bfloat16, torch.device("cpu")
TABLE = roofline("avx512_bf16", LOW)
NAMES = work_of(LOW, "cpu").keys()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    monkeypatch.delenv(SWITCH, raising=False)
    units = {LOW: "avx512_bf16"}
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)
    monkeypatch.setattr(speeds, "_known", {})
    return tmp_path / "cache"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The factors of the measurements to come; each takes one off the front."""
    factors = [1.0, 2.0, 4.0]

    order = sorted(NAMES)

    def one(*_: Any) -> dict[str, float]:
        factor = factors.pop(0)
        return {name: 1000.0 * (1 + at) * factor for at, name in enumerate(order)}

    monkeypatch.setattr(speeds, "measured", one)
    return factors


def asked(**changes: Any) -> Device:
    return device_for(CPU, LOW, **{"calibrate": True, **changes})


def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "_known", {})


# -- measuring -------------------------------------------------------------------------


def test_all_probes_have_a_name_and_run() -> None:
    every = probes(CPU, LOW)
    assert {probe.name for probe in every} == NAMES
    assert len(every) == len(NAMES), "a name occurs twice"
    for probe in every:
        if str(SIZES[-1]) not in probe.name:
            assert probe.call() is not None


def test_measuring_ends_in_time_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    with contextlib.suppress(NoTimeError):  # on a busy machine
        assert is_sane(measured(CPU, LOW), LOW, CPU)
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_of_the_caller_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside a capture, tensors would be fake, and times those of Python."""
    monkeypatch.setattr("autoamp.passes.speeds.speeds._AGREE", math.inf)
    monkeypatch.setattr("autoamp.passes.speeds.speeds._MOST", 1)
    with torch._subclasses.FakeTensorMode(), torch.autocast("cpu", LOW):
        assert is_sane(measured(CPU, LOW, seconds=60), LOW, CPU)


def test_readings_that_differ_are_no_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A neighbour that takes the processor now and then, and at last always."""
    module = "autoamp.passes.speeds.speeds."
    monkeypatch.setattr(f"{module}probes", lambda *_: [Probe("one", lambda: None)])
    for readings, is_one in (
        ([90.0, 10.0, 30.0, 19.0], True),
        ([90.0, 10.0, 30.0, 21.0], False),
    ):
        given = itertools.cycle(readings)
        monkeypatch.setattr(f"{module}seconds_of", lambda *_, g=given: next(g) / 1e9)
        monkeypatch.setattr(f"{module}_MOST", len(readings))
        if is_one:
            assert measured(CPU, LOW)["one"] == pytest.approx(10.0)
        else:
            with pytest.raises(NoTimeError):
                measured(CPU, LOW)


def test_too_slow_a_device_gives_up() -> None:
    with pytest.raises(NoTimeError):
        measured(CPU, LOW, seconds=1e-6)


# -- the figures -----------------------------------------------------------------------


def flat(ns: float) -> dict[str, float]:
    return dict.fromkeys(NAMES, ns)


def test_a_figure_is_what_was_measured_less_the_start() -> None:
    """A product of 64 rows of 2048 x 1024 in 2 ms, started in 8 + 8 microseconds."""
    times = flat(1e6) | {
        "start of an op": 8192.0,
        "bf16 start of a product": 16384.0,
        "bf16 product of 64 rows": 2_097_152.0 + 16384.0,
    }
    device = device_from(times, LOW, TABLE, "here")
    assert device.launch_ns == 8192
    assert device.low.start_ns == 8192
    assert dict(device.low.products)[64.0] == 128  # 2 * 64 * 2048 * 1024 / 2^21
    assert device.flops_per_ns("matmul", 64, low=True) == 128


def test_figures_are_rounded_to_a_grid() -> None:
    """Times that differ by less than a step mostly give the same figures."""
    one = device_from(flat(1e6), LOW, TABLE, "here")
    assert device_from(flat(1.01e6), LOW, TABLE, "here") == one
    for rate in (one.bytes_per_ns, one.launch_ns, one.low.convolution):
        steps = 4 * math.log2(rate)
        assert steps == pytest.approx(round(steps), abs=1e-2)


def test_an_op_that_takes_less_than_a_start_still_has_a_rate() -> None:
    device = device_from(flat(1e4), LOW, TABLE, "here")
    assert all(rate > 0 for _, rate in device.low.products)


def test_channels_last_only_where_it_is_surely_faster() -> None:
    usual, last = "bf16 convolution", "bf16 convolution, channels last"
    for factor, chosen in ((0.9, True), (0.97, False), (1.2, False)):
        times = flat(1e6) | {usual: 1e6, last: factor * 1e6}
        assert device_from(times, LOW, TABLE, "").channels_last is chosen
    never = replace(TABLE, channels_last=False)
    assert not device_from(flat(1e6) | {last: 1e5}, LOW, never, "").channels_last


# -- kept ------------------------------------------------------------------------------


def test_a_second_process_measures_nothing(
    measurements: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asked()
    assert asked() is first
    new_process(monkeypatch)
    assert asked() == first
    assert len(measurements) == 2, "measured once"
    assert first.name.endswith(", measured")


def test_measuring_again_replaces_what_is_kept(
    measurements: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asked()
    second = measure_again(CPU, LOW)
    assert second != first
    new_process(monkeypatch)
    assert asked() == second


def test_other_threads_are_another_machine(measurements: list[float]) -> None:
    first, before = asked(), torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert asked() != first
    finally:
        torch.set_num_threads(before)
    assert asked() is first


def test_another_clock_is_another_machine(
    measurements: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoamp.passes.speeds.clock._CLOCK", tmp_path)
    limit = tmp_path / "scaling_max_freq"
    limit.write_text("3000000\n")
    first = asked()
    limit.write_text("1200000\n")
    assert "1200000" in described(CPU)
    assert asked() != first


def test_each_dtype_is_measured(measurements: list[float]) -> None:
    asked()
    with pytest.MonkeyPatch.context() as patch:
        units = dict.fromkeys((LOW, torch.float16), "amx_fp16")
        patch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)
        half = {n.replace("bf16", "fp16"): 1e6 for n in NAMES}
        patch.setattr(speeds, "measured", lambda *_: half)
        assert device_for(CPU, torch.float16, calibrate=True).name.endswith("measured")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda line: line[: len(line) // 2],
        lambda line: line.replace("[", "{", 1),
        lambda line: '["bf16", {}]',
        lambda line: line.replace("fp32 convolution", "fp32 revolution", 1),
        lambda line: json.dumps(["bf16", dict.fromkeys(NAMES, -1.0)]),
        lambda line: json.dumps(["bf16", dict.fromkeys(NAMES, 1e300)]),
        lambda line: json.dumps(["bf16", dict.fromkeys(NAMES, 10**400)]),
        lambda line: json.dumps(["bf16", dict.fromkeys(NAMES, math.nan)]),
        lambda line: json.dumps(["bf16", dict.fromkeys(NAMES, True)]),
        lambda line: json.dumps(["bf16", dict.fromkeys(NAMES, "fast")]),
        lambda line: json.dumps(["bf16", {**dict.fromkeys(NAMES, 9.0), "x": 1}]),
        lambda line: "[" * 5000,
    ],
)
def test_a_spoilt_file_is_measured_anew(
    spoil: Callable[[str], str],
    measurements: list[float],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = asked()
    (file,) = folder.iterdir()
    file.write_text(spoil(file.read_text().strip()))
    new_process(monkeypatch)
    second = asked()
    assert second != first
    new_process(monkeypatch)
    assert asked() == second, "the new line is behind the spoilt one"


def test_a_folder_that_cannot_be_written_costs_a_warning(
    measurements: list[float], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")
    assert asked().name.endswith(", measured")
    assert "cannot be stored on disk" in caplog.text


def test_of_two_that_measure_at_once_both_take_the_first_line(
    measurements: list[float], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = asked()
    (file,) = folder.iterdir()
    line = file.read_text()
    file.unlink()
    new_process(monkeypatch)

    def slower(*_: Any) -> dict[str, float]:
        file.write_text(line)  # the other process is done before this one
        return flat(5e5)

    monkeypatch.setattr(speeds, "measured", slower)
    assert asked() == first


# -- a table's figures -----------------------------------------------------------------


def test_no_time_is_said(
    monkeypatch: pytest.MonkeyPatch, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    def slow(*_: Any) -> None:
        raise NoTimeError

    monkeypatch.setattr(speeds, "measured", slow)
    found = asked()
    assert replace(found, name="") == replace(TABLE, name="")
    assert "by a table, as it was too busy to be measured in 0.5 s" in found.name
    assert "are those of a table" in caplog.text
    assert not folder.exists(), "the next process tries again"


def test_a_device_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(speeds, "measured", fails)
    assert "measuring failed (RuntimeError: out of memory)" in asked().name


@pytest.mark.parametrize("value", ["0", "off", " FALSE "])
def test_the_switch(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "measured", None)
    monkeypatch.setenv(SWITCH, value)
    assert asked() == TABLE
    monkeypatch.delenv(SWITCH)
    assert asked(calibrate=False) == TABLE


def test_nothing_is_measured_where_low_precision_does_not_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)
    monkeypatch.setattr(speeds, "measured", None)
    assert not asked().pays
    assert device_for(torch.device("meta"), LOW, calibrate=True).pays


# -- used ------------------------------------------------------------------------------


BF16 = {"precision": "bf16"}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def test_convert_and_explain_place_by_what_was_measured(
    measurements: list[float],
) -> None:
    x = torch.ones(4, 8)
    for calibrate in (True, False):
        model = autoamp.convert(net(), precision="bf16", calibrate=calibrate)
        model(x)
        for report in (
            autoamp.report(model),
            autoamp.explain(net(), x, **(BF16 | {"calibrate": calibrate})),
        ):
            assert report.headline.device.endswith(", measured") is calibrate
    named = autoamp.explain(net(), x, **BF16, device="cpu:amx")
    assert named.headline.device == "CPU with AMX"


# -- several ranks ---------------------------------------------------------------------


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Device]:
    """What a rank is given; ranks take their turns, as processes with one store."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr("autoamp.compat.are_several", lambda: True)
    monkeypatch.setattr("autoamp.compat.default_store", lambda: store)
    monkeypatch.setattr(speeds, "_PATIENCE", 0.2)

    def given(number: int) -> Device:
        new_process(monkeypatch)
        monkeypatch.setenv(FOLDER, f"{os.environ[FOLDER]}-{number}")  # other disks
        monkeypatch.setattr("torch.distributed.get_rank", lambda: number)
        return asked()

    return given


def test_ranks_take_the_figures_of_the_first(
    measurements: list[float], rank: Callable[[int], Device]
) -> None:
    first = rank(0)
    assert [rank(1), rank(2)] == [first, first]
    assert len(measurements) == 2, "the first rank alone has measured"


def test_without_the_first_rank_all_take_those_of_another(
    measurements: list[float], rank: Callable[[int], Device]
) -> None:
    """The first rank holds a stage of a pipeline that converts nothing until later."""
    second = rank(1)
    assert [rank(2), rank(0)] == [second, second]


def test_ranks_take_the_table_where_the_first_does(
    monkeypatch: pytest.MonkeyPatch, rank: Callable[[int], Device]
) -> None:
    def fails(*_: Any) -> None:
        raise NoTimeError

    monkeypatch.setattr(speeds, "measured", fails)
    first = rank(0)
    monkeypatch.setattr(speeds, "measured", None)
    assert rank(1) == first
    assert "too busy" in first.name
