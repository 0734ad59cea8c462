"""Low ops read operands that lie as those of the same ops under autocast.

Kernels choose by layout how they sum and how often they round, so that a cast may come
before a view only where the view of the cast lies as a cast of the view would.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import autoamp
from autoamp.passes.decide.ceiling import low_under_autocast
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.see.nodes import tensors_of
from tests import small_models
from tests.metrics import relative_error
from tests.small_models import Of

View = Callable[[Tensor], Tensor]
SIZE = (4, 6, 8)
PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}

LAYOUTS: dict[str, View] = {
    "rows": lambda x: x[:, 1:],
    "every other row": lambda x: x[:, ::2],
    "columns": lambda x: x[..., :4],
    "every other column": lambda x: x[..., ::2],
    "batch": lambda x: x[1:],
    "every other batch": lambda x: x[::2],
    "left": lambda x: x.chunk(2, -1)[0],
    "right": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split([2, 4], 1)[1],
    "turned": lambda x: x.transpose(1, 2),
    "turned batch": lambda x: x.transpose(0, 1),
    "permuted": lambda x: x.permute(2, 0, 1),
    "turned rows": lambda x: x[:, 1:].transpose(1, 2),
    "rows of turned": lambda x: x.transpose(1, 2)[:, 1:],
    "one row": lambda x: x[:, 2][None],
    "one column": lambda x: x[..., 1][:, None],
    "unbound": lambda x: x.unbind(1)[3][None],
    "expanded": lambda x: x[:1].expand(5, -1, -1),
    "expanded rows": lambda x: x[:, :1].expand(-1, 4, -1),
    "diagonal": lambda x: x.diagonal(0, 0, 1)[None],
    "unfolded": lambda x: x.unfold(1, 3, 1)[:, 0],
    "joined": lambda x: torch.cat([x[:, 1:], x[:, :2]], 1),
    "stacked": lambda x: torch.stack([x[0, :, :4], x[1, :, 4:]]),
    "flipped": lambda x: x.flip(1)[:, 1:],
    "copied": lambda x: x[:, 1:].contiguous(),
    "cloned": lambda x: x[..., 1:5].transpose(1, 2).clone(),
    "flat": lambda x: x[:, 1:].reshape(-1, 8)[None],
    "turned and flat": lambda x: x.transpose(1, 2).reshape(4, 6, 8),
    "heads": lambda x: x.view(4, 6, 2, 4).transpose(1, 2)[:, 0],
    "padded": lambda x: F.pad(x, (0, 0, 1, 1))[:, ::2],
}
"""Views of one fp32 value, all of three dimensions."""


def weight(m: Any, width: int) -> Tensor:
    found: Tensor = getattr(m, f"w{width}")
    return found


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "linear": lambda m, v: F.linear(v, weight(m, v.shape[-1]), m.bias),
    "linear without bias": lambda m, v: F.linear(v, weight(m, v.shape[-1])),
    "linear of rows": lambda m, v: F.linear(v[0], weight(m, v.shape[-1]), m.bias),
    "linear of images": lambda m, v: F.linear(
        v[:, None], weight(m, v.shape[-1]), m.bias
    ),
    "linear after": lambda m, v: F.linear(v * 3, weight(m, v.shape[-1]), m.bias),
    "linear by it": lambda m, v: F.linear(weight(m, v.shape[-1]), v[0], None),
    "linear by it, and a bias": lambda m, v: F.linear(
        weight(m, v.shape[-1])[None], v[0], v[0, :, 0]
    ),
    "matmul": lambda m, v: v @ weight(m, v.shape[-1]).t(),
    "matmul of two": lambda m, v: v @ v.transpose(1, 2),
    "bmm": lambda m, v: torch.bmm(v.transpose(1, 2), v),
    "addmm": lambda m, v: torch.addmm(m.bias, v[0], weight(m, v.shape[-1]).t()),
    "baddbmm": lambda m, v: torch.baddbmm(v[:, :, :1], v, v.transpose(1, 2)),
    "conv1d": lambda m, v: F.conv1d(
        v.transpose(1, 2), weight(m, v.shape[-1])[..., None], m.bias
    ),
    "conv2d": lambda m, v: F.conv2d(v[:, None], m.kernel, padding=1),
    "einsum": lambda m, v: torch.einsum("bij,oj->bio", v, weight(m, v.shape[-1])),
    "attention": lambda m, v: F.scaled_dot_product_attention(
        v[:, None], v[:, None], v[:, None]
    ),
}
"""Ops that run low."""

OF_OUR_OWN = {"attention", "conv1d", "conv2d"}
"""Ops that this package gives other kernels, or another layout, and so other bits."""


def layouts_for(reader: str, every: bool) -> list[str]:
    """All layouts, or every fourth one: four readers in turn have all of them."""
    first = [*READERS].index(reader) % 4
    return [*LAYOUTS] if every or reader == "linear" else [*LAYOUTS][first::4]


def lay_out(reader: str, layouts: Sequence[str]) -> Of:
    """A model whose one op reads these layouts of one fp32 value."""
    read = READERS[reader]

    def function(m: Any, x: Tensor) -> list[Tensor]:
        x = x * m.factor
        return [read(m, LAYOUTS[name](x)) for name in layouts]

    torch.manual_seed(0)
    widths = sorted({view(torch.empty(SIZE)).shape[-1] for view in LAYOUTS.values()})
    weights = {f"w{n}": nn.Parameter(torch.randn(5, n)) for n in widths}
    return Of(
        function,
        factor=torch.full((8,), 1.7),
        bias=nn.Parameter(torch.randn(5)),
        kernel=nn.Parameter(torch.randn(2, 1, 3, 3)),
        **weights,
    )


def data(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(1))


class Seen(fx.Interpreter):
    """Runs a graph, and keeps the tensors that each call reads."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self.read: dict[str, list[Tensor]] = {}

    def run_node(self, n: fx.Node) -> Any:
        values = self.map_nodes_to_values(list(n.all_input_nodes), n)
        self.read[n.name] = tensors_of(values)
        return super().run_node(n)


