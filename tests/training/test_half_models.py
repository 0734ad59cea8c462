"""Models that arrive in half precision, in programs that do not know autoamp.

Each program trains a norm whose weights begin at 1, by updates that a half weight
near 1 cannot hold: without fp32 masters none of them moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autoamp
from tests.one_rank import one_rank
from tests.processes import run_script
from tests.training.steps import is_watched, masters_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WIDTH, STEPS, RATE = 16, 20, 1e-3


@pytest.fixture(autouse=True)
def automatic(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "autoamp")
    autoamp.enable(hot=False, do_no_harm=False)
    yield
    autoamp.disable()


class Net(nn.Module):
    """A layer, a norm and a head, whose weights are the same for each test."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.norm(self.layer(x))))
        return out


def adam(params: Any, **options: Any) -> optim.AdamW:
    return optim.AdamW(params, lr=RATE, weight_decay=0.0, **options)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    of = torch.Generator().manual_seed(1)
    x = torch.randn(32, WIDTH, generator=of)
    return x.to(dtype), torch.randint(0, 4, (32,), generator=of)


def loss_of(model: nn.Module, dtype: torch.dtype) -> Tensor:
    x, y = batch(dtype)
    return nn.functional.cross_entropy(model(x).float(), y)


def loop(model: nn.Module, optimizer: Any, dtype: torch.dtype) -> None:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, dtype).backward()
        optimizer.step()


# -- programs: each makes a model in a dtype and trains it -----------------------------


