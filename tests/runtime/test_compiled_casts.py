"""Casts in graphs that inductor compiles: their fates, and rounding at each."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn import functional as F

import autoamp
from autoamp.auto.environment import read
from tests.says import says
from tests.small_models import BF16, Of


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory) -> Iterator[None]:
    """Inductor compiles anew for these tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def own_code() -> Iterator[None]:
    """Each test captures its models anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gated() -> nn.Module:
    torch.manual_seed(0)
    return Of(
        lambda m, x: m.out(F.silu(m.gate(x)) * m.up(x)),
        gate=nn.Linear(64, 128),
        up=nn.Linear(64, 128),
        out=nn.Linear(128, 64),
    )


def wave(read_twice: bool) -> nn.Module:
    """A cast down whose readers are `exp` in bf16, and a product where asked."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        wave = (x * 2.0).sin()
        result: Tensor = m.fc(wave.exp())
        return result + m.fc(wave) if read_twice else result

    return Of(forward, fc=nn.Linear(64, 64))


OLDER_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13)
rounds_on_cpus = pytest.mark.skipif(
    OLDER_TORCH, reason="kernels for CPUs of a torch before 2.13 cannot round at casts"
)

LOW_EXP: dict[str, Any] = {**BF16, "allow": ["exp"]}


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    return autoamp.convert(copy.deepcopy(model), backend="inductor", **options)


def fates(model: nn.Module) -> dict[str, str]:
    casts = autoamp.report(model).casts
    return {cast.name: cast.compiled for cast in casts if cast.every_call}


def test_a_torch_that_cannot_round_on_cpus_is_said_to(monkeypatch) -> None:
    """So is torch 2.11: its Triton kernels round, and its C++ kernels do not."""
    monkeypatch.setattr("autoamp.compat.inductor._cpus_round", lambda: False)
    model = compiled(wave(False), exact_casts=True, **LOW_EXP)
    with torch.no_grad():
        model(torch.randn(24, 64))  # of its own: graphs are kept on disk
    told = " ".join(str(autoamp.report(model)).split())
    says(told, "rounds no value", "sin_bf16", "cannot be told to round")
    assert "round at each cast" not in told


@rounds_on_cpus
def test_it_rounds_as_eager_does_and_no_setting_stays() -> None:
    """In the backward as well."""
    model, x = gated(), torch.randn(32, 64, requires_grad=True)
    before = config.emulate_precision_casts, config._post_fusion_custom_pass

    def trained(**options: Any) -> list[Tensor]:
        x.grad = None
        again = autoamp.convert(copy.deepcopy(model), **BF16, **options)
        y = again(x)
        y.square().sum().backward()
        return [y.detach(), *(p.grad for p in again.parameters()), x.grad]

    eager = trained()
    assert all(map(torch.equal, trained(backend="inductor", exact_casts=True), eager))
    assert not all(map(torch.equal, trained(backend="inductor"), eager))
    after = config.emulate_precision_casts, config._post_fusion_custom_pass
    assert before == after == (False, None)


@rounds_on_cpus
def test_a_cast_inside_a_kernel_rounds_no_value() -> None:
    """The fates read from the schedule are those that the numbers show."""
    model, x = wave(False), torch.randn(32, 64)
    low = copy.deepcopy(model).bfloat16()
    angle = (x * 2.0).sin()
    with torch.no_grad():
        kept = compiled(model, **LOW_EXP)
        assert torch.equal(kept(x), low.fc(angle.exp().bfloat16()).float())
        assert fates(kept) == {"sin_bf16": "inside", "linear_fp32": "written"}
        exact = compiled(model, exact_casts=True, **LOW_EXP)
        assert torch.equal(exact(x), low.fc(angle.bfloat16().exp()).float())
        assert fates(exact) == fates(kept)
    said, told = (" ".join(str(autoamp.report(m)).split()) for m in (kept, exact))
    says(said, "2 casts", "1 inside a kernel", "sin_bf16", option="exact_casts=True")
    says(autoamp.report(kept).full(), "sin_bf16: sin at")
    says(told, "round at each cast")
    assert "rounds no value" not in autoamp.report(exact).full()


def test_a_cast_may_be_written_and_be_read_before_that() -> None:
    model, x = wave(True), torch.randn(32, 64)
    low = copy.deepcopy(model).bfloat16()
    angle = (x * 2.0).sin()
    with torch.no_grad():
        kept = compiled(model, **LOW_EXP)
        y = kept(x)
        unrounded = low.fc(angle.exp().bfloat16())
        rounded = low.fc(angle.bfloat16())
    assert torch.equal(y, (unrounded.float() + rounded.float()).to(y.dtype)) or (
        torch.equal(y, (unrounded + rounded).float())
    )
    assert fates(kept)["sin_bf16"] == "partly"
    saved = json.loads(autoamp.report(kept).to_json())
    assert saved["graphs"][0]["exact_casts"] is False
    assert {c["name"]: c["compiled"] for c in saved["casts"] if c["every_call"]} == (
        fates(kept)
    )


@pytest.mark.parametrize("trains", [False, True])
def test_the_fates_are_known_of_code_from_a_cache(trains: bool) -> None:
    found = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        model = compiled(wave(True), **LOW_EXP)
        with torch.set_grad_enabled(trains):
            model(torch.randn(32, 64))
        found.append((fates(model), counters["inductor"]["fxgraph_cache_hit"]))
        assert not [key for key in counters["inductor"] if "autoamp" in key]
    (first, _), (second, hit) = found
    assert hit > 0
    assert first == second
    assert first["sin_bf16"] == "partly"


def test_a_graph_that_is_not_compiled_has_no_fates() -> None:
    model = autoamp.convert(wave(False), **LOW_EXP)
    model(torch.randn(4, 64))
    assert set(fates(model).values()) == {""}
    assert "nductor" not in str(autoamp.report(model))
    saved = json.loads(autoamp.report(model).to_json())
    assert saved["graphs"][0]["exact_casts"] is None


# -- the option ------------------------------------------------------------------------


def other(gm: Any, inputs: Any) -> Any:
    return gm.forward


def test_eager_rounds_anyway_and_that_is_said(caplog) -> None:
    with caplog.at_level(logging.DEBUG, "autoamp"):
        model = autoamp.convert(gated(), exact_casts=True, **BF16)
    says(caplog.text, option="backend='eager'")
    assert autoamp.is_converted(model)


def test_a_compiler_of_the_users_own_is_told(caplog) -> None:
    options = read({"AUTOAMP_EXACT_CASTS": "1"}).options
    assert options.exact_casts
    with caplog.at_level(logging.DEBUG, "autoamp"):
        assert not options.compiled_by(other).exact_casts
    says(caplog.text, option="AUTOAMP_EXACT_CASTS=1")
    inductor = torch._TorchCompileInductorWrapper("default", {}, None)
    assert options.compiled_by(inductor).exact_casts


@rounds_on_cpus
def test_a_users_own_compilation_by_inductor_rounds_and_keeps_its_options() -> None:
    """The wrapper that `torch.compile` makes holds settings of the user's."""
    model, x = wave(False), torch.randn(32, 64)
    given = {"max_fusion_size": 1}
    wrapper = torch._TorchCompileInductorWrapper(None, given, None)
    eager = autoamp.convert(copy.deepcopy(model), **LOW_EXP)(x)
    with torch.no_grad():
        again = copy.deepcopy(model)
        autoamp.convert(again, backend=wrapper, exact_casts=True, **LOW_EXP)
        assert torch.equal(again(x), eager)
    assert wrapper.config == given
    assert autoamp.report(again).sections[0].exact_casts is True
