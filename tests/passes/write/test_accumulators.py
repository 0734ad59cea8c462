"""Products that keep their fp32 sums: the numbers, the counts, and where they are made.

Torch's CPU has no such kernel: there `product` multiplies widened operands.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp import compat
from autoamp.passes.functions import product
from tests.metrics import relative_error
from tests.passes.write.door import Device, read_wide, sums
from tests.small_models import Of, is_rounded

WIDTH = 16
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def device_whose_sums_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "keeps_sums", True)
    monkeypatch.setattr(sums, "PYTHON_NS", 0.0)


# -- the function ----------------------------------------------------------------------


def forms() -> Iterator[Any]:
    for shape in ((5,), (3, 5), (2, 3, 5), (2, 0, 5)):
        for how in ("", "turned", "wide", "turned wide", "turned bias"):
            yield pytest.param(shape, how, id=f"{shape} {how}")


def operands(shape: Any, how: str, low: torch.dtype) -> tuple[list[Any], list[Any]]:
    """The arguments of `product`, and the same numbers in float64."""
    torch.manual_seed(0)
    data = torch.randn(shape).to(low).requires_grad_()
    weight = nn.Parameter(torch.randn((4, 5) if "turned" in how else (5, 4)))
    bias = nn.Parameter(torch.randn(4)) if "bias" in how else None
    given: list[Any] = [data, weight, weight.detach().to(low)]
    given += [] if bias is None else [bias, bias.detach().to(low)]
    wide = [
        given[at].detach().double().requires_grad_()
        for at in (0, *range(2, len(given), 2))
    ]
    return given, wide


def in_float64(wide: list[Tensor], how: str) -> Tensor:
    data, weight, *bias = wide
    if "turned" in how:
        return functional.linear(data, weight, *bias)
    return data @ weight


@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize(("shape", "how"), [*forms()])
def test_values_and_gradients(shape: Any, how: str, low: torch.dtype) -> None:
    given, wide = operands(shape, how, low)
    flags = {name: name in how for name in ("turned", "wide")}
    made, true = product(*given, **flags), in_float64(wide, how)
    assert made.dtype == (torch.float32 if "wide" in how else low)
    assert made.shape == true.shape
    torch.testing.assert_close(made.double(), true, rtol=2e-2, atol=2e-2)
    leaves = [given[0], *given[1::2]]
    by = torch.randn(made.shape).to(low)
    for create_graph in (False, True):
        ours = torch.autograd.grad(made, leaves, by.to(made.dtype), True, create_graph)
        truth = torch.autograd.grad(true, wide, by.double(), True, create_graph)
        for one, other, leaf in zip(ours, truth, leaves, strict=True):
            assert (one.dtype, one.shape) == (leaf.dtype, leaf.shape)
            torch.testing.assert_close(one.double(), other, rtol=2e-2, atol=2e-2)
    # The gradients again, of all gradients squared.
    ours, truth = (
        torch.autograd.grad(
            sum(each.double().square().sum() for each in first), of, allow_unused=True
        )
        for first, of in ((ours, leaves), (truth, wide))
    )
    for one, other in zip(ours, truth, strict=True):
        if other is not None:
            torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=1e-1)
    made.relu_()  # a result is nobody's view
    batch = torch.randn((3, *made.shape)).to(made.dtype)
    again = product(*given, **flags)
    found = torch.autograd.grad(again, leaves, batch, is_grads_batched=True)
    assert [each.shape[1:] for each in found] == [leaf.shape for leaf in leaves]


def test_batches_of_matrices() -> None:
    torch.manual_seed(0)
    one, other = (
        torch.randn(2, 3, *s).to(BF16).requires_grad_() for s in ((4, 5), (5, 4))
    )
    made = product(one, other, wide=True)
    assert made.dtype == torch.float32
    torch.testing.assert_close(made.double(), one.double() @ other.double())
    made.sum().backward()
    want = torch.autograd.grad((one.double() @ other.double()).sum(), (one, other))
    assert torch.equal(one.grad, want[0])
    assert torch.equal(other.grad, want[1])


def test_gradients_of_weights_are_truer_than_rounded_ones() -> None:
    """A rounding to bf16 alone is off by 2 ** -9 of each number, and is gone."""
    given, wide = operands((64, 5), "turned", BF16)
    by = torch.randn(64, 4).to(BF16)
    (truth,) = torch.autograd.grad(in_float64(wide, "turned"), wide[1:], by.double())
    (ours,) = torch.autograd.grad(product(*given, turned=True), given[1], by)
    assert relative_error(ours, truth) < 1e-6
    assert relative_error(truth.to(BF16), truth) > 1e-4


@pytest.mark.parametrize(("factor", "flag"), [(1.0, 0.0), (1e6, 1.0)])
def test_an_overflow_is_seen_where_the_gradient_leaves(
    factor: float, flag: float
) -> None:
    given, _ = operands((3, 5), "turned bias", FP16)
    found = torch.zeros(1)
    edge = torch.tensor(0.125), found
    made = product(*given, turned=True, edge=edge)
    made.backward((torch.ones_like(made, dtype=torch.float32) * factor).to(FP16))
    assert found.item() == flag
    if not flag:
        assert torch.equal(given[3].grad, torch.full((4,), 3 / 8))


def test_the_loss_scale_is_put_on_where_the_gradient_is_rounded() -> None:
    """A gradient of 1e-9 is 0 in fp16, and 1e-9 times 2 ** 16 is not."""
    given, wide = operands((3, 5), "turned wide", FP16)
    scale = torch.tensor(2.0**16)
    edge = 1 / scale, torch.zeros(1)
    made = product(*given, turned=True, wide=True, loss_scale=scale, edge=edge)
    (made.sum() * 1e-9).backward()
    (truth,) = torch.autograd.grad(in_float64(wide, "turned").sum() * 1e-9, wide[1])
    assert relative_error(given[1].grad, truth) < 1e-3


class Ops(compat.CountingDispatch):
    """Counts ops that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_kernels_of_a_gpu() -> None:
    """Tensors without memory stand for a GPU's: one cast rounds the gradient."""
    with FakeTensorMode():
        given, _ = operands((2, 3, 5), "turned wide", BF16)
        counted = Ops()
        with counted:
            made = product(*given, turned=True, wide=True)
            made.backward(torch.ones(made.shape))
    assert counted.count["aten.mm.dtype"] == 2  # the result, the gradient of the weight
    assert counted.count["aten._to_copy.default"] == 1
    assert counted.count["aten.mm.default"] == 1