def plain(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    loop(model, adam(model.parameters()), dtype)
    return model


def optimizer_first(dtype: torch.dtype) -> Net:
    model = Net()
    optimizer = adam(model.parameters())
    loop(model.to(dtype), optimizer, dtype)
    return model


def loaded_last(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    optimizer = adam(model.parameters())
    saved = {k: v.to(dtype) for k, v in Net().state_dict().items()}
    model.load_state_dict(saved, assign=True)
    optimizer.param_groups[0]["params"][:] = model.parameters()
    loop(model, optimizer, dtype)
    return model


def fused(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    loop(model, adam(model.parameters(), fused=True), dtype)
    return model


def scheduled(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    optimizer = adam(model.parameters())
    scheduler = optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    loop(model, optimizer, dtype)
    scheduler.step()
    return model


def own_autocast(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    low = BF16 if dtype == FP32 else dtype
    with torch.autocast("cpu", low):
        loop(model, adam(model.parameters()), dtype)
    return model


def closure(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    optimizer = adam(model.parameters())

    def evaluate() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, dtype)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(evaluate)
    return model


def own_scaler(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    optimizer, scaler = adam(model.parameters()), torch.amp.GradScaler("cpu")
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, dtype)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
    return model


def with_accelerate(dtype: torch.dtype) -> Net:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net().to(dtype)
    ready, optimizer = accelerator.prepare(model, adam(model.parameters()))
    for _ in range(STEPS):
        optimizer.zero_grad()
        accelerator.backward(loss_of(ready, dtype))
        optimizer.step()
    return model


def with_trainer(dtype: torch.dtype) -> Net:
    transformers = pytest.importorskip("transformers")

    class Losses(Net):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            out = super().forward(x.to(dtype))
            return {"loss": nn.functional.cross_entropy(out.float(), labels)}

    x, y = batch(FP32)
    rows = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    model = Losses().to(dtype)
    transformers.Trainer(
        model,
        transformers.TrainingArguments(
            bf16=True,
            use_cpu=True,
            max_steps=STEPS,
            learning_rate=RATE,
            per_device_train_batch_size=32,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=rows,
    ).train()
    return model


def with_lightning(dtype: torch.dtype) -> Net:
    lightning = pytest.importorskip("pytorch_lightning")
    model = Net()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, given: Any, index: int) -> Tensor:
            out = self.net(given[0])
            return nn.functional.cross_entropy(out.float(), given[1])

        def configure_optimizers(self) -> optim.Optimizer:
            return adam(self.parameters())

    data = torch.utils.data.TensorDataset(*batch(FP32))
    lightning.Trainer(
        accelerator="cpu",
        precision={BF16: "bf16-true", FP32: "32-true"}[dtype],
        max_epochs=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=32))
    return model


def under_ddp(dtype: torch.dtype) -> Net:
    model = Net().to(dtype)
    with one_rank():
        ready = nn.parallel.DistributedDataParallel(model)
        loop(ready, adam(ready.parameters()), dtype)
    return model


def under_fsdp2(dtype: torch.dtype) -> Any:
    from torch.distributed.fsdp import fully_shard

    with one_rank():
        model: Any = fully_shard(Net().to(dtype))
        loop(model, adam(model.parameters()), dtype)
        model.norm.weight.full_tensor()
        whole = Net().to(dtype)
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        whole.load_state_dict(full)
    return whole


PROGRAMS: list[tuple[Callable[[torch.dtype], Any], torch.dtype]] = [
    *((program, dtype) for program in (plain, own_autocast) for dtype in (BF16, FP16)),
    (optimizer_first, BF16),
    (loaded_last, BF16),
    (fused, BF16),
    (scheduled, BF16),
    (closure, BF16),
    (own_scaler, FP16),
    (with_accelerate, BF16),
    (with_trainer, BF16),
    (with_lightning, BF16),
    (under_ddp, BF16),
    (under_fsdp2, BF16),
]


@pytest.mark.filterwarnings("ignore")  # of trainers, about torch and the machine
@pytest.mark.parametrize(
    ("program", "dtype"),
    PROGRAMS,
    ids=lambda each: getattr(each, "__name__", str(each).removeprefix("torch.")),
)
def test_norms_move_as_in_fp32(
    program: Callable[[torch.dtype], Any],
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = program(dtype)
    assert {p.dtype for p in model.state_dict().values()} == {dtype}
    told = [record.message for record in caplog.records]
    said = [text for text in told if "fp32 masters of 6 weights" in text]
    assert len(said) == 1, "one line"
    split = dtype == BF16
    assert ("take 1.48 kB" if split else "take 2.96 kB") in said[0]
    autoamp.disable()
    expected = plain(FP32).norm.weight
    weight = model.norm.weight.detach().float()
    moved, wanted = weight - 1, expected.detach() - 1
    assert int(moved.count_nonzero()) >= 0.9 * int(wanted.count_nonzero())
    # Half of the gap between two half-precision weights just above 1, and some noise.
    assert (moved - wanted).abs().mean() < 0.006
    assert torch.nn.functional.cosine_similarity(moved, wanted, dim=0) > 0.9


def test_without_masters_none_of_them_moves() -> None:
    autoamp.enable(hot=False, do_no_harm=False, masters="off")
    model = plain(BF16)
    assert torch.equal(model.norm.weight, torch.ones(32, dtype=BF16))


# -- which weights ---------------------------------------------------------------------


def test_frozen_weights_have_none_until_they_are_thawed() -> None:
    model = Net().to(BF16)
    model.layer.requires_grad_(False)
    optimizer = adam(model.parameters())
    loop(model, optimizer, BF16)
    assert model.layer.weight not in masters_of(optimizer)
    assert len(masters_of(optimizer)) == 4
    model.layer.requires_grad_(True)
    loop(model, optimizer, BF16)
    assert len(masters_of(optimizer)) == 6


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


def test_a_model_half_of_which_is_fp32_is_treated_weight_by_weight() -> None:
    model = Net().to(BF16)
    model.norm.float().register_forward_pre_hook(lambda _, given: given[0].float())
    model.norm.register_forward_hook(lambda *given: given[2].to(BF16))
    optimizer = adam(model.parameters())
    loop(model, optimizer, BF16)
    halves = {p for p in model.parameters() if p.dtype == BF16}
    assert set(masters_of(optimizer)) == halves
    assert model.norm.weight.dtype == FP32


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


def test_resumed_where_nobody_named_the_optimizer() -> None:
    def trained(times: int, saved: Any = None) -> tuple[Net, Any]:
        model = Net().to(BF16)
        optimizer = adam(model.parameters())
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for _ in range(times):
            loop(model, optimizer, BF16)
        return model, optimizer

    half_way = [each.state_dict() for each in trained(1)]
    resumed, whole = trained(1, half_way), trained(2)
    for ours, theirs in zip(
        masters_of(resumed[1]).values(), masters_of(whole[1]).values(), strict=True
    ):
        assert torch.equal(ours, theirs)


# -- switching off ---------------------------------------------------------------------


def test_disable_takes_them_away() -> None:
    model = Net().to(BF16)
    optimizer = adam(model.parameters())
    loop(model, optimizer, BF16)
    autoamp.disable()
    assert not is_watched(optimizer)
    assert "step" not in vars(optimizer)
    loop(model, optimizer, BF16)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}


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
