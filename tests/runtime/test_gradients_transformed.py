"""Every function and op of ours under every transform of torch's that fp32 code takes.

One table of small models holds each function that a rewritten graph calls.  Each way of
`WAYS` is tried on each model: the numbers are those of fp32 code, rounded.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.passes import functions
from autoamp.passes.functions import FOR_COMPILERS, LEAF_FUNCTIONS, MESH_CALLS
from autoamp.runtime.conversion import conversion_of
from tests.quick import one_in
from tests.small_models import Of

WIDTH = 8
ROUNDINGS = 36
"""Four products, each with two operands and a result, in the forward, in the backward
and in the backward of that.  A loss scale that is missing is an error of 3 or 0.75."""

TORCHS_OWN = {("bf16-batch", "per_sample")}
"""Under autocast, which stands in there, torch raises an error as well."""


class Attention(nn.Module):
    """`kind` says how the scores are changed, or that attention is written out."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.kind == "written":
            found = scores.masked_fill(later, -1e9).softmax(-1) @ v
        elif self.kind == "softmax":
            found = (scores.softmax(-1) * 1.5).tanh() @ v
        else:
            given = {"causal": {"is_causal": True}, "mask": {"attn_mask": ~later}}
            found = functional.scaled_dot_product_attention(
                *(q, k, v), **given.get(self.kind, {})
            )
        return self.out(found.transpose(1, 2).flatten(2))


def two_layers(between: Callable[[Tensor], Tensor]) -> nn.Module:
    return Of(
        lambda m, x: m.out(between(m.enter(x))),
        enter=nn.Linear(WIDTH, WIDTH),
        out=nn.Linear(WIDTH, WIDTH),
    )


def alike(h: Tensor) -> Tensor:
    """Attention of one tensor, which is query, key and value."""
    h = h[:, None]
    return (h @ h.mT).softmax(-1) @ h


def turned(h: Tensor) -> Tensor:
    angles = torch.arange(h.shape[1])[:, None] / 10 ** torch.arange(WIDTH)
    first, second = h.chunk(2, -1)
    return h * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def summed(h: Tensor) -> Tensor:
    """Rows of a graph network, sent along edges."""
    rows = torch.zeros(h.shape, dtype=torch.float32)
    return rows.index_add(1, torch.tensor([0, 2, 0]), h.float())


def summed_up(h: Tensor) -> Tensor:
    """The same, in place."""
    rows = torch.zeros(h.shape, dtype=torch.float32)
    return rows.index_add_(1, torch.tensor([0, 2, 0]), h.float())


class Recurrent(nn.Module):
    def __init__(
        self, kind: type[nn.Module], *, packed: bool = False, **given: Any
    ) -> None:
        super().__init__()
        self.packed = packed
        self.inner = kind(WIDTH, WIDTH, **given)
        self.out = nn.Linear(WIDTH * (1 + ("bidirectional" in given)), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed:
            x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2, 1]))
            return self.out(self.inner(x)[0].data)
        if isinstance(self.inner, nn.RNNCellBase):
            found = self.inner(x[0])
            return self.out(found[0] if isinstance(found, tuple) else found)
        return self.out(self.inner(x)[0])


def checkpointed() -> nn.Module:
    return Of(
        lambda m, x: m.out(checkpoint(m.inner, x, use_reentrant=False)),
        inner=Attention("written"),
        out=nn.Linear(WIDTH, WIDTH),
    )


