"""Random models to convert whole: layers inside layers, as a person would write them.

A model is a tree of layers; a layer is a tuple of its name and, for some, other layers:
`("residual", (("norm",), ("attention",)))`.  It prints as that tree, and hypothesis
shrinks it to the fewest layers that still fail.  Every layer takes (batch, length,
WIDTH) to the same, for any batch and length, and about keeps the scale of what it is
given, so that any tree is a model whose gradients neither die nor explode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH, HEADS, WORDS, CLASSES = 16, 2, 11, 5

Layer = tuple[Any, ...]


def _leaf(function: Callable[[Any, Tensor], Tensor], **parts: Any) -> nn.Module:
    """A layer with no layers inside, of a class whose `forward` is `function`."""
    layer = type("Leaf", (nn.Module,), {"forward": function})()
    for name, part in parts.items():
        if isinstance(part, nn.Parameter) or not isinstance(part, Tensor):
            setattr(layer, name, part)
        else:
            layer.register_buffer(name, part)
    return layer


def _linear(inner: int = WIDTH, outer: int = WIDTH) -> nn.Linear:
    return nn.Linear(inner, outer)


def _attend(m: Any, x: Tensor) -> Tensor:
    shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
    q, k, v = (part.view(shape).transpose(1, 2) for part in m.qkv(x).chunk(3, -1))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(mixed.transpose(1, 2).reshape(x.shape))


def _attend_by_hand(m: Any, x: Tensor) -> Tensor:
    scores = m.q(x) @ m.k(x).transpose(1, 2) / WIDTH**0.5
    ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(ahead, torch.finfo(x.dtype).min)
    return scores.softmax(-1) @ m.v(x)


def _count(m: Any, x: Tensor) -> Tensor:
    m.calls += 1
    with torch.no_grad():
        m.running.lerp_(x.detach().mean((0, 1)), 0.1)
    return x - m.running


def _write(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    y[..., : WIDTH // 2] *= 0.5
    y[:, 0] = x[:, -1]
    return y.add_(x)


def _quiet(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(m.fc(x))
    return x * gate + m.other(x)


def _full(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return m.other(torch.tanh(m.fc(x.to(m.fc.weight.dtype))))


def _branch_on_data(m: Any, x: Tensor) -> Tensor:
    # What decides is far from where it would change its mind, whatever the rounding.
    if x.shape[0] > 0 and m.turn.item() % 2 == 0:
        return m.fc(x)
    return torch.tanh(m.other(x))


def _cond(m: Any, x: Tensor) -> Tensor:
    if x.dtype == torch.float64:  # the oracle, whose modes `cond` cannot run under
        return m.first(x)
    return torch.cond(m.turn % 2 == 0, m.first, m.second, (x,))


def _loop(m: Any, x: Tensor) -> Tensor:
    state = x[:, 0]
    seen = []
    for i in range(3):
        state = torch.tanh(m.fc(state) + m.other(x[:, i % x.shape[1]]))
        seen.append(state)
    return x + torch.stack(seen, 1).mean(1, keepdim=True)


def _gather(m: Any, x: Tensor) -> Tensor:
    order = torch.arange(x.shape[1]).flip(0)
    return m.fc(x)[:, order] + x.index_select(1, order)


def _reduce(m: Any, x: Tensor) -> Tensor:
    y = m.fc(x)
    centred = y - y.mean(-1, keepdim=True)
    return centred + y.amax(1, keepdim=True) - y.logsumexp(-1)[..., None]


def _layer(
    function: Callable[[Any, Tensor], Tensor], names: str = "fc", **more: Any
) -> Any:
    """Makes a leaf of linear layers of these names, and of what `more` makes."""

    def make() -> nn.Module:
        parts = {name: _linear() for name in names.split()}
        return _leaf(function, **parts, **{n: part() for n, part in more.items()})

    return make


def _turned(kind: Callable[[], nn.Module]) -> Any:
    """A layer of torch's that has its channels before its length."""
    return _layer(lambda m, x: m.of(x.transpose(1, 2)).transpose(1, 2), "", of=kind)


def _zero() -> Tensor:
    return torch.zeros(())


