"""Eight scripts in the style of real projects, in fp32, bf16 and fp16.

Each is trained as people write it; converted, its losses follow those of fp32 as far as
the digits of the compute dtype go, and its products run low, by count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autoamp
from tests.small_models import Of

Convert = Callable[..., nn.Module]
"""Converts a model, given the optimizers of its script; or leaves it, for fp32."""

STEPS = 6
EPS = {"bf16": 2.0**-8, "fp16": 2.0**-11}


Script = Callable[[Convert], Iterator[Tensor]]
"""Gives the loss of each step of one training."""

SCRIPTS: dict[Script, int] = {}
"""How many matrix products, convolutions, attention and recurrent ops each has."""


def script(products: int) -> Callable[[Script], Script]:
    def note(losses: Script) -> Script:
        SCRIPTS[losses] = products
        return losses

    return note


def learn(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(*shape: int, below: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, below, shape, generator=generator)


# -- a mean teacher, whose weights are swapped in between forward and backward ---------


class Average:
    """Keeps an average of weights, and lends it to the model by `.data`."""

    def __init__(self, model: nn.Module) -> None:
        self.kept = [p.detach().clone() for p in model.parameters()]

    def update(self, model: nn.Module) -> None:
        for kept, p in zip(self.kept, model.parameters(), strict=True):
            kept.lerp_(p.detach(), 0.1)

    def call(self, model: nn.Module, x: Tensor) -> Tensor:
        own = [p.data.clone() for p in model.parameters()]
        for kept, p in zip(self.kept, model.parameters(), strict=True):
            p.data.copy_(kept)
        with torch.no_grad():
            result: Tensor = model(x)
        for saved, p in zip(own, model.parameters(), strict=True):
            p.data.copy_(saved)
        return result


@script(2)
def mean_teacher(convert: Convert) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    average = Average(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = convert(model, optimizer)
    for step in range(STEPS):
        x, wanted = data(16, 8, seed=step), data(16, 4, seed=100 + step)
        found = model(x)
        taught = average.call(model, x + 0.1)
        loss = functional.mse_loss(found, wanted) + functional.mse_loss(found, taught)
        learn(optimizer, loss)
        average.update(model)
        yield loss


# -- a soft prompt before a frozen model -----------------------------------------------


def attend(m: nn.Module, x: Tensor) -> Tensor:
    split = (*x.shape[:2], 2, x.shape[2] // 2)
    q, k, v = (p.view(split).transpose(1, 2) for p in m.qkv(x).chunk(3, -1))
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + m.out(y.transpose(1, 2).reshape(x.shape))
    return m.head(m.norm(x).mean(1))


def encoder() -> nn.Module:
    parts = {"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16)}
    return Of(attend, **parts, norm=nn.LayerNorm(16), head=nn.Linear(16, 3))


@script(4)
def soft_prompt(convert: Convert) -> Iterator[Tensor]:
    model = encoder().requires_grad_(False)
    prompt = nn.Parameter(data(4, 16, seed=9))
    optimizer = torch.optim.Adam([prompt], lr=0.1)
    model = convert(model, optimizer)
    for step in range(STEPS):
        x, wanted = data(8, 5, 16, seed=step), tokens(8, below=3, seed=step)
        joined = torch.cat([prompt.expand(8, -1, -1), x], dim=1)
        loss = functional.cross_entropy(model(joined), wanted)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_([prompt], 0.5)
        optimizer.step()
        yield loss


# -- an optimizer for each parameter, stepped in the backward --------------------------


@script(3)
def steps_in_backward(convert: Convert) -> Iterator[Tensor]:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)
    )
    optimizers = {
        p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()
    }
    model = convert(model, *optimizers.values())

    def step_one(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(step_one)
    for step in range(STEPS):
        x, wanted = data(16, 8, seed=step), data(16, 2, seed=50 + step)
        loss = functional.mse_loss(model(x), wanted)
        loss.backward()
        yield loss


# -- a regressor on raw features, that denormalises what it predicts -------------------


def regressor() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        y = m.out(functional.silu(m.hidden(m.norm(x))))
        return y * m.spread + m.mean

    layers = {"norm": nn.BatchNorm1d(8), "hidden": nn.Linear(8, 16)}
    scale = {"mean": torch.tensor(250_000.0), "spread": torch.tensor(40_000.0)}
    return Of(forward, **layers, out=nn.Linear(16, 1), **scale)


@script(2)
def prices(convert: Convert) -> Iterator[Tensor]:
    model = regressor()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model = convert(model, optimizer)
    for step in range(STEPS):
        x = data(32, 8, seed=step) * 500 + 1e4
        wanted = 250_000 + 40 * (x.mean(1, keepdim=True) - 1e4)
        loss = functional.l1_loss(model(x), wanted) / 40_000
        yield learn(optimizer, loss)


# -- sentences of several lengths ------------------------------------------------------


def tag(m: nn.Module, words: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(
        m.table(words), lengths, batch_first=True, enforce_sorted=False
    )
    seen, _ = pad_packed_sequence(m.layer(packed)[0], batch_first=True)
    return m.head(seen)


@script(2)
def tags(convert: Convert) -> Iterator[Tensor]:
    table = nn.Embedding(20, 16, padding_idx=0)
    layer = nn.GRU(16, 16, batch_first=True, bidirectional=True)
    model = Of(tag, table=table, layer=layer, head=nn.Linear(32, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model = convert(model, optimizer)
    for step in range(STEPS):
        lengths = tokens(6, below=8, seed=step) + 2
        most = int(lengths.max())
        words = tokens(6, most, below=19, seed=step) + 1
        logits = model(words, lengths)
        inside = torch.arange(most) < lengths[:, None]
        loss = functional.cross_entropy(logits[inside], (words % 5)[inside])
        yield learn(optimizer, loss)


# -- a recurrence written with while_loop ----------------------------------------------


def loop(m: nn.Module, x: Tensor, steps: Tensor) -> Tensor:
    def goes_on(i: Tensor, h: Tensor) -> Tensor:
        return i < steps

    def body(i: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(m.cell(h))

    start = torch.zeros((), dtype=torch.int64)
    _, h = torch._higher_order_ops.while_loop(goes_on, body, (start, m.into(x)))
    return m.out(h)


@script(3)
def loops(convert: Convert) -> Iterator[Tensor]:
    model = Of(loop, into=nn.Linear(4, 8), cell=nn.Linear(8, 8), out=nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model = convert(model, optimizer)
    for step in range(STEPS):
        loss = functional.mse_loss(
            model(data(8, 4, seed=step), torch.tensor(3)), data(8, 1, seed=step)
        )
        yield learn(optimizer, loss)


# -- weights that are put away between steps -------------------------------------------


@script(2)
def offloaded(convert: Convert) -> Iterator[Tensor]:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model = convert(model, optimizer)
    weights = list(model.parameters())
    away: list[Tensor] = []
    for step in range(STEPS):
        for p, kept in zip(weights, away, strict=False):
            p.untyped_storage().resize_(kept.numel() * kept.element_size())
            p.data.copy_(kept)
        x, wanted = data(16, 8, seed=step), data(16, 2, seed=70 + step)
        loss = functional.mse_loss(model(x), wanted)
        learn(optimizer, loss)
        away = [p.detach().clone() for p in weights]
        for p in weights:
            p.untyped_storage().resize_(0)
        yield loss


# -- a model called by its methods -----------------------------------------------------


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        return mean, log_variance

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)


@script(3)
def by_methods(convert: Convert) -> Iterator[Tensor]:
    model: Any = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model = convert(model, optimizer)
    for step in range(STEPS):
        x = data(16, 8, seed=step)
        mean, log_variance = model.encode(x)
        noise = data(16, 4, seed=200 + step)
        found = model.decode(mean + noise * (0.5 * log_variance).exp())
        divergence = mean.square() + log_variance.exp() - 1 - log_variance
        loss = functional.mse_loss(found, x) + 0.05 * divergence.mean()
        yield learn(optimizer, loss)


def run(script: Script, convert: Convert) -> list[float]:
    torch.manual_seed(3)
    return [float(loss.detach()) for loss in script(convert)]


def left_alone(model: nn.Module, *_: torch.optim.Optimizer) -> nn.Module:
    return model


def runs() -> Iterator[Any]:
    """Every script in both; the long ones in fp16 only among the slow tests."""
    for each in SCRIPTS:
        for precision in EPS:
            long = each in (tags, loops) and precision == "fp16"
            marks = [pytest.mark.slow] if long else []
            label = f"{each.__name__}-{precision}"
            yield pytest.param(each, precision, marks=marks, id=label)


@pytest.mark.thorough(but=["soft_prompt-bf16", "by_methods-fp16"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.parametrize(("script", "precision"), list(runs()))
def test_follows_fp32_and_is_active(script: Script, precision: str) -> None:
    converted: list[nn.Module] = []

    def convert(model: nn.Module, *optimizers: torch.optim.Optimizer) -> nn.Module:
        options = {"precision": precision, "do_no_harm": False}
        converted.append(autoamp.convert(model, **options))
        return converted[-1]

    ours, true = run(script, convert), run(script, left_alone)
    for found, wanted in zip(ours, true, strict=True):
        assert math.isfinite(found)
        # A step rounds what goes into a product and what comes out, forward and
        # backward, and the next ones carry that on.
        assert found == pytest.approx(wanted, rel=4 * STEPS * EPS[precision])
    products = {
        (place, row.op, row.module, row.source, row.is_low)
        for place, model in enumerate(converted)
        for row in autoamp.report(model).ops
        if row.op.removeprefix("aten::").partition(".")[0] in _PRODUCTS
    }
    assert [low for *_, low in products] == [True] * SCRIPTS[script]
    coverages = [autoamp.report(model).coverage for model in converted]
    assert all(c is not None and c.calls and not c.calls_aside for c in coverages)


_PRODUCTS = ("linear", "matmul", "scaled_dot_product_attention", "gru")