class Several(nn.Module):
    """A value that several products read, and a weight that is used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = (x * 1.5).tanh().cumsum(-1)
        found = sum(layer(h) for layer in self.some)
        return self.some[0](found).tanh() + h


def between(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *norm, nn.Linear(WIDTH, WIDTH))


def convolutions(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3))


class Row(NamedTuple):
    """A model, the shape of its input, and what of ours its graph calls."""

    build: Callable[[], nn.Module]
    calls: str = ""
    shape: tuple[int, ...] = (2, 3, WIDTH)


IMAGE, THREE = (2, 3, 8, 8), (3, 3, WIDTH)
TABLE = {
    "attention": Row(Attention, "attention unscale_grad scaled_result"),
    "causal": Row(lambda: Attention("causal"), "attention"),
    "mask": Row(lambda: Attention("mask"), "attention"),
    "written": Row(lambda: Attention("written")),
    "softmax": Row(lambda: Attention("softmax")),
    "alike": Row(lambda: two_layers(alike)),
    "summed": Row(lambda: two_layers(summed), "index_add"),
    "summed up": Row(lambda: two_layers(summed_up), "index_add_"),
    "turned": Row(lambda: two_layers(turned), "rotary"),
    "layer": Row(lambda: between(nn.LayerNorm(WIDTH)), "layer_norm"),
    "rms": Row(lambda: between(nn.RMSNorm(WIDTH)), "rms_norm"),
    "batch": Row(lambda: convolutions(nn.BatchNorm2d(4)), "", IMAGE),
    "group": Row(lambda: convolutions(nn.GroupNorm(2, 4)), "", IMAGE),
    "instance": Row(lambda: convolutions(nn.InstanceNorm2d(4, affine=True)), "", IMAGE),
    "gelu": Row(lambda: between(nn.GELU(), nn.PReLU())),
    "several": Row(Several, "low_uses scale_grad"),
    "gru": Row(lambda: Recurrent(nn.GRU), "gru_fp32_state"),
    "lstm": Row(lambda: Recurrent(nn.LSTM)),
    "gru packed": Row(
        lambda: Recurrent(nn.GRU, packed=True), "gru_data_fp32_state", THREE
    ),
    "lstm packed": Row(
        lambda: Recurrent(nn.LSTM, packed=True), "lstm_data_fp32_state", (3, 3, WIDTH)
    ),
    "lstm both ways": Row(
        lambda: Recurrent(nn.LSTM, bidirectional=True), "lstm_fp32_state"
    ),
    "rnn both ways": Row(
        lambda: Recurrent(nn.RNN, bidirectional=True), "rnn_tanh_fp32_state"
    ),
    "rnn packed": Row(
        lambda: Recurrent(nn.RNN, packed=True, bidirectional=True),
        "rnn_tanh_data_fp32_state",
        THREE,
    ),
    "rnn relu": Row(lambda: Recurrent(nn.RNN, bidirectional=True, nonlinearity="relu")),
    "gru cell": Row(lambda: Recurrent(nn.GRUCell), "gru_cell_fp32_state"),
    "lstm cell": Row(lambda: Recurrent(nn.LSTMCell), "lstm_cell_fp32_state"),
    "checkpoint": Row(checkpointed, "checkpointed"),
}


def direct(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: call(x.bfloat16()).float()


def filtered(conv1d: Any) -> Callable[[Tensor], Tensor]:
    """Channels filtered by numbers of the first image: both operands are trained."""
    return lambda x: conv1d(x, x[0, :, None, :5], None, [1], [2], [1], 3)


def noted_sine(low: Tensor) -> Tensor:
    sine = torch.sin(low)
    again = functions.noted(sine, torch.ops.aten.sin.default, low)
    return functions.made_again(torch.ops.aten.square.default, (again,), sine)


ONE, NONE_YET = torch.ones(()), torch.zeros(1)
DIRECT: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": direct(lambda low: functions.softmax(low, -1)),
    "depthwise": direct(filtered(functions.depthwise)),
    "saturating_cast": direct(lambda low: functions.saturating_cast(low, low.dtype)),
    "low_weight": lambda x: functions.low_weight(x, x.detach().bfloat16()).float(),
    "low_weight_unscaled": lambda x: functions.low_weight_unscaled(
        x, x.detach().bfloat16(), ONE, NONE_YET
    ).float(),
    "low_weights": lambda x: functions.low_weights(x, x.detach().bfloat16())[0].float(),
    "low_weights_unscaled": lambda x: functions.low_weights_unscaled(
        ONE, NONE_YET, x, x.detach().bfloat16()
    )[0].float(),
    "unscaled_weights": lambda x: functions.unscaled_weights(ONE, NONE_YET, x)[0] * 1,
    "unscale_half": direct(lambda low: functions.unscale_half(low, ONE, NONE_YET)),
    "unscale_grad_": lambda x: functions.unscale_grad_(x * 1, ONE, NONE_YET) * 1,
    "laid_out": lambda x: functions.laid_out(
        x[:, :, None], torch.channels_last, torch.contiguous_format
    ),
    "product": direct(
        lambda low: functions.product(
            low, torch.eye(WIDTH), torch.eye(WIDTH).bfloat16()
        )
    ),
    "made_again": direct(noted_sine),
    "with_dtypes": lambda x: functions.with_dtypes(x, [torch.bfloat16]).float(),
}
"""Functions that a GPU's graphs call, or few graphs, by themselves."""

