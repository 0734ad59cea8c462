"""The op that the cache gives for a call is the op that a trace would have found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from autoamp.passes.see import normalise as passes
from autoamp.passes.see.normalise import Normalised, normalise
from autoamp.passes.see.op_cache import OpCache, op_cache_for
from tests.models import BY_NAME, LARGE
from tests.quick import some_slow

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

Graph = tuple[fx.GraphModule, list[Any]]


def captured(model: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Graph]:
    """The graphs Dynamo hands to a backend, with what it hands them."""
    return [graph for graph, _ in both(model, *args, **kwargs)]


def both(
    model: Callable[..., Any], *args: Any, **kwargs: Any
) -> list[tuple[Graph, tuple[Normalised, Normalised, int]]]:
    """Each graph of a model, normalised from memory and by a trace of everything.

    And how many calls the cache answered.
    """
    found = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            repeats = _counting(patch)
            quick = normalise(gm, inputs)
            patch.setattr(passes, "op_cache_for", lambda *_: None)
            slow = normalise(gm, inputs)
        found.append(((gm, inputs), (quick, slow, len(repeats))))
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(allow_rnn=True):
        torch.compile(model, backend=backend)(*args, **kwargs)
    torch._dynamo.reset()
    return found


def _counting(patch: pytest.MonkeyPatch) -> list[str]:
    repeats: list[str] = []
    inner = OpCache.repeated

    def repeated(self: OpCache, call: Any, node: fx.Node) -> Any:
        result = inner(self, call, node)
        if result is not None:
            repeats.append(node.name)
        return result

    patch.setattr(OpCache, "repeated", repeated)
    return repeats


def told(gm: fx.GraphModule) -> list[tuple[Any, ...]]:
    """Everything the passes read of a graph; memory by the order it appears in."""
    memory: dict[int, int] = {}

    def value(of: Any) -> Any:
        if isinstance(of, (list, tuple)):
            return tuple(value(each) for each in of)
        if not isinstance(of, Tensor):
            return repr(of)
        place = -1
        if of.layout == torch.strided:
            key = of.untyped_storage()._cdata
            place = memory.setdefault(key, len(memory))
        strides = of.stride() if place != -1 else ()
        return of.shape, strides, of.dtype, of.device, of.requires_grad, place

    kept = ("autoamp_requires_grad", "autoamp_is_parameter", "autoamp_path")
    return [
        (
            node.op,
            node.name,
            str(node.target),
            repr(node.args),
            repr(node.kwargs),
            value(node.meta.get("val")),
            node.stack_trace,
            str(node.meta.get("nn_module_stack")),
            *(node.meta.get(key) for key in kept),
        )
        for node in gm.graph.nodes
    ]


def assert_equal(model: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Both ways give the same graphs; how many calls the cache answered."""
    found = both(model, *args, **kwargs)
    assert found
    for _, (quick, slow, _) in found:
        assert told(quick.gm) == told(slow.gm)
    return sum(repeats for _, (*_, repeats) in found)


# Of bert, `test_layers_need_no_trace` has the layers.
SLOW = LARGE | {"bert"}


@pytest.mark.parametrize("name", some_slow(BY_NAME, SLOW.__contains__))
def test_graphs_of_models_are_those_of_a_trace(name: str) -> None:
    case = BY_NAME[name]
    args, kwargs = case.inputs(0)
    assert_equal(case.model(), *args, **kwargs)


def signs_of_zero(x: Tensor) -> Tensor:
    return (x * 0.0) / 1.0 + 1.0 / (x * -0.0) + 1.0 / (x * 0.0)


def one_and_true(x: Tensor) -> Tensor:
    return x * 1 + x * True + x * 1.0


