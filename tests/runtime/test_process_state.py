"""An error at any point of a capture, or of a call, leaves the process as it was."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.quick import each_with_one
from tests.small_models import BF16

WIDTH = 16


class Regions(nn.Module):
    """Every kind of region that sets a mode, with a graph break inside two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            mean = self.first(x).mean()
            torch._dynamo.graph_break()
        with torch.autocast("cpu", enabled=False):
            x = self.first(x) + mean
        x = self.drop(x)
        with torch.enable_grad():
            x = self.second(x).relu()
        return self.without_gradients(x) + x

    @torch.no_grad()
    def without_gradients(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.second(x) * random.random()


def state() -> dict[str, Any]:
    """The modes of the process and the next numbers of its generators."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(d) for d in ("cpu", "cuda")],
        "autocast dtype": [torch.get_autocast_dtype(d) for d in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "functions": torch._C._len_torch_function_stack(),
        "dispatch": torch._C._len_torch_dispatch_stack(),
        "frames": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
    }


class StopError(Exception):
    """The error that the tests plant."""


class Planted:
    """Raises at the `at`-th Python call in Dynamo and autoamp, as if that code did."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.left, self.error = at, error
        self.place = ""

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if event != "call" or not ("/torch/_dynamo/" in path or "/autoamp/" in path):
            return
        self.left -= 1
        if self.left == 0:
            sys.setprofile(None)
            self.place = f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
            inside: dict[str, Any] = {"__name__": frame.f_globals["__name__"]}
            exec("def fail(error): raise error", inside)
            inside["fail"](self.error("planted"))


def called_with(planted: Planted, call: Callable[[], Any]) -> Any:
    """The result of a call in which an error is planted; None where the call raised."""
    sys.setprofile(planted)
    try:
        return call()
    except (StopError, KeyboardInterrupt):
        return None
    finally:
        sys.setprofile(None)


def numbers() -> tuple[Any, Any]:
    """The states of the generators that the model draws from."""
    return torch.get_rng_state().tolist(), random.getstate()


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


def check(at: int, error: type[BaseException], warm: bool) -> str:
    """Plants an error in the first call, or in a later call that captures anew."""
    torch._dynamo.reset()
    x = torch.randn(4, WIDTH)
    plain = Regions()
    model = autoamp.convert(copy.deepcopy(plain), **BF16)
    if warm:
        model(torch.randn(3, 2, WIDTH))
    seed()
    exact = plain(x)
    drawn = numbers()
    seed()
    before = state()
    planted = Planted(at, error)
    found = called_with(planted, lambda: model(x))
    assert state() == before, planted.place
    if found is not None:
        torch.testing.assert_close(found, exact, rtol=0.05, atol=0.05)
        assert found.requires_grad
        assert numbers() == drawn, planted.place
    seed()
    torch.testing.assert_close(model(x), exact, rtol=0.05, atol=0.05)
    assert state() == before
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    return planted.place


# An error planted in the callback of a weak reference is only told of.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("warm", "error"), each_with_one([False, True], [StopError, KeyboardInterrupt])
)
@pytest.mark.parametrize("points", [4, pytest.param(150, marks=pytest.mark.slow)])
def test_an_error_in_a_capture_leaves_the_process_as_it_was(
    points: int, warm: bool, error: type[BaseException]
) -> None:
    """CI has one error in a first capture, and the other in a later one."""
    reached = [check(at, error, warm) for at in points_of(warm, points)]
    assert sum(map(bool, reached)) > len(reached) / 2


@functools.cache
def points_of(warm: bool, count: int) -> list[int]:
    """Points all over a capture: half evenly, half more densely at its beginning.

    To count the calls takes as long as a test, and both errors have the same points.
    """
    torch._dynamo.reset()
    model = autoamp.convert(Regions(), **BF16)
    if warm:
        model(torch.randn(3, 2, WIDTH))
    planted = Planted(sys.maxsize, StopError)
    called_with(planted, lambda: model(torch.randn(4, WIDTH)))
    every = sys.maxsize - planted.left
    chosen = random.Random(0)
    even = [chosen.randrange(1, every) for _ in range(count // 2)]
    early = [round(every ** chosen.random()) for _ in range(count - len(even))]
    return [*even, *early]
