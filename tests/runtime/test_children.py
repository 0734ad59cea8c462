"""Modules of a converted model that code outside of its captured methods calls."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.logs import warned
from tests.says import says
from tests.small_models import converted

LOW = {"do_no_harm": False}


class Net(nn.Module):
    """Has one way to each part of it that no captured method holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, 4)
        self.critic = nn.Linear(8, 1)
        self.act = nn.ReLU()
        self.gain = nn.Parameter(torch.ones(4))  # in no module's graph
        self.logged: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = self.act(block(x))
        return self.head(x) * self.gain

    def log(self, value: Tensor) -> None:
        self.logged.append(value.detach())

    def training_step(self, x: Tensor) -> Tensor:
        loss = Net.forward(self, x).square().mean()
        self.log(loss)
        return loss

    def _loss(self, x: Tensor) -> Tensor:
        return Net.forward(self, x).square().mean()

    def learn(self, x: Tensor, *optimizers: Optimizer) -> None:
        loss = self._loss(x)
        loss.backward()
        for each in optimizers:
            each.step()


def logs(net: Net, x: Tensor, *optimizers: Optimizer) -> None:
    step(net.training_step(x), *optimizers)


def is_private(net: Net, x: Tensor, *optimizers: Optimizer) -> None:
    step(net._loss(x), *optimizers)


def trains_itself(net: Net, x: Tensor, *optimizers: Optimizer) -> None:
    net.learn(x, *optimizers)


def is_the_script(net: Net, x: Tensor, *optimizers: Optimizer) -> None:
    step(net.head(net.body(x)).square().mean(), *optimizers)


def validates_first(net: Net, x: Tensor, *optimizers: Optimizer) -> None:
    with torch.no_grad():
        net(x)
    step(net._loss(x), *optimizers)


def plays_two_parts(net: Net, x: Tensor, *optimizers: Optimizer) -> None:
    """A GAN in one module: each part is trained by itself."""
    made = net.body(x)
    step(net.critic(made.detach()).mean() + net.critic(x).square().mean())
    step(-net.critic(net.body(x)).mean() + net.head(made).square().mean(), *optimizers)


def step(loss: Tensor, *optimizers: Optimizer) -> None:
    loss.backward()
    for each in optimizers:
        each.step()


WAYS = [
    logs,
    is_private,
    trains_itself,
    is_the_script,
    validates_first,
    plays_two_parts,
]
Way = Callable[..., None]


def trained(net: Net, way: Way, **options: Any) -> Net:
    """`net` after three rounds of `way`, with an optimizer for each half of it."""
    body, rest = set(net.body.parameters()), set(net.parameters())
    found = [SGD([*body], 0.05), SGD([*rest - body], 0.05)]
    if options:
        autoamp.convert(net, found if way is trains_itself else None, **options)
    data = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(1))
    for x in data:
        for each in found:
            each.zero_grad()
        way(net, x, *found)
    return net


def check_training(plain: nn.Module, net: nn.Module, precision: str) -> None:
    """Close to fp32 training, with every product low."""
    for wide, low in zip(plain.parameters(), net.parameters(), strict=True):
        torch.testing.assert_close(low, wide, rtol=2**-5, atol=2**-7)
    report = autoamp.report(net)
    products = [op for op in report.ops if op.name.startswith("linear")]
    assert {op.precision for op in products} == {precision}
    assert {op.module for op in products} <= {path for path, _ in net.named_modules()}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_they_are_captured_whatever_calls_them(
    precision: str, way: Way, caplog
) -> None:
    torch.manual_seed(0)
    net = Net()
    before, plain = copy.deepcopy(net), trained(copy.deepcopy(net), way)
    trained(net, way, precision=precision, **LOW)
    check_training(plain, net, precision)
    each = (m.parameters() for m in (before, plain, net))
    for old, wide, low in zip(*each, strict=True):
        moved = not torch.equal(old, wide)
        assert moved != torch.equal(wide, low), "fp32 and low training differ"
    assert not warned(caplog)


