"""A step never ends worse than without masters, whatever class of optimizer steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.says import says
from tests.training.optimizer_makers import OWN_MEMORY, Kind, Made, kinds, maker

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = kinds(40)
STEPS = 4

Call = Callable[..., Any]


def half_model(dtype: torch.dtype = BF16) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return model.to(dtype)


def train(half: list[nn.Parameter], kind: Kind, call: Call) -> None:
    """Trains by `call(method, *args)`; gradients are of the half weights' dtype."""
    for step in range(STEPS):

        def closure(aim: float = 0.3 * step) -> Tensor:
            for param in half:
                param.grad = None
            loss = torch.stack([(p.float() - aim).square().sum() for p in half]).sum()
            loss.backward()
            return loss

        methods = kind.extra.split()
        if "second_step" in methods:
            for method in methods:
                closure()
                call(method)
            continue
        if kind.closure:
            call("step", closure)
        else:
            closure()
            call("step")
        for method in methods:
            call(method)


def by_hand(kind: Kind, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    """The masters of the same class over fp32 parameters, in torch alone."""
    model = half_model(dtype)
    half = [*model.parameters()]
    masters = [nn.Parameter(p.detach().float()) for p in half]
    optimizer = maker(kind)(masters)

    def widen() -> None:
        """Accumulates the gradients, so that hooks fire as in a backward."""
        for master in masters:
            master.grad = None
        grads = [p.grad.float() for p in half if p.grad is not None]
        with torch.enable_grad():
            torch.autograd.backward([m.view_as(m) for m in masters], grads)

    def narrow() -> None:
        with torch.no_grad():
            for param, master in zip(half, masters, strict=True):
                param.copy_(master)

    def call(method: str, closure: Any = None) -> None:
        def inside() -> None:
            narrow()
            closure()
            widen()

        if closure is None:
            widen()
        getattr(optimizer, method)(*([] if closure is None else [inside]))
        narrow()

    train(half, kind, call)
    names = dict(model.named_parameters())
    return dict(zip(names, (m.detach() for m in masters), strict=True))


def without_masters(kind: Kind, dtype: torch.dtype = BF16) -> dict[str, Tensor]:
    """The weights that torch alone trains in half precision."""
    model = half_model(dtype)
    half = [*model.parameters()]
    optimizer = maker(kind)(half)
    train(half, kind, lambda method, *args: getattr(optimizer, method)(*args))
    return {each: p.detach() for each, p in model.named_parameters()}


def seen(half: list[nn.Parameter], optimizer: Made, *, addresses: bool) -> Any:
    """What a user sees of the parameters outside of a step."""
    groups = optimizer.param_groups
    return (
        [(id(p), p.dtype, p.shape, p.is_leaf, p.requires_grad) for p in half],
        [p.data_ptr() for p in half if addresses],
        [len(p._post_accumulate_grad_hooks or ()) for p in half],
        [[id(p) for p in group["params"]] for group in groups],
        [id(group["params"]) for group in groups],
    )


def converted(
    kind: Kind, caplog: pytest.LogCaptureFixture, dtype: torch.dtype = BF16
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[str]]:
    """The weights and the masters that autoamp trains, and its warnings."""
    model = half_model(dtype)
    half = [*model.parameters()]
    optimizer = maker(kind)(half)
    precision: Any = "bf16" if dtype == BF16 else "fp16"
    caplog.set_level(logging.WARNING, logger="autoamp")
    model, optimizer = autoamp.convert(model, optimizer, precision=precision)
    fixed = kind.write != "new data"
    before = seen(half, optimizer, addresses=fixed)

    def call(method: str, *args: Any) -> None:
        getattr(optimizer, method)(*args)
        assert seen(half, optimizer, addresses=fixed) == before
        assert {*map(id, optimizer.state)} <= {*map(id, half)}

    train(half, kind, call)
    masters = optimizer.state_dict().get("autoamp_masters", {})
    said = [each.getMessage() for each in caplog.records]
    return {each: p.detach() for each, p in model.named_parameters()}, masters, said


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[each], b[each]) for each in a)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((k, BF16) for k in KINDS), *((k, FP16) for k in KINDS[:8])],
    ids=str,
)
def test_a_step_ends_no_worse_than_without_masters(
    kind: Kind, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Masters are those by hand; weights that were written past them win."""
    weights, masters, said = converted(kind, caplog, dtype)
    if masters and kind.reach not in OWN_MEMORY:
        assert same(masters, by_hand(kind, dtype))
        assert same(weights, {each: m.to(dtype) for each, m in masters.items()})
        return
    # State of the class's own that was made in half precision may decline masters.
    early = kind.state in ("mine early", "list early", "attributes early")
    assert early or kind.reach in OWN_MEMORY
    assert same(weights, without_masters(kind, dtype))
    assert len(said) == 1
    says(said, maker(kind).__name__)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_law_tells_masters_from_none(kind: Kind) -> None:
    rounded = {each: m.to(BF16) for each, m in by_hand(kind).items()}
    assert not same(rounded, without_masters(kind))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("reach", ["groups", "own list"])
def test_gradients_may_be_assigned(reach: str, dtype: torch.dtype) -> None:
    kind = Kind(reach)
    model = half_model()
    half = [*model.parameters()]
    model, optimizer = autoamp.convert(model, maker(kind)(half), precision="bf16")

    def call(method: str) -> None:
        for param in half:
            assert param.grad is not None
            param.grad = param.grad.to(dtype)
        getattr(optimizer, method)()

    train(half, kind, call)
    assert same(optimizer.state_dict()["autoamp_masters"], by_hand(kind))