def laid_otherwise(found: Rewritten) -> list[str]:
    """The low ops that read an operand in another layout than autocast hands them."""
    runs = [Seen(found.before), Seen(found.gm)]
    for each in runs:
        with torch.no_grad():
            each.run(*found.inputs)
    before, after = (each.read for each in runs)
    under = low_under_autocast(found.classified)
    nodes = {n.name: n for n in found.before.graph.nodes}
    wrong, checked = [], 0
    for name in under & found.assignment.low:
        if not found.classified.is_allowed(name):
            continue
        operands = zip(
            nodes[name].all_input_nodes, before[name], after[name], strict=True
        )
        for node, wide, mine in operands:
            if wide.dtype != torch.float32 or mine.dtype != torch.bfloat16:
                continue
            checked += 1
            # What an op of the graph made low is sliced low by autocast too.
            is_low = found.facts.producer(node.name) in under
            expected = wide if is_low else wide.to(torch.bfloat16)
            if mine.stride() != expected.stride():
                wrong.append(f"{name} reads {node.name}: {mine.stride()}")
    assert checked
    return wrong


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("grad", "every"),
    [
        pytest.param(True, False, id="some-True"),
        pytest.param(False, False, id="False"),
        pytest.param(True, True, id="True", marks=pytest.mark.slow),
        pytest.param(False, True, id="every-False", marks=pytest.mark.slow),
    ],
)
def test_operands_lie_as_under_autocast(reader: str, grad: bool, every: bool) -> None:
    """CI has each layout with a linear, whose kernel was found to choose by layout.

    Of the other readers and the layouts CI has each, and not each pair of them, with
    gradients and without.
    """
    layouts = layouts_for(reader, every)
    model = lay_out(reader, layouts).requires_grad_(grad)
    found = small_models.rewritten(
        model, (data(*SIZE).requires_grad_(grad),), "bf16", strict=True
    )
    assert len(found.assignment.low) >= len(layouts)
    assert laid_otherwise(found) == []


@pytest.mark.parametrize(
    ("precision", "every"),
    [
        pytest.param("bf16", False, id="some-bf16"),
        pytest.param("fp16", False, id="fp16"),
        pytest.param("bf16", True, id="bf16", marks=pytest.mark.slow),
        pytest.param("fp16", True, id="every-fp16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("reader", sorted({*READERS} - OF_OUR_OWN))
def test_results_are_autocasts_to_the_bit(
    reader: str, precision: Literal["bf16", "fp16"], every: bool
) -> None:
    """CI has the pairs of the test above; fp16 has other numbers alone."""
    layouts = layouts_for(reader, every)
    model = lay_out(reader, layouts)
    ours: nn.Module = autoamp.convert(
        copy.deepcopy(model),
        precision=precision,
        do_no_harm=False,
        strict=True,
        loss_scale="off",  # large gradients overflow once they are scaled
    )
    exact = copy.deepcopy(model).double()
    with torch.autocast("cpu", PRECISIONS[precision]):
        expected = gradients(layouts, model, data(*SIZE))
    found = gradients(layouts, ours, data(*SIZE))
    true = gradients(layouts, exact, data(*SIZE).double())
    for name, (mine, my_grads) in found.items():
        assert torch.equal(mine, expected[name][0]), name
        for at, grad in my_grads.items():
            error = relative_error([grad.double()], [true[name][1][at]])
            other = relative_error(
                [expected[name][1][at].double()], [true[name][1][at]]
            )
            assert error <= 1.1 * other, (name, at)


def gradients(
    layouts: Sequence[str], model: nn.Module, x: Tensor
) -> dict[str, tuple[Tensor, dict[int, Tensor]]]:
    """The result of each layout, and its gradients by their places among the leaves."""
    leaves = [x.requires_grad_(), *model.parameters()]
    found = {}
    for name, result in zip(layouts, model(x), strict=True):
        loss = result.double().square().sum()
        each = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        grads = {i: g for i, g in enumerate(each) if g is not None}
        found[name] = result, grads
    return found
