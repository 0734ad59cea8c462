"""fp32 masters of a model that arrives in half precision."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

import autoamp
from autoamp import compat
from autoamp.training.half_optimizers import trains_half
from autoamp.training.options import Options
from tests.one_rank import one_rank
from tests.says import says
from tests.small_models import Of
from tests.training.steps import OPTIMIZERS, assert_same, masters_of, state_of

WIDTH = 8
BF16, FP16 = torch.bfloat16, torch.float16
KEY = "autoamp_masters"


def mlp(dtype: torch.dtype = BF16) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 4)
    ).to(dtype)


def batch(dtype: torch.dtype = BF16, rows: int = 5) -> Tensor:
    return torch.randn(rows, WIDTH).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().pow(2).mean()


def contents(optimizer: Optimizer) -> Any:
    """All that an optimizer step may write to."""
    params = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]
    masters = [m.detach().clone() for m in masters_of(optimizer).values()]
    return params, masters, state_of(optimizer)


def assert_rounded(optimizer: Optimizer) -> None:
    for param, master in masters_of(optimizer).items():
        assert master.dtype == torch.float32
        assert torch.equal(param, master.to(param.dtype))


def saved(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state after a trip through a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# -- what a user sees ------------------------------------------------------------------


def test_without_an_optimizer_it_is_left_as_it_is() -> None:
    model = mlp()
    autoamp.convert(model)
    assert not autoamp.is_converted(model)
    nobody_named = optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, batch()).backward()
    nobody_named.step()
    assert all(p.grad is not None and p.grad.dtype == BF16 for p in model.parameters())
    assert KEY not in nobody_named.state_dict()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_parameters_stay_the_same_half_objects(dtype: torch.dtype) -> None:
    model, x = mlp(dtype), batch(dtype)
    params, memory = (
        list(model.parameters()),
        [compat.data_address(p) for p in model.parameters()],
    )
    keys, exact = list(model.state_dict()), model(x)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    result = autoamp.convert(model, optimizer)
    assert result == (model, optimizer)
    assert torch.equal(model(x), exact)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    assert not optimizer.step_was_skipped
    held = optimizer.param_groups[0]["params"]
    for mine, kept, was, ptr in zip(
        model.parameters(), held, params, memory, strict=True
    ):
        assert mine is kept is was
        assert mine.dtype == dtype
        assert compat.data_address(mine) == ptr
        assert mine.grad.dtype == torch.float32
    assert list(optimizer.state) == params
    assert list(model.state_dict()) == keys
    assert all(v.dtype == dtype for v in model.state_dict().values())
    assert_rounded(optimizer)
    assert any(not torch.equal(m, p.float()) for p, m in masters_of(optimizer).items())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_the_report_says_so(dtype: torch.dtype) -> None:
    model = mlp(dtype)
    autoamp.convert(model, optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, batch(dtype))
    report = autoamp.report(model)
    assert "its optimizer steps fp32 master weights" in str(report.skipped)
    # bf16 has fp32's range: nothing to scale, so nothing to capture.
    assert autoamp.is_converted(model) == (dtype == FP16)
    assert (report.loss_scale is not None) == (dtype == FP16)


def test_muon_steps_fp32_masters() -> None:
    """It takes matrices only; test_split.py has torch's other optimizers."""
    half = nn.Linear(6, 4, bias=False).to(BF16)
    full = copy.deepcopy(half).float()
    optimizer, exact = OPTIMIZERS["Muon"](half), OPTIMIZERS["Muon"](full)
    autoamp.convert(half, optimizer)
    for seed in range(4):
        grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
        for weight, by in ((half.weight, optimizer), (full.weight, exact)):
            weight.grad = grad.clone()
            by.step()
    assert torch.equal(masters_of(optimizer)[half.weight], full.weight)
    assert_same([*optimizer.state.values()], [*exact.state.values()])


# -- writes by others ------------------------------------------------------------------


@pytest.fixture
def trained() -> tuple[nn.Sequential, Optimizer]:
    """A bf16 model after a few steps: its masters are not its weights."""
    model = mlp()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    autoamp.convert(model, optimizer)
    for _ in range(3):
        train_once(model, optimizer)
    assert any(not torch.equal(m, p.float()) for p, m in masters_of(optimizer).items())
    return model, optimizer