ELSEWHERE = {
    *(function.__name__ for function in MESH_CALLS.values()),
    "noted",  # is called by the row of `made_again`
    *("gather_low", "gathered_low"),  # torch transforms no gradients of DTensors
    *(function.__name__ for function in FOR_COMPILERS.values()),
    *("traced_attention", "traced_scale_grad_", "traced_scale_grad_apart"),
    *("rnn_relu_fp32_state", "rnn_relu_data_fp32_state"),  # in bf16 alone: "rnn relu"
}
"""Functions of meshes; and what AOT autograd traces, which never runs by itself."""

OPS = {
    f"autoamp::{name}"
    for name in ("from_local", "to_local", "redistribute", "attention_backward")
}


def test_the_table_has_every_function() -> None:
    known = {name for row in TABLE.values() for name in row.calls.split()}
    known |= DIRECT.keys() | ELSEWHERE
    assert {function.__name__ for function in LEAF_FUNCTIONS} <= known
    names = torch._C._dispatch_get_all_op_names()
    assert {name for name in names if name.startswith("autoamp::")} == OPS
    homes = {function.__module__ for function in LEAF_FUNCTIONS}
    homes |= {"autoamp.passes.functions.attention"}  # of the op, which the table has
    homes |= {"autoamp.passes.functions.norms"}
    # It runs the users' own Functions (tests/whole/test_higher_derivatives.py).
    homes |= {"autoamp.compat.custom_functions"}
    assert {each.__module__ for each in functions_of_autograd()} <= homes


def functions_of_autograd() -> Iterator[type]:
    left = [torch.autograd.Function]
    while left:
        each = left.pop()
        left += each.__subclasses__()
        if each.__module__.startswith("autoamp."):
            yield each


# -- ways to differentiate -----------------------------------------------------------


def parameters(call: Any) -> list[Tensor]:
    return [*call.parameters()] if isinstance(call, nn.Module) else []


def some(call: Any, x: Tensor) -> Tensor:
    return call(x).flatten()[:3]  # type: ignore[no-any-return]


def together(given: Any) -> Tensor:
    return torch.cat([each.detach().flatten() for each in given if each is not None])


def batched(call: Any, x: Tensor, *, again: bool = False) -> Tensor:
    given = [x, *parameters(call)]
    found = torch.autograd.grad(
        *(some(call, x), given, torch.eye(3)),
        is_grads_batched=True,
        create_graph=again,
        allow_unused=True,
    )
    return differentiated(found, given) if again else together(found)


def mapped(call: Any, x: Tensor, *, again: bool = False) -> Tensor:
    y, given = some(call, x), [x, *parameters(call)]

    def pull(seed: Tensor) -> Any:
        keep = {"retain_graph": True, "create_graph": again}
        return tuple(torch.autograd.grad(y, given, seed, **keep))

    found = vmap(pull)(torch.eye(3))
    return differentiated(found, given) if again else together(found)


