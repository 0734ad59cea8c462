"""Results of an export are finite where those of fp32 are, on its example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.says import says
from tests.tools.export.programs import FP16, Heads, dtypes_in, plan_of


class Decoder(nn.Module):
    """A decoder like that of a VAE, whose numbers exceed fp16 in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 16, 3, padding=1)
        self.middle = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)
            )
            for _ in range(4)
        )
        self.up, self.norm = nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.last = nn.Conv2d(16, 3, 3, padding=1)
        with torch.no_grad():
            self.first.weight *= 1.2e5

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> Any:
        x = self.first(x if shift is None else x + shift)
        for each in self.middle:
            x = x + each(x)
        x = self.last(self.norm(self.up(x)).relu())
        return x if shift is None else {"image": x, "rows": x.flatten(1).argmax(1)}


def normed() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(4, 16, 3), nn.GroupNorm(4, 16))
    with torch.no_grad():
        model[0].weight *= 1e6
    return model


def least(model: nn.Module, *_: Any) -> Any:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model(x).flatten(1).argmax(1)

    return Chosen()


IMAGE = torch.randn(2, 4, 8, 8)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any], str]] = {
    "decoder": (Decoder, IMAGE, {}, 'keep=["first", "up"]'),
    "kwargs": (Decoder, IMAGE, {"shift": torch.ones(8, 8)}, 'keep=["first", "up"]'),
    "weight": (Heads, torch.randn(4, 32), {}, 'keep=["b"]'),
    "norm": (normed, IMAGE, {}, 'deny=["aten::conv2d"]'),
    "integers": (lambda: least(Decoder()), IMAGE, {}, "keep="),
    "in range": (lambda: Heads(1e-3), torch.randn(4, 32), {}, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_ops_whose_results_leave_the_range_stay_fp32(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    make, x, kwargs, rule = CASES[case]
    model = make().eval()
    sizes = (
        ({0: torch.export.Dim("rows", min=2, max=4)},) if case == "decoder" else None
    )
    program = autoamp.export(model, (x,), kwargs, dynamic_shapes=sizes, **FP16)
    with torch.no_grad():
        given, exact = (
            torch.utils._pytree.tree_leaves(each(x, **kwargs))
            for each in (program.module(), model)
        )
    for one, true in zip(given, exact, strict=True):
        assert torch.equal(one.isfinite(), true.isfinite())
        assert torch.equal(one.isnan(), true.isnan())
        assert one.is_floating_point() or torch.equal(one, true)
    assert (torch.float16 in dtypes_in(program)) == (case != "norm")
    notes = [each["why"] for each in plan_of(program)["report"]["skipped"]]
    if rule:
        says(warned(caplog), option=rule)
        says(notes, option=rule)
    else:
        assert (warned(caplog), notes) == ([], [])
