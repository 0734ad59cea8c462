"""Uses of several weights as one call: the same numbers, and what stays apart."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autoamp
from autoamp.errors import VerificationError
from autoamp.passes.functions import (
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
    unscale_grad,
    unscaled_weights,
)
from tests.one_rank import one_rank
from tests.passes.write.door import MAY_GROUP, Device, copied, differences, together

WIDTH = 8
TOGETHER = (low_weights, low_weights_unscaled, unscaled_weights)


@pytest.fixture(autouse=True)
def kernels_cost_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "starts_kernels", True)


class Net(nn.Module):
    """A convolution, norms, layers, a weight that is used twice, and a frozen one."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).mean((2, 3))
        for layer in (*self.layers, self.layers[0]):
            h = layer(h).tanh()
        for norm in self.norms:
            h = norm(h)
        return self.frozen(h)


def data() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 3, 8, 8)


def converted(model: nn.Module, precision: str, **options: Any) -> Any:
    torch._dynamo.reset()
    options = {"do_no_harm": False, "strict": True, **options}
    return autoamp.convert(model, precision=precision, **options)


def graph_of(model: nn.Module) -> fx.GraphModule:
    return autoamp.report(model).graphs[0]


def calls_of(gm: fx.GraphModule, *targets: Any) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target in targets]


def gradients(model: nn.Module, factor: float = 1.0) -> list[Tensor | None]:
    model.zero_grad()
    (model(data()).square().sum() * factor).backward()
    return [p.grad for p in model.parameters()]


