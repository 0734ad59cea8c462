"""Split masters: a bf16 weight and 16 bits beside it are an fp32 master weight.

A run with split masters equals, to the bit, a loop written by hand that keeps the fp32
weights beside the model, steps them by torch's optimizer and rounds them.
"""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import autoamp
from autoamp.training import split
from autoamp.training.attach import boundary_of
from autoamp.training.elementwise_optimizers import body_of, is_elementwise
from autoamp.training.masters import Masters
from autoamp.training.split import CHUNK, Chunk, can_split, chunks_of
from tests.quick import one_in
from tests.training.steps import OldStyle, masters_of

BF16 = torch.bfloat16
Make = Callable[[Any], Any]


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


# -- the numbers -----------------------------------------------------------------------


def patterns() -> Tensor:
    """Every rest of numbers near 1, 0, the largest and the least, and random ones."""
    uppers = torch.tensor(
        [0x3F80, 0x3F81, 0xBF7F, 0, 1, 0x8000, 0x8001, 0x7F7F, 0xFF7F]
    )
    bits = (uppers[:, None] << 16) + torch.arange(1 << 16)
    drawn = torch.randint(0, 1 << 32, (1 << 20,), generator=torch.Generator())
    whole = torch.cat([bits.flatten(), drawn]).to(torch.int32).view(torch.float32)
    return whole[~whole.isnan()]


def test_every_number_comes_back() -> None:
    numbers = patterns()
    param = nn.Parameter(numbers.to(BF16))
    chunk = Chunk([param], [numbers])
    (found,) = chunk.values()
    assert same_bits(found, numbers)
    ties = (numbers.view(torch.int32) & 0xFFFF) == 0x8000
    assert int(ties.sum()) > 10, "numbers halfway between two bf16 numbers"
    assert same_bits(param.detach(), numbers.to(BF16))


def test_layouts_stay() -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    across = torch.randn(7, 3).t()
    params = [nn.Parameter(each.to(BF16)) for each in (weight, across)]
    found = Chunk(params, [weight, across]).values()
    for value, wanted in zip(found, (weight, across), strict=True):
        assert value.stride() == wanted.stride()
        assert same_bits(value, wanted)


def test_what_cannot_be_split() -> None:
    assert not can_split(torch.zeros(2, dtype=torch.float16))
    assert not can_split(torch.zeros(4, 4, dtype=BF16)[:, :2])
    assert not can_split(torch.zeros(1, dtype=BF16).expand(3))
    assert not can_split(torch.zeros(2, dtype=BF16, device="meta"))
    assert can_split(torch.zeros(2, 3, dtype=BF16).t())


def test_chunks_hold_so_many_elements() -> None:
    sizes = [CHUNK // 2, CHUNK // 2, 1, CHUNK + 1, 1]
    params = [torch.zeros(size, dtype=BF16) for size in sizes]
    held = [[p.numel() for p in chunk] for chunk in chunks_of(params)]
    assert held == [sizes[:2], [1], [CHUNK + 1], [1]]


# -- optimizers ------------------------------------------------------------------------


class OfAStack(optim.SGD):
    def step(self, closure: Any = None) -> Any:
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.data.add_(p.grad / norm, alpha=-1e-3)


class Calls(optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


OF_TORCH: dict[str, Make] = {
    "sgd": lambda p: optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=1e-4),
    "adamw": lambda p: optim.AdamW(p, lr=1e-4, amsgrad=True),
    "adamw_fused": lambda p: optim.AdamW(p, lr=1e-4, fused=True),
    "adamw_foreach": lambda p: optim.AdamW(p, lr=1e-4, foreach=True),
    "nadam": lambda p: optim.NAdam(p, lr=1e-4),
    "radam": lambda p: optim.RAdam(p, lr=1e-4),
    "adamax": lambda p: optim.Adamax(p, lr=1e-4),
    "adagrad": lambda p: optim.Adagrad(p, lr=1e-3),
    "adadelta": lambda p: optim.Adadelta(p, lr=1e-2),
    "rmsprop": lambda p: optim.RMSprop(p, lr=1e-4, momentum=0.9, centered=True),
    "rprop": lambda p: optim.Rprop(p, lr=1e-4),
    "asgd": lambda p: optim.ASGD(p, lr=1e-3),
    "adafactor": lambda p: optim.Adafactor(p, lr=1e-3),
}


@pytest.mark.parametrize("make", OF_TORCH.values(), ids=OF_TORCH)
def test_torchs_own_classes_step_each_parameter_by_itself(make: Make) -> None:
    assert body_of(make([nn.Parameter(torch.zeros(2, 2))])) is not None


@pytest.mark.parametrize("make", [OfAStack, Calls, optim.LBFGS])
def test_any_other_class_may_look_at_all_parameters(make: Make) -> None:
    assert body_of(make([nn.Parameter(torch.zeros(2, 2))])) is None


# -- training, beside fp32 weights that are kept by hand -------------------------------


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 10)
    ).to(BF16)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices}, {"params": others, "lr": 3e-3, "weight_decay": 0.0}]


