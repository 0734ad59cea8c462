"""Gradients leave a graph in fp32 at their true value, whatever the loss scale is.

bf16 has fp32's range, so there a scale that is a power of two changes no bit of any
gradient: a scale that is missed, or taken twice, anywhere shows as a factor of it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.backends.registry import lookup_backend

import autoamp
from autoamp.passes.functions import scaled_result
from tests.models import BY_NAME, Case
from tests.quick import explored, some_slow
from tests.small_models import Of
from tests.strategies import Program, inputs, programs, run
from tests.training.boundary_scripts import (
    FORWARDS,
    SCRIPTS,
    Net,
    Seen,
    Sparse,
    fill_row,
    given,
    loss_of,
)
from tests.training.steps import forget_backwards, last_flags
from tests.whole import test_laws
from tests.whole.test_laws import from_printed_code, text_of

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:.*should not be instantiated:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32 tensor cores:UserWarning"),
]

S = 2.0**10
EPS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
DEPTH = 8
"""Roundings between a result and any gradient of a script: four casts, each way."""


def converting(precision: str = "bf16", **options: Any) -> Callable[..., nn.Module]:
    return functools.partial(
        autoamp.convert, precision=precision, do_no_harm=False, strict=True, **options
    )


def seen_by(script: Callable[..., Seen], convert: Callable[..., nn.Module]) -> Seen:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return script(convert)


def same_bits(ours: Seen, expected: Seen) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if value is None or ours[name] is None:
            assert value is ours[name], name
            continue
        assert ours[name].dtype == value.dtype, name
        assert torch.equal(ours[name], value), name


def close(ours: Seen, expected: Seen, eps: float) -> None:
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert ours[name] is None, name
            continue
        assert ours[name].dtype == value.dtype, name
        limit = DEPTH * eps * value.norm().clamp(min=eps)
        assert (ours[name] - value).norm() <= limit, name


# -- the table of scripts --------------------------------------------------------------

REPEATED = {
    f"write_column_on_{of}" for of in ("plain", "view", "two_views", "hidden_base")
}
"""Writes of which `write_div` is the quick one; both are quick on one forward."""


@pytest.mark.parametrize("name", some_slow(SCRIPTS, REPEATED.__contains__))
def test_the_scale_changes_no_bit(name: str) -> None:
    script = SCRIPTS[name]
    unscaled = seen_by(script, converting(loss_scale="off"))
    close(unscaled, seen_by(script, lambda m: m), EPS["bf16"])
    same_bits(seen_by(script, converting(loss_scale=S)), unscaled)


def check_compiled(name: str, backend: Any) -> None:
    script = SCRIPTS[name]
    unscaled = seen_by(script, converting(loss_scale="off", backend=backend))
    scaled = seen_by(script, converting(loss_scale=S, backend=backend))
    # What a compiler fuses differs with the graph, and so does the order of sums; on a
    # GPU so does where inductor rounds.
    by_triton = backend == "inductor" and torch.get_default_device().type == "cuda"
    close(scaled, unscaled, EPS["bf16"] if by_triton else 2.0**-20)


ALIASES = ["returns_used_inside", "returns_base_and_view", "returns_two_views"]
WRITES = ["returns_relu_", "returns_changed_weight", "returns_zeros_written"]
COMPILED = [*ALIASES, *WRITES, "cache_read_after_the_call"]
SAMPLE = {"returns_base_and_view", "returns_changed_weight", COMPILED[-1]}


def aot() -> Any:
    return lookup_backend("aot_eager")


@pytest.mark.parametrize("name", some_slow(COMPILED, lambda n: n not in SAMPLE))
def test_compiled_graphs_too(name: str) -> None:
    check_compiled(name, aot())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (700, 750), (2, 640, 512)])
@pytest.mark.parametrize("turned", [False, True])
def test_a_large_gradient_is_scaled_in_pieces(
    shape: tuple[int, ...], turned: bool, dtype: torch.dtype
) -> None:
    value = torch.randn(shape).to(dtype).requires_grad_()
    grad = torch.randn(shape[::-1]).permute(*range(len(shape))[::-1])
    grad = (grad if turned else grad.contiguous()) * 1e-7  # subnormal where unscaled
    scale = torch.tensor(S)
    scaled_result(value, scale).backward(grad)
    assert value.grad is not None
    assert torch.equal(value.grad, (grad * scale).to(dtype))


# -- all models, and random programs ---------------------------------------------------


def gradients(case: Case, **options: Any) -> Seen:
    torch._dynamo.reset()
    model = converting(**options)(case.model())
    args, kwargs = case.inputs(0)
    torch.manual_seed(5)
    case.loss(model(*args, **kwargs)).backward()
    assert autoamp.report(model).runs
    return {name: p.grad for name, p in model.named_parameters()}


@explored(4, 200, lambda most: (programs(most=most), st.integers(-8, 20)))
def test_random_programs_do_not_feel_the_scale(program: Program, power: int) -> None:
    seen = []
    for loss_scale in ("off", 2.0**power):
        torch._dynamo.reset()
        model = converting(loss_scale=loss_scale)(copy.deepcopy(program))
        seen.append(run(model, model, inputs()))
    test_laws.same_bits(seen[1].result, seen[0].result)
    expected, ours = (outcome.gradients for outcome in seen)
    assert (ours is None) == (expected is None), "only one lets its backward run"
    if expected is not None and ours is not None:
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            # Readers of one tensor may be summed in another order; the terms are of the
            # size of the loss's own gradient, 1 and more, and may cancel to nothing.
            error = (ours[name] - value).abs().max()
            assert error <= 2.0**-19 * value.abs().max().clamp(min=1), name


# -- what scaling is for ---------------------------------------------------------------

TINY = 2.0**-30


def tiny_gradients(loss_scale: Any) -> tuple[Seen, Seen]:
    """Gradients of a loss times TINY, in fp16 and in fp32, both made large again."""

    def script(convert: Callable[..., nn.Module]) -> Seen:
        model = convert(Net())
        (model(given()).square().mean() * TINY).backward()
        return {n: p.grad / TINY for n, p in model.named_parameters()}

    ours = seen_by(script, converting("fp16", loss_scale=loss_scale))
    return ours, seen_by(script, lambda m: m)


def test_gradients_below_fp16_come_back() -> None:
    ours, exact = tiny_gradients(2.0**30)
    for name, value in exact.items():
        assert (ours[name] - value).norm() <= 2 * EPS["fp16"] * value.norm(), name
    lost, _ = tiny_gradients("off")
    assert not any(value.any() for value in lost.values())


COMPARED = ["mlp", "tied_lm", "finfo_mask", "in_place"]
BY_COMPILER = [f"{name} compiled" for name in COMPARED]


@pytest.mark.parametrize(
    "name", [*COMPARED, *some_slow(BY_COMPILER, BY_COMPILER[:-1].__contains__)]
)
def test_fp16_gradients_are_no_worse_than_grad_scalers(name: str) -> None:
    """By half at most: a cast more or less on a gradient's way is one rounding."""
    name, *compiled = name.split()
    case = BY_NAME[name]
    args, kwargs = case.inputs(0)
    exact, theirs = case.model(), case.model()
    case.loss(exact(*args, **kwargs)).backward()
    device = torch.get_default_device().type
    scaler = torch.amp.GradScaler(device, init_scale=2.0**13)
    optimizer = torch.optim.SGD(theirs.parameters())
    with torch.autocast(device, torch.float16):
        loss = case.loss(theirs(*args, **kwargs))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    backend = aot() if compiled else "eager"
    del scaler
    ours = gradients(case, precision="fp16", loss_scale=2.0**13, backend=backend)
    errors = {"ours": 0.0, "theirs": 0.0}
    for (key, p), q in zip(exact.named_parameters(), theirs.parameters(), strict=True):
        assert ours[key].dtype == torch.float32
        scale = p.grad.norm()
        errors["ours"] += float((ours[key] - p.grad).norm() / scale)
        errors["theirs"] += float((q.grad - p.grad).norm() / scale)
    assert errors["ours"] <= 1.5 * errors["theirs"]


