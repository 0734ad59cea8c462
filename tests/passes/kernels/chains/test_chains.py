"""Chains that run as one kernel: found however they are spelled.

How true their numbers are is held against float64 and autocast in test_spelled.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import autoamp
from autoamp.passes.kernels.table import KERNEL_NAMES
from autoamp.training.options import Options
from tests.metrics import relative_error
from tests.passes.kernels.door import KERNELS, chains_in, recognised
from tests.says import says
from tests.small_models import Of
from tests.spelled.activations import C, gelu_fast, gelu_new

WIDTH = 32


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def squares(x: Tensor) -> Tensor:
    return mean(x.square())


def variance(x: Tensor) -> Tensor:
    return x.var(-1, keepdim=True, unbiased=False)


def moved(x: Tensor) -> Tensor:
    return x - mean(x)


def standard(x: Tensor, eps: float = 1e-5) -> Tensor:
    return moved(x) / torch.sqrt(moved(x).pow(2).mean(-1, keepdim=True) + eps)


def exps(x: Tensor) -> Tensor:
    return torch.exp(less_its_maximum(x))


def less_its_maximum(x: Tensor) -> Tensor:
    return x - x.amax(-1, keepdim=True)


def rms(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def softmax(x: Tensor) -> Tensor:
    return torch.exp(x) / total(torch.exp(x))


def log_sum(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1, keepdim=True)


def by_tanh(x: Tensor, inner: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(inner))


def by_erf(x: Tensor, inner: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(inner))


def rounded(x: Tensor) -> Tensor:
    """To whole numbers, by a number so large that fp32 has no fractions beside it."""
    return (x + 1.5 * 2**23) - 1.5 * 2**23


def cubic(x: Tensor, by: float = 0.044715) -> Tensor:
    return x + by * x**3


Function = Callable[..., Tensor]

BY_KERNEL: dict[str, dict[str, Function]] = {
    "gelu_tanh": {
        "gelu_new": gelu_new,
        "gelu_fast": gelu_fast,
        # BLOOM's and Megatron's, with a constant of eight digits
        "gelu_bloom": lambda x: by_tanh(x, 0.79788456 * x * (1 + 0.044715 * x * x)),
        "gelu_by_sigmoid": lambda x: x * torch.sigmoid(2 * C * cubic(x)),
    },
    "gelu": {
        "gelu_erf": lambda x: by_erf(x, x / math.sqrt(2.0)),
        "gelu_erf_last": lambda x: (torch.erf(x * 2**-0.5) + 1) * x / 2,
        "gelu_eight_digits": lambda x: by_erf(x, 0.70710678 * x),
    },
    "silu": {
        "swish": lambda x: x * torch.sigmoid(x),
        "swish_by_exp": lambda x: x / (1 + torch.exp(-x)),
        "swish_by_reciprocal": lambda x: x * (1 + (-x).exp()).reciprocal(),
    },
    "mish": {
        "mish": lambda x: x * torch.tanh(F.softplus(x)),
    },
    "softmax": {
        "softmax": softmax,
        "softmax_by_logsumexp": lambda x: torch.exp(x - log_sum(x)),
    },
    "log_softmax": {
        "log_softmax": lambda x: x - log_sum(x),
        "log_softmax_by_sum": lambda x: x - total(torch.exp(x)).log(),
    },
    "layer_norm": {
        "layer_norm": lambda x, w, b: w * standard(x) + b,
        "layer_norm_var": lambda x, w, b: (
            moved(x) * torch.rsqrt(variance(x) + 1e-12) * w + b
        ),
        "layer_norm_power": lambda x, w: (
            w * moved(x) * mean(moved(x) ** 2).add(1e-6) ** -0.5
        ),
        "layer_norm_by_correction": lambda x, w, b: (
            moved(x) / (torch.var(x, -1, correction=0, keepdim=True) + 1e-5) ** 0.5 * w
            + b
        ),
    },
    "rms_norm": {
        # Llama's and T5's norms
        "rms_llama": lambda x, w: w * rms(x.float()).to(torch.float32),
        # Gemma's: the weight is around 0
        "rms_gemma": lambda x, w: rms(x.float()) * (1.0 + w.float()),
        "rms_by_division": lambda x, w: w * x / torch.sqrt(mean(x * x) + 1e-5),
        "rms_by_power": lambda x: x * (squares(x) + 1e-6).pow(-0.5),
        "rms_mamba": lambda x, w: x * (1 / torch.sqrt(squares(x) + 1e-5)) * w,
        "rms_epsilon_of_fp32": lambda x, w: rms(x, torch.finfo(torch.float32).eps) * w,
        "rms_without_epsilon": lambda x: x / torch.sqrt(mean(x * x)),
    },
}
"""How libraries write what torch has one kernel for."""

SPELLINGS: dict[str, tuple[str, Function]] = {
    name: (kernel, function)
    for kernel, functions in BY_KERNEL.items()
    for name, function in functions.items()
}

OTHERS: dict[str, Function] = {
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "half a gelu": lambda x: x * (1 + torch.tanh(C * cubic(x))),
    "std unbiased": lambda x, w, b: w * moved(x) / (x.std(-1, keepdim=True) + 1e-6) + b,
    "another dimension": lambda x: (
        x * torch.rsqrt(x.square().mean(-2, keepdim=True) + 1e-6)
    ),
    "softmax of another dimension": lambda x: (
        torch.exp(x) / torch.exp(x).sum(1, keepdim=True)
    ),
    "softmax off by one": lambda x: torch.exp(x) / (1 + total(torch.exp(x))),
    "limited": lambda x: rms(x.clamp(-3, 3)),
    "weight twice": lambda x, w: w * (w * rms(x)),
    # epsilons that are no kernel's
    "softmax and an epsilon": lambda x: exps(x) / (total(exps(x)) + 1e-6),
    "softmax and a small epsilon": lambda x: exps(x) / (total(exps(x)) + 1e-30),
    "softmax above an epsilon": lambda x: exps(x) / total(exps(x)) + 1e-30,
    "log_softmax and an epsilon": lambda x: x - torch.log(total(torch.exp(x)) + 1e-12),
    "rms and a small epsilon": lambda x: x / (torch.sqrt(squares(x)) + 1e-13),
    "rms epsilon before the square": lambda x: x * torch.rsqrt(squares(x + 1e-12)),
    "norm of a negative epsilon": lambda x: rms(x, -1e-12),
    "layer_norm and an epsilon": lambda x: standard(x, 0.0) + 1e-13,
    "layer_norm epsilon outside": lambda x: moved(x) / (variance(x).sqrt() + 1e-12),
    # constants that are another number
    "gelu of one digit": lambda x: by_tanh(x, 0.8 * cubic(x)),
    "gelu of five digits": lambda x: by_tanh(x, 0.79788 * cubic(x)),
    "gelu of another cubic": lambda x: by_tanh(x, C * cubic(x, 0.0447149)),
    "gelu of another root": lambda x: by_erf(x, x / 1.4142),
    "gelu squared": lambda x: by_erf(x, x * x / math.sqrt(2)),
    "swish of almost one": lambda x: x * torch.sigmoid(x * (1 + 2**-23)),
    "swish squared": lambda x: x * x * torch.sigmoid(x),
    "swish of another sign": lambda x: x * torch.sigmoid(-x),
    "swish of rounded numbers": lambda x: rounded(x) * torch.sigmoid(rounded(x)),
    "swish off by one": lambda x: x / (1.0000002 + torch.exp(-x)),
    "mish of half": lambda x: x * torch.tanh(F.softplus(x, beta=0.5)),
    "mish of a threshold": lambda x: x * torch.tanh(F.softplus(x, threshold=8)),
    # sums of something else
    "softmax of two shifts": lambda x: torch.exp(x - 1) / total(torch.exp(x - 2)),
    "softmax of temperatures": lambda x: torch.exp(x) / total(torch.exp(x * 2)),
    "softmax squared": lambda x: torch.exp(x) / total(torch.exp(x)).square(),
    "mean of exps": lambda x: torch.exp(x) / mean(torch.exp(x)),
    "log_softmax of twice": lambda x: x - log_sum(2 * x),
    "log_softmax of half the sum": lambda x: x - log_sum(x) / 2,
    "layer_norm of roots": lambda x: (
        moved(x).sqrt().square() / (variance(x) + 1e-5).sqrt()
    ),
    "layer_norm moved once": lambda x: moved(x) * torch.rsqrt(squares(x) + 1e-5),
    "layer_norm moved below": lambda x: x / standard(x, 1e-5) * moved(x),
    "rms of a sum": lambda x: x * torch.rsqrt(total(x.square()) + 1e-6),
    "rms of one too few": lambda x: (
        x * torch.rsqrt(total(x.square()) / (WIDTH - 1) + 1e-6)
    ),
    "rms of a fourth power": lambda x: x * torch.rsqrt(mean(x.pow(4)) + 1e-6),
    "rms to another power": lambda x: x * (squares(x) + 1e-6).pow(-0.25),
    "rms of two epsilons": lambda x: rms(x, 1e-6) + rms(x, 1e-5),
    "rms times two": lambda x: 2 * rms(x),
    "rms and weight added": lambda x, w: rms(x) + w,
    "rms, a mean of a mean": lambda x: (
        x * torch.rsqrt(total(squares(x)) * WIDTH + 1e-6)
    ),
    # a norm for real numbers, but in fp32 the kernel overflows where this does not
    "rms of scaled rows": lambda x: (
        (x / x.amax(-1, True)) * torch.rsqrt(squares(x / x.amax(-1, True)))
    ),
}
"""Functions that look like kernels and are none, from their first op to the last."""

RARE: dict[str, Function] = {
    "gelu by odd erf": lambda x: x * 0.5 * (1.0 - torch.erf(-x / 2**0.5)),
    "gelu of two terms": lambda x: 0.5 * (x + x * torch.erf(x / math.sqrt(2))),
    "swish by tanh": lambda x: by_tanh(x, 0.5 * x),
    "mish by log1p": lambda x: x * torch.tanh(torch.log1p(torch.exp(x))),
    "variance by squares": lambda x: (
        moved(x) / (squares(x) - mean(x).square() + 1e-5).sqrt()
    ),
    "rms by length": lambda x: x / (total(x.pow(2)) + WIDTH * 1e-6).sqrt() * WIDTH**0.5,
}
"""Kernels in spellings that no library uses: the calls stay as they are."""


def tensors(function: Callable[..., Tensor], ndim: int = 3) -> list[Tensor]:
    count = function.__code__.co_argcount
    generator = torch.Generator().manual_seed(0)
    data = torch.randn((2, 5, 3, WIDTH)[-ndim:], generator=generator)
    return [data, *(torch.randn(WIDTH, generator=generator) for _ in range(count - 1))]


def traced(function: Callable[..., Tensor], *given: Tensor) -> fx.Graph:
    gm = make_fx(function, pre_dispatch=True, tracing_mode="fake")(*given)
    return gm.graph


def whole(graph: fx.Graph) -> str:
    """The kernel for the chain from the graph's input to its output, or ""."""
    output = graph.output_node().all_input_nodes[0]
    data = next(n for n in graph.nodes if n.op == "placeholder")
    for chains in chains_in(graph):
        for chain in chains:
            if chain.result is output and chain.data is data:
                found = recognised(chain)
                return found.kernel.name if found else ""
    return ""