LEAVES: dict[str, Callable[[], nn.Module]] = {
    "linear": _linear,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "rms_norm": lambda: nn.RMSNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "feed_forward": _layer(
        lambda m, x: m.down(functional.gelu(m.up(x))),
        "",
        up=lambda: _linear(WIDTH, 4 * WIDTH),
        down=lambda: _linear(4 * WIDTH, WIDTH),
    ),
    "attention": _layer(_attend, "out", qkv=lambda: _linear(WIDTH, 3 * WIDTH)),
    "attention_by_hand": _layer(_attend_by_hand, "q k v"),
    "conv": _turned(lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "batch_norm": _turned(lambda: nn.BatchNorm1d(WIDTH)),
    "group_norm": _turned(lambda: nn.GroupNorm(4, WIDTH)),
    "image": _layer(
        lambda m, x: m.norm(m.conv(x.unsqueeze(1))).mean(1),
        "",
        conv=lambda: nn.Conv2d(1, 4, 3, padding=1),
        norm=lambda: nn.BatchNorm2d(4),
    ),
    "lstm": _layer(
        lambda m, x: m.of(x)[0],
        "",
        of=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    ),
    "tied": _layer(
        lambda m, x: m.fc(torch.tanh(functional.linear(x, m.fc.weight.t())))
    ),
    "count": _layer(
        _count,
        "",
        running=lambda: torch.zeros(WIDTH),
        calls=lambda: torch.zeros((), dtype=torch.long),
    ),
    "write": _layer(_write),
    "quiet": _layer(_quiet, "fc other"),
    "full": _layer(_full, "fc other"),
    "user_low": _layer(lambda m, x: m.fc(x).to(torch.bfloat16).to(x.dtype) + x),
    "user_double": _layer(
        lambda m, x: m.fc(x).double().softmax(-1).to(x.dtype) * WIDTH**0.5
    ),
    "branch_on_data": _layer(_branch_on_data, "fc other", turn=_zero),
    "cond": _layer(_cond, "first second", turn=_zero),
    "loop": _layer(_loop, "fc other"),
    "look_up": _layer(
        lambda m, x: x + m.table(torch.arange(x.shape[1]) % WORDS),
        "",
        table=lambda: nn.Embedding(WORDS, WIDTH),
    ),
    "choose": _layer(lambda m, x: torch.where(m.fc(x) > 0, x, m.other(x)), "fc other"),
    "gather": _layer(_gather),
    "reduce": _layer(_reduce),
    "low_rank": _layer(
        lambda m, x: torch.einsum("bld,dr,re->ble", x, m.left, m.left.t()) / 2,
        "",
        left=lambda: nn.Parameter(torch.randn(WIDTH, 4) / 2),
    ),
}


class Nested(nn.Module):
    """A layer made of layers, which it calls in one of several ways."""

    def __init__(self, how: str, layers: tuple[Layer, ...]) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(build(layer) for layer in layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "residual":
            return x + self.chain(x)
        if self.how == "repeat":
            return self.chain(self.chain(x))
        if self.how == "parallel":
            return sum(layer(x) for layer in self.layers) / len(self.layers) ** 0.5
        if self.how == "gated":
            return torch.sigmoid(x) * self.chain(x)
        if self.how == "checkpoint" and self.training:
            return checkpoint(self.chain, x, use_reentrant=False)
        return self.chain(x)

    def chain(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


NESTINGS = ("residual", "parallel", "repeat", "gated", "checkpoint")


def build(layer: Layer) -> nn.Module:
    name, *inside = layer
    return Nested(name, inside[0]) if inside else LEAVES[name]()


@dataclass
class Outcome:
    """One of the ways a model returns what it has found."""

    logits: Tensor
    hidden: Tensor
    best: Tensor


torch.utils._pytree.register_dataclass(Outcome)

RETURNS = ("tensor", "tuple", "dict", "dataclass", "loss")


class Model(nn.Module):
    """Words to vectors, the layers, a head whose weight may be the table's."""

    def __init__(self, layers: tuple[Layer, ...], returns: str, shared: bool) -> None:
        super().__init__()
        self.tree, self.returns, self.shared = layers, returns, shared
        self.table = nn.Embedding(WORDS, WIDTH)
        self.body = Nested("chain", layers)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        if shared:
            self.head.weight = self.table.weight

    def forward(self, words: Tensor, values: Tensor) -> Any:
        hidden = self.norm(self.body(self.table(words) + values))
        logits = self.head(hidden)
        best = logits.argmax(-1)
        if self.returns == "tensor":
            return logits
        if self.returns == "tuple":
            return logits, [hidden, best]
        if self.returns == "dict":
            return {"logits": logits, "pooled": hidden.mean(1), "best": best}
        if self.returns == "dataclass":
            return Outcome(logits, hidden, best)
        return functional.cross_entropy(logits.flatten(0, 1), words.flatten())

    def __repr__(self) -> str:
        return f"Model({self.tree!r}, {self.returns!r}, shared={self.shared})"


def trees() -> st.SearchStrategy[tuple[Layer, ...]]:
    leaf = st.tuples(st.sampled_from(list(LEAVES)))

    def nested(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        some = st.lists(inside, min_size=1, max_size=3).map(tuple)
        return st.tuples(st.sampled_from(NESTINGS), some)

    layers = st.recursive(leaf, nested, max_leaves=6)
    return st.lists(layers, min_size=1, max_size=5).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A model with weights that are the same for the same tree."""
    tree = draw(trees())
    returns, shared = draw(st.sampled_from(RETURNS)), draw(st.booleans())
    torch.manual_seed(draw(st.integers(0, 99)))
    return Model(tree, returns, shared)


def batch(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Words, and vectors that go with them."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (rows, length), generator=generator)
    return words, torch.randn(rows, length, WIDTH, generator=generator)