# -- more than once --------------------------------------------------------------------


def said(caplog) -> list[str]:
    return [r.message for r in caplog.records if "create_graph=True" in r.message]


def test_a_compiled_model_is_differentiated_twice_from_the_next_call_on(caplog) -> None:
    torch._dynamo.reset()
    model = converting(loss_scale=S, backend=aot())(Net())
    exact = copy.deepcopy(Net())
    exact.load_state_dict(model.state_dict())
    x = given().requires_grad_()

    def penalty(net: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return slope.square().sum()

    loss_of(model(x)).backward()  # a plain one before: nothing is said
    assert not said(caplog)
    with pytest.raises(RuntimeError):
        penalty(model).backward()
    model.zero_grad()
    penalty(model).backward()
    penalty(exact).backward()
    assert len(said(caplog)) == 1
    ours = {n: p.grad for n, p in model.named_parameters() if n != "out.bias"}
    true = {n: p.grad for n, p in exact.named_parameters() if n != "out.bias"}
    close(ours, true, EPS["bf16"])


def used_often(m: nn.Module, x: Tensor) -> Tensor:
    """21 products of `x` with one weight, and one of 2048 `x` before them."""
    products = [nn.functional.linear(x, m.weight) for _ in range(21)]
    return sum(products, nn.functional.linear(2048 * x, m.weight))


def often(precision: str) -> nn.Module:
    model = Of(used_often, weight=nn.Parameter(torch.full((2, 2), 0.5)))
    return converting(precision, loss_scale=8.0)(model)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_weight_used_often_gets_every_use(precision: str) -> None:
    """2048 + 21 is a number of neither bf16 nor fp16: its uses are summed in fp32.

    So are those of an input, whose shared cast has no gradient of its own to unscale.
    """
    model, x = often(precision), torch.ones(1, 2, requires_grad=True)
    model(x).sum().backward()
    assert model.weight.grad.unique().tolist() == [2048 + 21]
    assert x.grad.unique().tolist() == [2048 + 21]


# -- a scale that moves ----------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot"])
def test_a_scale_that_moves_is_the_forwards_own(backend: str) -> None:
    scale = autoamp.DynamicLossScale(init_scale=S)
    chosen = aot() if backend == "aot" else backend
    model = converting(loss_scale=scale, backend=chosen)(Net())
    seen = []
    for _ in range(5):
        model.zero_grad()
        result = model(given())
        scale.update(torch.ones(1))  # another model's step, before this backward
        loss_of(result).backward()
        seen.append({n: p.grad.clone() for n, p in model.named_parameters()})
    assert scale.scale == S / 2**5
    for each in seen[1:]:
        same_bits(each, seen[0])
    assert len(autoamp.report(model).graphs) == 1, "a new scale is a new graph"


def test_a_graph_with_a_boundary_runs_from_its_printed_code() -> None:
    model = converting(loss_scale=S)(Net(FORWARDS["used_inside"]))
    model(given())
    (graph,) = autoamp.report(model).graphs
    names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
    assert names[-3:] == ["loss_scale", "inv_loss_scale", "found_inf"]
    rebuilt = from_printed_code(graph)
    assert text_of(rebuilt) == text_of(graph)
    args = [
        torch.ones(tuple(n.meta["val"].shape), dtype=n.meta["val"].dtype)
        for n in graph.graph.nodes
        if n.op == "placeholder"
    ]
    for ours, expected in zip(rebuilt(*args), graph(*args), strict=True):
        assert torch.equal(ours, expected)
    autoamp.rewrite(graph, args, precision="bf16", do_no_harm=False)


# -- what is a leaf in one call is computed in the next --------------------------------


class TakesHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.float())


