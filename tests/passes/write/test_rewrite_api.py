"""`rewrite()`: the compiler pass alone, pure, on graphs people already hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoamp
from tests.metrics import count_ops, relative_error
from tests.says import says
from tests.small_models import BF16

MATMUL = torch.ops.aten.matmul.default
WIDTH = 8
CLOSE = 0.02  # bf16 rounding of three layers


class Net(nn.Module):
    """Linear layers, a norm with statistics, a buffer, and a loss-like end."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 16)
        self.norm = nn.BatchNorm1d(16)
        self.second = nn.Linear(16, 4)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return torch.log_softmax(self.second(x) + self.shift, -1)


def traced(model: nn.Module, x: Tensor) -> fx.GraphModule:
    return fx.symbolic_trace(model)


def exported(model: nn.Module, x: Tensor) -> torch.export.ExportedProgram:
    return torch.export.export(model, (x,))


FORMS: list[Callable[[nn.Module, Tensor], Any]] = [traced, exported]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(6, WIDTH)


def low_ops(gm: fx.GraphModule, x: Tensor) -> int:
    """The floating-point operations that run in bf16 when `gm` is run."""
    return count_ops(lambda: gm(x)).low_flops


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_rewritten_graph_runs_low_and_gives_fp32(
    form: Callable[[nn.Module, Tensor], Any], x: Tensor
) -> None:
    model = Net().eval()
    exact = model(x)
    low = autoamp.rewrite(form(model, x), (x,), **BF16)
    assert isinstance(low, fx.GraphModule)
    y = low(x)
    assert y.dtype is torch.float32
    assert 0 < relative_error([y], [exact]) < CLOSE
    assert low_ops(low, x) == 2 * 6 * 16 * (WIDTH + 4)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_input_is_not_changed(
    form: Callable[[nn.Module, Tensor], Any], x: Tensor
) -> None:
    model = Net()
    given = form(model, x)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    printed = str(given.graph)
    metas = [dict(n.meta) for n in given.graph.nodes]
    autoamp.rewrite(given, (x,), **BF16)
    assert str(given.graph) == printed
    assert [dict(n.meta).keys() for n in given.graph.nodes] == [m.keys() for m in metas]
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(after[k], state[k]) for k in state)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_parameters_are_shared_and_get_fp32_gradients(
    form: Callable[[nn.Module, Tensor], Any], x: Tensor
) -> None:
    model = Net()
    exact = copy.deepcopy(model)
    given = form(model, x)
    low = autoamp.rewrite(given, (x,), **BF16)
    theirs = {id(p) for p in model.parameters()}
    assert {id(p) for p in low.parameters()} == theirs
    low(x).square().mean().backward()
    exact(x).square().mean().backward()
    for (name, p), want in zip(
        model.named_parameters(), exact.parameters(), strict=True
    ):
        assert p.grad is not None, name
        assert p.grad.dtype is torch.float32
        if name != "first.bias":  # batch norm cancels its gradient
            assert relative_error([p.grad], [want.grad]) < 0.05, name


def test_training_updates_the_shared_statistics(x: Tensor) -> None:
    model = Net()
    low = autoamp.rewrite(fx.symbolic_trace(model), (x,), **BF16)
    low(x)
    assert model.norm.num_batches_tracked == 1
    assert not torch.equal(model.norm.running_mean, torch.zeros(16))


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.__name__)
def test_denying_everything_is_bit_identical(
    form: Callable[[nn.Module, Tensor], Any], x: Tensor
) -> None:
    model = Net().eval()
    deny = ["linear", "batch_norm", "relu", "add", "log_softmax"]
    same = autoamp.rewrite(form(model, x), (x,), deny=deny, **BF16)
    assert torch.equal(same(x), model(x))


def test_keyword_of_convert_are_keywords_of_rewrite(x: Tensor) -> None:
    gm = fx.symbolic_trace(Net().eval())
    kept = autoamp.rewrite(gm, (x,), keep=["first"], **BF16)
    assert low_ops(kept, x) == 2 * 6 * 16 * 4


