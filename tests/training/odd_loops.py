"""Odd training loops, as people write them, each of which can be run in several ways.

Plain ones, in any order of their parts, are those of `test_machine.py`.

A loop is written once, with the calls of a `GradScaler` where its documentation wants
them.  They do something beside `torch.autocast` only: autoamp and plain fp32 run the
bare loop.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim import (
    LBFGS,
    Adam,
    Optimizer,
    lr_scheduler,
)
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.training import steps
from tests.training.steps import WIDTH, batch, mlp

FP32, GRAD_SCALER = "fp32", "GradScaler"
OURS = ("convert fp16", "convert bf16", "enable fp16")
"""In bf16 the automatic mode does what `convert` does."""
BIG = 1e3
"""Times this, a loss overflows at a loss scale of 2**15, and at the next few below.

A batch of NaN comes when the scale has settled: a GradScaler is lowered by it, which
may save it an overflow by chance.
"""


@dataclass
class Way:
    """How a loop is run, and what became of it."""

    name: str = FP32
    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    seen: list[Tensor] = field(default_factory=list)
    taken: int = 0

    def __post_init__(self) -> None:
        how, _, self.precision = self.name.partition(" ")
        self.converts = how == "convert"
        self.automatic = how == "enable"
        scaled = self.name == GRAD_SCALER
        self.scaler = torch.amp.GradScaler("cpu", 2.0**15) if scaled else None

    # -- what a loop calls -------------------------------------------------------------

    def ready(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """The model is made, and these are its optimizers so far."""
        self.models.append(model)
        self.optimizers.extend(optimizers)
        if self.converts:
            options: Any = {"precision": self.precision, "do_no_harm": False}
            autoamp.convert(model, list(optimizers), **options)

    def adam(self, model: nn.Module, lr: float = 0.01, **options: Any) -> Optimizer:
        """The optimizer of most loops."""
        optimizer = Adam(model.parameters(), lr, **options)
        self.ready(model, optimizer)
        return optimizer

    def amp(self) -> AbstractContextManager[Any]:
        """`torch.autocast`, beside a GradScaler."""
        return torch.autocast("cpu", torch.float16, enabled=self.scaler is not None)

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler else loss

    def unscale_(self, optimizer: Optimizer) -> None:
        if self.scaler:
            self.scaler.unscale_(optimizer)

    def update(self) -> None:
        if self.scaler:
            self.scaler.update()

    def step(
        self, optimizer: Optimizer, by: Callable[..., Any] | None = None, *given: Any
    ) -> None:
        """A step, by something else than `optimizer.step` where `by` is given."""
        with self.counted(optimizer):
            if self.scaler:
                self.scaler.step(optimizer)
            else:
                (by or optimizer.step)(*given)

    @contextmanager
    def counted(self, optimizer: Optimizer) -> Iterator[None]:
        """A step is taken if it moves a weight."""
        weights = [p for group in optimizer.param_groups for p in group["params"]]
        before = [p.detach().clone() for p in weights]
        yield
        self.taken += not all(map(torch.equal, before, weights))

    def penalty_grad(self, out: Tensor, x: Tensor) -> Tensor:
        """A gradient that a loss is made of, as GradScaler's documentation has it."""
        (grad,) = torch.autograd.grad(self.scale(out), x, create_graph=True)
        return grad / self.scaler.get_scale() if self.scaler else grad

    # -- what came of it ---------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Weights, buffers and the states of optimizers, by name."""
        found: dict[str, Tensor] = {}
        for number, model in enumerate(self.models):
            for name, value in model.state_dict().items():
                found[f"model {number} {name}"] = value.clone()
        for number, optimizer in enumerate(self.optimizers):
            for of, state in optimizer.state_dict()["state"].items():
                for name, value in state.items():
                    if isinstance(value, Tensor):
                        found[f"optimizer {number} {of} {name}"] = value.clone()
        return found


@dataclass(frozen=True)
class Outcome:
    """What a loop has ended with."""

    taken: int
    """How many steps moved a weight."""

    state: dict[str, Tensor]
    seen: list[Tensor]
    """What the loop looked at between its steps."""


class Judged(nn.Sequential):
    """The model of most loops, which gives its loss where it is given targets.

    So a loss scale alone is in the way of an overflow: nothing enters but the
    gradient of a loss to itself.
    """

    def __init__(self) -> None:
        super().__init__(*mlp())

    def forward(self, x: Tensor, y: Tensor | None = None, factor: Any = None) -> Any:
        out = super().forward(x)
        return out if y is None else F.mse_loss(out, y) * factor


