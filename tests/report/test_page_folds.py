"""Blocks that are alike are folded on the page; no difference hides in a fold."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import autoamp
from tests.report.page_models import Block, explained


class Stack(nn.Module):
    """Blocks one after the other, of which one may be called again and again."""

    def __init__(self, blocks: nn.ModuleList, order: tuple[int, ...]) -> None:
        super().__init__()
        self.h, self.order = blocks, order

    def forward(self, x: Tensor) -> Tensor:
        for each in self.order:
            x = self.h[each](x)
        return x


class Wide(Block):
    """A block of other shapes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 48), nn.Linear(48, 16)


def folds_of(model: nn.Module, **options: object) -> list[tuple[str, int]]:
    """The label and the number of blocks of each fold of the page."""
    report = explained(model, torch.randn(4, 16), **options)
    return folds_in(report)


def folds_in(report: autoamp.Report) -> list[tuple[str, int]]:
    text = report.to_html().partition('id="data">')[2].partition("</script>")[0]
    groups = json.loads(text)["graphs"][0]["groups"]
    return [(each["label"], each["folds"]) for each in groups if each["folds"]]


def stack(count: int, **changed: nn.Module) -> Stack:
    kinds = [changed.get(f"h{n}", Block()) for n in range(count)]
    return Stack(nn.ModuleList(kinds), tuple(range(count)))


def test_blocks_that_are_alike_are_folded() -> None:
    assert folds_of(stack(12)) == [("h.0\u2013h.11 \u00d712", 12)]
    assert folds_of(stack(2)) == []


@pytest.mark.parametrize(
    ("changed", "options"),
    [({"h3": Wide()}, {}), ({}, {"keep": ["h.3"]})],
    ids=["other shapes", "other precision"],
)
def test_no_difference_hides_in_a_fold(
    changed: dict[str, nn.Module], options: dict[str, object]
) -> None:
    folded = folds_of(stack(8, **changed), **options)
    # Casts beside the block that differs may differ too.
    assert all("h.3" not in label for label, _ in folded)
    assert ("h.5\u2013h.7 \u00d73", 3) in folded or (
        "h.4\u2013h.7 \u00d74",
        4,
    ) in folded


class Between(nn.Sequential):
    """Blocks with an op of the model itself between them."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x).sin()
        return x


def test_a_fold_never_reads_its_own_results() -> None:
    assert folds_of(Between(*(Block() for _ in range(4)))) == []
    assert folds_of(nn.Sequential(*(Block() for _ in range(4)))) == [
        ("0\u20133 \u00d74", 4)
    ]
