"""Chains that run as one kernel: found however they are spelled.

How true their numbers are is held against float64 and autocast in test_spelled.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoamp
from autoamp.passes.kernels.table import KERNEL_NAMES
from autoamp.training.options import Options
from tests.metrics import relative_error
from tests.passes.kernels.door import KERNELS, chains_in, recognised
from tests.says import says
from tests.small_models import Of
from tests.spelled.backwards import BACKWARDS, custom
from tests.spelled.chains import (
    BY_KERNEL,
    NEAR,
    SPELLINGS,
    WRITTEN,
    C,
    by_tanh,
    cubic,
    gelu_new,
    standard,
)
from tests.spelled.layers import WIDTH


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


@pytest.mark.parametrize("name", WRITTEN | NEAR)
def test_another_function_is_no_kernel(name: str) -> None:
    function = (WRITTEN | NEAR)[name]
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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by Dynamo
@pytest.mark.parametrize(
    ("backward", "expected"),
    [("right", ["silu", "silu"]), ("of the sigmoid", [])],
)
def test_a_custom_function_is_a_kernel_if_its_backward_is(
    backward: str, expected: list[str]
) -> None:
    """Also where it reads the kernel that another became."""
    swish = custom(BACKWARDS[backward])
    model = Of(
        lambda m, x: m.b(swish(m, swish(m, m.a(x)))),
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