def differentiated(found: Any, given: list[Tensor]) -> Tensor:
    loss = sum(each.square().sum() for each in found if each is not None)
    if not loss.requires_grad:
        return together(found)
    return together([*found, *torch.autograd.grad(loss, given, allow_unused=True)])


def again(way: Callable[..., Tensor]) -> Callable[[Any, Tensor], Tensor]:
    """The gradients, and those of a loss of the gradients."""
    twice = functools.partial(way, again=True)
    twice.__name__ = f"{way.__name__} again"  # type: ignore[attr-defined]
    return twice


def seeds_in_reverse(call: Any, x: Tensor) -> Tensor:
    y = some(call, x)
    pull = lambda seed: torch.autograd.grad(y, x, seed, create_graph=True)[0]  # noqa: E731
    return jacrev(pull)(torch.ones(3))


def seeds_forward(call: Any, x: Tensor) -> Tensor:
    y, one = some(call, x), torch.ones(3)
    return jvp(lambda seed: torch.autograd.grad(y, x, seed)[0], (one,), (one,))[1]


def reverse(call: Any, x: Tensor) -> Tensor:
    return jacrev(lambda given: some(call, given))(x)


def kernel(call: Any, x: Tensor) -> Tensor:
    by = lambda given: some(lambda x: functional_call(call, given, (x,)), x)  # noqa: E731
    return together(jacrev(by)(dict(call.named_parameters())).values())


def per_sample(call: Any, x: Tensor) -> Tensor:
    def loss(given: Any, row: Tensor) -> Tensor:
        return functional_call(call, given, (row[None],)).square().mean()

    given = {name: each.detach() for name, each in call.named_parameters()}
    return together(vmap(grad(loss), (None, 0))(given, x.detach()).values())


