"""`objective="memory"` keeps no value that a cheap call makes of values kept anyway.

Beside each model stands the same model whose notes are not taken: its calls are those
of a graph without the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autoamp.errors import VerificationError
from tests.metrics import saved_bytes
from tests.passes.write.door import (
    MAY_MAKE_AGAIN,
    copied,
    differences,
    made_again_functions,
    passes,
)
from tests.small_models import converted

ROWS, WIDTH = 24, 32
VALUE = ROWS * WIDTH * 2
"""The bytes of a value in bf16."""


class Layers(nn.Module):
    """Products round calls that are cheap."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.three = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.rms = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, self.one(x))


def gelu(m: Layers, h: Tensor) -> Tensor:
    return m.two(F.gelu(h))


def swiglu(m: Layers, h: Tensor) -> Tensor:
    return m.three(F.silu(h) * m.two(h))


def normed(m: Layers, h: Tensor) -> Tensor:
    return m.two(m.norm(h))


def read_by_two(m: Layers, h: Tensor) -> Tensor:
    y = m.rms(h)
    return m.two(y) + m.three(y)


def viewed(m: Layers, h: Tensor) -> Tensor:
    """The product keeps a part of the value, and the value lives on for it."""
    return m.two(F.gelu(h).view(2, ROWS // 2, WIDTH)[1])


def wide(m: Layers, h: Tensor) -> Tensor:
    """The norm reads fp32, and its result is cast: two calls make the copy again."""
    return m.two(m.norm(h.float() + 1))


def made_deeply(m: Layers, h: Tensor) -> Tensor:
    """Three calls in a row are too many; each of them keeps its operand."""
    return m.two(F.gelu(F.gelu(F.gelu(h))))


def relu(m: Layers, h: Tensor) -> Tensor:
    """The result is what the call itself keeps."""
    return m.two(h.relu())


def written(m: Layers, h: Tensor) -> Tensor:
    """What the value was made of is overwritten."""
    y = h * 2
    first = m.two(y)
    h.zero_()
    return first + h


def overwritten(m: Layers, h: Tensor) -> Tensor:
    y = F.silu(h)
    y.mul_(2)
    return m.two(y)


def returned(m: Layers, h: Tensor) -> Any:
    """The caller gets an fp32 copy of the value."""
    y = F.gelu(h)
    return m.two(y), y


GAINS: dict[Callable[..., Any], int] = {
    gelu: VALUE,
    swiglu: 2 * VALUE,
    normed: VALUE,
    read_by_two: VALUE,
    viewed: VALUE,
    wide: VALUE,
    made_deeply: 2 * VALUE,
    relu: 0,
    written: 0,
    overwritten: 0,
    returned: VALUE,
}
"""How many bytes fewer are kept."""


def model(between: Callable[[Any, Tensor], Tensor], **options: Any) -> Any:
    return converted(Layers(between), objective="memory", **options)


def data() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(ROWS, WIDTH, requires_grad=True)


def plainly() -> Any:
    """A region in which calls keep what they keep without the pass."""
    return mock.patch(
        "autoamp.passes.functions.made_again._may_note", return_value=False
    )


def step(call: Any, x: Tensor) -> Iterator[Tensor]:
    result = call(x)
    result = result if isinstance(result, Tensor) else result[0]
    yield result.detach()
    yield torch.autograd.grad(result.square().sum(), x)[0]


def penalty(call: Any, x: Tensor) -> Iterator[Tensor]:
    """Gradients of a loss of gradients."""
    (slope,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    given = [x, *call.parameters()]
    yield from torch.autograd.grad(slope.square().sum(), given, allow_unused=True)


def twice(call: Any, x: Tensor) -> Iterator[Tensor]:
    """Two backwards of one graph, the first of a part of it."""
    result = call(x).square().sum()
    weights = [*call.parameters()]
    for wanted in (weights[:1], [x], weights[2:4]):
        kept = torch.autograd.grad(result, wanted, retain_graph=True, allow_unused=True)
        yield from kept
    yield from torch.autograd.grad(result, [x, *weights], allow_unused=True)


def each_row(call: Any, x: Tensor) -> Iterator[Tensor]:
    result = call(x).flatten()[:3]
    seeds = torch.eye(3)
    yield torch.autograd.grad(result, x, seeds, is_grads_batched=True)[0]
    result = call(x).flatten()[:3]
    pull = lambda s: torch.autograd.grad(result, x, s, retain_graph=True)[0]  # noqa: E731
    yield torch.func.vmap(pull)(seeds)


def in_a_checkpoint(call: Any, x: Tensor) -> Iterator[Tensor]:
    yield from step(lambda x: checkpoint(call, x, use_reentrant=False), x)


def packed(call: Any, x: Tensor) -> Iterator[Tensor]:
    with save_on_cpu():
        yield from step(call, x)


def named(each: Any) -> str:
    return str(each.__name__)


WAYS = [step, penalty, twice, each_row, in_a_checkpoint, packed]


def equal(found: Any, other: Any) -> bool:
    pairs = list(zip(found, other, strict=True))
    return all(
        b is None if a is None else torch.equal(a.detach(), b.detach())
        for a, b in pairs
    )


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("between", GAINS, ids=named)
def test_what_is_kept(between: Any) -> None:
    m, x = model(between), data()
    m(x)  # captured
    kept = saved_bytes(lambda: m(x)).total
    with plainly():
        before = saved_bytes(lambda: m(x)).total
    assert before - kept == GAINS[between]


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("way", WAYS, ids=named)
@pytest.mark.parametrize("between", [swiglu, read_by_two, viewed, wide], ids=named)
def test_every_bit_stays(between: Any, way: Any) -> None:
    m, x = model(between), data()
    found = [*way(m, x)]
    with plainly():
        assert equal(found, way(m, x))


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("between", [swiglu, read_by_two], ids=named)
def test_every_bit_stays_in_fp16(between: Any) -> None:
    m, x = model(between, precision="fp16", loss_scale=8.0), data()
    found = [*step(m, x)]
    kept = saved_bytes(lambda: m(x)).total
    with plainly():
        assert equal(found, step(m, x))
        assert saved_bytes(lambda: m(x)).total > kept


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize(("between", "calls"), [(read_by_two, 1), (swiglu, 2)])
def test_a_value_is_made_once_for_all_its_readers(between: Any, calls: int) -> None:
    m, x = model(between), data()
    loss = m(x).sum()
    made = made_again_functions._Note._make
    with mock.patch.object(
        made_again_functions._Note, "_make", autospec=True, side_effect=made
    ) as spied:
        loss.backward()
    assert spied.call_count == calls


@pytest.mark.usefixtures("bf16_units")
def test_a_checkpoint_holds_no_operand_of_a_note() -> None:
    m, x = model(gelu), data()
    m(x)
    outer = lambda: checkpoint(m, x, use_reentrant=False)  # noqa: E731
    assert saved_bytes(outer).total <= x.nbytes


@pytest.mark.parametrize("which", ["x", "weight"])
def test_an_operand_that_was_written_to_is_refused(which: str) -> None:
    """As torch refuses it: of what makes a value, and of what the call keeps beside."""
    given = {"x": torch.ones(2), "weight": torch.ones(2)}
    y = given["x"].sin().requires_grad_()
    again = made_again_functions.noted(y, torch.ops.aten.sin.default, given["x"])
    product = torch.ops.aten.mul.Tensor
    weight = given["weight"].requires_grad_()
    result = made_again_functions.made_again(product, (again,), y, weight)
    with torch.no_grad():
        given[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("objective", ["time", "memory"])
def test_other_objectives_make_nothing_again(objective: str) -> None:
    m, x = converted(Layers(gelu), objective=objective), data()
    m(x)
    kept = saved_bytes(lambda: m(x)).total
    with plainly():
        before = saved_bytes(lambda: m(x)).total
    assert (before > kept) == (objective == "memory")


def another_maker(note: fx.Node) -> None:
    note.update_arg(1, torch.ops.aten.silu.default)


def another_operand(note: fx.Node) -> None:
    note.update_arg(2, note.args[0])


def another_literal(note: fx.Node) -> None:
    note.kwargs = {"approximate": "tanh"}


def another_value(note: fx.Node) -> None:
    note.update_arg(0, note.args[2])


@pytest.mark.usefixtures("bf16_units")
def test_the_check_refuses_another_maker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = passes.with_values_made_again

    def spied(gm: fx.GraphModule, *rest: Any) -> fx.GraphModule:
        seen.append((gm, real(gm, *rest)))
        return seen[-1][1]  # type: ignore[no-any-return]

    monkeypatch.setattr(passes, "with_values_made_again", spied)
    model(gelu)(data())
    (before, after), *_ = seen
    differences(before, after, MAY_MAKE_AGAIN)
    for fault in (another_maker, another_operand, another_literal, another_value):
        broken, _ = copied(after)
        (note,) = (n for n in broken.graph.nodes if n.name.endswith("_again"))
        fault(note)
        with pytest.raises(VerificationError):
            differences(before, broken, MAY_MAKE_AGAIN)
