"""Odd training loops, as people write them, each of which can be run in several ways.

Plain ones, in any order of their parts, are those of `test_machine.py`.

A loop is written once, with the calls of a `GradScaler` where its documentation wants
them.  They do something beside `torch.autocast` only: autoamp and plain fp32 run the
bare loop.
"""

from __future__ import annotations

import functools
import itertools
import math
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
from tests.small_models import Of
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


def loss_by(model: nn.Module, factor: Callable[[int], float], step: int) -> Tensor:
    return loss_of(model, step, factor(step))


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


# -- what most loops do ----------------------------------------------------------------


def fit(
    way: Way,
    optimizer: Optimizer,
    steps: int,
    loss: Callable[[int], Tensor | None],
    *,
    change: Callable[[int], Any] | None = None,
    by: tuple[Any, ...] = (),
    after: Callable[[Tensor], Any] = lambda _: None,
    none: bool = True,
) -> None:
    """Steps as in a tutorial.

    Args:
        loss: makes the loss of a step; there is no backward where it gives None.
        change: is called with the number of the step, before it, on gradients without
            a loss scale; there is no step where it gives False.
        by: what is called for the step, with its arguments.
        after: is called with each loss at the end of its step.
        none: what `zero_grad` is given.
    """
    for step in range(steps):
        optimizer.zero_grad(none)
        with way.amp():
            found = loss(step)
        if found is None:
            continue
        way.scale(found).backward()
        if change is not None:
            way.unscale_(optimizer)
        if change is None or change(step) is not False:
            way.step(optimizer, *by)
        way.update()
        after(found)


def bad_at(*steps: int, value: float = math.nan, other: float = BIG) -> Any:
    """A factor of a loss that is bad at these steps."""
    return lambda step: value if step in steps else other


LATE_NAN = bad_at(15)

# -- the script skips a step by itself -------------------------------------------------


@loop(
    after_ten_good_steps={"small": 10},
    keeps_zeros={"none": False},
)
def skips_where_the_norm_is_infinite(
    way: Way, small: int = 0, none: bool = True
) -> None:
    model = Judged()

    def is_finite(_: int) -> bool:
        return bool(clip_grad_norm_(model.parameters(), 1.0).isfinite())

    factor = bad_at(*range(small), value=1e-4)
    loss = functools.partial(loss_by, model, factor)
    fit(way, way.adam(model), 40, loss, change=is_finite, none=none)


@loop()
def skips_where_the_loss_is_nan(way: Way) -> None:
    model = Judged()

    def loss(step: int) -> Tensor | None:
        x, y = batch(step)
        if step % 4 == 1:
            x[0, 0] = math.nan
        found = F.mse_loss(model(x), y) * BIG
        return found if found.isfinite() else None

    fit(way, way.adam(model), 20, loss)


# -- probes between steps --------------------------------------------------------------


def saliency(way: Way, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    with way.amp():
        out = model(x)
    return torch.autograd.grad(out.float().sum(), x)[0]


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


PROBES = grad_cam, hessian_times


@loop(**{probe.__name__: {"probe": probe} for probe in PROBES})
def probes_between_steps(way: Way, probe: Callable[..., Tensor]) -> None:
    model = Judged()
    optimizer = way.adam(model)
    for step in range(8):
        fit(way, optimizer, 3, lambda _, at=step: loss_of(model, at, 0.01))
        way.seen.append(probe(way, model, *batch(step)))


@loop(of_a_small_loss={"factor": 1e-5}, of_a_big_loss={"factor": 1e5})
def probes_after_training(way: Way, factor: float) -> None:
    model = Judged()
    fit(way, way.adam(model), 24, lambda step: loss_of(model, step, factor))
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
    loss = functools.partial(loss_by, model, factor)
    fit(way, way.adam(model, eps=1e-15), 40, loss)


@loop()
def a_sum_over_two_towers(way: Way) -> None:
    """One loss of two models: 1e-6 of the one, and the sum of squares of the other."""
    first, second = Judged(), Judged()
    one, two = way.adam(first), way.adam(second)
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


@loop()
def makes_all_gradients_finite(way: Way) -> None:
    """The first steps overflow, and later a batch has an infinity."""
    model = Judged()

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step == 20:
            y[0, 0] = math.inf
        return F.mse_loss(model(x), y) * BIG

    def finite(_: int) -> None:
        for p in model.parameters():
            torch.nan_to_num(p.grad, 0.0, 0.0, 0.0, out=p.grad)

    fit(way, way.adam(model), 30, loss, change=finite)


# -- bad batches -----------------------------------------------------------------------


@loop(
    of_huge_numbers={"value": 1e15, "bad": (5, 20)},
    of_nan_every_other_time={"value": math.nan, "bad": range(0, 64, 2)},
)
def a_target(way: Way, value: float, bad: Any) -> None:
    """What enters the backward is bad, and the gradients grow on their way."""
    model = nn.Sequential(mlp(), nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4))
    for layer in (model[1], model[3]):
        nn.init.normal_(layer.weight)

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        if step in bad:
            y[0, 0] = value
        return F.mse_loss(model(x), y)

    fit(way, way.adam(model), 64, loss)