def lightning_fit(**options: Any) -> nn.Module:
    """A Lightning module that does all by itself, after two epochs."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self.body(self.all_gather(batch[0])).square().mean()
            self.log("loss", loss)
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("validation", self.body(batch[0]).mean())

        def predict_step(self, batch: Any, _: int) -> Any:
            return self.body(batch[0])

        def configure_optimizers(self) -> Optimizer:
            return SGD(self.parameters(), 0.05)

    torch.manual_seed(0)
    net, quiet = Module(), dict.fromkeys(["logger", "enable_checkpointing"], False)
    quiet |= dict.fromkeys(["enable_progress_bar", "enable_model_summary"], False)
    if options:
        autoamp.convert(net, **options)
    batches = torch.utils.data.TensorDataset(torch.randn(32, 8))
    loader = torch.utils.data.DataLoader(batches, batch_size=16)
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **quiet)
    trainer.fit(net, loader, loader)
    assert len(trainer.predict(net, loader)) == 2
    return net


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_lightning_module_that_logs(precision: str, caplog) -> None:
    plain = lightning_fit()
    net = lightning_fit(precision=precision, **LOW)
    check_training(plain, net, precision)
    assert not any(map(torch.equal, plain.parameters(), net.parameters()))
    assert not [each for each in caplog.records if each.name.startswith("autoamp")]


@pytest.mark.parametrize("pattern", ["blocks.1", "body.*", "head", "blocks"])
def test_patterns_name_them_from_the_root(pattern: str) -> None:
    net = converted(Net(), keep=[pattern], strict=False)
    net._loss(torch.randn(4, 8))
    ops = [op for op in autoamp.report(net).ops if op.name.startswith("linear")]
    wide = {op.module for op in ops if op.precision == "fp32"}
    stem = pattern.removesuffix(".*")
    assert wide == {op.module for op in ops if op.module.startswith(stem)} != set()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_can_be_traced_and_a_shallow_copy_runs_in_fp32() -> None:
    x, net = torch.randn(4, 8), Net()
    expected, whole = net.body(x), net(x)
    converted(net, strict=False)
    assert torch.equal(torch.jit.trace(net.body, x)(x), expected)
    other = copy.copy(net)
    for _ in range(2):
        assert torch.equal(other(x), whole)


def test_they_go_with_their_root() -> None:
    x, net = torch.randn(4, 8), Net()
    expected, keys = net._loss(x), net.state_dict().keys()
    converted(net, strict=False)
    assert not torch.equal(net._loss(x), expected)
    assert net.state_dict().keys() == keys
    with autoamp.disabled():
        assert torch.equal(net._loss(x), expected)
    for other in (pickle.loads(pickle.dumps(net)), copy.copy(Net())):
        assert not any("forward" in vars(each) for each in other.modules())
    twin = copy.deepcopy(net)
    autoamp.revert(net)
    assert torch.equal(net._loss(x), expected), "revert takes all of it away"
    assert not any("forward" in vars(each) for each in net.modules())
    found = twin._loss(x)
    assert not torch.equal(found, expected), "a deep copy stays converted"
    found.backward()
    assert net.head.weight.grad is None, "and runs its own weights"


def test_a_captured_call_of_the_owner_holds_them() -> None:
    x, net = torch.randn(4, 8), converted(Net(), strict=False)
    net(x)
    assert len(autoamp.report(net).graphs) == 1
    assert not any("forward" in vars(m) for m in net.modules() if m is not net)
    alone = net.body(x)
    twice = net(x)
    assert torch.equal(twice, net(x))
    paths = [op.module for op in autoamp.report(net).ops]
    assert paths.count("body.0") >= 2, "in the root's graph, and in its own"
    autoamp.revert(net.body)
    assert not torch.equal(net.body(x), alone), "a module is reverted by itself"


def append(net: Net) -> nn.Module:
    net.blocks.append(nn.Linear(8, 8))
    return net.blocks[2]


def give(net: Any) -> nn.Module:
    net.extra = nn.Sequential(nn.Linear(8, 8))
    return net.extra[0]


def exchange(net: Net) -> nn.Module:
    net.head(torch.randn(2, 8))  # the old one is captured
    net.head = nn.Linear(8, 5)
    return net.head


def give_to_a_part(net: Net) -> nn.Module:
    net.body(torch.randn(2, 8))
    net.body.append(nn.Linear(8, 3))
    return net.body[3]


@pytest.mark.parametrize("given", [append, give, exchange, give_to_a_part])
def test_a_module_that_is_given_to_the_model_later_is_captured(
    given: Callable[[Net], nn.Module],
) -> None:
    x, net = torch.randn(4, 8), converted(Net(), strict=False)
    module = given(net)
    expected = F.linear(x, *module.parameters())
    assert not torch.equal(module(x), expected)
    path = next(path for path, each in net.named_modules() if each is module)
    assert path in {op.module for op in autoamp.report(net).ops}
    autoamp.revert(net)
    assert torch.equal(module(x), expected)


class Many(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def one_by_one(sizes: list[int], **options: Any) -> int:
    """How many graphs lone layers have, each of which gives its own result."""
    net = converted(Many(nn.Linear(8, size) for size in sizes), strict=False, **options)
    x = torch.randn(4, 8)
    for layer in net.requires_grad_(False):
        found, wide = layer(x), F.linear(x, layer.weight, layer.bias)
        assert (found - wide).abs().max() < 2**-5
        assert torch.equal(found, wide) == (layer is net[1] and bool(options))
    return len(autoamp.report(net).graphs)


def test_parts_that_are_alike_share_graphs_unless_options_name_some() -> None:
    assert one_by_one([8] * 20) == 1
    assert one_by_one([8] * 4, keep=["1"]) == 2


def test_captures_of_parts_are_bounded(caplog) -> None:
    assert one_by_one([*range(2, 82)]) < 70
    (told,) = warned(caplog)
    says(told, "called by themselves", "graphs")


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum().item() > 1e9:
            x = x * 2
        return self.second(x)


class Checkpointed(nn.Module):
    """Checkpoints a module, a method that is captured, and one that is not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.off = Breaks(), nn.Linear(8, 4)
        self.reentrant = reentrant

    def part(self, x: Tensor) -> Tensor:
        return Breaks.forward(self.inner, x)

    def _part(self, x: Tensor) -> Tensor:
        return self.inner.second(x * x.sum().sign().item())

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def switched_off(self, x: Tensor) -> Tensor:
        return self.off(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        for part in (self.inner, self.part, self._part):
            x = checkpoint(part, x, use_reentrant=self.reentrant)  # type: ignore[no-untyped-call]
        return self.switched_off(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("automatic", [True, False])
def test_a_checkpoint_around_a_graph_break_is_captured_both_times(
    automatic: bool, reentrant: bool, off_again: None
) -> None:
    net, x = Checkpointed(reentrant), torch.randn(16, 8, requires_grad=True)
    net(x).square().mean().backward()
    wide = [p.grad for p in net.parameters()]
    net.zero_grad()
    if automatic:
        autoamp.enable(precision="bf16", **LOW)
    else:
        converted(net, strict=False)
    for _ in range(2):
        net.zero_grad()
        net(x).square().mean().backward()
    for expected, weight in zip(wide, net.parameters(), strict=True):
        assert not torch.equal(weight.grad, expected)
        torch.testing.assert_close(weight.grad, expected, rtol=2**-5, atol=2**-6)
    ops = [op for op in autoamp.report(net).ops if op.name.startswith("linear")]
    assert {(op.module, op.precision) for op in ops} == {
        ("inner.first", "bf16"),
        ("inner.second", "bf16"),
        ("off", "bf16"),
    }


# -- a step of a model of which no call was captured -----------------------------------


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def _loss(self, x: Tensor) -> Tensor:
        return F.linear(x, self.layer.weight).sum()


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_step_past_the_conversion_is_told_of_once(
    named: bool, strict: bool, caplog
) -> None:
    model, x = Functional(), torch.randn(4, 8)
    optimizer, other = SGD(model.parameters(), 0.1), nn.Linear(2, 2)
    given = optimizer if named else None
    autoamp.convert(model, given, precision="bf16", strict=strict, **LOW)
    step(other(torch.ones(1, 2)).sum(), SGD(other.parameters(), 0.1))
    optimizer.step()  # no gradients
    assert not any("Functional" in line for line in warned(caplog))
    model._loss(x).backward()
    if strict:
        with pytest.raises(autoamp.AutoampError) as raised:
            optimizer.step()
        says(raised, "Functional._loss")
    for _ in range(3):
        step(model._loss(x), optimizer)
    # Models of other tests may end meanwhile, and say so.
    told = [line for line in warned(caplog) if "Functional" in line]
    assert len(told) == (not strict)
    assert strict or says(told, "Functional", "_loss") is None


def called(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sum()


def switched_off(model: nn.Module, x: Tensor) -> Tensor:
    with autoamp.disabled():
        return model(x).sum()


def part_switched_off(model: Any, x: Tensor) -> Tensor:
    with autoamp.disabled():
        return model.layer(x).sum()


def part_of_another(model: nn.Module, x: Tensor) -> Tensor:
    return autoamp.convert(nn.Sequential(model), precision="bf16", **LOW)(x).sum()


def frozen(model: nn.Module, x: Tensor) -> Tensor:
    model.requires_grad_(False)
    return x.clone().requires_grad_().sum()


def harmless(model: Any, x: Tensor) -> Tensor:
    autoamp.revert(model)
    return model._loss(x)


def half(model: Any, x: Tensor) -> Tensor:
    autoamp.convert(model.bfloat16(), precision="bf16", **LOW)
    return model._loss(x.bfloat16())


@pytest.mark.parametrize(
    "loss",
    [called, switched_off, part_switched_off, part_of_another, frozen, harmless, half],
    ids=lambda f: f.__name__,
)
def test_no_step_is_told_of_where_nothing_is_the_matter(loss: Any, caplog) -> None:
    model = Functional()
    optimizer = SGD(model.parameters(), 0.1)
    converted(model, strict=False)
    step(loss(model, torch.randn(4, 8)), optimizer)
    assert not any("no call of it" in each for each in warned(caplog))
