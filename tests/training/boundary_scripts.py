"""What a user may do with gradients of a converted model: a table of short scripts.

A script makes its models with `convert`, trains or differentiates them, and returns by
name everything the user sees.  `test_boundary.py` runs each with several conversions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.small_models import Of

Convert = Callable[[nn.Module], nn.Module]
Seen = dict[str, Any]
Script = Callable[[Convert], Seen]

SCRIPTS: dict[str, Script] = {}
WIDTH = 8


def script(function: Script) -> Script:
    SCRIPTS[function.__name__] = function
    return function


class Net(nn.Module):
    """Two layers, a buffer and a table; `forward` is what it is given."""

    def __init__(self, forward: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("cache", torch.zeros(WIDTH, WIDTH))
        self.run = forward or (lambda m, x: m.out(m.fc(x).tanh()))

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


def given(seed: int = 0) -> Tensor:
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randn(WIDTH, WIDTH, generator=generator)


def grads(*models: nn.Module, **more: Any) -> Seen:
    found = {
        f"{i}.{name}": p.grad
        for i, model in enumerate(models)
        for name, p in model.named_parameters()
    }
    return found | more


def loss_of(*results: Tensor) -> Tensor:
    """A loss whose gradient differs from element to element and result to result."""
    return torch.stack([(r * (i + 1)).sin().sum() for i, r in enumerate(results)]).sum()


# -- one model, many results -----------------------------------------------------------

Forward = Callable[..., Any]


def zeros_written(m: Net, x: Tensor) -> Tensor:
    z = torch.zeros(WIDTH, WIDTH)
    z[:, :4] = m.fc(x)[:, 4:]
    return z


def changed_weight(m: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.fc.weight.mul_(1.5)
    return m.out(m.fc(x))


FORWARDS: dict[str, Forward] = {
    "plain": lambda m, x: m.out(m.fc(x).tanh()),
    "used_inside": lambda m, x: ((h := m.fc(x)), m.out(h)),
    "view": lambda m, x: m.fc(x).t(),
    "base_used_inside": lambda m, x: ((h := m.fc(x)).t(), m.out(h)),
    "base_and_view": lambda m, x: ((h := m.fc(x)), h.t()),
    "two_views": lambda m, x: ((h := m.fc(x))[:, :5], h[:, 3:]),
    "hidden_base": lambda m, x: functional.instance_norm(m.fc(x)[None])[0],
    "zeros_written": zeros_written,
    "changed_weight": changed_weight,
    "relu_": lambda m, x: m.fc(x.relu_()),
    "mul_": lambda m, x: (x.mul_(0.5), m.fc(x)),
}
"""What each does to `x`, an input that is no leaf and needs a gradient."""


def results_of(forward: Forward) -> Script:
    def run(convert: Convert) -> Seen:
        model = convert(Net(forward))
        x = given().requires_grad_()
        results = model(x * 2)
        results = results if isinstance(results, tuple) else (results,)
        loss_of(*(r for r in results if r.requires_grad)).backward()
        return grads(model, x=x.grad)

    return run


SCRIPTS |= {f"returns_{name}": results_of(f) for name, f in FORWARDS.items()}


# -- results that the caller writes to -------------------------------------------------


def write_div(r: Tensor) -> None:
    r.div_(2.0)


def write_column(r: Tensor) -> None:
    r[:, 0] = 0


def written_outside(forward: Forward, write: Callable[[Tensor], None]) -> Script:
    def run(convert: Convert) -> Seen:
        model = convert(Net(forward))
        x = given().requires_grad_()
        results = model(x * 2)
        results = results if isinstance(results, tuple) else (results,)
        write(results[0])
        loss_of(*results).backward()
        return grads(model, x=x.grad)

    return run


SCRIPTS |= {
    f"{write.__name__}_on_{name}": written_outside(FORWARDS[name], write)
    for name in ("plain", "view", "two_views", "base_and_view", "hidden_base")
    for write in (write_div, write_column)
}


# -- inputs that the graph writes to ---------------------------------------------------


def fill_row(m: Net, x: Tensor, kept: Tensor) -> Tensor:
    kept[0] = m.fc(x)[1]
    return m.out(kept)


def fill_buffer(m: Net, x: Tensor) -> Tensor:
    m.cache = m.cache.clone()
    m.cache.copy_(m.fc(x))
    return m.out(x + m.cache)


@script
def cache_read_after_the_call(convert: Convert) -> Seen:
    model = convert(Net(fill_row))
    kept = torch.zeros(WIDTH, WIDTH)
    result = model(given(), kept)
    loss_of(result, kept).backward()
    return grads(model)


def fill_through_a_view(m: Net, x: Tensor, kept: Tensor) -> Tensor:
    older = kept.view(-1).view(WIDTH, WIDTH)
    older[0] = m.fc(x)[1]
    return m.out(older)


@script
def older_view_of_a_cache(convert: Convert) -> Seen:
    model = convert(Net(fill_through_a_view))
    kept = torch.zeros(WIDTH, WIDTH)
    result = model(given(), kept)
    loss_of(result, kept).backward()
    return grads(model)


@script
def buffer_with_a_gradient(convert: Convert) -> Seen:
    model = convert(Net(fill_buffer))
    result = model(given())
    loss_of(result, model.cache).backward()
    return grads(model)


# -- ways to differentiate -------------------------------------------------------------


@script
def two_models_in_one_backward(convert: Convert) -> Seen:
    maker, judge = convert(Net()), convert(Net(FORWARDS["used_inside"]))
    made = maker(given())
    seen: list[Tensor] = []
    made.register_hook(seen.append)
    loss_of(made, *judge(made)).backward()
    return grads(maker, judge, between=seen[0])


@script
def asked_for_by_name(convert: Convert) -> Seen:
    model = convert(Net(FORWARDS["used_inside"]))
    x = given().requires_grad_()
    hidden, result = model(x)
    wanted = [x, hidden, *model.parameters()]
    found = torch.autograd.grad(loss_of(result), wanted)
    return {str(i): g for i, g in enumerate(found)}


@script
def hooks_on_tensors(convert: Convert) -> Seen:
    model = convert(Net(FORWARDS["base_used_inside"]))
    seen: Seen = {}
    x = given().requires_grad_()
    x.register_hook(lambda g: seen.update(x=g))
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.update({name: g}))
        p.register_post_accumulate_grad_hook(
            lambda p, name=name: seen.update({f"{name}.after": p.grad.clone()})
        )
    view, result = model(x)
    view.register_hook(lambda g: seen.update(view=g))
    result.register_hook(lambda g: seen.update(result=g))
    loss_of(view, result).backward()
    return seen


@script
def hooks_on_an_input_handed_back(convert: Convert) -> Seen:
    model = convert(Net(FORWARDS["mul_"]))
    seen: Seen = {}
    written, result = model(given().requires_grad_() * 2)
    written.register_hook(lambda g: seen.update(written=g))
    result.register_hook(lambda g: seen.update(result=g))
    wanted = [written, model.fc.weight]
    found = torch.autograd.grad(loss_of(written, result), wanted)
    return seen | {"asked": found[0], "weight": found[1]}


@script
def hooks_on_the_module(convert: Convert) -> Seen:
    model = convert(Net())
    seen: Seen = {}
    model.register_full_backward_hook(
        lambda _, given, results: seen.update(given=given[0], results=results[0])
    )
    loss_of(model(given().requires_grad_())).backward()
    return grads(model, **seen)


def penalty(order: int) -> Script:
    """A loss that holds derivatives of a reused layer by the input."""

    def run(convert: Convert) -> Seen:
        model = convert(Net(lambda m, x: m.out(m.fc(m.fc(x).tanh()).tanh())))
        x = given().requires_grad_()
        total = value = loss_of(model(x))
        for _ in range(order - 1):
            (slope,) = torch.autograd.grad(value, x, create_graph=True)
            value = (slope.norm(dim=-1) - 1).square().mean()
            total = total + value
        total.backward()
        return grads(model, x=x.grad)

    return run


SCRIPTS |= {"gradient_penalty": penalty(2), "penalty_on_a_penalty": penalty(3)}


# -- kinds of graph --------------------------------------------------------------------


def Sparse(sparse: bool = True) -> Of:
    """A sparse table that is looked up with repeats."""
    return Of(
        lambda m, ids: m.fc(m.table(ids)),
        table=nn.Embedding(WIDTH, WIDTH, sparse=sparse),
        fc=nn.Linear(WIDTH, WIDTH),
    )


@script
def sparse_table(convert: Convert) -> Seen:
    model = convert(Sparse())
    loss_of(model(torch.tensor([1, 3, 3, 0]))).backward()
    assert model.table.weight.grad.is_sparse
    dense = model.table.weight.grad.to_dense()
    return {"table": dense, "fc": model.fc.weight.grad}


@script
def half_and_whole_numbers_given(convert: Convert) -> Seen:
    def forward(m: Net, x: Tensor, low: Tensor, ids: Tensor) -> Tensor:
        return m.out(m.fc(x)[ids] * low.float())

    model = convert(Net(forward))
    low = given(1).half().requires_grad_()
    loss_of(model(given(), low, torch.arange(WIDTH).flip(0))).backward()
    assert low.grad.dtype == torch.float16
    return grads(model, low=low.grad.float())


@script
def across_graph_breaks(convert: Convert) -> Seen:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.fc(x)
        top = h.relu()
        torch._dynamo.graph_break()
        h.mul_(0.5)
        late = m.out(h)
        torch._dynamo.graph_break()
        return late + top.t()

    model = convert(Net(forward))
    loss_of(model(given())).backward()
    return grads(model)


def regions(reentrant: bool) -> Script:
    def run(convert: Convert) -> Seen:
        def region(m: Net, x: Tensor) -> Tensor:
            return functional.dropout(m.fc(x).tanh(), 0.5)

        def forward(m: Net, x: Tensor) -> Tensor:
            return m.out(x + checkpoint(region, m, x, use_reentrant=reentrant))

        model = convert(Net(forward))
        x = given().requires_grad_()
        loss_of(model(x)).backward()
        return grads(model, x=x.grad)

    return run


SCRIPTS |= {"checkpoint": regions(False), "checkpoint_reentrant": regions(True)}


@script
def branch_on_a_value(convert: Convert) -> Seen:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.fc(x)
        y = torch.cond(x.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,))
        return m.out(y)

    model = convert(Net(forward))
    loss_of(model(given())).backward()
    return grads(model)


@script
def copy_that_is_written_and_returned(convert: Convert) -> Seen:
    """A product is of a cast of the copy's source, which may have another layout."""

    def forward(m: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        product = m.fc(y)
        turned = y.t().contiguous().t()
        m.cache.copy_(turned.detach())
        return (turned + m.cache).clamp(max=2).contiguous().relu_(), product

    model, x = convert(Net(forward)), given().requires_grad_()
    result, _ = model(x)
    loss_of(result).backward()
    return grads(model, x=x.grad, result=result.detach())