# -- several models --------------------------------------------------------------------


@loop(
    frozen={"freeze": True},
    unequal={"every": 4},
)
def adversaries(way: Way, freeze: bool = False, every: int = 1) -> None:
    maker, critic = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), mlp()
    makes, judges = way.adam(maker), way.adam(critic)
    for step in range(20):
        real, noise = batch(step)
        judges.zero_grad()
        with way.amp():
            fake = maker(noise)
            loss = F.softplus(-critic(real)).mean()
            loss = (loss + F.softplus(critic(fake.detach())).mean()) * BIG
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

    def loss(step: int) -> Tensor:
        real, other = batch(step)
        fake = torch.cat([other, -other], 1)
        mixed = (0.3 * real + 0.7 * fake).requires_grad_()
        out = critic(mixed).float().sum()
        with torch.autocast("cpu", enabled=False):
            grad = way.penalty_grad(out, mixed)
        found: Tensor = critic(fake).mean() - critic(real).mean()
        return found + 10 * (grad.norm(dim=1) - 1).square().mean()

    fit(way, way.adam(critic), 15, loss)


@loop()
def learns_to_learn(way: Way) -> None:
    """MAML: a loss of weights that a gradient step has made."""
    model = Judged()
    names = dict(model.named_parameters())

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        inner = F.mse_loss(model(x), y)
        with torch.autocast("cpu", enabled=False):
            grads = torch.autograd.grad(inner, [*names.values()], create_graph=True)
        fast = {n: p - 0.1 * g for (n, p), g in zip(names.items(), grads, strict=True)}
        out: Any = torch.func.functional_call(model, fast, (x,))
        return F.mse_loss(out, y) * BIG

    fit(way, way.adam(model), 12, loss)


# -- closures --------------------------------------------------------------------------


@loop()
def a_closure_of_lbfgs(way: Way) -> None:
    model = Judged()
    optimizer = LBFGS(model.parameters(), 0.1, max_iter=4)
    way.ready(model, optimizer)
    for step in range(8):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step % 2, math.nan if step == 4 else 1e-2)
            loss.backward()
            return loss

        if step != 4 or way.name != FP32:
            way.step(optimizer, None, closure)


UNSCALED.add("a closure of lbfgs")


# -- steps that are reached by another road --------------------------------------------


def compiled(optimizer: Optimizer) -> Any:
    return torch.compile(optimizer.step, backend="eager")


@loop(
    bound_before={"before": lambda o: (o.step,)},
    bound_after={"after": lambda o: (o.step,)},
    of_the_class={"after": lambda o: (Adam.step, o)},
    that_is_compiled={"before": lambda o: (compiled(o),)},
)
def a_step(way: Way, before: Any = None, after: Any = None) -> None:
    model = Judged()
    optimizer = Adam(model.parameters(), 0.01)
    by = before(optimizer) if before else ()
    way.ready(model, optimizer)
    by = after(optimizer) if after else by
    fit(way, optimizer, 20, functools.partial(loss_by, model, LATE_NAN), by=by)