def dual(call: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        pair = forward_ad.make_dual(x.detach(), torch.ones_like(x))
        return forward_ad.unpack_dual(call(pair)).tangent


def penalty(call: Any, x: Tensor) -> Tensor:
    given = [x, *parameters(call)]
    (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
    return together(
        torch.autograd.grad((slope.norm() - 1) ** 2, given, allow_unused=True)
    )


def copied(call: Any, x: Tensor) -> Tensor:
    return batched(copy.deepcopy(call), x)


def recomputed(call: Any, x: Tensor) -> Tensor:
    outer = lambda x: checkpoint(call, x, use_reentrant=False)  # noqa: E731
    return mapped(outer, x)


def recomputed_by_reentry(call: Any, x: Tensor) -> Tensor:
    y = checkpoint(call, x, use_reentrant=True).square().mean()
    y.backward(inputs=None)
    found = together([x.grad, *(each.grad for each in call.parameters())])
    x.grad = None
    call.zero_grad()
    return found


OF_GRADIENTS = [
    *(batched, mapped, again(batched), again(mapped)),
    *(seeds_in_reverse, seeds_forward),
]
WAYS = [
    *OF_GRADIENTS,
    *(reverse, kernel, per_sample, dual, penalty),
    *(copied, recomputed, recomputed_by_reentry),
]


def outcome(way: Callable[[Any, Tensor], Tensor], call: Any, x: Tensor) -> Any:
    """The numbers, or the error."""
    torch.manual_seed(1)
    try:
        return way(call, x).detach()
    except (RuntimeError, ValueError) as raised:
        return raised


def wrong(call: Any, exact: Any, x: Tensor, ways: Any = WAYS) -> Iterator[str]:
    """The ways whose results are not those of `exact`, but for roundings."""
    for way in ways:
        expected = outcome(way, exact, x)
        if isinstance(expected, Exception):
            continue  # torch cannot do that in fp32
        found = outcome(way, call, x)
        if isinstance(found, Exception):
            yield f"{way.__name__}: {found}"
        elif not (found - expected).norm() <= ROUNDINGS * 2**-8 * expected.norm():
            yield f"{way.__name__}: {(found - expected).norm() / expected.norm()}"


def called(model: nn.Module) -> Iterator[str]:
    """The names of our functions and ops that the graphs of a model call."""
    state: Any = conversion_of(model)
    for graph in state.engine.record.graphs:
        for inner in graph.prepared.gm.modules():
            if isinstance(inner, fx.GraphModule):
                for node in inner.graph.nodes:
                    if node.target in LEAF_FUNCTIONS:
                        yield node.target.__name__
                    elif str(node.target).startswith("autoamp."):
                        yield str(node.target).removesuffix(".default")


KNOWN = [
    "ignore:.*torch.jit.*:DeprecationWarning",  # torch's own, in forward-mode AD
    "ignore:There is a performance drop:UserWarning",
    "ignore:None of the inputs have requires_grad:UserWarning",
]


@pytest.mark.parametrize(
    ("precision", "name"),
    one_in(
        3,
        product(["bf16", "fp16"], TABLE),
        lambda case: (case[0] == "fp16") == bool(TABLE[case[1]].calls),
    ),
)
@pytest.mark.filterwarnings(*KNOWN)
def test_every_function_under_every_transform(precision: str, name: str) -> None:
    """CI has all models that call ours in fp16, which scales, and a third in bf16."""
    torch.manual_seed(0)
    row = TABLE[name]
    exact = row.build().train(precision == "fp16")
    model = copy.deepcopy(exact)
    scale = {"loss_scale": 4.0} if precision == "fp16" else {}
    autoamp.convert(model, precision=precision, do_no_harm=False, **scale)
    x = torch.randn(row.shape, requires_grad=True)
    but = {way for case, way in TORCHS_OWN if case == f"{precision}-{name}"}
    ways = [way for way in WAYS if way.__name__ not in but]
    assert [*wrong(model, exact, x, ways)] == []
    assert precision == "bf16" or {*row.calls.split()} <= {*called(model)}


def dropped(m: Any, x: Tensor) -> Tensor:
    q, k, v = functional.linear(x, m.layer.in_proj_weight).chunk(3, -1)
    found = functional.scaled_dot_product_attention(q, k.float(), v, dropout_p=0.5)
    return m.layer.out_proj(found)  # type: ignore[no-any-return]


@pytest.mark.parametrize("whole", [True, False])
def test_attention_with_dropout_in_torch_func(whole: bool) -> None:
    """Torch makes it of plain products there; a whole layer runs in fp32."""
    layer = nn.MultiheadAttention(WIDTH, 2, 0.5, batch_first=True)
    torchs = lambda m, x: m.layer(x, x, x, need_weights=False)[0]  # noqa: E731
    model, x = Of(torchs if whole else dropped, layer=layer), torch.randn(2, 5, WIDTH)
    weights = dict(model.named_parameters())

    def gradients() -> Any:
        torch.manual_seed(1)
        call = lambda w: functional_call(model, w, (x,)).square().mean()  # noqa: E731
        return grad(call)(weights)

    wide = gradients()
    autoamp.convert(model, precision="bf16", do_no_harm=False)
    low = gradients()
    assert any(not torch.equal(low[name], wide[name]) for name in wide) != whole
    for name in wide:
        error = (low[name] - wide[name]).norm() / wide[name].norm().clamp(min=1e-3)
        assert error < 2**-5, name


@pytest.mark.parametrize("name", DIRECT)
@pytest.mark.filterwarnings(*KNOWN)
def test_a_function_by_itself(name: str) -> None:
    plain = {"softmax": lambda x: x.softmax(-1), "laid_out": lambda x: x[:, :, None]}
    plain["depthwise"] = filtered(functional.conv1d)
    plain["made_again"] = lambda x: x.sin().square()
    exact = plain.get(name, lambda x: x * 1)
    x = torch.randn(2, 3, WIDTH).bfloat16().float().requires_grad_()
    assert [*wrong(DIRECT[name], exact, x, OF_GRADIENTS)] == []
