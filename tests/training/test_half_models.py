"""Models that arrive in half precision, in programs that do not know autoamp.

Each program trains a norm whose weights begin at 1, by updates that a half weight
near 1 cannot hold: without fp32 masters none of them moves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autoamp
from autoamp.messages import bytes_text
from tests.processes import run_script
from tests.says import says
from tests.training.half_programs import (
    BF16,
    FP16,
    FP32,
    RATE,
    STEPS,
    Net,
    adam,
    adversaries,
    compiled,
    loaded_last,
    loop,
    loss_of,
    mapped,
    own_autocast,
    own_scaler,
    plain,
    weight_normed,
    with_a_plateau,
)
from tests.training.half_trainers import (
    accumulated_by_accelerate,
    adapters_by_trainer,
    causal_by_trainer,
    resumed_by_trainer,
    with_lightning,
)
from tests.training.steps import is_watched, masters_of


@pytest.fixture(autouse=True)
def automatic(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "autoamp")
    autoamp.enable(hot=False, do_no_harm=False)
    yield
    autoamp.disable()


Program = Callable[[torch.dtype], nn.Module]

PROGRAMS: list[tuple[Program, torch.dtype]] = [
    *((program, dtype) for program in (plain, own_autocast) for dtype in (BF16, FP16)),
    (own_scaler, FP16),
    *(
        (program, BF16)
        for program in (
            *(loaded_last, mapped, with_a_plateau, weight_normed, adversaries),
            *(compiled, accumulated_by_accelerate, with_lightning),
            *(causal_by_trainer, resumed_by_trainer, adapters_by_trainer),
        )
    ),
]

LINES = {adversaries: 2, resumed_by_trainer: 2}
"""How many optimizers a program has, if not one."""


def norms_of(model: nn.Module) -> Tensor:
    """All the trained weights of its norms, in fp32."""
    norms = [m for m in model.modules() if "Norm" in type(m).__name__]
    owned = [dict(m.named_parameters(recurse=False)).get("weight") for m in norms]
    weights = [w for w in owned if w is not None and w.requires_grad]
    return torch.cat([w.detach().float() for w in weights])


@pytest.mark.filterwarnings("ignore")  # of trainers, about torch and the machine
@pytest.mark.parametrize(
    ("program", "dtype"),
    PROGRAMS,
    ids=lambda each: getattr(each, "__name__", str(each).removeprefix("torch.")),
)
def test_norms_move_as_in_fp32(
    program: Program,
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = program(dtype)
    values = [*model.state_dict().values()]
    assert {v.dtype for v in values if v.is_floating_point()} == {dtype}
    found = [
        re.findall(r"fp32 masters of (\d+) w.* take (.+?),", each.message)
        for each in caplog.records
    ]
    said = [each for line in found for each in line]
    assert len(said) == LINES.get(program, 1), "one line for each optimizer"
    trained = [p for p in model.parameters() if p.requires_grad]
    if len(said) == 1:
        size = sum(p.numel() for p in trained) * (2 if dtype == BF16 else 4)
        assert said == [(str(len(trained)), bytes_text(size))]
    autoamp.disable()
    moved, wanted = norms_of(model) - 1, norms_of(program(FP32)) - 1
    # An update is lost that is less than half of the gap between two half-precision
    # weights, and so is the mean; the rest is noise.
    far = wanted.abs() > 0.004
    assert int((moved[far] != 0).sum()) >= 0.9 * int(far.sum()) > 0
    assert (moved - wanted).abs().mean() < 0.006
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.9


def test_without_masters_none_of_them_moves() -> None:
    autoamp.enable(hot=False, do_no_harm=False, masters="off")
    model = plain(BF16)
    assert torch.equal(model.norm.weight, torch.ones(32, dtype=BF16))


# -- which weights ---------------------------------------------------------------------


def test_fp32_adapters_over_a_frozen_half_base_have_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net().to(BF16)
    model.requires_grad_(False)
    model.head = nn.Linear(32, 4)
    model.norm.register_forward_hook(lambda *given: given[2].float())
    optimizer = adam(model.parameters())
    loop(model, optimizer, BF16)
    assert masters_of(optimizer) == {}
    assert "fp32 masters" not in caplog.text


def test_an_fp32_model_has_no_boundary_for_masters() -> None:
    model = Net()
    optimizer = adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not is_watched(optimizer)


# -- what can go wrong -----------------------------------------------------------------


def test_two_optimizers_share_the_masters_of_a_weight() -> None:
    model = Net().to(BF16)
    first, second = adam(model.parameters()), adam(model.norm.parameters())
    for _ in range(3):
        loss_of(model, BF16).backward()
        first.step()
        second.step()
    weight = model.norm.weight
    assert masters_of(first)[weight] is masters_of(second)[weight]
    assert torch.equal(masters_of(first)[weight].to(BF16), weight)


def test_a_first_step_that_raises_leaves_all_in_place() -> None:
    model = Net().to(BF16)

    class Tight(optim.AdamW):
        tight = True

        def _init_group(self, *given: Any, **named: Any) -> Any:
            if Tight.tight:
                raise MemoryError("for the state")
            return super()._init_group(*given, **named)

    optimizer = Tight(model.parameters(), lr=RATE)
    loss_of(model, BF16).backward()
    with pytest.raises(MemoryError):
        optimizer.step()
    optimizer.zero_grad()
    assert [p.grad for p in model.parameters()] == [None] * 6
    assert optimizer.param_groups[0]["params"] == [*model.parameters()]
    Tight.tight = False
    loop(model, optimizer, BF16)
    assert "zero_grad" not in vars(optimizer)
    assert optimizer.param_groups[0]["params"] == [*model.parameters()]
    assert int((model.norm.weight != 1).sum()) > 28


def test_without_room_for_masters_it_trains_as_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from autoamp.training.masters import Masters

    prepare, calls = Masters._prepare, []

    def tight(self: Masters, param: Tensor) -> None:
        calls.append(param)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        prepare(self, param)

    monkeypatch.setattr(Masters, "_prepare", tight)
    model = Net().to(BF16)
    optimizer = adam(model.parameters())
    loop(model, optimizer, BF16)
    assert len(calls) == 3, "tried once"
    assert caplog.text.count("have no fp32 masters") == 1
    assert "AUTOAMP_MASTERS=off" in caplog.text or "masters='off'" in caplog.text
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}
    assert optimizer.state[model.norm.weight]["exp_avg"].dtype == BF16


def test_a_model_made_fp32_takes_the_masters_digits_along() -> None:
    model = Net().to(BF16)
    optimizer = adam(model.parameters())
    loop(model, optimizer, BF16)
    digits = masters_of(optimizer)[model.norm.weight].detach().clone()
    state = optimizer.state[model.norm.weight]["exp_avg"].clone()
    model.float()
    assert not torch.equal(model.norm.weight, digits)
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.0
    loss_of(model, FP32).backward()
    optimizer.step()
    assert torch.equal(model.norm.weight, digits)
    assert not torch.equal(optimizer.state[model.norm.weight]["exp_avg"], state)


@pytest.mark.parametrize("met", ["before", "after", "never"])
def test_a_step_that_is_compiled(met: str, caplog: pytest.LogCaptureFixture) -> None:
    """Torch breaks a graph at each step: masters that are there are stepped outside."""
    model = Net().to(BF16)
    optimizer = adam(model.parameters())
    if met == "before":
        loop(model, optimizer, BF16)
    before = model.norm.weight.detach().clone()
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    if met == "after":
        autoamp.convert(model, optimizer)
    loop(model, optimizer, BF16)
    never = met == "never"
    assert (masters_of(optimizer) == {}) == never
    assert torch.equal(model.norm.weight, before) == never
    assert ("first step is compiled" in caplog.text) == never
    if never:
        says(caplog.text, "no fp32 masters", "convert(model, optimizer)")


def test_sparse_gradients() -> None:
    table = nn.Embedding(8, 4, sparse=True).to(BF16)
    nn.init.ones_(table.weight)
    optimizer = optim.SparseAdam([*table.parameters()], lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        table(torch.tensor([1, 2, 2])).float().sum().backward()
        optimizer.step()
    assert int((table.weight != 1).sum()) == 8
    assert masters_of(optimizer)[table.weight].dtype == FP32


def test_other_tensors_after_the_first_step() -> None:
    model = Net().to(BF16)
    optimizer = adam(model.parameters())
    loop(model, optimizer, BF16)
    model.norm = nn.LayerNorm(32).to(BF16)
    optimizer.param_groups[0]["params"][:] = [*model.parameters()]
    loop(model, optimizer, BF16)
    assert set(masters_of(optimizer)) == set(model.parameters())
    assert int((model.norm.weight != 1).sum()) > 28


# -- switching off ---------------------------------------------------------------------


def test_convert_with_masters_off_holds_in_the_automatic_mode_too() -> None:
    model = Net().to(BF16)
    optimizer = adam(model.parameters())
    autoamp.convert(model, optimizer, masters="off")
    loop(model, optimizer, BF16)
    assert masters_of(optimizer) == {}
    assert torch.equal(model.norm.weight, torch.ones(32, dtype=BF16))


SCRIPT = """
import torch
model = torch.nn.LayerNorm(8).bfloat16()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.arange(8.0).bfloat16()).float().cumsum(0).sum().backward()
    optimizer.step()
print("MOVED", int((model.weight != 1).sum()))
"""


@pytest.mark.parametrize("masters", ["split", "fp32", "off", "of"])
def test_the_variable(masters: str) -> None:
    result = run_script(SCRIPT, AUTOAMP_ENABLE="1", AUTOAMP_MASTERS=masters)
    assert result.returncode == 0, result.stderr
    kept = masters in ("split", "fp32")
    assert ("MOVED 0" in result.stdout) != kept
    assert ("Adam updates fp32 masters of 2 weights" in result.stderr) == kept
    assert ("give one of auto, split, fp32, off" in result.stderr) == (masters == "of")


COLD = """
import sys, torch
model = torch.nn.LayerNorm(8).half()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(torch.arange(8.0).half()).float().cumsum(0).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
masters = optimizer.state_dict()["autoamp_masters"]
lost = [bool((m != m.half().float()).any()) for m in masters.values()]
print(sorted(masters), all(lost))
"""


def test_a_scaler_of_a_cold_model_meets_fp32_gradients() -> None:
    result = run_script(COLD, AUTOAMP_ENABLE="1")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "['bias', 'weight'] True\n"
    assert result.stderr.count("fp32 masters") == 1
