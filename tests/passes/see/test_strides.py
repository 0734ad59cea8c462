"""The strides that the pass knows of a graph's values are those that they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autoamp
from autoamp.passes.see.normalise import normalise
from tests.small_models import BF16, Of
from tests.strategies import capture

SPLIT: dict[str, Callable[[Tensor], Tensor]] = {
    "reshape": lambda t: t.reshape(*t.shape[:2], 4, 4),
    "view": lambda t: t.view(*t.shape[:2], 4, 4),
    "view as": lambda t: t.view_as(torch.empty(*t.shape[:2], 4, 4)),
    "unflatten": lambda t: t.unflatten(2, (4, 4)),
    "in two": lambda t: t.unflatten(2, (4, 4)).flatten(2).unflatten(2, (4, 4)),
    "of one column": lambda t: t.unflatten(2, (4, 4))[..., :1],
}


def to_image(split: Callable[[Tensor], Tensor]) -> Of:
    """Turns tokens to an image, which a convolution and a shuffle of pixels enlarge."""
    torch.manual_seed(0)

    def forward(m: Any, tokens: Tensor) -> Tensor:
        image = split(m.embed(tokens).permute(0, 2, 1))
        return m.last(m.shuffle(m.conv(image)))  # type: ignore[no-any-return]

    return Of(
        forward,
        embed=nn.Linear(16, 16),
        conv=nn.Conv2d(16, 64, 3, padding=1),
        shuffle=nn.PixelShuffle(2),
        last=nn.Conv2d(16, 3, 3, padding=1),
    )


class Lie(fx.Interpreter):
    """Runs a graph, and keeps how the results lie, beside how they were recorded."""

    def run_node(self, n: fx.Node) -> Any:
        made = super().run_node(n)
        if n.op == "call_function" and isinstance(made, Tensor):
            self.found.append((n.name, made.stride(), n.meta["val"].stride()))
        return made

    found: list[tuple[str, Any, Any]]


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("split", SPLIT)
def test_values_are_recorded_as_they_lie(split: str, batch: int) -> None:
    model, x = to_image(SPLIT[split]), torch.randn(batch, 16, 16)
    runs = Lie(normalise(capture(model, 1), [x]).gm)
    runs.found = []
    runs.run(x)
    assert runs.found
    for name, lies, recorded in runs.found:
        assert lies == recorded, name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("split", SPLIT)
def test_a_batch_of_one_costs_no_op_its_precision(split: str, precision: str) -> None:
    options: dict[str, Any] = {**BF16, "precision": precision}
    low = []
    for batch in (1, 2):
        model = autoamp.convert(to_image(SPLIT[split]), **options)
        model(torch.randn(batch, 16, 16))
        report = autoamp.report(model)
        assert not report.skipped
        low.append(sum(each.precision == precision for each in report.ops))
    assert low[0] == low[1]


def test_sizes_that_vary_keep_the_record_true() -> None:
    model = autoamp.convert(to_image(lambda t: t.unflatten(2, (4, -1))), **BF16)
    for tokens in (16, 20, 24):
        model(torch.randn(1, tokens, 16))
    assert not autoamp.report(model).skipped
