"""Optimizer classes by a small grammar: how they reach, keep, compute, write."""

from __future__ import annotations

import functools
import random
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

RATE = 0.01
OWN_MEMORY = ("flat", "kept data")
"""Classes that write to the half weights' memory, past the parameters."""

AXES = {
    "reach": "groups, own list, keyed, kept groups, hooks, one inside, two inside, "
    "flat, kept data",
    "state": "torch, torch early, mine, mine early, list early, attributes early",
    "update": "sgd, momentum, sign, adam",
    "rate": "fixed, norm, length, counter, group counter, decays, property, clipped",
    "write": "in place, data in place, new data, copy, foreach",
    "extra": ", , eval train, swap_ema swap_ema, first_step second_step",
    "closure": ", , closure",
}


class Kind(NamedTuple):
    """One sentence of the grammar; `extra` are methods that are called after a step."""

    reach: str
    state: str = "torch"
    update: str = "momentum"
    rate: str = "fixed"
    write: str = "in place"
    extra: str = ""
    closure: str = ""


def kinds(count: int, seed: int = 0) -> list[Kind]:
    """`count` kinds, in which each word of each axis comes about equally often."""
    draw = random.Random(seed)
    columns = [(words.split(", ") * count)[:count] for words in AXES.values()]
    for column in columns:
        draw.shuffle(column)
    return [Kind(*row) for row in zip(*columns, strict=True)]


def maker(kind: Kind) -> type[Made]:
    name = "Made" + "".join(word.title() for word in kind.reach.split())
    return type(name, (Made,), {"kind": kind})


def _clips(step: Any) -> Any:
    @functools.wraps(step)
    def clipped(self: Made, *args: Any) -> Any:
        if self.kind.rate == "clipped":
            nn.utils.clip_grad_norm_(self.all, 0.1)
        return step(self, *args)

    return clipped


