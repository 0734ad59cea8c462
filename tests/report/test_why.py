"""`report.why(node)`: the reason of a precision, the price of the other, the root."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.small_models import BF16


class Net(nn.Module):
    """A residual stream that begins with a trained table, and caller's data beside."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 16), nn.LayerNorm(16)
        self.body, self.last = nn.Linear(16, 16), nn.LayerNorm(16)
        self.shift = nn.Parameter(torch.ones(16))

    def forward(self, ids: Tensor, data: Tensor) -> tuple[Tensor, ...]:
        h = self.table(ids)
        h = h + functional.gelu(self.body(self.norm(h)))
        own = functional.silu(self.shift * 2)
        return self.last(h), functional.softplus(torch.tanh(data)), own


ARGS = torch.arange(4), torch.ones(4, 16)


def report_of(**options: object) -> autoamp.Report:
    return autoamp.explain(Net(), *ARGS, **{**BF16, **options})


def node_of(report: autoamp.Report, op: str, last: bool = True) -> str:
    names = [row.name for row in report.ops if row.op.startswith(f"aten::{op}.")]
    return names[-1 if last else 0]


def test_asking_changes_nothing_in_the_report() -> None:
    report = report_of()
    before = report.to_json()
    report.why(node_of(report, "layer_norm"))
    assert report.to_json() == before


class Odd(nn.Module):
    """A checkpointed region, an fp32 region, a cell that gives fp32, a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.cell = nn.Linear(16, 16), nn.GRUCell(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = checkpoint(self.body, x, use_reentrant=False)
        h = 0.5 * h * (1 + torch.tanh(0.7978845608 * (h + 0.044715 * h**3)))
        with torch.autocast("cpu", enabled=False):
            h = h + self.body(x)
        h = functional.softplus(self.cell(x, h))
        out = torch.zeros_like(h)
        out[:, 0] = h[:, 0]
        return out.cumsum(0), h.topk(2)[0].exp()


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize(
    "given",
    [{}, {"do_no_harm": True}, {"placement": "forced"}, {"objective": "memory"}],
)
def test_every_node_has_an_answer(given: dict[str, object]) -> None:
    options = {**BF16, **given}
    report = autoamp.explain(Odd(), torch.randn(4, 16), **options)
    answers = {}
    for row in report.ops:
        graph = f"{row.graph}/{row.body}" if row.body else row.graph
        answers[row.op] = report.why(row.name, graph=graph)
    assert all("\n  in " in told for told in answers.values())
    assert (
        "root       gru_cell (aten::gru_cell) is fp32" in answers["aten::exp.default"]
    )


class Branches(nn.Module):
    """The ops of a condition's branches and of a loop are ops of bodies."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        def up(h: Tensor) -> tuple[Tensor]:
            return (self.up(h).exp(),)

        def down(h: Tensor) -> tuple[Tensor]:
            return (self.down(h).softmax(-1),)

        (h,) = torch.cond(x.sum() > 0, up, down, (x,))
        return checkpoint(lambda h: self.up(h).cumsum(0), h, use_reentrant=False)


@pytest.mark.usefixtures("bf16_units")
def test_every_listed_op_is_found_by_its_name_alone() -> None:
    report = autoamp.explain(Branches(), torch.randn(4, 16), **BF16)
    assert len(report.sections) == 4
    for row in report.ops:
        told = report.why(row.name)
        keys = [
            section.key
            for section in report.sections
            if any(row.name == each.name for each in section.ops)
        ]
        assert told.startswith(row.name)
        assert f"of graph {keys[0]} runs in" in told
        assert all(repr(key) in told for key in keys[1:])


class Moves(nn.Module):
    """Moves of fp32 numbers: one is returned, two in a row stand before an fp32 op."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 16)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        h = self.table(ids)
        end = torch.cat([h[:2], h[2:]])
        sums = torch.stack([h, h]).transpose(0, 1).flatten().cumsum(0)
        return end, sums, torch.special.expit(h[0]).to(torch.float64)


@pytest.mark.usefixtures("bf16_units")
def test_an_op_that_cannot_be_low_is_told_the_law_in_one_sentence() -> None:
    report = autoamp.explain(Moves(), torch.arange(4), **BF16)
    says = report.why(node_of(report, "cat")), report.why(node_of(report, "transpose"))
    assert "cat would round numbers that the graph returns in fp32" in says[0]
    assert "would round numbers that cumsum reads in fp32 through " in says[1]
    for said in says:
        assert "must be low" not in said
        assert "<fp32>" not in said


def test_a_product_that_writes_its_fp32_sums_has_no_cast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoamp.compat.products_give_fp32", lambda: True)

    class Head(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            read = functional.linear(x, self.weight).exp()
            return read, functional.linear(x, self.weight, self.bias).exp()

    with torch.device("meta"):
        model, x = Head(2048, 8192), torch.empty(8192, 2048)
    asked = {"device": "h100", "precision": "bf16", "deny": ["exp"]}
    report = autoamp.explain(model, x, **asked)
    assert [c.value for c in report.casts if c.kind == "up"] == ["linear_1"]
    assert "writes     its fp32 sums, which are read as they are: +" in report.why(
        "linear"
    )
    assert "linear (bf16, its fp32 sums)" in report.why("exp")
    assert "linear_1 (bf16, cast to fp32)" in report.why("exp_1")
    assert "sums" not in report.why("linear_1")
    told = report.headline
    assert told.seconds < told.seconds_autocast
    plain = autoamp.explain(model, x, **asked, fuse={"accumulators": False})
    assert {c.value for c in plain.casts if c.kind == "up"} == {"linear", "linear_1"}
    assert plain.headline.seconds > told.seconds
    assert plain.headline.seconds_autocast == told.seconds_autocast