@loop(not_named={}, bound={"bound": True})
def an_optimizer_made_late(way: Way, bound: bool = False) -> None:
    """After the first forward, and unknown to `convert`."""
    model = Judged()
    way.ready(model)
    model(batch(0)[0])
    optimizer = Adam(model.parameters(), 0.01)
    way.optimizers.append(optimizer)
    by = (optimizer.step,) if bound else ()
    fit(way, optimizer, 20, functools.partial(loss_by, model, LATE_NAN), by=by)


# -- optimizers and weights that change ------------------------------------------------


@loop(
    one_cycle={"kind": lr_scheduler.OneCycleLR, "max_lr": 0.1, "total_steps": 31},
    plateau={"kind": lr_scheduler.ReduceLROnPlateau, "patience": 2},
)
def a_schedule(way: Way, kind: Any, **options: Any) -> None:
    model = Judged()
    optimizer = way.adam(model)
    schedule = kind(optimizer, **options)

    def after(loss: Tensor) -> None:
        plateau = kind is lr_scheduler.ReduceLROnPlateau
        schedule.step(*[loss.detach()] if plateau else [])

    loss = functools.partial(loss_by, model, LATE_NAN)
    fit(way, optimizer, 30, loss, after=after)


@loop()
def a_new_optimizer_for_each_phase(way: Way) -> None:
    model = Judged()
    way.ready(model)
    for phase in range(5):
        optimizer = Adam(model.parameters(), 0.01)
        fit(way, optimizer, 8, lambda step, of=phase: loss_of(model, step, 10.0**of))
    way.optimizers.append(optimizer)


@loop()
def a_state_from_step_to_step(way: Way) -> None:
    """Truncated backpropagation through time, of a cell that is called many times."""
    model = Of(lambda m, x, state: m.cell(x, state), cell=nn.GRUCell(4, WIDTH))
    states = [torch.zeros(6, WIDTH)]

    def loss(step: int) -> Tensor:
        state, losses = states[-1].detach(), []
        for part in range(4):
            x, y = batch(4 * step + part)
            state = model(y, state)
            losses.append(F.mse_loss(state.float(), x))
        states.append(state)
        return torch.stack(losses).sum() * LATE_NAN(step)

    fit(way, way.adam(model), 20, loss)


@loop()
def scales_by_hand(way: Way) -> None:
    """The script has a scale of its own, as code for fp16 had before GradScaler."""
    model = Judged()

    def unscale(_: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.div_(1024)

    def loss(step: int) -> Tensor:
        return loss_of(model, step, bad_at(15, other=1.0)(step)) * 1024

    fit(way, way.adam(model), 25, loss, change=unscale)


# -- backwards that are not one to a step ----------------------------------------------


@loop(reentrant={"reentrant": True}, not_reentrant={"reentrant": False})
def checkpoints(way: Way, reentrant: bool) -> None:
    model = Judged()

    def loss(step: int) -> Tensor:
        x, y = batch(step)
        out = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        return F.mse_loss(out, y) * LATE_NAN(step)

    fit(way, way.adam(model), 20, loss)


@loop()
def models_that_share_weights(way: Way) -> None:
    body = nn.Linear(WIDTH, 8)
    heads = [nn.Sequential(body, nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)]
    both = [*body.parameters(), *heads[0][2].parameters(), *heads[1][2].parameters()]
    optimizer = Adam(both, 0.01)
    for head in heads:
        way.ready(head, *[] if way.optimizers else [optimizer])

    def loss(step: int) -> Tensor:
        found = steps.loss_of(heads[step % 2], step, BIG)
        if step % 5 == 0:
            found = found + steps.loss_of(heads[1 - step % 2], step, 1e-3)
        return found

    fit(way, optimizer, 20, loss)


# -- all of it at once -----------------------------------------------------------------


@loop()
def everything_at_once(way: Way) -> None:
    """Accumulation, a probe, a skip of the script's own and a NaN, in turn."""
    model = Judged()
    optimizer = way.adam(model)
    for step, micro in itertools.product(range(30), range(2)):
        nan = step == 13 and micro == 1
        with way.amp():
            loss = loss_of(model, step, math.nan if nan else BIG) / 2
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
