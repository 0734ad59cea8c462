"""Fixtures that every test gets, and the rules for tests that need special machines."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis.internal.conjecture import providers
from torch import nn
from torch._dynamo import guards

import autoamp
from autoamp import compat, messages
from tests import levels, processes
from tests.passes.check import numbers
from tests.small_models import BF16
from tests.training.steps import converted

CPUS: dict[str, dict[torch.dtype, str]] = {
    "plain": {},
    "avx512_bf16": {torch.bfloat16: "avx512_bf16"},
    "amx_bf16": {torch.bfloat16: "amx_bf16"},
}
"""The units of the CPUs that tests can be told they run on."""

CPU_HELP = "the 16-bit units of the CPU that tests are told they run on"

# The tests draw the same examples on every machine and every day, by no clock; `fuzz`
# is for `make fuzz` alone.  Hypothesis itself has `default`, and `ci` where CI is set.
SAME: dict[str, Any] = {
    "database": None,
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
for _profile in ("default", "ci"):
    hypothesis.settings.register_profile(_profile, derandomize=True, **SAME)
hypothesis.settings.register_profile("fuzz", derandomize=False, **SAME)
hypothesis.settings.load_profile("default")

# Hypothesis draws constants of the modules that were imported before, too, which depend
# on the tests that ran before in the same process.
providers.is_local_module_file = lambda _: False


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--cpu plain` and `--cpu avx512_bf16`: the same outcomes are to be had there."""
    parser.addoption("--cpu", choices=sorted(CPUS), default="amx_bf16", help=CPU_HELP)


def pytest_configure(config: pytest.Config) -> None:
    """Gives each xdist worker its share of the cores: two by two threads are slower."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Skips tests of GPUs where there is none, and those that no GPU can run."""
    levels.mark(items, levels.read())
    here = torch.cuda.is_available()
    for item in items:
        if here and (why := not_on_gpus(item)):
            item.add_marker(pytest.mark.skip(reason=why))
        if here:
            continue
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


ZEROED = "nobody waits for a GPU to see that a gradient was zeroed (loss-scaling.md)"
MASKS = "a GPU's dropout has another mask in each dtype"
NOT_ON_GPUS = {
    "Adagrad-fused": "torch has no fused Adagrad for GPUs",
    "[cuda-overflow zeroed in place": ZEROED,
    "a_second_backward_is_judged_by_itself[cuda-False]": ZEROED,
    "overflowed[cuda-False-False]": ZEROED,
    "digits_allow[cuda-checkpoint": MASKS,
    "changes_no_bit[cuda-checkpoint": MASKS,
    "[cuda-fourier]": "torch has no FFT in bf16 on GPUs: autocast fails",
}
"""Parts of the names of tests, each with the reason why no GPU can run them."""

if torch.__version__.startswith("2.11."):
    NOT_ON_GPUS["denied_model_is_bit_identical_through_convert["] = (
        "torch 2.11 captures no torch.randn on a default device"
    )


def not_on_gpus(item: pytest.Item) -> str:
    """Why a test of a GPU cannot be run on any; "" for all others."""
    if item.get_closest_marker("gpu") is None:
        return ""
    return next((why for part, why in NOT_ON_GPUS.items() if part in item.nodeid), "")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the conformance tests unread where none of them is asked for."""
    without = "not conformance" in config.option.markexpr
    return True if without and collection_path.name == "conformance" else None


@pytest.fixture(autouse=True, scope="session")
def described_machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The same CPU for every test, with the prices of a table: `--cpu` names its units.

    No test reads or writes the user's cache of measured speeds, whichever variables the
    test unsets.
    """
    cpu, times = request.config.getoption("--cpu"), tmp_path_factory.mktemp("times")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoamp.compat.cpu_low_precision_units", lambda: CPUS[cpu])
        patch.setenv(processes.CPU, cpu)
        patch.setenv("XDG_CACHE_HOME", str(times))
        patch.setenv("AUTOAMP_CACHE_DIR", str(times))
        patch.setenv("AUTOAMP_CALIBRATE", "0")
        yield


@pytest.fixture(autouse=True, scope="session")
def guards_are_not_timed() -> Iterator[None]:
    """Dynamo empties the processor's caches to time the guards of each capture.

    That takes 28 ms of a small model's 87.
    """
    with pytest.MonkeyPatch.context() as patch:
        timer = "profile_guard_manager"
        patch.setattr(guards, timer, lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="session")
def both_sides_are_run() -> Iterator[None]:
    """Each kernel and the calls that it replaces run on the same numbers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoamp.passes.check.checks.differences", numbers.proved)
        yield


@pytest.fixture(autouse=True)
def both_sides_are_alike(both_sides_are_run: None) -> Iterator[None]:
    """Fails the test in which a kernel gave other numbers, though the pass left it."""
    numbers.FOUND.clear()
    yield
    assert not numbers.FOUND, numbers.FOUND


@pytest.fixture
def numbers_may_differ() -> Iterator[None]:
    """The test plants a fault, which `both_sides_are_alike` is to forget."""
    yield
    numbers.FOUND.clear()


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Hides older objects from the collector: 1.5 million take a second to look at.

    Those of imported modules, mostly.  Tests collect, and a first call of a model in
    fp16 looks for optimizers among all objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Starts every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    # `torch.manual_seed` alone keeps a stack trace for each kind of device that is not
    # there: 3 ms a test, for ten thousand tests.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def reports_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a report that cannot be made is an error, which users only read of."""
    monkeypatch.setattr("autoamp.messages.CAUGHT", ())


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    """What other tests were told is told again."""
    messages._logged.clear()


@pytest.fixture
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of our variables in the environment."""
    for name in [name for name in os.environ if name.startswith("AUTOAMP_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def off_again() -> Iterator[None]:
    """The automatic mode, if the test switches it on, goes off with it."""
    yield
    autoamp.disable()


@pytest.fixture
def automatic(off_again: None) -> None:
    """The automatic mode, in bf16."""
    autoamp.enable(**BF16)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch: two that wait for each other starve on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def fresh_dynamo(request) -> Iterator[None]:
    """Drops compiled code between tests, so that no test meets another's limits."""
    yield
    if request.node.get_closest_marker("one_model"):
        return
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture
def bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which bf16 pays by its prices, whatever CPU the tests run on."""
    units = CPUS["amx_bf16"]
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", lambda: units)


@pytest.fixture
def real_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The units of the CPU that the tests run on, as a new process finds them."""
    units = compat.device.cpu_low_precision_units
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", units)


@pytest.fixture
def no_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU on which bf16 does not pay, whatever CPU the tests run on."""
    monkeypatch.setattr("autoamp.compat.cpu_low_precision_units", dict)


@pytest.fixture(
    scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
def device(request) -> Iterator[str]:
    """Where tensors are made.  Tests that use it run once on each device there is.

    On a CPU no default is set, as in most scripts.
    """
    if request.param == "cpu":
        yield request.param
        return
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture(scope="module")
def base(device: str) -> Iterator[nn.Module]:
    """A converted model.  Tests marked `one_model` train copies, which share graphs."""
    torch.manual_seed(0)
    yield converted()
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _autocast_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves a region of autocast open: autocast would cast no weight anew."""
    yield
    depth = 0
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting():
        depth += 1
    assert depth == 0, f"{request.node.nodeid} left {depth} regions of autocast open"