def train_once(model: nn.Module, optimizer: Optimizer, x: Tensor | None = None) -> None:
    optimizer.zero_grad()
    loss_of(model, batch() if x is None else x).backward()
    optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_capture_between_backward_and_step(dtype: torch.dtype, monkeypatch) -> None:
    """A second micro batch of another size, and a validation, meet fp32 gradients."""
    monkeypatch.setattr("autoamp.training.ledger.ENTRY", 2.0**11)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), mlp(), nn.Linear(4, WIDTH)).to(dtype)
    model.append(nn.Linear(WIDTH, WIDTH, dtype=dtype))
    model[3].weight = model[0].weight  # tied
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    precision = "fp16" if dtype == torch.float16 else "bf16"
    autoamp.convert(model, optimizer, precision=precision, strict=True)
    found = []
    for _ in range(2):  # the graphs of the second round are captured in the first
        for rows in (2, 4, 8):
            x = torch.ones(rows, WIDTH, dtype=dtype)
            model(x).sum().backward()
            with torch.no_grad():
                model(x)
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    for first, second in zip(*found, strict=True):
        assert first is not None
        assert first.dtype == torch.float32
        assert torch.equal(first, second)


def test_following_goes_by_bits(trained: tuple[nn.Sequential, Optimizer]) -> None:
    model, optimizer = trained
    weight = model[0].weight
    kept = masters_of(optimizer)[weight].detach().clone()
    with torch.no_grad():
        weight[0, 0], weight[0, 1], weight[0, 2] = 0.0, -0.0, torch.nan
    named = optimizer.state_dict()[KEY]["0.weight"]
    assert_same(named[0, :2], torch.tensor([0.0, -0.0]))
    assert named[0, 2].isnan()
    assert torch.equal(named[1:], kept[1:])  # the rows nobody wrote keep every bit
    with torch.no_grad():
        weight[0, 0] = -0.0
    assert torch.signbit(optimizer.state_dict()[KEY]["0.weight"][0, 0])


def test_hooks_round_the_step_see_and_write_parameters() -> None:
    """A pruning mask laid on after each step must not be undone by the masters."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.5)
    mask = (torch.rand(16, WIDTH) > 0.5).to(BF16)
    averages: list[Tensor] = []

    def after(*_: Any) -> None:
        averages.append(model[0].weight.detach().clone())
        model[0].weight.data.mul_(mask)

    def before(stepped: Optimizer, *_: Any) -> None:
        assert stepped.param_groups[0]["params"][0] is model[0].weight
        model[3].bias.data.fill_(3.0)

    optimizer.register_step_post_hook(after)
    optimizer.register_step_pre_hook(before)
    autoamp.convert(model, optimizer)
    late = optimizer.register_step_pre_hook(before)
    start = model[0].weight.detach().clone()
    train_once(model, optimizer)
    assert not torch.equal(averages[0], start)
    assert torch.equal(model[0].weight, averages[0] * mask)
    assert model[3].bias.gt(2).all()
    late.remove()
    train_once(model, optimizer)
    assert (model[0].weight[mask == 0].abs() < 0.5).all()


def test_whoever_hooks_the_accumulation_stays_hooked() -> None:
    """Those who reduce gradients between ranks hold on to that node."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    autoamp.convert(model, optimizer)
    weight, fired = model[0].weight, []
    node: Any = weight.expand_as(weight).grad_fn
    accumulator = node.next_functions[0][0]
    accumulator.register_hook(lambda *_: fired.append(1))
    for _ in range(3):
        train_once(model, optimizer)
    assert len(fired) == 3


def test_versions_move_with_the_weights_that_are_stepped() -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    autoamp.convert(model, optimizer)
    stepped, left = model[0].weight, model[2].weight
    versions = stepped._version, left._version
    loss_of(model, batch()).backward()
    left.grad = None
    optimizer.step()
    assert stepped._version > versions[0]
    assert left._version == versions[1]


class Unusual(optim.SGD):
    """Steps in two parts, looks at marks on its weights, and clears gradients."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(getattr(p, "shift", 0.0))
        self.zero_grad()
        return result


def test_a_step_in_two_parts() -> None:
    """Torch calls its hooks for both; the masters stay in until the outer one ends."""
    model = mlp()
    optim.SGD(model.parameters(), lr=0.1)  # the class has its hooks from here on
    optimizer = Unusual(model.parameters(), lr=0.1)
    autoamp.convert(model, optimizer)
    weight = model[0].weight
    weight.shift = 1e-4
    for _ in range(3):
        loss_of(model, batch()).backward()
        assert weight.grad is not None
        true = masters_of(optimizer)[weight].detach() - 0.1 * weight.grad + 1e-4
        optimizer.step()
        torch.testing.assert_close(masters_of(optimizer)[weight].detach(), true)
        assert weight.grad is None
    assert_rounded(optimizer)


class Breaks(optim.SGD):
    """Writes to its first weight, then raises."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        with torch.no_grad():
            first.add_(1.0)
        raise RuntimeError("planted")