@pytest.mark.parametrize("ndim", [1, 2, 4])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_chain_is_recognised_however_it_is_spelled(spelling: str, ndim: int) -> None:
    """But for a weight beside a single row, which could as well be the data."""
    name, function = SPELLINGS[spelling]
    given = tensors(function, ndim)
    is_clear = ndim > 1 or len(given) == 1
    assert whole(traced(function, *given)) == (name if is_clear else "")


@pytest.mark.parametrize("name", [*OTHERS, *RARE])
def test_another_function_is_no_kernel(name: str) -> None:
    function = {**OTHERS, **RARE}[name]
    assert whole(traced(function, *tensors(function))) == ""


@pytest.mark.parametrize(
    ("factor", "is_root"),
    [
        (C, True),
        (0.7978845608, True),
        (0.79788456, True),
        (0.7978845, False),
        (0.797885, False),
        (0.7978847, False),
        (C * (1 + 2.0**-23), False),
    ],
)
def test_numbers_are_equal_where_fp32_has_one_for_both(
    factor: float, is_root: bool
) -> None:
    graph = traced(lambda x: by_tanh(x, factor * cubic(x)), torch.randn(4, WIDTH))
    assert whole(graph) == ("gelu_tanh" if is_root else "")


@pytest.mark.parametrize("epsilon", [1e-12, 1e-6, 1.0])
def test_a_kernel_gets_the_epsilon_of_the_chain(epsilon: float) -> None:
    """And the weight and the bias, whichever the chain reads first."""
    function = lambda x, b, w: b + w * standard(x, epsilon)  # noqa: E731
    graph = traced(function, *tensors(function))
    (chain,) = [c for c in next(chains_in(graph)) if len(c.vectors) == 2]
    found = recognised(chain)
    assert found is not None
    assert (found.kernel.name, found.epsilon) == ("layer_norm", epsilon)
    assert (found.weight, found.bias) == (1, 0)


