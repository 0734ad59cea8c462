"""Each module call has its path from the root, wherever Dynamo breaks a graph."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.quick import some_slow
from tests.says import says
from tests.small_models import BF16, Of

X = torch.ones(3, 4)


def _print(x: Tensor) -> Tensor:
    print("", end="", file=sys.stderr, flush=True)
    return x


def _break(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x


BREAKS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: -x if x.detach().abs().mean().item() < 0 else x,
    "print": _print,
    "numpy": lambda x: x + float(x.detach().numpy().mean()) * 0,
    "break": _break,
    "none": lambda x: x,
}


class Block(nn.Module):
    """Two layers, with a break before, between or after them, and a block inside."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kinds = [draw.choice([*BREAKS]) for _ in range(3)]
        self.inner = Block(draw, depth - 1) if depth else None

    def forward(this, x: Tensor) -> Tensor:  # noqa: N805 (a name of the user's own)
        h = BREAKS[this.kinds[0]](x)
        h = BREAKS[this.kinds[1]](this.a(h))
        if this.inner is not None:
            h = this.inner(h)
        return BREAKS[this.kinds[2]](this.b(h))


class Net(nn.Module):
    """Blocks in all the places in which a module can hold modules."""

    def __init__(self, seed: int, *, whole: bool = True) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.mod = Block(draw, 1) if whole else nn.Identity()
        parts = [Block(draw, 0), nn.Sequential(Block(draw, 0))] if whole else []
        self.several = nn.ModuleList(parts)
        # These three are alike: one frame of Dynamo's would do for all of them.
        first = Block(draw, 0)
        self.alike = nn.ModuleDict({k: copy.deepcopy(first) for k in ("x", "y", "z")})
        self.plain = {"in": [copy.deepcopy(first)]}
        self.tied = self.alike["y"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.mod(x)
        for each in self.several:
            x = each(x)
        x = self.alike["x"](x)
        x = _of_a_function(self.alike["z"], x)
        result: Tensor = self.plain["in"][0](self.tied(x))
        return result


def _of_a_function(block: Any, x: Tensor) -> Tensor:
    x = _break(block.a(x))
    result: Tensor = block.b(x)
    return result


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    found = {p: m for p, m in model.named_modules() if isinstance(m, nn.Linear)}
    held = vars(model)["plain"]["in"][0]
    return found | {"plain.in.0.a": held.a, "plain.in.0.b": held.b}


PATTERNS = {
    "mod": ["mod."],
    "mod.a": ["mod.a"],
    "mod.inner": ["mod.inner."],
    "several": ["several."],
    "several.1.0.b": ["several.1.0.b"],
    "alike.y": ["alike.y."],
    "tied.a": ["alike.y.a"],
    "alike.?.b": ["alike.x.b", "alike.y.b", "alike.z.b"],
    "alike.z.b": ["alike.z.b"],
    "plain.in.0": ["plain.in.0."],
}
"""Patterns of `keep=`, each with the beginnings of the paths of the layers it names."""


def _in_fp32(model: nn.Module) -> set[str]:
    """The layers that run in fp32: with weights that bf16 rounds, they tell 1 from 0.

    All other layers pass on what they get, so the answer reaches the result.
    """
    layers, found = _layers(model), set()
    for asked in layers:
        with torch.no_grad():
            for path, layer in layers.items():
                is_asked = path == asked
                nn.init.eye_(layer.weight).mul_(4097.0 if is_asked else 1.0)
                layer.bias.fill_(-4096.0 if is_asked else 0.0)
        if model(X).detach().eq(1).all():
            found.add(asked)
    return found


def _named(layers: dict[str, nn.Module], patterns: list[str]) -> set[str]:
    starts = tuple(start for pattern in patterns for start in PATTERNS[pattern])
    return {path for path in layers if path.startswith(starts)}


def _check(model: nn.Module, patterns: list[str]) -> None:
    layers = _layers(model)
    autoamp.convert(model, keep=patterns, **BF16)
    expected = _named(layers, patterns)
    assert _in_fp32(model) == expected
    twin = copy.deepcopy(model)
    assert _in_fp32(twin) == expected
    ops = [op for op in autoamp.report(model).ops if "linear" in op.op]
    assert {op.module for op in ops} <= set(layers)
    assert {op.module for op in ops if op.precision == "fp32"} <= expected
    assert expected & {op.module for op in ops if op.precision == "fp32"}


# Four seeds draw each number of patterns; more are of `make test-all`.
@pytest.mark.parametrize("seed", some_slow(range(1, 8), lambda seed: seed > 4))
def test_each_pattern_keeps_the_modules_it_names(seed: int) -> None:
    chosen = random.Random(seed).sample([*PATTERNS], 1 + seed % 3)
    small = seed == 1
    _check(Net(seed, whole=not small), ["alike.z.b", "tied.a"] if small else chosen)


def test_a_model_that_is_alike_has_its_own_paths() -> None:
    """Models that are alike run the same code: the second captures nothing."""
    for model in (Net(3, whole=False), Net(3, whole=False)):
        autoamp.convert(model, keep=["alike.x"], **BF16)
        assert _in_fp32(model) == {"alike.x.a", "alike.x.b"}


def sized() -> nn.Module:
    """A layer and a norm, with a break between; alike blocks share its graphs."""
    return Of(lambda m, x: m.n(_break(m.a(x))), a=nn.Linear(4, 4), n=nn.LayerNorm(4))


@pytest.mark.parametrize(
    ("size", "op"), [(6e4, "aten::linear.default in 2.a"), (9e4, "weight 2.a.weight")]
)
def test_blame_names_the_module_that_overflowed(
    size: float, op: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[sized() for _ in range(3)], nn.Linear(4, 4))
    with torch.no_grad():
        nn.init.eye_(model[2].a.weight).mul_(size)
    autoamp.convert(model, precision="fp16", do_no_harm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
    says(caplog.text, op, option='keep=["2"]')