class Made(Optimizer):
    """An optimizer whose class attribute `kind` says how it works."""

    kind: ClassVar[Kind]

    def __init__(self, params: list[nn.Parameter]) -> None:
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        super().__init__(groups, {"lr": torch.tensor(RATE), "t": torch.zeros(())})
        reach, self.all = self.kind.reach, params
        self.t = torch.zeros(())
        self.decay = {p: 0.5 for p in params if reach == "keyed" and p.dim() > 1}
        self.lists = [group["params"] for group in self.param_groups]
        self.collected: dict[Tensor, Tensor] = {}
        self.memo: list[dict[str, Tensor]] = [{} for _ in params]
        self.mine: dict[Tensor, dict[str, Tensor]] = {}
        for p in params if reach == "hooks" else ():
            p.register_post_accumulate_grad_hook(functools.partial(self._collect, p))
        self.datas = [p.data for p in params] if reach in OWN_MEMORY else []
        if reach == "flat":
            self.datas = [torch.cat([each.flatten() for each in self.datas])]
            parts = self.datas[0].split([p.numel() for p in params])
            for p, part in zip(params, parts, strict=True):
                p.data = part.view_as(p)
        inside = {"one inside": [optim.SGD], "two inside": [optim.SGD, optim.AdamW]}
        makers: list[Any] = inside.get(reach, [])
        self.inner = [make(params[at :: len(makers)]) for at, make in enumerate(makers)]
        for at, t in enumerate(self.reached() if "early" in self.kind.state else ()):
            self.moments(at, t)

    def _collect(self, param: Tensor, reported: Any) -> None:
        self.collected[param] = reported.grad.clone()

    def reached(self) -> list[Any]:
        if self.kind.reach in OWN_MEMORY:
            return self.datas
        groups = [group["params"] for group in self.param_groups]
        lists = {"groups": groups, "kept groups": self.lists}
        return [p for each in lists.get(self.kind.reach, [self.all]) for p in each]

    def grads(self) -> list[Tensor]:
        if self.kind.reach == "hooks":
            return [self.collected[p] for p in self.all]
        found = [p.grad for p in self.all if p.grad is not None]
        is_flat = self.kind.reach == "flat"
        return [torch.cat([g.flatten() for g in found])] if is_flat else found

    def moments(self, at: int, t: Tensor) -> list[Tensor]:
        where: Any = self.mine.setdefault(t, {})
        keys = ["m", "v"]
        if self.kind.state.startswith("torch") and isinstance(t, nn.Parameter):
            where = self.state[t]
        elif self.kind.state == "list early":
            where = self.memo[at]
        elif self.kind.state == "attributes early":
            where, keys = vars(self), [f"m{at}", f"v{at}"]
        return [where.setdefault(key, torch.zeros_like(t)) for key in keys]

    @property
    def norm(self) -> float:
        return float(torch.stack([g.float().norm() for g in self.grads()]).norm())

    def rate(self) -> float:
        """The rate of this step, by a way to which all parameters matter."""
        first, last, how = self.param_groups[0], self.param_groups[-1], self.kind.rate
        if how == "counter":
            self.t += 1
        elif how == "group counter":
            first["t"] += 1
        elif how == "decays":
            first["lr"].mul_(0.9)
        elif how == "length":
            return RATE / len(last["params"])
        elif how == "norm":
            squares = [float(g.float().square().sum()) for g in self.grads()]
            return RATE / float(sum(squares) ** 0.5)
        elif how == "property":
            return RATE / self.norm
        return float(first["lr"]) / max(1.0, float(self.t), float(first["t"]))

    def change(self, at: int, t: Tensor, grad: Tensor, rate: float) -> Tensor:
        m, v = self.moments(at, t)
        grad = grad + self.decay[t] * t if t in self.decay else grad
        if self.kind.update == "momentum":
            return m.mul_(0.9).add_(grad) * rate
        if self.kind.update == "sign":
            sign = m.mul(0.9).add_(grad, alpha=0.1).sign_()
            m.lerp_(grad, 0.01)
            return sign * rate
        if self.kind.update == "adam":
            m.lerp_(grad, 0.1)
            v.lerp_(grad * grad, 0.01)
            return m / (v.sqrt() + 1e-3) * rate
        return grad * rate

    def update(self) -> None:
        rate, tensors = self.rate(), self.reached()
        for each in self.inner:
            each.param_groups[0]["lr"] = rate
            each.step()
        if not self.inner:
            pairs = enumerate(zip(tensors, self.grads(), strict=True))
            changes = [self.change(at, t, grad, rate) for at, (t, grad) in pairs]
            self.write(tensors, changes)
        for t, memo in zip(tensors, self.memo, strict=False):
            memo.setdefault("ema", t.detach().clone()).lerp_(t.detach(), 0.1)

    def write(self, tensors: list[Any], changes: list[Tensor]) -> None:
        if self.kind.write == "foreach":
            torch._foreach_sub_(tensors, changes)
            return
        for t, change in zip(tensors, changes, strict=True):
            if self.kind.write == "copy":
                t.copy_(t - change)
            elif self.kind.write == "data in place":
                t.data.add_(change, alpha=-1)
            elif self.kind.write == "new data" and isinstance(t, nn.Parameter):
                t.data = t.data - change
            else:
                t.sub_(change)

    @torch.no_grad()
    @_clips
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.update()

    @torch.no_grad()
    def eval(self, weight: float = 0.5) -> None:
        """Shows averaged weights, as schedulefree does."""
        for t, memo in zip(self.reached(), self.memo, strict=False):
            t.lerp_(memo["ema"], weight)

    def train(self) -> None:
        """Undoes `eval`."""
        self.eval(-1.0)

    @torch.no_grad()
    def swap_ema(self) -> None:
        """Exchanges the weights and their averages."""
        for t, memo in zip(self.reached(), self.memo, strict=False):
            now = t.clone()
            t.copy_(memo["ema"])
            memo["ema"].copy_(now)

    @torch.no_grad()
    def first_step(self) -> None:
        """Climbs, as SAM does."""
        for t, grad, memo in zip(self.reached(), self.grads(), self.memo, strict=False):
            memo["climb"] = grad * 0.05
            t.add_(memo["climb"])

    @torch.no_grad()
    def second_step(self) -> None:
        """Comes back, and steps by the gradients from above."""
        for t, memo in zip(self.reached(), self.memo, strict=False):
            t.sub_(memo["climb"])
        self.update()
