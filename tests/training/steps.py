"""Small training runs with overflows planted in them, and what they are held against.

Copies of one converted model share its graphs, so a run costs no capture.  In bf16 a
loss scale that is a power of two changes no bit: a run that skips a step must equal, to
the bit, one that never saw the bad batch.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

import autoamp
from autoamp import DynamicLossScale
from autoamp.runtime.conversion import conversion_of
from autoamp.training.attach import attach, boundary_of, detach, give_masters
from autoamp.training.ledger import BACKWARDS
from autoamp.training.model_scaling import ModelScaling
from autoamp.training.options import Options

WIDTH = 8
BF16: dict[str, Any] = {
    "precision": "bf16",
    "loss_scale": "dynamic",
    "do_no_harm": False,
    "strict": True,
}
FP16: dict[str, Any] = {"precision": "fp16", "do_no_harm": False, "strict": True}
HUGE = 1e38
"""Times a loss scale of 2**15 this is infinite in fp32, and in bf16."""


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4))


def converted(model: nn.Module | None = None, **options: Any) -> nn.Module:
    return autoamp.convert(model or mlp(), **{**BF16, **options})


def scaling_of(model: nn.Module) -> ModelScaling:
    state = conversion_of(model)
    return state.engine.record.scaling


def begin_at(scaling: ModelScaling, loss_scale: autoamp.LossScale) -> None:
    """Gives a scaling another loss scale."""
    object.__setattr__(scaling, "own_scale", loss_scale)


def fresh_copy(
    base: nn.Module, given: autoamp.LossScale | None = None, **scale: Any
) -> nn.Module:
    """A copy of a converted model that begins with a loss scale of its own.

    Copies share their scaling: one copy is trained after the other.
    """
    scaling = scaling_of(base)
    scaling.ledger.foreign = None
    scaling.ledger.skips.clear()
    begin_at(scaling, given or DynamicLossScale(**scale))
    forget_backwards()
    return copy.deepcopy(base)


def forget_backwards() -> None:
    """No later step goes by a backward that has been."""
    BACKWARDS.runs.clear()


def last_flags() -> list[float]:
    """What the only run since then has found: 1 for an overflow."""
    (last,) = BACKWARDS.runs
    return [float(flag) for flag in last.found_inf]


def runs_remembered() -> int:
    """How many runs of graphs are kept until an optimizer steps."""
    return len(BACKWARDS.runs)


def let_go(optimizer: Any) -> None:
    """What `revert` does about an optimizer."""
    boundary = boundary_of(optimizer)
    assert boundary is not None
    detach(boundary)


def name(optimizer: Optimizer, model: nn.Module) -> Any:
    """What `convert(model, optimizer)` does about the optimizer."""
    boundary = attach(optimizer)
    boundary.link(scaling_of(model))
    give_masters(boundary, [model], Options())
    return optimizer


def is_watched(optimizer: Optimizer) -> bool:
    """Whether autoamp decides about the optimizer's steps."""
    return boundary_of(optimizer) is not None


def masters_of(optimizer: Optimizer) -> dict[Tensor, Tensor]:
    """The fp32 master of each half weight that the optimizer steps."""
    boundary = boundary_of(optimizer)
    if boundary is None or boundary.masters is None:
        return {}
    return boundary.masters.values()


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flags are not read from the host's memory: a fused kernel takes them, as there.

    On a CPU the flag lies in the host's memory, and is read at once.
    """
    for module in ("step", "scale", "ledger", "attach"):
        free = f"autoamp.training.{module}.free_to_read"
        monkeypatch.setattr(free, lambda _: False)

    def not_finite(grads: list[Tensor]) -> Tensor:
        found = [torch.isfinite(grad).all() for grad in grads]
        return (~torch.stack(found)).any().float().reshape(1)

    monkeypatch.setattr("autoamp.training.step.not_finite", not_finite)


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(1000 + step)
    x = torch.randn(6, WIDTH, generator=generator)
    return x, torch.randn(6, 4, generator=generator)


def loss_of(model: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    x, y = batch(step)
    return nn.functional.mse_loss(model(x), y) * factor


# -- what is compared ------------------------------------------------------------------


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in model.named_parameters()}


def state_of(optimizer: Optimizer) -> dict[str, Any]:
    """A copy of its state dictionary, less what is ours."""
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        group.pop("autoamp", None)
    return state


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested states differ; tensors are compared by bits."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(
                a.detach().contiguous().reshape(-1).view(torch.uint8),
                b.detach().contiguous().reshape(-1).view(torch.uint8),
            )
        )
        return [] if same else [f"{path}: {a} != {b}"]
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"{path}: keys {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [d for k in a for d in differences(a[k], b[k], f"{path}.{k}")]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        if len(a) != len(b):
            return [f"{path}: {len(a)} != {len(b)} entries"]
        pairs = enumerate(zip(a, b, strict=True))
        return [d for i, (x, y) in pairs for d in differences(x, y, f"{path}[{i}]")]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} != {b!r}"]


def assert_same(a: Any, b: Any) -> None:
    found = differences(a, b)
    assert not found, "\n".join(found[:5])


def moved(before: dict[str, Tensor], model: nn.Module) -> bool:
    """Whether any weight is another than `before`."""
    after = weights_of(model)
    return any(not torch.equal(before[k], after[k]) for k in before)


# -- optimizers ------------------------------------------------------------------------


class OldStyle(Optimizer):
    """By hand, as before torch 0.4: writes `p.data`, counts in `state`."""

    def __init__(self, params: Iterable[Tensor], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["buffer"] = 0, torch.zeros_like(p.data)
                state["count"] += 1
                state["buffer"].mul_(group["momentum"]).add_(p.grad.data)
                p.data.add_(state["buffer"], alpha=-group["lr"])
        return loss


_SETTINGS: dict[str, dict[str, Any]] = {
    "Adagrad": {"weight_decay": 0.1},
    "Adam": {"weight_decay": 0.1, "amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True, "lr": 1e-3},
    "NAdam": {"weight_decay": 0.1},
    "Adafactor": {"lr": 0.01},
}
_PLAIN = [
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
]


def _offered() -> dict[str, Callable[[nn.Module], Optimizer]]:
    table: dict[str, Callable[[nn.Module], Optimizer]] = {
        "OldStyle": lambda m: OldStyle(m.parameters())
    }
    for of in _PLAIN:
        made: type[Optimizer] = getattr(torch.optim, of)
        signature = inspect.signature(made).parameters
        variants: dict[str, dict[str, Any]] = {of: {}}
        for how in ("foreach", "fused"):
            if how in signature:
                variants[of] = {**variants[of], "foreach": False}
                variants[f"{of}-{how}"] = {how: True}
        for label, how_made in variants.items():
            table[label] = _maker(made, {**_SETTINGS.get(of, {}), **how_made})
    return table


def _maker(
    made: type[Optimizer], options: dict[str, Any]
) -> Callable[[nn.Module], Optimizer]:
    def make(model: nn.Module) -> Optimizer:
        # Muon takes matrices only.
        matrices = made.__name__ == "Muon"
        params = [p for p in model.parameters() if p.ndim == 2 or not matrices]
        maker: Any = made
        return maker(params, **options)

    return make


OPTIMIZERS = _offered()
"""Every optimizer of torch.optim in every implementation, by name.  LBFGS and
SparseAdam need other loops, and have tests of their own."""


class Reads(TorchDispatchMode):
    """Counts how often the value of a tensor is asked for: on a GPU each is a wait."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
