"""`find_overflow` tells what is near the limit, and refuses bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan, while_loop

import autoamp
from tests.says import says
from tests.small_models import WIDTH


def small(*sizes: int) -> Tensor:
    return torch.randn(*sizes, WIDTH)


def line() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def test_nothing_out_of_range_is_as_informative() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with torch.no_grad():
        model[1].weight.fill_(2000.0)
    found = autoamp.find_overflow(model.eval(), small(4))
    assert not found
    assert (found.kind, found.direction) == ("op", "forward")
    assert found.module == "1"
    assert 1 < found.largest < found.limit == 65504
    says(found.headline, f"{found.limit / found.largest:.3g} times")


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


@pytest.mark.parametrize("factor", [1e5, 1e38 * 1e38])
def test_bf16_has_the_range_of_fp32(factor: float) -> None:
    options = {"precision": "bf16"}
    found = autoamp.find_overflow(line(), small(4) * factor, **options)
    assert (bool(found), found.in_fp32) == (factor > 1e38, factor > 1e38)
    assert found.limit > 1e38


def test_what_fp32_cannot_hold_is_the_models_own_fault() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x @ x) / 0.0

    found = autoamp.find_overflow(Own(), torch.ones(WIDTH, WIDTH).requires_grad_())
    assert (found.in_fp32, found.rule) == (True, None)
    says(found, "no option cures it")
    model = nn.Sequential(line(), line())
    with torch.no_grad():
        model[1].bias[3] = math.inf
    found = autoamp.find_overflow(model, small(4))
    assert (found.kind, found.name, found.in_fp32) == ("weight", "1.bias", True)


class Steep(nn.Module):
    """A healthy model in whose gradients no fp16 number holds a sum of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return 3000.0 * self.fc(x)


@pytest.mark.parametrize("training", [True, False])
def test_without_a_loss_the_forward_alone_is_judged(training: bool) -> None:
    model = Steep().train(training)
    found = autoamp.find_overflow(model, small(4))
    assert (bool(found), found.forward_only, found.rule) == (False, True, None)
    says(str(found), "the forward alone", "loss_fn=")
    judged = autoamp.find_overflow(model, small(4), loss_fn=torch.sum)
    assert (bool(judged), judged.forward_only) == (True, False)
    assert "the forward alone" not in str(judged)


def test_the_loss_of_an_output_is_a_loss() -> None:
    class WithLoss(Steep):
        def forward(self, x: Tensor) -> Any:
            return {"loss": super().forward(x).sum(), "other": x}

    found = autoamp.find_overflow(WithLoss(), small(4))
    assert (found.direction, found.forward_only) == ("backward", False)


def test_a_cure_that_leaves_the_nan_of_fp32_says_so() -> None:
    class Both(nn.Module):
        """An exponential overflows in fp16; the root has a NaN gradient in fp32."""

        def __init__(self) -> None:
            super().__init__()
            self.scores, self.out = line(), line()

        def forward(self, x: Tensor) -> Tensor:
            high = torch.exp(0 * self.scores(x) + 12.0)
            return self.out(high) + torch.sqrt(0 * self.scores(x))

    found = autoamp.find_overflow(Both(), small(4), loss_fn=torch.mean)
    assert (found.op, found.in_fp32) == ("aten::exp.default", True)
    assert found.rule is not None
    says(found, "it stays in range", "fp32 too gives", "infinity or NaN in this call")
    assert "it works" not in str(found)


META = nn.Linear(WIDTH, WIDTH, device="meta")
BAD: dict[str, tuple[Any, dict[str, Any], type[Exception], list[str]]] = {
    "no module": (small, {}, autoamp.UnsupportedModelError, ["function"]),
    "on meta": (
        META,
        {},
        autoamp.UnsupportedModelError,
        ["weight of Linear", "meta"],
    ),
    "no scalar": (
        line(),
        {"loss_fn": lambda out: out},
        autoamp.OptionError,
        ["one element", "(4, 8)"],
    ),
    "no tensor": (
        line(),
        {"loss_fn": lambda _: None},
        autoamp.OptionError,
        ["NoneType"],
    ),
    "no option": (
        line(),
        {"precison": "fp16"},
        autoamp.OptionError,
        ["precison"],
    ),
    "no loss function": (line(), {"loss_fn": 3}, autoamp.OptionError, ["loss_fn=3"]),
    "an argument": (
        line(),
        {"options": {"precision": "fp16"}},
        autoamp.OptionError,
        ["kwargs={'options': ...}"],
    ),
    "no keyword arguments": (
        line(),
        {"kwargs": "x"},
        autoamp.OptionError,
        ["kwargs= is a str"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name: str) -> None:
    model, given, kind, named = BAD[name]
    before = dict(vars(model)) if isinstance(model, nn.Module) else {}
    with pytest.raises(kind) as raised:
        autoamp.find_overflow(model, small(4), **given)
    says(raised, *named)
    assert not before or vars(model) == before


def test_an_input_on_another_device_is_named() -> None:
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        autoamp.find_overflow(line(), small(4).to("meta"))
    says(raised, "[0]", "meta")


def test_an_error_of_the_loss_function_is_raised_unchanged() -> None:
    own = LookupError("the user's own")

    def loss_fn(_: Tensor) -> Tensor:
        raise own

    with pytest.raises(LookupError) as raised:
        autoamp.find_overflow(line(), small(4), loss_fn=loss_fn)
    assert raised.value is own


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
    says(found.source, line="* 400 * 400")
    assert found.rule is not None


class Infinite(nn.Module):
    """Infinite in fp32, too; so small that no op runs low where bf16 has units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = line(), line()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.exp(self.up(x) + 90))


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("training", [True, False])
def test_a_model_of_which_nothing_runs_low_is_looked_at(training: bool) -> None:
    model, x = Infinite().train(training), small(4)
    assert not any(op.is_low for op in autoamp.explain(model, x, precision="bf16").ops)
    found = autoamp.find_overflow(model, x, precision="bf16")
    assert found
    assert "exp" in found.op
    assert found.in_fp32


@pytest.mark.usefixtures("bf16_units")
def test_a_comparison_in_which_nothing_was_rounded_says_so() -> None:
    found = autoamp.compare(line(), small(4), precision="bf16")
    assert found.errors.output == 0
    says(str(found), "No op runs in bf16", "nothing is rounded")
    low = autoamp.compare(line(), small(4), precision="bf16", do_no_harm=False)
    assert "nothing is rounded" not in str(low)