# -- the passes ------------------------------------------------------------------------


class Net(nn.Module):
    """A layer that is used twice, a frozen one, one in a checkpoint, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.mixed = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.head = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(self.twice(self.enter(x)).tanh())
        h = self.frozen(h).tanh() @ self.mixed
        h = checkpoint(lambda h: self.inner(h) + h.float(), h, use_reentrant=False)
        return self.head(h)


def data(batch: int = 4) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, 6, WIDTH)


def converted(precision: str, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"do_no_harm": False, "strict": True, **options}
    return autoamp.convert(Net(), precision=precision, **options)


def products(model: nn.Module) -> list[fx.Node]:
    gms = [m for gm in autoamp.report(model).graphs for m in gm.modules()]
    nodes = (n for gm in gms if isinstance(gm, fx.GraphModule) for n in gm.graph.nodes)
    return [n for n in nodes if n.target is product]


def gradients(model: nn.Module, given: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model(given).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_is_no_less_true(precision: str) -> None:
    truth = gradients(Net().double(), data().double())
    scale = {"loss_scale": 1024.0} if precision == "fp16" else {}
    errors = []
    for fuse in (True, {"accumulators": False}):
        model = converted(precision, fuse=fuse, **scale)
        found = gradients(model, data())
        assert found.keys() == truth.keys()
        assert all(each.dtype == torch.float32 for each in found.values())
        assert bool(products(model)) == (fuse is True)
        errors.append(
            sum(relative_error(found[name], truth[name]) for name in truth) / len(truth)
        )
    assert errors[0] < 1.1 * errors[1]


def test_which_products_keep_their_sums() -> None:
    """Those without a bias whose reader is a result, or what is read in fp32 anyhow."""
    model = converted("bf16")
    model(data())
    wide = [n for n in products(model) if n.kwargs.get("wide")]
    assert [n.name for n in wide] == ["matmul", "linear_4"]


def test_other_batches_and_copies_of_the_model() -> None:
    model = converted("bf16")
    other = copy.deepcopy(model)
    for batch in (4, 2, 7, 1, 0):
        found = [gradients(m, data(batch)) for m in (model, other)]
        assert found[0].keys() == found[1].keys()
        assert all(
            torch.equal(found[0][n], found[1][n]) or batch == 0 for n in found[0]
        )
    with torch.no_grad():
        assert not model(data()).requires_grad


def test_steps_with_overflows_are_skipped() -> None:
    model = converted("fp16", loss_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = [p.detach().clone() for p in model.parameters()]
    (model(data()).sum() * 1e6).backward()
    optimizer.step()
    assert all(map(torch.equal, before, map(Tensor.detach, model.parameters())))


@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: (functional.linear(x, w), functional.linear(x, w).bfloat16()),
        lambda x, w: functional.linear(x, w).relu_(),
        lambda x, w: functional.linear(x, w, w[0]),
    ],
)
def test_a_result_that_is_read_low_stays_low(program: Callable[..., Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Any:
            return program(x, self.weight)

    torch._dynamo.reset()
    model = autoamp.convert(Model(), precision="bf16", do_no_harm=False, strict=True)
    with torch.no_grad():
        model(data())
    found = [n for n in products(model) if n.kwargs.get("wide")]
    assert len(found) <= 1


def test_weights_and_their_copies_are_given_to_products() -> None:
    """A bias that is no weight is given to the product as it was."""

    def function(m: Any, x: Tensor) -> Tensor:
        return m.last(functional.linear(x, m.weight, x.sum(0)))

    torch.manual_seed(0)
    last = nn.Linear(WIDTH, WIDTH, bias=False)
    model = Of(function, weight=nn.Parameter(torch.eye(WIDTH)), last=last)
    x = torch.randn(4, WIDTH)
    exact = model(x)
    ours = autoamp.convert(model, precision="bf16", do_no_harm=False, strict=True)
    assert is_rounded(ours(x), exact)
    assert [len(n.args) for n in products(ours)] == [4, 3]


def test_a_function_pays_by_the_bytes_that_it_saves(monkeypatch) -> None:
    monkeypatch.setattr(sums, "PYTHON_NS", 15_000.0)
    device = Device("test", 100.0, 1.0, 1.0, 1.0, True)
    edge = 15_000 * 100 // 4
    assert [sums.pays(n, device) for n in (edge, edge + 1)] == [False, True]
    model = converted("bf16", loss_scale="off")
    gradients(model, data())
    assert not products(model)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [BF16, FP16], ids=str)
@pytest.mark.parametrize("how", ["turned", "turned bias", "turned wide", "wide"])
def test_kernels_of_a_gpu_give_the_sums(how: str, low: torch.dtype) -> None:
    given, _ = operands((64, 5), how, low)
    flags = {name: name in how for name in ("turned", "wide")}
    found = []
    for device in ("cpu", "cuda"):
        own = [t.detach().to(device).requires_grad_(t.requires_grad) for t in given]
        made = product(*own, **flags)
        made.sum().backward()
        found.append([made, *(t.grad for t in own if t.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other.cpu())


def test_a_product_without_a_copy_reads_both_operands_as_they_come() -> None:
    graph = fx.Graph()
    operands = graph.placeholder("x"), graph.placeholder("factor")
    graph.output(graph.call_function(product, operands, {"wide": True}))
    assert read_wide(fx.GraphModule({}, graph), 2) == (0, 1)
