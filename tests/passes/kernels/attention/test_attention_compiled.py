"""Attention in graphs for compilers: its kernels, and how true its gradients are."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.passes.decide.devices import Device
from tests.passes.kernels.attention.test_attention import converted, made, seen
from tests.passes.kernels.attention_backward.test_gradients import (
    SEEDS,
    beside_autocast,
    tokens,
)
from tests.quick import SLOW
from tests.spelled.attention import timm
from tests.spelled.layers import HEADS, SIZE, WIDTH

Backend = str | Callable[..., Any]
OURS = "autoamp::attention_backward"
TORCHS = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"

BACKENDS = [
    pytest.param(aot_eager, id="aot_eager"),
    pytest.param("inductor", id="inductor", marks=SLOW),
]


class Own(nn.Module):
    """Attention as the user calls torch's."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.project, self.options = nn.Linear(WIDTH, 3 * WIDTH), options

    def attend(self, x: Tensor) -> Tensor:
        parts = self.project(x).chunk(3, -1)
        heads = (t.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for t in parts)
        return functional.scaled_dot_product_attention(*heads, **self.options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x).transpose(1, 2).flatten(2)


class Checkpointed(Own):
    def forward(self, x: Tensor) -> Tensor:
        result: Any = checkpoint(super().forward, x, use_reentrant=False)
        return result


@pytest.fixture(autouse=True)
def as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "attends_by_products", False)


def backwards(call: Callable[[Tensor], Tensor], length: int = 12) -> Counter[str]:
    """The kernels of attention's backward that a step runs."""
    x = torch.randn(2, length, WIDTH)
    call(x).sum().backward()  # the capture
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as found:
        call(x).sum().backward()
    names = Counter(event.name for event in found.events())
    # Our op calls torch's kernel in fp32.
    return Counter({OURS: names[OURS], TORCHS: names[TORCHS] * (not names[OURS])})


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=SLOW)])
@pytest.mark.parametrize("model", [Own, Checkpointed], ids=lambda m: m.__name__)
def test_inductor_gets_the_backward_in_fp32(backend: Backend, model: type[Own]) -> None:
    assert backwards(converted(model(), backend=backend))[OURS] == 1
    assert backwards(converted(model(is_causal=True), backend=backend))[OURS] == 1
    left = converted(model(), backend=backend, fuse={"attention_backward": False})
    assert backwards(left) == {OURS: 0, TORCHS: 1}


@pytest.mark.slow
def test_so_does_the_users_own_compilation() -> None:
    by_name = torch.compile(
        Own(), backend="autoamp", options={"precision": "bf16", "do_no_harm": False}
    )
    assert backwards(by_name)[OURS] == 1
    assert backwards(torch.compile(converted(Own())))[OURS] == 1


def test_other_compilers_get_ops_of_torchs_alone() -> None:
    seen_ops: set[str] = set()

    def looked_at(gm: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def noted(inner: torch.fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
            seen_ops.update(str(node.target) for node in inner.graph.nodes)
            return make_boxed_func(inner.forward)  # type: ignore[no-any-return]

        made: Callable[..., Any] = aot_autograd(fw_compiler=noted)(gm, inputs)
        return made

    for model in (Own(), made(timm)):
        backwards(converted(model, backend=looked_at))
    assert any("attention" in op for op in seen_ops)
    assert not any("autoamp" in op for op in seen_ops)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spread", [1.0, 0.1])
def test_written_attention_is_as_true_as_under_autocast(
    backend: Backend, spread: float
) -> None:
    ratios: list[list[float]] = [[], []]
    for seed in range(SEEDS):
        model = made(timm, seed)
        x = tokens(16, spread)
        ours = converted(model, backend=backend)
        found = beside_autocast(model, ours, x)
        assert autoamp.report(ours).runs > 0
        for into, ratio in zip(ratios, found, strict=True):
            into.append(ratio)
    assert max(map(statistics.geometric_mean, ratios)) <= 1.05


@pytest.mark.slow
def test_the_compiled_backward_is_the_eager_one() -> None:
    """With masks, with sizes that change, and for queries that are too many."""
    mask = torch.rand(1, 1, 20, 20) < 0.7
    mask[..., 0] = True
    for options in ({}, {"attn_mask": mask}, {"scale": 0.3}, {"is_causal": True}):
        torch.manual_seed(0)
        model = Own(**options)
        x = torch.randn(2, 20, WIDTH)
        eager, compiled = converted(model), converted(model, backend="inductor")
        for one, other in zip(
            seen(eager, eager, x), seen(compiled, compiled, x), strict=True
        ):
            assert (one - other).norm() <= 2**-8 * one.norm()
    model = converted(Own(), backend="inductor")
    for length in (12, 17, 23, 800):
        assert backwards(model, length)[OURS] == (length < 768)