def alike(ours: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return all(
        one is other is None
        or (
            one is not None
            and other is not None
            and one.dtype == other.dtype
            and one.stride() == other.stride()
            and torch.equal(one, other)
        )
        for one, other in zip(ours, others, strict=True)
    )


@pytest.fixture(params=["bf16", "fp16"])
def pair(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[nn.Module, nn.Module]:
    """A model whose uses are together, and one whose uses are apart."""
    made = []
    for is_on in (True, False):
        monkeypatch.setattr(Device, "starts_kernels", is_on)
        scale = {"loss_scale": 8.0} if request.param == "fp16" else {}
        model = converted(Net(), request.param, **scale)
        gradients(model)
        made.append(model)
    return made[0], made[1]


def test_gradients_are_the_same_bits(pair: tuple[nn.Module, nn.Module]) -> None:
    ours, apart = pair
    assert calls_of(graph_of(ours), *TOGETHER)
    assert not calls_of(graph_of(ours), low_weight, low_weight_unscaled, unscale_grad)
    assert not calls_of(graph_of(apart), *TOGETHER)
    assert alike(gradients(ours), gradients(apart))


def accumulated(model: Any) -> list[Tensor | None]:
    model.zero_grad()
    for _ in range(2):
        model(data()).sum().backward()
    return [p.grad for p in model.parameters()]


def of_one_weight(model: Any) -> list[Tensor | None]:
    """Of the other weights autograd gives no gradient to the group."""
    return [*torch.autograd.grad(model(data()).sum(), model.layers[1].weight)]


def of_gradients(model: Any) -> list[Tensor | None]:
    x = data().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    model.zero_grad()
    slope.square().sum().backward()
    return [p.grad for p in model.parameters()]


def in_a_batch(model: Any) -> list[Tensor | None]:
    out, weight = model(data()), model.layers[1].weight
    seeds = torch.eye(4)[:, :, None].expand(4, *out.shape)
    return [*torch.autograd.grad(out, weight, seeds, is_grads_batched=True)]


def of_computed_weights(model: Any) -> list[Tensor | None]:
    named = model.named_parameters()
    leaves = {name: p.detach().clone().requires_grad_() for name, p in named}
    doubled = {name: 2 * leaf for name, leaf in leaves.items()}
    torch.func.functional_call(model, doubled, (data(),)).sum().backward()
    return [leaf.grad for leaf in leaves.values()]


WAYS = [accumulated, of_one_weight, of_gradients, in_a_batch, of_computed_weights]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_gradients_are_the_same_bits_however_they_are_taken(
    way: Callable[[Any], list[Tensor | None]], pair: tuple[nn.Module, nn.Module]
) -> None:
    assert alike(*map(way, pair))


def test_an_overflow_is_found() -> None:
    scale = autoamp.DynamicLossScale(16.0)
    model = converted(Net(), "fp16", loss_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for factor in (1.0, 1e38, 1.0):
        before = copy.deepcopy(model.state_dict())
        gradients(model, factor)
        optimizer.step()
        moved = any(
            not torch.equal(v, before[n]) for n, v in model.state_dict().items()
        )
        assert moved == (factor == 1.0)
        assert bool(optimizer.step_was_skipped) != moved  # type: ignore[attr-defined]


def test_it_can_be_switched_off() -> None:
    model = converted(Net(), "bf16", fuse={"together": False})
    gradients(model)
    assert not calls_of(graph_of(model), *TOGETHER)


def test_gradients_arrive_one_by_one_among_ranks(monkeypatch) -> None:
    """DDP sends the first while the last are computed, and FSDP takes each module's."""
    with one_rank():
        model = converted(Net(), "bf16")
        gradients(model)
        assert calls_of(graph_of(model), *TOGETHER)
        order: list[str] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, name=name: order.append(name)
                )
        out = model(data())
        assert not any("_Together" in each for each in history(out.grad_fn))
    assert any("_Together" in each for each in history(model(data()).grad_fn))


def history(node: Any) -> set[str]:
    found, todo = set(), [node]
    while todo:
        each = todo.pop()
        if each is not None and each not in found:
            found.add(each)
            todo += [after for after, _ in each.next_functions]
    return {type(each).__name__ for each in found}


def test_groups_are_no_larger_than_the_limits(monkeypatch) -> None:
    model = converted(Net(depth=together.MOST + 3), "bf16")
    gradients(model)
    sizes = [len(node.args) // 2 for node in calls_of(graph_of(model), *TOGETHER)]
    assert max(sizes) == together.MOST
    assert len(sizes) == 3
    monkeypatch.setattr(together, "MOST_BYTES", 3 * WIDTH**2 * 2)
    model = converted(Net(), "bf16")
    gradients(model)
    for node in calls_of(graph_of(model), *TOGETHER):
        copies = node.args[len(node.args) // 2 :]
        assert sum(c.meta["val"].nbytes for c in copies) <= 3 * WIDTH**2 * 2


def test_uses_of_another_kind_dtype_or_device_are_apart(monkeypatch) -> None:
    monkeypatch.setattr(together, "MOST_BYTES", 4 * WIDTH)
    graph = fx.Graph()

    def use(target: Any = low_weight, size: int = WIDTH, **how: Any) -> fx.Node:
        node = graph.call_function(target, (graph.placeholder("w"), None))
        node.meta["val"] = torch.empty(size, **{"dtype": torch.bfloat16, **how})
        return node

    first = use()
    assert together._fits([first], use())
    assert not together._fits([first], use(low_weight_unscaled))
    assert not together._fits([first], use(size=WIDTH + 1))
    assert not together._fits([first], use(dtype=torch.float16))
    assert not together._fits([first], use(device="meta"))


def test_no_group_reaches_over_a_change_of_grad_mode() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](x))
            with torch.no_grad():
                y = x.exp()
            return self.layers[3](self.layers[2](x * y))

    model = converted(Stopped(), "bf16")
    model(torch.randn(3, WIDTH)).sum().backward()
    assert len(calls_of(graph_of(model), *TOGETHER)) == 2


def test_a_weight_that_the_graph_writes_to_stays_apart() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.layers[0](x)
            with torch.no_grad():
                self.layers[1].weight.mul_(0.5)
            return self.layers[2](functional.linear(x, self.layers[1].weight))

    model, plain = converted(Written(), "bf16"), Written()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, WIDTH)
    for _ in range(2):
        assert torch.allclose(model(x), plain(x), atol=0.02)


# -- the check ------------------------------------------------------------------------


def the_other_index(call: fx.Node, first: fx.Node, second: fx.Node) -> None:
    first.args, second.args = second.args, first.args


def another_copy(call: fx.Node, first: fx.Node, second: fx.Node) -> None:
    count = len(call.args) // 2
    call.update_arg(count, call.args[count + 1])


def after_a_write(call: fx.Node, first: fx.Node, second: fx.Node) -> None:
    with call.graph.inserting_before(first):
        call.graph.call_function(torch.ops.aten.mul_.Tensor, (call.args[0], 2.0))


def another_kind_of_use(call: fx.Node, first: fx.Node, second: fx.Node) -> None:
    call.target = low_weights_unscaled


def an_index_beyond(call: fx.Node, first: fx.Node, second: fx.Node) -> None:
    first.args = (call, len(call.args))


@pytest.mark.parametrize(
    "fault",
    [
        the_other_index,
        another_copy,
        after_a_write,
        another_kind_of_use,
        an_index_beyond,
    ],
)
def test_the_check_refuses(fault: Callable[..., None], monkeypatch) -> None:
    graphs = []
    for is_on in (True, False):
        monkeypatch.setattr(Device, "starts_kernels", is_on)
        model = converted(Net(), "bf16")
        gradients(model)
        graphs.append(graph_of(model))
    after, before = graphs
    differences(before, after, MAY_GROUP)
    broken, _ = copied(after)
    (call, *_) = calls_of(broken, *TOGETHER)
    uses = [n for n in call.users if n.target is operator.getitem]
    fault(call, uses[0], uses[1])
    with pytest.raises(VerificationError):
        differences(before, broken, MAY_GROUP)
