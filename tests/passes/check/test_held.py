"""Results have the dtypes that their graph says, whatever a kernel really gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.errors import AutoampError
from autoamp.passes.check import promised_dtypes
from autoamp.passes.functions import with_dtypes
from tests.small_models import converted

BF16, FP32 = torch.bfloat16, torch.float32
LIB = torch.library.Library("promised", "FRAGMENT")


def define(name: str, real: Callable[..., Any], said: Callable[..., Any]) -> None:
    """An op whose kernel gives `real`, where torch is told that it gives `said`."""
    out = "(Tensor, Tensor)" if "pair" in name else "Tensor"
    LIB.define(f"{name}(Tensor x) -> {out}")
    LIB.impl(name, real, "CPU")
    LIB.impl(name, said, "Meta")


define("wide", lambda x: x.float() * 2, torch.empty_like)
torch.library.register_autograd("promised::wide", lambda _, grad: grad * 2, lib=LIB)
define("narrow", lambda x: (x * 2).bfloat16(), torch.empty_like)
define(
    "pair",
    lambda x: (x.float() * 2, x * 3),
    lambda x: (torch.empty_like(x), torch.empty_like(x)),
)
define("sums", lambda x: x.float() * 2, lambda x: torch.empty_like(x, dtype=FP32))
define(
    "some_pair",
    lambda x: (x * 2, x.float() * 3),
    lambda x: (torch.empty_like(x), torch.empty_like(x, dtype=FP32)),
)


class Between(nn.Module):
    """An op of the user's between two products."""

    def __init__(self, op: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.op = op
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def middle(self, x: Tensor) -> Tensor:
        made = self.op(self.first(x))
        return self.last(made[0] + made[1] if isinstance(made, tuple) else made)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(x)


class Checkpointed(Between):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.middle, x, use_reentrant=False)


OPS = torch.ops.promised


def low_ops(model: nn.Module) -> list[str]:
    rows = autoamp.report(model).ops
    return [row.op.rpartition(".")[0] for row in rows if row.precision == "bf16"]


def notes(model: nn.Module) -> list[str]:
    return [why for _, why in autoamp.report(model).skipped]


@pytest.mark.parametrize("kind", [Between, Checkpointed])
@pytest.mark.parametrize("name", ["wide", "pair"])
def test_a_low_call_that_gives_fp32_is_cast_and_said(
    kind: type[Between], name: str
) -> None:
    model = kind(getattr(OPS, name))
    x = torch.randn(4, 16)
    with torch.no_grad():
        expected = model(x)
        converted(model, allow=[f"promised::{name}"], strict=False)
        given = [model(x) for _ in range(3)]
    assert all(torch.equal(each, given[0]) for each in given)
    assert given[0].dtype == FP32
    torch.testing.assert_close(given[0], expected, rtol=2**-5, atol=2**-5)
    assert f"promised::{name}" in low_ops(model)
    (note,) = notes(model)
    assert f"promised::{name}" in note
    assert "fp32 where bf16 was expected" in note
    assert f'deny=["promised::{name}"]' in note
    with torch.no_grad():  # the cure is one
        denied = converted(
            kind(getattr(OPS, name)), deny=[f"promised::{name}"], strict=False
        )
        denied(x)
    assert notes(denied) == []


def test_casts_that_change_the_program_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A faulty graph with casts never runs; its results are cast node by node."""
    real = promised_dtypes._with_casts

    def faulty(gm: fx.GraphModule, broken: Any) -> fx.GraphModule:
        amended = real(gm, broken)
        (cast,) = amended.graph.find_nodes(op="call_function", target=with_dtypes)
        (reader,) = cast.users
        reader.args = (cast, *reader.args[1:-1], None)  # without its bias
        return amended

    monkeypatch.setattr(promised_dtypes, "_with_casts", faulty)
    model, x = Between(OPS.wide), torch.randn(4, 16)
    with torch.no_grad():
        expected = model(x)
        converted(model, allow=["promised::wide"], strict=False)
        given = [model(x) for _ in range(3)]
    for each in given:
        torch.testing.assert_close(each, expected, rtol=2**-5, atol=2**-5)
    _, note = notes(model)
    assert "node by node" in note
    with torch.no_grad(), pytest.raises(AutoampError, match="reads"):
        converted(Between(OPS.wide), allow=["promised::wide"], strict=True)(x)


def test_fp32_that_is_low_is_widened_for_its_readers() -> None:
    model = Between(OPS.narrow)
    x = torch.randn(4, 16)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            model(x)  # torch's own `linear` refuses what the op gives
        converted(model, deny=["promised::narrow"], keep=["last"], strict=False)
        assert model(x).dtype == FP32
        assert model(x).dtype == FP32
    (note,) = notes(model)
    assert "bf16 where fp32 was expected" in note
    assert "deny" not in note  # it is fp32 already


def test_a_returned_result_is_as_the_model_gives_it() -> None:
    class Returned(Between):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.first(x), OPS.narrow(x)

    model = Returned(OPS.narrow)
    x = torch.randn(4, 16)
    with torch.no_grad():
        plain = [each.dtype for each in model(x)]
        converted(model, deny=["promised::narrow"], strict=False)
        assert [each.dtype for each in model(x)] == plain == [FP32, BF16]
    assert notes(model) == []


def test_gradients_flow_through_a_cast() -> None:
    x = torch.randn(4, 16)
    plain = Between(OPS.wide)
    model = Between(OPS.wide)
    model.load_state_dict(plain.state_dict())
    converted(model, allow=["promised::wide"], strict=False)
    plain(x).square().sum().backward()
    expected = plain.first.weight.grad
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        grad = model.first.weight.grad
        assert grad is not None
        assert (grad - expected).norm() <= 2**-5 * expected.norm()
    assert len(notes(model)) == 1


def test_an_allowed_op_that_gives_fp32_by_its_own_word_runs_low() -> None:
    model = converted(Between(OPS.sums), allow=["promised::sums"])
    with torch.no_grad():
        model(torch.randn(4, 16))
    assert low_ops(model) == ["aten::linear", "promised::sums", "aten::linear"]
    assert notes(model) == []


def test_an_allowed_op_of_which_some_results_follow_stays_fp32() -> None:
    model = converted(Between(OPS.some_pair), allow=["promised::some_pair"])
    with torch.no_grad():
        model(torch.randn(4, 16))
    report = autoamp.report(model)
    assert "only some of its results follow" in report.why("some_pair")


def test_an_error_of_the_users_reads_as_without_autoamp() -> None:
    def refuse(x: Tensor) -> Tensor:
        raise ValueError("too few rows")

    define("refuses", refuse, torch.empty_like)
    model = Between(OPS.refuses)
    x = torch.randn(4, 16)
    found = []
    for each in (model, converted(Between(OPS.refuses), strict=False)):
        with torch.no_grad(), pytest.raises(ValueError, match="few") as caught:
            each(x)
        assert not isinstance(caught.value, AutoampError)
        found.append(str(caught.value))
    assert found[0] == found[1] == "too few rows"