@pytest.mark.parametrize(
    "data",
    [torch.tensor(0.5), torch.randn(4, WIDTH, dtype=torch.float64), torch.ones(0)],
    ids=["no dimension", "float64", "empty"],
)
def test_data_of_another_kind_are_left_alone_or_safe(data: Tensor) -> None:
    found = whole(traced(gelu_new, data))
    assert found == ("gelu_tanh" if data.shape == (0,) else "")


def test_every_kernel_is_spelled_above() -> None:
    assert {kernel.name for kernel in KERNELS} == {*BY_KERNEL}


class Between(nn.Module):
    """Two products with a function between them."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)
        self.names = [f"v{i}" for i in range(1, function.__code__.co_argcount)]
        for name in self.names:
            self.register_parameter(name, nn.Parameter(torch.randn(WIDTH)))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        vectors = [getattr(self, name) for name in self.names]
        return self.second(self.function(self.first(x), *vectors))


def stepped(model: nn.Module, x: Tensor, autocast: bool = False) -> list[Tensor]:
    """The output and all gradients, in float64."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = model(x)
    output.float().square().mean().backward()
    grads = [p.grad for p in (x, *model.parameters())]
    return [t.double() for t in (output.detach(), *grads) if t is not None]


def converted(model: nn.Module, x: Tensor, **options: Any) -> autoamp.Report:
    options = {"precision": "bf16", "do_no_harm": False, "strict": True, **options}
    autoamp.convert(model, **options)
    model(x)
    return autoamp.report(model)