def in_place(x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(1.0)
    z = y.relu_()
    y.add_(1.0)
    y[0] = 2.0
    y[0] = 2.0
    return z + y.mul_(2.0)


def identities(x: Tensor) -> Tensor:
    y = x.float() + x.contiguous()
    z = y.float() + y.contiguous()
    return z.float() * z.to(torch.float32) * z.float()


def views(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    c, d = (a + 1).chunk(2, dim=-1)
    e, f = (b + 1).chunk(2, dim=-1)
    y = x + 1
    y[:, :2].add_(1.0)
    y[:, :2].add_(1.0)
    return torch.cat([c, d, e, f, a[:, :2], b[:, :2], y], -1).t().t()


def statistics(x: Tensor) -> Tensor:
    first = torch.var_mean(x, 0)
    second = torch.var_mean(x, 0)
    return first[0] + second[1] + torch.native_layer_norm(x, [8], None, None, 1e-5)[1]


def named_results(x: Tensor) -> Tensor:
    for _ in range(3):
        values, places = torch.max(x, 1)
        best, order = x.topk(8, 1)
        x = x.sort(dim=1).values + values[:, None] + places[:, None] + best + order
    return torch.stack(x.unbind(1), 1)


def same_operand_twice(x: Tensor) -> Tensor:
    y = x + 1
    return torch.add(x, x) + torch.add(x, y) + torch.add(y, y) + torch.add(y, x)


def modes(x: Tensor) -> Tensor:
    y = (x + 1) * 2
    with torch.no_grad():
        z = (x + 1) * 2
    return y + z


def other_dtypes(x: Tensor) -> Tensor:
    picked = x.argmax(-1)
    return (
        functional.one_hot(picked, 8)
        + (picked + 1).float()[:, None]
        + picked.cos()[:, None]
    )


def recomputed(x: Tensor) -> Tensor:
    for _ in range(3):
        x = checkpoint(lambda v: (v * 2).tanh(), x, use_reentrant=False)
    return x


def moved(x: Tensor) -> Tensor:
    y, z = x.clone(), x + 1
    before = y.view(-1)
    y.set_(z)
    return before + y.view(-1)


def laid_out_anew(x: Tensor) -> Tensor:
    a, b, c = torch.relu(x), torch.relu(x * 2), torch.relu(x * 3)
    b.t_()
    c.unsqueeze_(0)
    return a + torch.relu(b).t() + torch.relu(c)[0] + c.transpose_(0, 1)[:, 0]


def many_shapes(x: Tensor) -> Tensor:
    shapes = [x, x.t(), x[:2], x[:, ::2], x[:0], x[:, :1].expand(4, 8)]
    parts = [torch.relu(each) * 2.0 + each for each in shapes]
    parts = [functional.dropout(each, 0.5, training=True) for each in parts]
    parts = [torch.max(each.softmax(-1), 1).values.cumsum(0) for each in parts]
    return torch.cat([each + each[:1] for each in parts])


def indexed(x: Tensor) -> Tensor:
    """Given the whole result, an index that is still to come seems to do nothing."""
    parts = [x[:2, :3], x[None, :2, :3][0], x[..., 1:5][:2, :3], x[1:3, 2:5]]
    parts += [x[:2, :3], x[1:3, 2:5], x.split(3, dim=1)[0][:2], x[[0, 1], :3]]
    return sum(parts[1:], parts[0]) + x[0, :3] + x[0, 0] + x[:2, 0, None]


def made_from_nothing(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + torch.arange(8) + torch.ones(4, 1) + torch.full((8,), 2.0)
    return x


def autocast_inside(x: Tensor) -> Tensor:
    y = x @ x.t()
    with torch.autocast("cpu", torch.bfloat16):
        z = x @ x.t()
        z = z @ x
    return y.sum() + z.float() + torch.relu(z)


def random(x: Tensor) -> Tensor:
    return torch.rand_like(x) + functional.dropout(x) + torch.rand_like(x)


PROGRAMS = (
    signs_of_zero,
    one_and_true,
    in_place,
    identities,
    views,
    statistics,
    named_results,
    same_operand_twice,
    modes,
    other_dtypes,
    recomputed,
    moved,
    laid_out_anew,
    many_shapes,
    indexed,
    made_from_nothing,
    autocast_inside,
    random,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
def test_odd_programs(program: Callable[[Tensor], Tensor], trained: bool) -> None:
    x = torch.randn(4, 8).requires_grad_(trained)
    assert_equal(program, x)


def test_symbolic_sizes_are_traced() -> None:
    def program(x: Tensor) -> Tensor:
        return (x + 1).view(-1) * (x + 1).view(-1)

    graphs: list[Graph] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((gm, inputs))
        assert op_cache_for(gm, inputs) is None
        return gm.forward

    torch.compile(program, backend=backend, dynamic=True)(torch.randn(4, 8))
    assert graphs


@pytest.mark.parametrize("says_it_is_torchs", [False, True])
def test_a_function_that_keeps_a_state_is_traced_each_time(
    says_it_is_torchs: bool,
) -> None:
    made: list[int] = []

    def counted(x: Tensor) -> Tensor:
        made.append(1)
        return x * float(len(made))

    if says_it_is_torchs:
        counted = functools.wraps(functional.relu)(counted)
    counted = torch.compiler.allow_in_graph(counted)

    def program(x: Tensor) -> Tensor:
        return counted(x + 1) + counted(x + 1) + counted(x + 1)

    (_, (quick, *_)) = both(program, torch.randn(4, 8))[0]
    factors = [n.args[1] for n in quick.gm.graph.nodes if "mul" in str(n.target)]
    assert len(set(factors)) == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.double(),
        lambda x: x[:2],
        lambda x: x.t().contiguous().t(),
        lambda x: x.clone().requires_grad_(),
        lambda x: nn.Parameter(x.clone()),
        lambda x: x.to_sparse(),
        lambda _: 3,
    ],
    ids=["dtype", "shape", "strides", "grad", "parameter", "sparse", "number"],
)
def test_other_inputs_than_dynamos_are_traced(other: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4, 8)
    ((gm, inputs),) = captured(lambda v: v + 1, x)
    assert op_cache_for(gm, inputs) is not None
    assert op_cache_for(gm, [other(inputs[0])]) is None