def test_an_exception_in_a_step_puts_the_parameters_back() -> None:
    model = mlp()
    params = list(model.parameters())
    optimizer = Breaks(params, lr=0.1, momentum=0.9)
    autoamp.convert(model, optimizer)
    loss_of(model, batch()).backward()
    start = params[0].detach().float()
    with pytest.raises(RuntimeError):
        optimizer.step()
    held = optimizer.param_groups[0]["params"]
    assert all(a is b for a, b in zip(held, params, strict=True))
    assert all(p.dtype == BF16 for p in params)
    assert torch.equal(masters_of(optimizer)[params[0]], start + 1)
    assert_rounded(optimizer)
    assert all(m.grad is None for m in masters_of(optimizer).values())
    model(batch())


# -- saved state -----------------------------------------------------------------------


def test_tied_and_foreign_parameters_are_saved_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    model = Tied().bfloat16()
    temperature = nn.Parameter(torch.ones(3, dtype=BF16))
    frozen = nn.Parameter(torch.ones(3, dtype=BF16), requires_grad=False)
    optimizer = optim.SGD([*model.parameters(), frozen, temperature], lr=0.1)
    autoamp.convert(model, optimizer)
    names = list(optimizer.state_dict()[KEY])
    assert names == ["one.weight", "one.bias", "two.bias", "unnamed_parameter_4"]
    optimizer.load_state_dict(saved(optimizer))


def test_exact_casts_of_another_compiler_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = Options(exact_casts=True).compiled_by("aot_eager")
    assert not options.exact_casts
    says(caplog.messages, "aot_eager", option="exact_casts=True")


def test_an_optimizer_that_is_differentiated_has_no_masters() -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1, differentiable=True)
    autoamp.convert(model, optimizer)
    assert masters_of(optimizer) == {}


def test_an_optimizer_without_groups_trains_no_half_weights() -> None:
    optimizer = optim.SGD(mlp().parameters(), lr=0.1)
    assert trains_half(optimizer)
    optimizer.param_groups.clear()
    assert not trains_half(optimizer)


def test_loaded_masters_are_no_state_of_the_optimizers() -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    autoamp.convert(model, optimizer)
    loss_of(model, batch()).backward()
    optimizer.step()
    optimizer.load_state_dict(saved(optimizer))
    assert not any(optimizer.state.values())


@pytest.mark.parametrize(
    ("damage", "value"),
    [
        (lambda m: m.pop("0.bias"), "0.bias"),
        (lambda m: m.update(head=torch.ones(1)), "head"),
        (lambda m: m.update({"0.bias": torch.ones(2)}), "(2,)"),
        (lambda m: m.update({"0.bias": 3}), "0.bias"),
        (lambda m: m.update({"0.bias": m["0.bias"].to("meta")}), "0.bias"),
        (lambda m: m.update({"0.bias": m["0.bias"].to_sparse()}), "0.bias"),
    ],
)
def test_masters_that_do_not_fit_change_nothing(
    damage: Callable[[dict[str, Any]], Any],
    value: str,
    trained: tuple[nn.Sequential, Optimizer],
) -> None:
    model, optimizer = trained
    state = saved(optimizer)
    train_once(model, optimizer)
    before = contents(optimizer)
    damage(state[KEY])
    with pytest.raises(autoamp.CheckpointError) as raised:
        optimizer.load_state_dict(state)
    says(raised, value)
    assert_same(before, contents(optimizer))
    state[KEY] = [1]
    with pytest.raises(autoamp.CheckpointError):
        optimizer.load_state_dict(state)