def kernels(report: autoamp.Report) -> list[str]:
    return [row.kernel for row in report.ops if row.kernel]


X = torch.randn(4, WIDTH)


def test_a_kernel_reads_and_writes_sixteen_bits() -> None:
    report = converted(Between(gelu_new), X)
    (row,) = [row for row in report.ops if row.kernel]
    assert (row.op, row.precision, row.calls) == ("aten::gelu.default", "bf16", 8)
    assert "8 ops of the model run as 1 kernel: gelu_tanh (1)." in str(report)
    assert "stands for 8 ops of the model" in report.why(row.name)


@pytest.mark.parametrize("off", [{"fuse": False}, {"fuse": {"gelu_tanh": False}}])
def test_a_kernel_can_be_switched_off(off: dict[str, Any]) -> None:
    report = converted(Between(gelu_new), X, **off)
    assert kernels(report) == []
    assert "aten::tanh.default" in {row.op for row in report.ops}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"gelu_tahn": False}, ["gelu_tahn", "gelu_tanh"]),
        ({1: False}, ["1"]),
        ({"gelu_tanh": 0}, ["'gelu_tanh'", "0", "True or False"]),
        *(
            (given, [repr(given)])
            for given in (None, 1, 0, "", "gelu", ["gelu_tanh"], set())
        ),
    ],
)
def test_a_bad_option_is_refused(given: Any, told: list[str]) -> None:
    with pytest.raises(autoamp.OptionError) as raised:
        autoamp.convert(Between(gelu_new), fuse=given)
    says(raised, *told, option="fuse")