def test_fp16(x: Tensor) -> None:
    model = Net().eval()
    low = autoamp.rewrite(
        fx.symbolic_trace(model), (x,), precision="fp16", do_no_harm=False
    )
    assert "torch.float16" in low.code
    assert 0 < relative_error([low(x)], [model(x)]) < CLOSE


RELU, TWO = fx.symbolic_trace(nn.ReLU()), (torch.zeros(2),)
TRAINS = {"backend": "inductor", "loss_scale": 2.0, "deny": ["relu"]}
BAD: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], list[str]]] = {
    "module": (Net(), TWO, BF16, autoamp.UnsupportedModelError, ["autoamp.convert"]),
    "string": ("net", (), BF16, autoamp.UnsupportedModelError, ["str"]),
    "precision": (RELU, TWO, {"precision": "fp8"}, autoamp.OptionError, ["'fp8'"]),
    "rules": (RELU, TWO, {"deny": ["matmull"]}, autoamp.RulesError, ["matmull"]),
    "options of training": (
        RELU,
        TWO,
        TRAINS,
        autoamp.OptionError,
        ["backend", "loss_scale"],
    ),
    "no option": (RELU, TWO, {"unlist": ()}, autoamp.OptionError, ["'unlist'"]),
    "too few inputs": (RELU, (), BF16, autoamp.AutoampError, ["input"]),
    "too many inputs": (RELU, TWO * 2, BF16, autoamp.AutoampError, ["input"]),
    "no tuple": (RELU, torch.zeros(3), BF16, autoamp.AutoampError, ["input"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    given, inputs, options, error, told = BAD[name]
    with pytest.raises(error) as raised:
        autoamp.rewrite(given, inputs, **options)
    says(raised, *told)


class Difference(nn.Module):
    """Two inputs that may be the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.layer(a) - 2 * self.layer(b)


def test_one_tensor_as_two_example_inputs(x: Tensor) -> None:
    model = Difference()
    low = autoamp.rewrite(fx.symbolic_trace(model), (x, x), **BF16)
    y = torch.randn(6, WIDTH)
    assert relative_error([low(x, y)], [model(x, y)]) < CLOSE


def ctc(x: Tensor) -> Tensor:
    log_probs = x.reshape(6, 2, WIDTH // 2).log_softmax(-1)
    targets = torch.ones(2, 2, dtype=torch.long)
    return nn.functional.ctc_loss(log_probs, targets, (6, 6), (2, 2))


def low_products(gm: fx.GraphModule) -> int:
    nodes = gm.graph.find_nodes(op="call_function", target=MATMUL)
    return sum(node.meta["val"].dtype == torch.bfloat16 for node in nodes)


DATA_DEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "corrcoef": torch.corrcoef,
    "cov": torch.cov,
    "ctc_loss": ctc,
}


@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_an_op_that_fake_tensors_refuse_stays_whole(name: str, x: Tensor) -> None:
    function, weight = DATA_DEPENDENT[name], torch.eye(WIDTH)

    def model(x: Tensor, weight: Tensor) -> Tensor:
        return function(x @ weight)

    gm = make_fx(model, pre_dispatch=True)(x, weight)
    rewritten = autoamp.rewrite(gm, (x, weight), **BF16)
    assert low_products(rewritten) == 1
    assert relative_error(rewritten(x, weight), model(x, weight)) < CLOSE


def test_an_exported_program_that_casts_in_its_own_code() -> None:
    """`torch.export` asserts the dtype of a value before the model's own cast of it."""

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(self.line(x).to(torch.float32) * 2)

    x = torch.randn(8, 64)
    exported = torch.export.export(Casts(), (x,))
    assert any("_assert_tensor" in str(n.target) for n in exported.graph.nodes)
    low = autoamp.rewrite(exported, (x,), precision="bf16", do_no_harm=False)
    assert low(x).dtype == torch.float32
    assert not any("_assert_tensor" in str(n.target) for n in low.graph.nodes)