def test_a_plain_checkpoint_gives_masters_of_the_half_weights(
    trained: tuple[nn.Sequential, Optimizer],
) -> None:
    full = mlp(torch.float32)
    plain = optim.AdamW(full.parameters(), lr=1e-3)
    train_once(full, plain, batch(torch.float32))
    for p in full.parameters():
        p.data += 1  # no element that the same half value would keep
    model, optimizer = trained
    model.load_state_dict(full.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    optimizer.state_dict()
    for mine, param in zip(model.parameters(), full.parameters(), strict=True):
        assert torch.equal(masters_of(optimizer)[mine], param.to(BF16).float())
        moment = optimizer.state[mine]["exp_avg"]
        assert moment.dtype == torch.float32
        assert torch.equal(moment, plain.state[param]["exp_avg"])
    train_once(model, optimizer)


# -- fp16: loss scaling at the edge ----------------------------------------------------


def small_gradients(masters: bool) -> tuple[Tensor, Tensor]:
    """The gradient of the first layer of an fp16 model, and the true one."""
    torch.manual_seed(0)
    model, x = mlp(FP16), batch(FP16)
    with torch.no_grad():
        model[3].weight.mul_(1e-3)
    full = copy.deepcopy(model).float()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    if masters:
        autoamp.convert(model, optimizer)
    (loss_of(model, x) * 1e-3).backward()
    (loss_of(full, x.float()) * 1e-3).backward()
    got, true = model[0].weight.grad, full[0].weight.grad
    assert got is not None
    assert true is not None
    return got, true


def test_gradients_that_underflow_in_fp16_do_not() -> None:
    got, true = small_gradients(masters=False)
    assert got.eq(0).all()
    assert true.abs().max() > 1e-9
    got, true = small_gradients(masters=True)
    assert got.dtype == torch.float32
    assert float((got - true).norm() / true.norm()) < 0.01


def test_gradients_of_gradients_pass_the_edge() -> None:
    torch.manual_seed(0)
    model, x = mlp(FP16), batch(FP16)
    full = copy.deepcopy(model).float()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    autoamp.convert(model, optimizer, loss_scale=1024.0)
    found: list[list[Tensor]] = []
    for each, rows in ((model, x), (full, x.float())):
        loss, orders = loss_of(each, rows), []
        for layer in (each[2], each[0], each[2]):
            (grad,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
            orders.append(grad.float())
            loss = grad.float().pow(2).sum()
        found.append(orders)
    for got, true in zip(*found, strict=True):
        assert ((got - true).norm() / true.norm()).item() < 0.03


def test_many_uses_of_an_fp16_weight_are_summed_in_fp32() -> None:
    model = Of(
        lambda m, x: torch.stack([x * m.weight for _ in range(40)]),
        weight=nn.Parameter(torch.ones(1, dtype=FP16)),
    )
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    autoamp.convert(model, optimizer, loss_scale=1.0)
    # 2048 + 1 is 2048 in fp16.
    x = torch.full((1,), 1.0, dtype=FP16)
    out = model(x)
    upstream = torch.ones_like(out)
    upstream[0] = 2048
    out.backward(upstream)
    assert model.weight.grad is not None
    assert float(model.weight.grad) == 2048 + 39


def test_nothing_of_a_half_model_is_lowered() -> None:
    """Not even what it does in fp32, at its root or in a module."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(FP16)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.inner(x).float() / 3
            return wide @ wide.t()

    model, x = Wide(), batch(FP16)
    exact = model(x)
    autoamp.convert(
        model, optim.SGD(model.parameters(), lr=0.1), placement="forced", strict=True
    )
    assert torch.equal(model(x), exact)
    assert autoamp.report(model).runs == 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_model_half_of_which_is_half(precision: str) -> None:
    parts = {"body": mlp(FP16), "head": nn.Linear(4, 2)}
    model, x = Of(lambda m, x: m.head(m.body(x).float()), **parts), batch(FP16)
    full = copy.deepcopy(model).float()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    autoamp.convert(model, optimizer, precision=precision, do_no_harm=False)
    ((model(x) ** 2).mean() * 1e-5).backward()
    ((full(x.float()) ** 2).mean() * 1e-5).backward()
    got, true = model.body[0].weight.grad, full.body[0].weight.grad
    assert got is not None
    assert float((got - true).norm() / true.norm()) < 0.03
    optimizer.step()
    assert_rounded(optimizer)
    assert model.head.weight.dtype == torch.float32
    assert model.head.weight not in masters_of(optimizer)
    assert len(masters_of(optimizer)) == 6
    optimizer.load_state_dict(saved(optimizer))
    assert "steps fp32 master weights" in str(autoamp.report(model).skipped)


def test_compilers_are_refused_where_gradients_would_be_lost() -> None:
    model = mlp(FP16)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(autoamp.UnsupportedModelError) as raised:
        autoamp.convert(model, optimizer, backend="inductor")
    says(raised, option="backend='eager'")
    assert "step" not in optimizer.__dict__
    autoamp.convert(model, optimizer, backend="inductor", loss_scale="off")
    assert masters_of(optimizer)


# -- coming and going ------------------------------------------------------------------


def test_converted_again_it_keeps_its_masters(
    trained: tuple[nn.Sequential, Optimizer],
) -> None:
    model, optimizer = trained
    before = contents(optimizer)
    autoamp.convert(model, optimizer)
    assert_same(before, contents(optimizer))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_revert_takes_the_masters_away(dtype: torch.dtype) -> None:
    model = mlp(dtype)
    params = list(model.parameters())
    optimizer = optim.SGD(params, lr=0.1, momentum=0.9)
    own = set(optimizer.__dict__)
    hooks = len(optimizer._optimizer_step_pre_hooks)
    autoamp.convert(model, optimizer)
    train_once(model, optimizer, batch(dtype))
    kept = [p.detach().clone() for p in params]
    autoamp.revert(model)
    assert set(optimizer.__dict__) == own
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert KEY not in optimizer.state_dict()
    for param, value in zip(params, kept, strict=True):
        assert torch.equal(param, value)
        assert param.grad.dtype == dtype
        assert optimizer.state[param]["momentum_buffer"].dtype == dtype
    train_once(model, optimizer, batch(dtype))
    assert params[0].grad.dtype == dtype


def test_converted_after_a_revert_under_a_scheduler() -> None:
    """Whose wrapper keeps ours on the optimizer."""
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    autoamp.convert(model, optimizer)
    optim.lr_scheduler.StepLR(optimizer, 1)
    autoamp.revert(model)
    train_once(model, optimizer)
    assert KEY not in optimizer.state_dict()
    autoamp.convert(model, optimizer)
    assert list(optimizer.state_dict()).count(KEY) == 1
    train_once(model, optimizer)
    assert_rounded(optimizer)


def test_state_and_gradients_there_before_become_fp32() -> None:
    model = mlp()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_once(model, optimizer)
    before = model[0].weight.grad
    assert before.dtype == BF16
    autoamp.convert(model, optimizer)
    after = model[0].weight.grad
    assert after is not None
    assert torch.equal(after, before.float())
    assert all(
        s["momentum_buffer"].dtype == torch.float32 for s in optimizer.state.values()
    )
    train_once(model, optimizer)


@pytest.mark.parametrize("how", ["copied", "pickled"])
def test_a_copied_optimizer_carries_its_masters_along(
    how: str, trained: tuple[nn.Sequential, Optimizer]
) -> None:
    model, optimizer = trained
    both = model, optimizer
    given = copy.deepcopy(both) if how == "copied" else pickle.loads(pickle.dumps(both))
    other, copied = given
    assert KEY not in copied.state_dict()
    assert copied.param_groups[0]["params"][0] is other[0].weight
    assert copied.state[other[0].weight]["exp_avg"].dtype == BF16
    autoamp.convert(other, copied)
    for mine, param in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(masters_of(copied)[mine], masters_of(optimizer)[param])
        state, wanted = copied.state[mine], optimizer.state[param]
        assert torch.equal(state["exp_avg"], wanted["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], wanted["exp_avg_sq"])
    x = batch()
    train_once(other, copied, x)
    train_once(model, optimizer, x)
    assert_same(contents(optimizer), contents(copied))


def test_groups_that_come_later_and_weights_that_are_thawed() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = optim.SGD(list(model.parameters())[:-2], lr=0.1)
    autoamp.convert(model, optimizer)
    assert len(masters_of(optimizer)) == 2  # frozen weights need none
    optimizer.add_param_group({"params": list(model[3].parameters())})
    model[0].requires_grad_(True)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train_once(model, optimizer)
    scheduler.step()
    assert len(masters_of(optimizer)) == 6
    train_once(model, optimizer)
    assert_rounded(optimizer)


@pytest.mark.skipif(os.name == "nt", reason="gloo with a file store")
def test_under_ddp_gradients_keep_the_dtype_it_reduces(caplog) -> None:
    with one_rank():
        model = nn.parallel.DistributedDataParallel(mlp())
        optimizer = optim.AdamW(model.parameters(), lr=1e-3)
        autoamp.convert(model, optimizer)
        assert "DistributedDataParallel reduces them" in caplog.text
        for _ in range(3):
            train_once(model, optimizer)
    assert_rounded(optimizer)
    assert "0.weight" in optimizer.state_dict()[KEY]
