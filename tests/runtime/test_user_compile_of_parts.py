"""Modules of a converted model in code that the user compiles: they run low there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.variables import UnspecializedNNModuleVariable
from torch.optim import SGD

import autoamp
from tests.logs import warned
from tests.says import says
from tests.small_models import BF16, is_rounded, runs

# Dynamo looks at `.grad` of whatever crosses a break; it hides the warning, though not
# from a filter that makes it an error.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


class Net(nn.Module):
    """Has a module with modules inside, and methods that call its modules."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(16, 8), nn.Tanh())
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), inner)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x) * 2

    def encode_in_a_closure(self, x: Tensor) -> Tensor:
        def through(y: Tensor) -> Tensor:
            return self.body(y)

        return through(x)

    def each_block(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x

    def recur(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x[None])[0][0])


def two_modules(net: Net) -> Callable[[Tensor], Tensor]:
    return lambda x: net.head(net.body(x))


Way = Callable[[Net], Callable[[Tensor], Tensor]]
WAYS: dict[str, tuple[Way, int]] = {
    "method": (lambda net: net.encode, 1),
    "closure": (lambda net: net.encode_in_a_closure, 1),
    "loop": (lambda net: net.each_block, 2),
    "recurrent": (lambda net: net.recur, 2),
    "function": (two_modules, 2),
    "module": (lambda net: net.body, 1),
    "layer": (lambda net: net.head, 1),
}
"""The code to compile, and how many modules it calls from outside of all others."""


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_they_run_as_without_it(
    precision: str, way: str, net: Net, x: Tensor, caplog
) -> None:
    get, calls = WAYS[way]
    plain = autoamp.convert(copy.deepcopy(net), precision=precision, do_no_harm=False)
    options: Any = {"precision": precision, "do_no_harm": False, "strict": True}
    autoamp.convert(net, **options)
    compiled = torch.compile(get(net), backend="eager")
    with torch.no_grad():
        wanted = get(plain)(x)
        for _ in range(2):
            assert torch.equal(compiled(x), wanted)
    assert runs(net) == 2 * calls  # modules inside run in the graphs of those outside
    assert not warned(caplog)
    same = autoamp.report(net).skipped == autoamp.report(plain).skipped
    assert same, "the report names the same methods"


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_training_is_as_without_it(
    backend: str, precision: str, x: Tensor, caplog
) -> None:
    def trained(*, is_low: bool, is_compiled: bool) -> Net:
        torch.manual_seed(0)
        net = Net()
        if is_low:
            autoamp.convert(net, precision=precision, do_no_harm=False, strict=True)
        step = two_modules(net)
        if is_compiled:
            step = torch.compile(step, backend=backend)
        optimizer = SGD(net.parameters(), 0.05)
        for scale in (1, 2, 3):
            optimizer.zero_grad()
            step(x * scale).square().mean().backward()
            optimizer.step()
        return net

    wide = trained(is_low=False, is_compiled=False)
    low = trained(is_low=True, is_compiled=False)
    compiled = trained(is_low=True, is_compiled=True)
    for found, same, exact in zip(
        *(net.parameters() for net in (compiled, low, wide)), strict=True
    ):
        assert torch.equal(found, same)
        torch.testing.assert_close(found, exact, rtol=2**-5, atol=2**-7)
    assert not torch.equal(compiled.head.weight, wide.head.weight)
    assert not warned(caplog)


def test_inductor_gets_their_graphs(net: Net, x: Tensor) -> None:
    exact = net.encode(x)
    autoamp.convert(net, **BF16, strict=True)
    assert is_rounded(torch.compile(net.encode)(x), exact)
    assert runs(net) == 1


@pytest.mark.parametrize("option", ["keep", "deny"])
def test_options_name_them_from_the_root(option: str, net: Net, x: Tensor) -> None:
    exact = net.encode(x)
    named = ["body.*", "body.2.*"] if option == "keep" else ["linear"]
    autoamp.convert(net, **BF16, **{option: named})
    assert torch.equal(torch.compile(net.encode, backend="eager")(x), exact)
    assert not [op for op in autoamp.report(net).ops if op.precision == "bf16"]


def test_as_one_graph_autocast_stands_in(net: Net, x: Tensor, caplog) -> None:
    exact = net.each_block(x)
    autoamp.convert(net, **BF16)
    compiled = torch.compile(net.each_block, backend="eager", fullgraph=True)
    assert is_rounded(compiled(x), exact)
    (said,) = warned(caplog)
    says(said, "autocast", option="fullgraph=True")


def test_as_one_graph_strict_raises(net: Net, x: Tensor) -> None:
    autoamp.convert(net, **BF16, strict=True)
    with pytest.raises(Exception, match="fullgraph=True"):
        torch.compile(net.encode, backend="eager", fullgraph=True)(x)


def test_in_a_branch_autocast_stands_in(net: Net, x: Tensor, caplog) -> None:
    def choose(x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, net.body, lambda y: net.body(y) + 1, (x,))

    exact = choose(x)
    autoamp.convert(net, **BF16)
    assert is_rounded(torch.compile(choose, backend="eager")(x), exact)
    says(warned(caplog), "autocast", "branch")


@pytest.mark.parametrize("way", ["method", "whole"])
def test_what_was_compiled_while_switched_off_runs_low_later(
    way: str, net: Net, x: Tensor
) -> None:
    code = net.encode if way == "method" else net
    exact = code(x)
    autoamp.convert(net, **BF16, strict=True)
    compiled = torch.compile(code, backend="eager")
    for _ in range(2):
        with autoamp.disabled():
            assert torch.equal(compiled(x), exact)
        assert is_rounded(compiled(x), exact)


def test_a_reverted_model_leaves_dynamo_as_it_was(net: Net, x: Tensor) -> None:
    before = UnspecializedNNModuleVariable.call_function
    exact, keys = net.encode(x), [*net.state_dict()]
    autoamp.convert(net, **BF16)
    compiled = torch.compile(net.encode, backend="eager")
    assert is_rounded(compiled(x), exact)
    assert [*net.state_dict()] == keys
    twin = copy.deepcopy(net)
    assert is_rounded(torch.compile(twin.encode, backend="eager")(x), exact)
    for each in (net, twin):
        autoamp.revert(each)
    assert torch.equal(compiled(x), exact)
    assert "forward" not in vars(net.body)
    del twin
    assert UnspecializedNNModuleVariable.call_function is before


def test_new_sizes_make_no_more_graphs_than_without_it(net: Net) -> None:
    plain = autoamp.convert(copy.deepcopy(net), **BF16)
    autoamp.convert(net, **BF16)
    compiled = torch.compile(net.encode, backend="eager")
    for size in (3, 5, 7, 9):
        plain.encode(torch.ones(size, 8))
        compiled(torch.ones(size, 8))
    assert len(autoamp.report(net).graphs) == len(autoamp.report(plain).graphs)