@pytest.mark.parametrize("first", ["leaf", "computed"])
@pytest.mark.parametrize("second", ["leaf", "computed"])
def test_half_inputs_have_their_gradient_whatever_was_captured(
    first: str, second: str
) -> None:
    """A leaf's is fp32 where it wants it so; what others computed has its own dtype."""
    model = converting("fp16", loss_scale=S)(TakesHalf())
    leaf = torch.ones(2, 8, dtype=torch.half, requires_grad=True)
    leaf.grad_dtype = torch.float32

    def run(kind: str) -> None:
        x = leaf if kind == "leaf" else leaf * 1
        (model(x).sum() * 2.0**-22).backward()

    run(first)
    leaf.grad = None
    run(second)
    expected = model.inner.weight.detach().sum(0).expand(2, 8) * 2.0**-22
    error = (leaf.grad.float() - expected).abs().max()
    # fp16's eleven digits, or where others computed it the step of its subnormals.
    assert error <= (2.0**-32 if second == "leaf" else 2.0**-25)


class WritesApart(nn.Module):
    """Writes to its input where no history follows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x * 2)
        x.detach().copy_(y)
        return y.tanh()


@pytest.mark.parametrize("first", ["leaf", "computed"])
@pytest.mark.parametrize("second", ["leaf", "computed"])
def test_a_detached_write_is_no_history_whatever_was_captured(
    first: str, second: str
) -> None:
    def script(model: Any) -> list[Tensor]:
        found = []
        for kind in (first, second):
            model.zero_grad()
            leaf = torch.ones(2, 8, requires_grad=True)
            model(leaf if kind == "leaf" else leaf * 1).sum().backward()
            assert leaf.grad is not None
            found += [leaf.grad, model.inner.weight.grad]
        return found

    torch.manual_seed(0)
    model = WritesApart()
    plain = script(model)
    scaled = script(converting(loss_scale=S)(model))
    for ours, exact in zip(scaled, plain, strict=True):
        assert torch.allclose(ours, exact, rtol=2.0**-6, atol=2.0**-6)


# -- overflow --------------------------------------------------------------------------


def flags(model: nn.Module, *args: Any, bad: float) -> float:
    """What the run's flag says after a backward from a gradient that holds `bad`."""
    forget_backwards()
    result = model(*args)
    seed = torch.zeros_like(result)
    seed.flatten()[-1] = bad
    result.backward(seed)
    return max(last_flags())