def losses_of(model: nn.Module, step: int) -> Iterable[Tensor]:
    """The losses of two micro-batches."""
    of = torch.Generator().manual_seed(step)
    for _ in range(2):
        x = torch.randn(16, 40, generator=of).to(BF16)
        y = torch.randint(0, 10, (16,), generator=of)
        yield nn.functional.cross_entropy(model(x).float(), y)


STEPS = 30


def by_hand(make: Make) -> tuple[nn.Module, Any, list[Tensor]]:
    """A model, the optimizer of its fp32 weights, and these weights, after training."""
    model = net()
    groups = groups_of(model)
    wide = {p: nn.Parameter(p.detach().float()) for p in model.parameters()}
    optimizer = make([{**g, "params": [wide[p] for p in g["params"]]} for g in groups])
    for step in range(STEPS):
        for loss in losses_of(model, step):
            grads = torch.autograd.grad(loss, [*wide])
            for master, half in zip(wide.values(), grads, strict=True):
                grad = half.float()
                master.grad = grad if master.grad is None else master.grad + grad
        nn.utils.clip_grad_norm_(wide.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for half, master in wide.items():
                half.copy_(master)
    return model, optimizer, [*wide.values()]


EACH: dict[str, Make] = {**OF_TORCH, "old_style": lambda p: OldStyle(p, lr=1e-3)}


@pytest.mark.parametrize(
    ("name", "kind"),
    one_in(4, product(EACH, ["split", "pieces", "fp32"]), lambda c: c[1] == "pieces"),
)
def test_each_optimizer_equals_fp32_masters_to_the_bit(
    name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimizer that looked at several weights at once would not, in pieces.

    CI has every optimizer in pieces, and a fourth of them with the other masters.
    """
    make = EACH[name]
    pieces = kind == "pieces"
    if pieces:  # the matrices are of 2 560 and 640 elements
        monkeypatch.setattr(split, "CHUNK", 496)
    by, own, wide = by_hand(make)
    model = net()
    how: Any = "fp32" if kind == "fp32" else "auto"
    model, optimizer = autoamp.convert(model, make(groups_of(model)), masters=how)
    for step in range(STEPS):
        for loss in losses_of(model, step):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == STEPS // 2:  # state that was saved and loaded goes on so
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            optimizer.load_state_dict(torch.load(file, weights_only=True))
    whole = kind == "fp32" or body_of(optimizer) is None
    assert len(masters(optimizer).of) == (6 if whole else 0)
    cut = [chunk for chunk in masters(optimizer).chunks if chunk.is_cut]
    assert len(cut) == (2 if pieces and is_elementwise(optimizer) else 0)
    for mine, theirs in zip(model.parameters(), by.parameters(), strict=True):
        assert same_bits(mine, theirs)
    found = masters_of(optimizer)
    for param, master in zip(model.parameters(), wide, strict=True):
        assert same_bits(found[param], master)
    mine, theirs = optimizer.state_dict()["state"], own.state_dict()["state"]
    assert mine.keys() == theirs.keys() or not theirs
    for index, state in theirs.items():
        for key, value in state.items():
            a, b = torch.as_tensor(value), torch.as_tensor(mine[index][key])
            assert a.dtype == b.dtype, key
            assert torch.equal(a, b), key
    assert vars(optimizer).get("taken") == vars(own).get("taken")
    assert optimizer.param_groups[0].get("step") == own.param_groups[0].get("step")


def masters(optimizer: Any) -> Masters:
    boundary = boundary_of(optimizer)
    assert boundary is not None
    assert boundary.masters is not None
    return boundary.masters


# -- what other code does to the weights -----------------------------------------------


def load(model: nn.Module, step: int) -> None:
    if step == 5:
        torch.manual_seed(5)
        model.load_state_dict({k: v + 0.5 for k, v in net().state_dict().items()})


def prune(model: nn.Module, step: int) -> None:
    weight = model[0].weight
    of = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight.mul_(torch.rand(weight.shape, generator=of) > 0.5)


def clamp_data(model: nn.Module, step: int) -> None:
    model[3].weight.data.clamp_(-0.05, 0.05)


def write_a_view(model: nn.Module, step: int) -> None:
    model[0].weight.detach()[3:5] = 0.25


def swap_out_and_in(model: nn.Module, step: int) -> None:
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.zero_()
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)


def give_other_memory(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.data = p.data.clone()
    model[1].weight.data = model[1].weight.data * 2


def read_the_address(model: nn.Module, step: int) -> None:
    for p in model.parameters():
        p.data_ptr()  # which moves a weight that has a copy-on-write clone


def resize_memory(model: nn.Module, step: int) -> None:
    weight = model[1].weight
    kept, size = weight.detach() * 2, weight.untyped_storage().nbytes()
    weight.untyped_storage().resize_(0)  # as offloading does
    weight.untyped_storage().resize_(size)
    weight.data.copy_(kept)
    weight.data.fill_(0.5)


def save_and_copy(model: nn.Module, step: int) -> None:
    torch.save(model.state_dict(), io.BytesIO())
    copy.deepcopy(model)


def share_memory(model: nn.Module, step: int) -> None:
    model.share_memory()


def write_in_inference_mode(model: nn.Module, step: int) -> None:
    with torch.inference_mode():
        model[3].bias.mul_(0.5)


def to_fp16_and_back(model: nn.Module, step: int) -> None:
    model.half().to(BF16)


def give_another_shape_of_memory(model: nn.Module, step: int) -> None:
    weight = model[0].weight
    weight.data = (weight.data + 1).t().contiguous().t()


def infinite(model: nn.Module, step: int) -> None:
    if step == 8:
        model[1].bias.data[0] = torch.inf


def freeze_and_thaw(model: nn.Module, step: int) -> None:
    model[0].requires_grad_(step % 3 > 0)


WRITES = [
    *(load, prune, clamp_data, write_a_view, swap_out_and_in, give_other_memory),
    *(read_the_address, infinite, freeze_and_thaw, resize_memory, save_and_copy),
    *(share_memory, write_in_inference_mode, to_fp16_and_back),
    give_another_shape_of_memory,
]


def trained(kind: str, write: Any, steps: int = 12) -> tuple[nn.Module, Any]:
    model = net()
    optimizer = optim.AdamW(groups_of(model), lr=1e-3)
    autoamp.convert(model, optimizer, masters=kind, guard=False)
    for step in range(steps):
        write(model, step)
        optimizer.zero_grad()
        for loss in losses_of(model, step):
            if loss.requires_grad:
                loss.backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_by_other_code_is_the_master_from_then_on(
    write: Any, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setattr(split, "CHUNK", 496)
    model, optimizer = trained("split", write)
    other, whole = trained("fp32", write)
    assert not masters(optimizer).of
    assert not masters(whole).chunks
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert same_bits(a.detach().nan_to_num(), b.detach().nan_to_num())
    found, wanted = masters_of(optimizer), masters_of(whole)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        mine, theirs = found[a].detach(), wanted[b].detach()
        assert same_bits(mine.nan_to_num(), theirs.nan_to_num())


def test_memory_that_others_share_is_not_watched_and_rounds_to_what_is_written() -> (
    None
):
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    autoamp.convert(model, optimizer)
    weight = model[1].weight
    shared = weight.detach().view(torch.int16).numpy()
    for step in range(4):
        for loss in losses_of(model, step):
            loss.backward()
        optimizer.step()
        shared[:8] = 0  # which is bf16's 0 too
        assert torch.equal(masters_of(optimizer)[weight].to(BF16), weight)
    shared[:8] = 0x3F80
    assert torch.equal(masters_of(optimizer)[weight].to(BF16), weight)


def test_asked_for_it_says_where_it_cannot(caplog: pytest.LogCaptureFixture) -> None:
    for dtype, make, said in (
        (BF16, optim.LBFGS, "LBFGS may look at several weights at once"),
        (torch.float16, optim.SGD, "the weights are fp16"),
        (BF16, optim.SGD, ""),
    ):
        caplog.clear()
        model = net().to(dtype)
        autoamp.convert(model, make(model.parameters(), lr=1e-3), masters="split")
        assert ("6 weights take 4 bytes each" in caplog.text) == bool(said)
        assert said in caplog.text


# -- bytes -----------------------------------------------------------------------------


def test_four_bytes_a_weight_and_one_chunk_in_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40))).to(BF16)
    count = sum(p.numel() for p in model.parameters())
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    autoamp.convert(model, optimizer)
    model(torch.randn(4, 256, dtype=BF16)).sum().backward()
    sizes: list[int] = []
    opened = Chunk.open

    def counted(chunk: Chunk) -> None:
        opened(chunk)
        storages = {each.untyped_storage() for each in chunk.masters}
        sizes.append(sum(each.nbytes() for each in storages))
        numbers = [len(c.masters[0]) > 0 for c in masters(optimizer).chunks]
        assert sum(numbers) == 1

    monkeypatch.setattr(Chunk, "open", counted)
    optimizer.step()
    held = sum(p.nbytes for p in model.parameters()) + masters(optimizer).bytes
    ties = 8 * count / 2**17
    assert 4 * count <= held <= 4 * count + 10 * (ties + 10)
    assert len(sizes) == len(masters(optimizer).chunks) == math.ceil(count / CHUNK)
    assert max(sizes) <= 4 * CHUNK


@pytest.mark.parametrize("pieces", [False, True])
def test_nothing_else_is_held_after_a_step(
    pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setattr(split, "CHUNK", 496)
    model = net()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    autoamp.convert(model, optimizer)
    gc.collect()
    before = {id(each) for each in gc.get_objects()}
    for loss in losses_of(model, 0):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    gc.collect()
    state = [v for each in optimizer.state.values() for v in each.values()]
    known = {v.untyped_storage()._cdata for v in [*state, *model.parameters()]}
    new = [each for each in gc.get_objects() if id(each) not in before]
    found = [each for each in new if issubclass(type(each), Tensor)]
    left = [each for each in found if each.untyped_storage()._cdata not in known]
    most = sum(p.numel() for p in model.parameters()) * 2  # the clones share memory
    fp32 = [each for each in left if each.dtype == torch.float32]
    assert sum(each.untyped_storage().nbytes() for each in fp32) == 0
    assert sum(each.untyped_storage().nbytes() for each in left) <= most + 1000


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("make", [optim.SGD, optim.Adagrad])
def test_sparse_gradients_of_a_large_weight(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "CHUNK", 64)
    found = []
    for kind in ("split", "fp32"):
        torch.manual_seed(0)
        model = nn.Embedding(100, 8, sparse=True).to(BF16)
        optimizer = make(model.parameters(), lr=0.1)
        autoamp.convert(model, optimizer, masters=kind)
        for step in range(5):
            optimizer.zero_grad()
            model(torch.arange(step, step + 9)).float().square().sum().backward()
            optimizer.step()
        found.append((model.weight, masters_of(optimizer)[model.weight]))
    for a, b in zip(*found, strict=True):
        assert same_bits(a, b)


def test_a_weight_of_two_optimizers_has_one_whole_master() -> None:
    model = net()
    first = optim.SGD(model.parameters(), lr=1e-2)
    second = optim.SGD(model[1].parameters(), lr=1e-2)
    autoamp.convert(model, first)
    for loss in losses_of(model, 0):
        loss.backward()
    first.step()
    assert not masters(first).of
    autoamp.convert(model, second)
    second.step()
    first.step()
    assert {*masters(first).of} == {*model[1].parameters()} == {*masters(second).of}
    for p in model[1].parameters():
        assert masters(first).of[p] is masters(second).of[p]
    assert sum(len(chunk.params) for chunk in masters(first).chunks) == 4
