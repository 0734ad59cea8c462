"""Results of an export are finite where those of fp32 are, on its example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.logs import warned
from tests.says import says
from tests.tools.export.programs import FP16, Heads, dtypes_in


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


IMAGE = torch.randn(2, 4, 8, 8)
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "decoder": (Decoder, IMAGE, {}),
    "kwargs": (Decoder, IMAGE, {"shift": torch.ones(8, 8)}),
    "weight": (Heads, torch.randn(4, 32), {}),
    "norm": (normed, IMAGE, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_results_that_leave_the_range_are_an_error_with_its_cure(
    case: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    make, x, kwargs = CASES[case]
    model = make().eval()
    with pytest.raises(autoamp.ExportError) as raised:
        autoamp.export(model, (x,), kwargs, out=tmp_path / "m.pt2", **FP16)
    says(raised, "output", "fp16", option="find_overflow")
    assert [*tmp_path.iterdir()] == []
    found = autoamp.find_overflow(model, x, kwargs=kwargs, **FP16)
    assert found.rule is not None
    rule = {"keep": found.rule.keep, "deny": found.rule.deny}
    program = autoamp.export(model, (x,), kwargs, **FP16, **rule)
    with torch.no_grad():
        given, exact = (
            torch.utils._pytree.tree_leaves(each(x, **kwargs))
            for each in (program.module(), model)
        )
    for one, true in zip(given, exact, strict=True):
        assert torch.equal(one.isfinite(), true.isfinite())


def test_infinities_of_fp32_are_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    program = autoamp.export(Heads(1e-3).eval(), (torch.randn(4, 32),), **FP16)
    assert torch.float16 in dtypes_in(program)
    assert warned(caplog) == []