def through_double(m: Net, x: Tensor) -> Tensor:
    return m.out.weight.double() @ x.double()


def half_given(m: Net, x: Tensor) -> Tensor:
    """Of 1e6 only the gradient of `x`, in fp16, overflows."""
    return x.float() + m.fc(torch.ones(1, 8))


def frozen_but_input(m: Net, x: Tensor) -> Tensor:
    return m.fc.weight.detach() @ x.float()


OVERFLOWS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "plain": (Net, lambda: (given(),)),
    "input": (lambda: Net(frozen_but_input), lambda: (given().requires_grad_(),)),
    "double": (lambda: Net(through_double), lambda: (given(),)),
    "half": (lambda: Net(half_given), lambda: (given().half().requires_grad_(),)),
    "double_input": (
        lambda: Net(frozen_but_input),
        lambda: (given().double().requires_grad_(),),
    ),
    "sparse": (Sparse, lambda: (torch.tensor([1, 3, 3]),)),
    "dense": (lambda: Sparse(sparse=False), lambda: (torch.tensor([1, 3, 3]),)),
    "written": (lambda: Net(fill_row), lambda: (given(), torch.zeros(8, 8))),
}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_the_flag_is_set_by_what_is_not_finite(name: str) -> None:
    make, args_of = OVERFLOWS[name]
    model = converting("fp16", loss_scale=1.0)(make())
    for bad in (1.0, 1e6, float("inf"), float("nan")):
        model.zero_grad()
        args = args_of()
        flag = flags(model, *args, bad=bad)
        tensors = [t for t in (*model.parameters(), *args) if t.is_leaf]
        found = [t.grad.to_dense() for t in tensors if t.grad is not None]
        assert found
        assert flag == float(not all(g.isfinite().all() for g in found)), bad
