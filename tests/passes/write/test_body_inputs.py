"""What bodies of checkpoints and branches read low alone is handed to them low."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.checkpoint import checkpoint

import autoamp
from tests.metrics import relative_error, saved_bytes
from tests.small_models import CLOSE, Of, converted

WIDTH = 8


def layers(width: int = WIDTH) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {f"fc{at}": nn.Linear(width, width) for at in range(3)}


def in_checkpoints(m: Any, x: Tensor) -> Tensor:
    """Each block begins with a product: nothing else reads what the last one gave."""
    for layer in (m.fc0, m.fc1, m.fc2):
        x = checkpoint(lambda x, fc=layer: fc(x).relu(), x, use_reentrant=False)
    return x


def with_residuals(m: Any, x: Tensor) -> Tensor:
    for layer in (m.fc0, m.fc1, m.fc2):
        x = checkpoint(lambda x, fc=layer: x + fc(x).relu(), x, use_reentrant=False)
    return x


def read_twice(m: Any, x: Tensor) -> Tensor:
    """The gradients of both reads are summed in fp32, behind two uses of one cast."""
    return checkpoint(lambda x: m.fc0(x) * m.fc1(x), x.exp(), use_reentrant=False)


def low_residuals(m: Any, x: Tensor) -> Tensor:
    """Under autocast a product begins the stream, which is low from then on."""
    x = m.fc0(x)
    for layer in (m.fc1, m.fc2):
        x = checkpoint(lambda x, fc=layer: x + fc(x).relu(), x, use_reentrant=False)
    return x


def residuals_outside(m: Any, x: Tensor) -> Tensor:
    """What the checkpoints give is low under autocast, and so are the sums."""
    x = m.fc0(x)
    for layer in (m.fc1, m.fc2):
        x = (x + checkpoint(layer, x, use_reentrant=False)).relu()
    return x


def several_reads(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: m.fc1(x) * m.fc2(x) + x, m.fc0(x), use_reentrant=False)


def in_branches(m: Any, x: Tensor) -> Tensor:
    h = x.sin()
    return torch.cond(
        h.sum() > 9, lambda h: m.fc0(h).tanh(), lambda h: m.fc1(h).cos(), (h,)
    )


def in_one_branch(m: Any, x: Tensor) -> Tensor:
    h = x.sin()
    return torch.cond(h.sum() > 9, m.fc0, lambda h: h.exp(), (h,))


def in_a_loop(m: Any, x: Tensor) -> Tensor:
    """A value goes round, and each round reads the first value low."""
    h = x.sin().detach()
    start = torch.zeros((), dtype=torch.long)
    return while_loop(
        lambda t, _: t < 2, lambda t, c: (t + 1, c.cos() + m.fc0(h)), (start, h)
    )[1]


def given_twice(m: Any, x: Tensor) -> Tensor:
    """A value that one input reads in fp32 is kept, and low it would be kept twice."""
    h = x.sin()
    return checkpoint(
        lambda a, b: m.fc0(a) * b.exp(), h, h.view_as(h), use_reentrant=False
    )


PROGRAMS: dict[Callable[..., Tensor], int] = {
    in_checkpoints: 3,
    with_residuals: 0,
    low_residuals: 2,
    residuals_outside: 2,
    several_reads: 1,
    read_twice: 0,
    in_branches: 1,
    in_one_branch: 0,
    in_a_loop: 0,
    given_twice: 0,
}
"""Each program, and how many operands its bodies are handed low."""


def handed_low(model: nn.Module) -> int:
    """How many operands of calls of bodies are low, beside copies of weights."""
    (graph,) = autoamp.report(model).graphs
    found = []
    for node in graph.graph.nodes:
        if any(n.op == "get_attr" for n in node.all_input_nodes):
            fx.node.map_arg(node.args, found.append)
    low = [n for n in found if n.op == "call_function"]
    values = [n.meta["val"] for n in low if isinstance(n.meta.get("val"), Tensor)]
    return sum(value.dtype == torch.bfloat16 for value in values)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    needing = [x, *model.parameters()]
    found = torch.autograd.grad(model(x).square().sum(), needing, allow_unused=True)
    return [each for each in found if each is not None]


# Torch's own `cond` asks for it of what is no leaf.
@pytest.mark.usefixtures("bf16_units")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_an_input_that_is_read_low_alone_comes_low(
    program: Callable[..., Tensor],
) -> None:
    model, plain = (Of(program, **layers()) for _ in range(2))
    x = torch.randn(4, WIDTH, requires_grad=True)
    expected = gradients(plain, x)
    converted(model)
    assert relative_error(gradients(model, x), expected) < CLOSE
    assert handed_low(model) == PROGRAMS[program]


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize(
    "program",
    [in_checkpoints, low_residuals, residuals_outside],
    ids=lambda p: p.__name__,
)
def test_checkpoints_keep_no_more_than_under_autocast(
    program: Callable[..., Tensor],
) -> None:
    plain, model = (Of(program, **layers(256)) for _ in range(2))
    converted(model)
    x = torch.randn(1024, 256, requires_grad=True)

    def under_autocast() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(x)

    model(x)
    kept = saved_bytes(lambda: model(x), model.parameters())
    autocasts = saved_bytes(under_autocast, plain.parameters())
    kept_data = kept.total - kept.weight_copies
    assert kept_data <= autocasts.total - autocasts.weight_copies


class Normed(nn.Module):
    """A norm, which CUDA's autocast computes in fp32 and that of CPUs does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        return checkpoint(lambda x: x + self.inner(x), x, use_reentrant=False)


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize(("device", "is_low"), [("cpu", True), ("h100", False)])
def test_each_device_has_its_own_autocast(device: str, is_low: bool) -> None:
    """The sum in the body is fp32 where the list of the device has the norm."""
    x = torch.randn(4, WIDTH)
    report = autoamp.explain(Normed(), x, device=device, precision="bf16")
    (added,) = (row for row in report.ops if row.name == "add")
    assert ("type promotion leaves it fp32" in added.reason) != is_low


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("keeps", [False, True])
def test_a_stream_that_autocast_would_not_have_low_stays_fp32(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Modules are kept, or the graph does not run without data."""

    def fails(*_: Any) -> None:
        raise RuntimeError("planted")

    model, options = Of(low_residuals, **layers()), {"keep": ["fc2"]} if keeps else {}
    if not keeps:
        walk = importlib.import_module("autoamp.passes.see.low_outside")._UnderAutocast
        monkeypatch.setattr(walk, "run", fails)
    converted(model, **options)
    model(torch.randn(4, WIDTH, requires_grad=True))
    assert handed_low(model) == 0


@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
def test_gradients_of_such_inputs_in_fp16(backend: str) -> None:
    """The loss scale goes through the edge of a body as through any low value."""
    model, plain = (Of(in_checkpoints, **layers()) for _ in range(2))
    x = torch.randn(4, WIDTH, requires_grad=True)
    expected = gradients(plain, x)
    options = {"precision": "fp16", "loss_scale": 256.0, "backend": backend}
    converted(model, **options)
    assert relative_error(gradients(model, x), expected) < CLOSE / 4


def test_the_report_says_what_a_body_takes_and_counts_each_cast_once() -> None:
    model = Of(in_checkpoints, **layers())
    converted(model)
    model(torch.randn(4, WIDTH))
    report = autoamp.report(model)
    calls = [row for row in report.ops if not row.body]
    assert {row.precision for row in calls} == {"bf16"}
    assert "takes getitem low; its body asks for it" in calls[1].reason
    assert "is an element of checkpointed, which gives fp32" in str(
        report.why("getitem")
    )
    # In each body one cast is left, of the result.
    assert report.cast_counts.forward == 6


def test_a_call_that_a_failed_check_keeps_fp32_hands_over_fp32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its body casts then: it can do either."""
    emitter: Any = importlib.import_module("autoamp.passes.write.casts")._Emitter
    emit = emitter._emit_op

    def failing(made: Any, node: fx.Node) -> fx.Node:
        if node.name == "checkpointed_1":
            raise ValueError("planted")
        return emit(made, node)  # type: ignore[no-any-return]

    monkeypatch.setattr(emitter, "_emit_op", failing)
    model, x = Of(in_checkpoints, **layers()), torch.randn(4, WIDTH)
    with torch.no_grad():
        expected = model(x)
        converted(model, strict=False)
        assert relative_error([model(x)], [expected]) < CLOSE
    assert handed_low(model) == 2  # of three
    rows = [row for row in autoamp.report(model).ops if "linear" in row.op]
    assert [row.precision for row in rows] == ["bf16"] * 3
