"""`find_overflow` leaves a model as it was, refuses bad input, tells what is near."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop

import autoamp
from autoamp.errors import AutoampError, OptionError, UnsupportedModelError

WIDTH = 8


class Noisy(nn.Module):
    """Statistics, noise, a buffer that counts, tied weights, an overflow in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.two.weight = self.one.weight
        self.register_buffer("calls", torch.zeros(()))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        y = self.drop(self.norm(self.one(x))) * 300
        y.mul_(300)
        self.last = y
        return {"out": self.two(y / 1e4), "more": [y, x]}


def small(*sizes: int) -> Tensor:
    return torch.randn(*sizes, WIDTH)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything that a call might change, copied."""
    return {
        "values": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": [
            None if p.grad is None else p.grad.clone() for p in model.parameters()
        ],
        "attributes": [dict(vars(module)) for module in model.modules()],
        "random": torch.get_rng_state(),
    }


def assert_as_it_was(model: nn.Module, before: dict[str, Any]) -> None:
    now = state_of(model)
    for name in before["values"]:
        assert torch.equal(now["values"][name], before["values"][name]), name
    for one, other in zip(now["grads"], before["grads"], strict=True):
        assert (one is None) == (other is None)
        assert one is None or one.equal(other) or str(one) == str(other)  # NaN
    for one, other in zip(now["attributes"], before["attributes"], strict=True):
        assert one.keys() == other.keys()
        assert all(one[name] is other[name] for name in one)
    assert torch.equal(now["random"], before["random"])


@pytest.mark.thorough(but=["False-False", "True-True"])
@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_the_model_is_left_as_it_was(converted: bool, training: bool) -> None:
    model = Noisy().train(training)
    called: list[str] = []
    model.one.weight.register_hook(lambda grad: called.append("gradient"))
    optimizer = torch.optim.Adam(model.parameters())
    if converted:
        autoamp.convert(model, optimizer, precision="fp16", do_no_harm=False)
    model(small(4))["out"].sum().backward()
    called.clear()
    x = small(6).requires_grad_()
    before, kept = state_of(model), x.detach().clone()
    found = autoamp.find_overflow(model, x)
    assert found.op == "aten::mul_.Tensor"
    assert_as_it_was(model, before)
    assert torch.equal(x, kept)
    assert x.grad is None
    assert called == []
    assert not optimizer.state
    assert model.training == training
    assert autoamp.is_converted(model) == converted


def test_nothing_out_of_range_is_as_informative() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        model[1].weight.fill_(2000.0)
    found = autoamp.find_overflow(model.eval(), small(4))
    assert not found
    assert (found.kind, found.direction) == ("op", "forward")
    assert found.module == "1"
    assert 1 < found.largest < found.limit == 65504
    assert f"{found.limit / found.largest:.3g} times below the limit" in found.headline


def test_a_mask_of_the_lowest_number_is_not_near_its_limit() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            lowest = torch.finfo(x.dtype).min
            return self.fc(x).masked_fill(x > 0, lowest).softmax(-1)

    found = autoamp.find_overflow(Masked().eval(), small(4))
    assert not found
    assert found.op != "aten::masked_fill.Scalar"
    assert found.largest < 100


def test_bf16_has_the_range_of_fp32() -> None:
    options = {"precision": "bf16"}
    found = autoamp.find_overflow(Noisy(), small(4), options=options)
    assert not found
    assert found.limit > 1e38
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    found = autoamp.find_overflow(model, small(4) * 1e38 * 1e38, options=options)
    assert found.in_fp32


def test_what_fp32_cannot_hold_is_the_models_own_fault() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x) / 0.0

    found = autoamp.find_overflow(Own(), torch.ones(WIDTH, WIDTH).requires_grad_())
    assert found.in_fp32
    assert found.rule is None
    assert "no option cures it" in str(found)


def test_an_infinite_weight_is_blamed_by_name() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        model[1].bias[3] = math.inf
    found = autoamp.find_overflow(model, small(4))
    assert (found.kind, found.name, found.in_fp32) == ("weight", "1.bias", True)


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise KeyError("the model's own")
        return x @ x


BAD: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "no module": (lambda: small, {}, UnsupportedModelError, "function"),
    "a model on meta": (
        lambda: nn.Linear(WIDTH, WIDTH, device="meta"),
        {},
        UnsupportedModelError,
        "meta device",
    ),
    "no scalar": (
        lambda: nn.Linear(WIDTH, WIDTH),
        {"loss_fn": lambda out: out},
        OptionError,
        r"one element, but it returns \(4, 8\)",
    ),
    "no tensor": (
        lambda: nn.Linear(WIDTH, WIDTH),
        {"loss_fn": lambda out: None},
        OptionError,
        "returns NoneType",
    ),
    "no option": (
        lambda: nn.Linear(WIDTH, WIDTH),
        {"options": {"precison": "fp16"}},
        OptionError,
        "precison",
    ),
    "no loss function": (
        lambda: nn.Linear(WIDTH, WIDTH),
        {"loss_fn": 3},
        OptionError,
        "loss_fn=3",
    ),
    "no options": (
        lambda: nn.Linear(WIDTH, WIDTH),
        {"options": "fp16"},
        OptionError,
        "options='fp16'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    make, given, kind, words = BAD[name]
    model = make()
    before = dict(vars(model)) if isinstance(model, nn.Module) else {}
    with pytest.raises(kind, match=words) as caught:
        autoamp.find_overflow(model, small(4), **given)
    assert isinstance(caught.value, AutoampError)
    assert not before or vars(model) == before


def test_an_input_on_another_device_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"\[0\].* is on meta"):
        autoamp.find_overflow(nn.Linear(WIDTH, WIDTH), small(4).to("meta"))


def test_an_error_of_the_models_own_is_raised_unchanged() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raises())
    x, wide = small(3), torch.randn(4, WIDTH + 1)
    before = state_of(model)
    with pytest.raises(KeyError, match="the model's own"):
        autoamp.find_overflow(model, x)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        autoamp.find_overflow(model, wide)
    assert_as_it_was(model, before)


def test_an_error_of_the_loss_function_is_raised_unchanged() -> None:
    def loss_fn(_: Tensor) -> Tensor:
        raise LookupError("the user's own")

    model, x = nn.Linear(WIDTH, WIDTH), small(4)
    before = state_of(model)
    with pytest.raises(LookupError, match="the user's own"):
        autoamp.find_overflow(model, x, loss_fn=loss_fn)
    assert_as_it_was(model, before)


# -- branches and loops ----------------------------------------------------------------


class Bodies(nn.Module):
    """One kind of body, in which a product overflows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def steep(y: Tensor) -> Tensor:
            return self.layer(y) * 400 * 400 / 1e5

        x = self.layer(x)
        if self.kind == "cond":
            return torch.cond(x.shape[0] > 1, steep, torch.sin, (x,))
        if self.kind == "while":
            first = torch.zeros((), dtype=torch.int64), x

            def body(i: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, steep(y)

            return while_loop(lambda i, y: i < 2, body, first)[1]
        if self.kind == "scan":

            def combine(carry: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                new = steep(y) + carry
                return new, new.clone()

            return scan(combine, torch.zeros(WIDTH), x)[1]
        return torch._higher_order_ops.map(steep, x)


@pytest.mark.parametrize("kind", ["cond", "while", "scan", "map"])
def test_an_op_in_a_body_is_named(kind: str) -> None:
    model = Bodies(kind).eval()
    found = autoamp.find_overflow(model, 3 * small(4))
    assert found.op == "aten::mul.Tensor", str(found)
    assert "* 400 * 400" in found.source
    assert found.rule is not None