def test_equal_options_are_equal_however_they_are_written() -> None:
    names = KERNEL_NAMES[:3]
    off = Options(fuse=dict.fromkeys(names, False))
    for same in (
        Options(fuse=dict.fromkeys([*names[::-1]], False)),
        Options(fuse={**dict.fromkeys(names, False), KERNEL_NAMES[4]: True}),
        Options().without_kernels(*names[:2]).without_kernels(*names),
        off.replace(strict=False),
    ):
        assert same == off
        assert hash(same) == hash(off)
    assert set(off.kernels_off) == set(names)
    assert Options(fuse={names[0]: True}) == Options(fuse={}) == Options()
    assert Options(fuse=False).without_kernels(*names).fuse is False


@pytest.mark.parametrize(
    "options",
    [
        {"deny": ["tanh"]},
        {"allow": ["tanh"]},
        {"keep": ["*"]},
        {"rules": "tensorflow", "placement": "tensorflow"},
    ],
)
def test_what_the_user_spoke_of_does_not_vanish_in_a_kernel(options: Any) -> None:
    assert kernels(converted(Between(gelu_new), X, **options)) == []


class MemorySavingSwish(torch.autograd.Function):
    """As written in EfficientNets: the input alone is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        sigmoid = torch.sigmoid(x)
        return grad * (sigmoid * (1 + x * (1 - sigmoid)))


class SwishPassedThrough(MemorySavingSwish):
    """The same forward with the gradient of another function."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by Dynamo
@pytest.mark.parametrize(
    ("function", "expected"),
    [(MemorySavingSwish, ["silu", "silu"]), (SwishPassedThrough, [])],
)
def test_a_custom_function_is_a_kernel_if_its_backward_is(
    function: type[torch.autograd.Function], expected: list[str]
) -> None:
    """Also where it reads the kernel that another became."""
    model = Of(
        lambda m, x: m.b(function.apply(function.apply(m.a(x)))),
        a=nn.Linear(WIDTH, WIDTH),
        b=nn.Linear(WIDTH, 8),
    )
    true = stepped(copy.deepcopy(model), X)
    x = X.clone().requires_grad_()  # a Function without a gradient is inlined
    report = converted(model, x)
    assert kernels(report) == expected
    for ours, theirs in zip(stepped(model, X), true, strict=True):
        assert relative_error(ours, theirs) < 0.02


def test_a_graph_that_stays_fp32_keeps_its_very_numbers() -> None:
    model = Between(SPELLINGS["rms_llama"][1])
    expected = stepped(model, X)
    autoamp.convert(
        model, precision="bf16", deny=["linear", "aten::addmm"], do_no_harm=False
    )
    found = stepped(model, X)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_widened_result_that_is_read_in_fp32_is_not_rounded() -> None:
    """`pow` is fp32 under autocast on GPUs, and so is what is added to it."""
    x = torch.randn(4, WIDTH)
    model = Of(lambda m, x: gelu_new(m.fc(x)) + x, fc=nn.Linear(WIDTH, WIDTH))
    report = converted(model, x)
    (row,) = [row for row in report.ops if row.kernel]
    assert row.precision == "fp32"


def test_for_another_device_its_rules_decide() -> None:
    """`exp` is denied in bf16 on GPUs, where the sum below is fp32; not on CPUs."""
    swish = SPELLINGS["swish_by_exp"][1]
    model = Of(lambda m, x: swish(m.fc(x)) + m.fc(x), fc=nn.Linear(WIDTH, WIDTH))
    options = {"precision": "bf16", "do_no_harm": False}
    for device, expected in ((None, "bf16"), ("cuda:sm_90", "fp32")):
        found = autoamp.explain(model, X, **options, device=device)
        assert [row.precision for row in found.ops if row.kernel] == [expected]


def test_sizes_that_change_are_not_compared_with_one_another() -> None:
    """A guard that two sizes differ would make one more graph where they are equal."""
    model = Between(gelu_new)
    report = converted(model, torch.randn(2, 3, WIDTH))
    for batch, length in ((4, 5), (6, 7), (5, 5), (9, 3), (3, 9)):
        model(torch.randn(batch, length, WIDTH))
    report = autoamp.report(model)
    assert len(report.graphs) == 2
    assert set(kernels(report)) == {"gelu_tanh"}