def loss_of(model: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    x, y = batch(step)
    loss: Tensor = model(x, y, torch.tensor(factor))
    return loss


Loop = Callable[[Way], None]
LOOPS: dict[str, Loop] = {}
"""Every loop by its name."""

UNSCALED: set[str] = set()
"""Names of loops that no GradScaler can run: they are held against plain fp32."""


def loop(**cases: dict[str, Any]) -> Callable[[Callable[..., None]], Any]:
    """Adds a loop to the list, once for each of its cases."""

    def add(function: Callable[..., None]) -> Any:
        for case, given in (cases or {"": {}}).items():
            name = function.__name__ + (f" {case}" if case else "")
            LOOPS[name.replace("_", " ")] = functools.partial(function, **given)
        return function

    return add


def run(name: str, way: str) -> Outcome:
    """Runs a loop from the same random state every time."""
    torch.manual_seed(0)
    ran = Way(way)
    if ran.automatic:
        options: Any = {"precision": ran.precision, "do_no_harm": False}
        autoamp.enable(hot=False, **options)
    try:
        LOOPS[name](ran)
        return Outcome(ran.taken, ran.state(), ran.seen)
    finally:
        autoamp.disable()


def all_finite(tensors: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors)


def from_start(step: int) -> float:
    return BIG


def after_ten(step: int) -> float:
    return BIG if step >= 10 else 1e-4


def one_step(
    way: Way, model: nn.Module, optimizer: Optimizer, step: int, factor: float = 1.0
) -> None:
    """A step as in a tutorial, of a loss of that size."""
    optimizer.zero_grad()
    with way.amp():
        loss = loss_of(model, step, factor)
    way.scale(loss).backward()
    way.step(optimizer)
    way.update()


# -- the script skips a step by itself -------------------------------------------------


@loop(
    after_ten_good_steps={"factor": after_ten},
    keeps_zeros={"factor": from_start, "none": False},
)
def skips_where_the_norm_is_infinite(
    way: Way, factor: Callable[[int], float], none: bool = True
) -> None:
    model = Judged()
    optimizer = way.adam(model)
    for step in range(40):
        with way.amp():
            loss = loss_of(model, step, factor(step))
        way.scale(loss).backward()
        way.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            optimizer.zero_grad(set_to_none=none)
            way.update()
            continue
        way.step(optimizer)
        way.update()
        optimizer.zero_grad(set_to_none=none)


@loop()
def skips_where_the_loss_is_nan(way: Way) -> None:
    model = Judged()
    optimizer = way.adam(model)
    for step in range(20):
        optimizer.zero_grad()
        x, y = batch(step)
        if step % 4 == 1:
            x[0, 0] = float("nan")
        with way.amp():
            loss = F.mse_loss(model(x), y) * BIG
        if not torch.isfinite(loss):
            continue
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


# -- probes between steps --------------------------------------------------------------


def saliency(way: Way, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    with way.amp():
        out = model(x)
    return torch.autograd.grad(out.float().sum(), x)[0]


def saliency_by_backward(way: Way, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    with way.amp():
        out = model(x)
    out.float().max(1).values.sum().backward()
    model.zero_grad()
    assert x.grad is not None
    return x.grad


def grad_cam(way: Way, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    kept: dict[str, Tensor] = {}

    def forward(module: nn.Module, given: Any, out: Tensor) -> None:
        kept["out"] = out
        out.register_hook(lambda grad: kept.update(grad=grad))

    handle = model.get_submodule("0").register_forward_hook(forward)
    with way.amp():
        out = model(x)
    out.float()[:, 0].sum().backward()
    handle.remove()
    model.zero_grad()
    return (kept["grad"].float() * kept["out"].float()).sum(1)


def hessian_times(way: Way, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    held = list(model.parameters())
    with way.amp():
        loss = F.mse_loss(model(x), y)
    grads = torch.autograd.grad(loss, held, create_graph=True)
    product = torch.autograd.grad(sum(g.sum() for g in grads), held)
    return torch.cat([p.flatten() for p in product])


PROBES = saliency_by_backward, grad_cam, hessian_times


@loop(**{probe.__name__: {"probe": probe} for probe in PROBES})
def probes_between_steps(way: Way, probe: Callable[..., Tensor]) -> None:
    model = Judged()
    optimizer = way.adam(model)
    for step in range(24):
        one_step(way, model, optimizer, step, 0.01)
        if step % 3 == 2:
            way.seen.append(probe(way, model, *batch(step)))


@loop(of_a_small_loss={"factor": 1e-5}, of_a_big_loss={"factor": 1e5})
def probes_after_training(way: Way, factor: float) -> None:
    model = Judged()
    optimizer = way.adam(model)
    for step in range(24):
        optimizer.zero_grad()
        with way.amp():
            loss = loss_of(model, step, factor)
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()
    model.eval()
    for step in range(6):
        way.seen.append(saliency(way, model, *batch(step)))


# -- losses of any size ----------------------------------------------------------------


@loop(
    of_1e_7={"factor": lambda step: 1e-7},
    that_alternates={"factor": lambda step: 1e-4 if step % 2 else 1e2},
    that_grows={"factor": lambda step: 2.0 ** (step - 20)},
)
def a_loss(way: Way, factor: Callable[[int], float]) -> None:
    model = Judged()
    optimizer = way.adam(model, eps=1e-15)
    for step in range(40):
        optimizer.zero_grad()
        with way.amp():
            loss = loss_of(model, step, factor(step))
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


@loop()
def a_sum_over_two_towers(way: Way) -> None:
    """One loss of two models: 1e-6 of the one, and the sum of squares of the other."""
    first, second = Judged(), Judged()
    one, two = Adam(first.parameters(), 0.01), Adam(second.parameters(), 0.01)
    way.ready(first, one)
    way.ready(second, two)
    for step in range(25):
        one.zero_grad()
        two.zero_grad()
        x, y = batch(step)
        with way.amp():
            loss = 1e-6 * F.mse_loss(first(x), y)
            loss = loss + (10 * second(x).float() - y).square().sum()
        way.scale(loss).backward()
        way.step(one)
        way.step(two)
        way.update()


# -- gradients made not finite by the script -------------------------------------------


def data_of_grad(model: nn.Module) -> None:
    weight: Any = model.get_parameter("2.bias")
    weight.grad.data = torch.full_like(weight, -float("inf"))


@loop()
def spoils_the_data_of_a_gradient(way: Way) -> None:
    model = Judged()
    optimizer = way.adam(model)
    for step in range(10):
        optimizer.zero_grad()
        with way.amp():
            loss = loss_of(model, step)
        way.scale(loss).backward()
        if step in (3, 7):
            data_of_grad(model)
        way.step(optimizer)
        way.update()


# -- gradients changed before the step -------------------------------------------------


def clamp_by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad.clamp(-1, 1)


def no_nan(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        torch.nan_to_num(p.grad, nan=0.0, posinf=0.0, neginf=0.0, out=p.grad)


@loop(
    by_hand={"change": clamp_by_hand},
    without_nan={"change": no_nan},
)
def clips(way: Way, change: Callable[[nn.Module], None]) -> None:
    """The first steps overflow, and later a batch has an infinity."""
    model = Judged()
    optimizer = way.adam(model)
    for step in range(30):
        optimizer.zero_grad()
        x, y = batch(step)
        if step == 20:
            y[0, 0] = float("inf")
        with way.amp():
            loss = F.mse_loss(model(x), y) * BIG
        way.scale(loss).backward()
        way.unscale_(optimizer)
        change(model)
        way.step(optimizer)
        way.update()


# -- bad batches -----------------------------------------------------------------------


@loop(
    of_nan_every_fifth_time={"value": float("nan"), "bad": range(0, 30, 5)},
    of_huge_numbers={"value": 1e10, "bad": [4, 5]},
)
def a_batch(way: Way, value: float, bad: Any) -> None:
    model = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)
    )
    optimizer = way.adam(model)
    for step in range(30):
        optimizer.zero_grad()
        x, y = batch(step)
        if step in bad:
            x[0, 0] = value
        with way.amp():
            loss = F.mse_loss(model(x), y)
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


@loop(
    of_huge_numbers={"value": 1e15, "bad": [5, 20]},
    of_nan_every_other_time={"value": float("nan"), "bad": range(0, 64, 2)},
)
def a_target(way: Way, value: float, bad: Any) -> None:
    """What enters the backward is bad, and the gradients grow on their way."""
    model = nn.Sequential(mlp(), nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    for layer in (model[1], model[3]):
        nn.init.normal_(layer.weight)
    optimizer = way.adam(model)
    for step in range(64):
        optimizer.zero_grad()
        x, y = batch(step)
        if step in bad:
            y[0, 0] = value
        with way.amp():
            loss = F.mse_loss(model(x), y)
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


# -- several models --------------------------------------------------------------------


@loop(
    frozen={"freeze": True, "factor": BIG},
    unequal={"factor": BIG, "every": 4},
)
def adversaries(
    way: Way, freeze: bool = False, factor: float = 1.0, every: int = 1
) -> None:
    maker, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), mlp()
    makes, judges = Adam(maker.parameters(), 0.01), Adam(critic.parameters(), 0.01)
    way.ready(maker, makes)
    way.ready(critic, judges)
    for step in range(20):
        real, noise = batch(step)
        judges.zero_grad()
        with way.amp():
            fake = maker(noise)
            loss = F.softplus(-critic(real)).mean()
            loss = (loss + F.softplus(critic(fake.detach())).mean()) * factor
        way.scale(loss).backward()
        way.step(judges)
        if step % every:
            way.update()
            continue
        makes.zero_grad()
        critic.requires_grad_(not freeze)
        with way.amp():
            loss = F.softplus(-critic(fake)).mean()
        way.scale(loss).backward()
        critic.requires_grad_(True)
        way.step(makes)
        way.update()


@loop()
def a_penalty_on_gradients(way: Way) -> None:
    critic = mlp()
    optimizer = way.adam(critic)
    for step in range(15):
        optimizer.zero_grad()
        real, other = batch(step)
        fake = torch.cat([other, -other], 1)
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        with way.amp():
            out = critic(mixed).float().sum()
        grad = way.penalty_grad(out, mixed)
        with way.amp():
            loss = critic(fake).mean() - critic(real).mean()
            loss = loss + 10 * (grad.norm(dim=1) - 1).square().mean()
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


@loop()
def learns_to_learn(way: Way) -> None:
    """MAML: a loss of weights that a gradient step has made."""
    model = Judged()
    optimizer = way.adam(model)
    names = dict(model.named_parameters())
    for step in range(12):
        optimizer.zero_grad()
        x, y = batch(step)
        with way.amp():
            inner = F.mse_loss(model(x), y)
        grads = torch.autograd.grad(inner, list(names.values()), create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(names.items(), grads, strict=True)}
        with way.amp():
            out: Any = torch.func.functional_call(model, fast, (x,))
            loss = F.mse_loss(out, y) * BIG
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


# -- closures --------------------------------------------------------------------------


@loop()
def a_closure_of_lbfgs(way: Way) -> None:
    model = Judged()
    optimizer = LBFGS(model.parameters(), 0.1, max_iter=4)
    way.ready(model, optimizer)
    for step in range(8):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step % 2, float("nan") if step == 4 else 1e-2)
            loss.backward()
            return loss

        if step != 4 or way.name != FP32:
            way.step(optimizer, None, closure)


UNSCALED.add("a closure of lbfgs")


# -- steps that are reached by another road --------------------------------------------


def steps_by(way: Way, model: nn.Module, optimizer: Any, by: Any, *given: Any) -> None:
    for step in range(20):
        optimizer.zero_grad()
        with way.amp():
            loss = loss_of(model, step, float("nan") if step == 15 else BIG)
        way.scale(loss).backward()
        way.step(optimizer, by, *given)
        way.update()


@loop()
def a_step_bound_before(way: Way) -> None:
    model = Judged()
    optimizer = Adam(model.parameters(), 0.01)
    bound = optimizer.step
    way.ready(model, optimizer)
    steps_by(way, model, optimizer, bound)


@loop()
def a_step_bound_after(way: Way) -> None:
    model = Judged()
    optimizer = way.adam(model)
    steps_by(way, model, optimizer, optimizer.step)


@loop()
def a_step_of_the_class(way: Way) -> None:
    model = Judged()
    optimizer = way.adam(model)
    steps_by(way, model, optimizer, Adam.step, optimizer)


@loop()
def a_compiled_step(way: Way) -> None:
    model = Judged()
    optimizer = Adam(model.parameters(), 0.01)
    compiled = torch.compile(optimizer.step, backend="eager")
    way.ready(model, optimizer)
    steps_by(way, model, optimizer, compiled)


@loop(not_named={}, bound={"bound": True})
def an_optimizer_made_late(way: Way, bound: bool = False) -> None:
    """After the first forward, and unknown to `convert`."""
    model = Judged()
    way.ready(model)
    model(batch(0)[0])
    optimizer = Adam(model.parameters(), 0.01)
    way.optimizers.append(optimizer)
    steps_by(way, model, optimizer, optimizer.step if bound else None)


# -- optimizers and weights that change ------------------------------------------------


@loop(
    one_cycle={"kind": lr_scheduler.OneCycleLR, "max_lr": 0.1, "total_steps": 31},
    plateau={"kind": lr_scheduler.ReduceLROnPlateau, "patience": 2},
)
def a_schedule(way: Way, kind: Any, **options: Any) -> None:
    model = Judged()
    optimizer = way.adam(model)
    schedule = kind(optimizer, **options)
    for step in range(30):
        optimizer.zero_grad()
        with way.amp():
            loss = loss_of(model, step, float("nan") if step == 15 else BIG)
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()
        plateau = kind is lr_scheduler.ReduceLROnPlateau
        schedule.step(*[loss.detach()] if plateau else [])


@loop()
def a_new_optimizer_for_each_phase(way: Way) -> None:
    model = Judged()
    way.ready(model)
    for phase in range(5):
        optimizer = Adam(model.parameters(), 0.01)
        for step in range(8):
            one_step(way, model, optimizer, step, 10.0**phase)
    way.optimizers.append(optimizer)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> Any:
        return self.cell(x, state)


@loop()
def a_state_from_step_to_step(way: Way) -> None:
    """Truncated backpropagation through time, of a cell that is called many times."""
    model = Cell()
    optimizer = way.adam(model)
    state = torch.zeros(6, WIDTH)
    for step in range(20):
        optimizer.zero_grad()
        losses = []
        for part in range(4):
            x, y = batch(4 * step + part)
            with way.amp():
                state = model(y, state)
            losses.append(F.mse_loss(state.float(), x))
        loss = sum(losses) * (float("nan") if step == 15 else BIG)
        way.scale(loss).backward()
        state = state.detach()
        way.step(optimizer)
        way.update()


@loop()
def scales_by_hand(way: Way) -> None:
    """The script has a scale of its own, as code for fp16 had before GradScaler."""
    model = Judged()
    optimizer = way.adam(model)
    for step in range(25):
        optimizer.zero_grad()
        with way.amp():
            loss = loss_of(model, step, float("nan") if step == 15 else 1.0)
        way.scale(loss * 1024).backward()
        way.unscale_(optimizer)
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(1024)
        way.step(optimizer)
        way.update()


# -- backwards that are not one to a step ----------------------------------------------


@loop(reentrant={"reentrant": True}, not_reentrant={"reentrant": False})
def checkpoints(way: Way, reentrant: bool) -> None:
    model = Judged()
    optimizer = way.adam(model)
    for step in range(20):
        optimizer.zero_grad()
        x, y = batch(step)
        factor = float("nan") if step == 15 else BIG
        with way.amp():
            out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
            loss = F.mse_loss(out, y) * factor
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


@loop()
def models_that_share_weights(way: Way) -> None:
    body = nn.Linear(WIDTH, 8)
    heads = [nn.Sequential(body, nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
    both = [*body.parameters(), *heads[0][2].parameters(), *heads[1][2].parameters()]
    optimizer = Adam(both, 0.01)
    for head in heads:
        way.ready(head, *[] if way.optimizers else [optimizer])
    for step in range(20):
        optimizer.zero_grad()
        with way.amp():
            loss = steps.loss_of(heads[step % 2], step, BIG)
            if step % 5 == 0:
                loss = loss + steps.loss_of(heads[1 - step % 2], step, 1e-3)
        way.scale(loss).backward()
        way.step(optimizer)
        way.update()


# -- all of it at once -----------------------------------------------------------------


@loop()
def everything_at_once(way: Way) -> None:
    """Accumulation, a probe, a skip of the script's own and a NaN, in turn."""
    model = Judged()
    optimizer = way.adam(model)
    for step, micro in itertools.product(range(30), range(2)):
        nan = step == 13 and micro == 1
        with way.amp():
            loss = loss_of(model, step, float("nan") if nan else BIG) / 2
        way.scale(loss).backward()
        if micro == 0:
            x = batch(step)[0].requires_grad_()
            way.seen.append(saliency(way, model, x, x))
            continue
        way.unscale_(optimizer)
        if step % 7 != 3 and torch.isfinite(clip_grad_norm_(model.parameters(), 1.0)):
            way.step(optimizer)
        way.update()
        optimizer.zero_grad()
