"""What a user does with a model on a GPU, end to end; on a CPU too, but slowly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import autoamp
from autoamp.passes.speeds import speeds
from autoamp.passes.speeds.speeds import SWITCH
from benchmarks.errors import relative_error

pytestmark = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode",
    "ignore:.*TensorFloat32 tensor cores",
)
LOWS = {"bf16": torch.bfloat16, "fp16": torch.float16}
both = pytest.mark.parametrize("precision", LOWS)
ALL: dict[str, Any] = {"do_no_harm": False, "strict": True}
WIDTH, HEADS, DEPTH = 64, 4, 10


def near(precision: str) -> float:
    """Three standard deviations of the roundings of `Net`: `DEPTH` calls run low.

    Each rounds its input and its output by half an eps at most, forward and backward.
    """
    eps = torch.finfo(LOWS[precision]).eps
    return float(3 * (4 * DEPTH) ** 0.5 * eps / 2)


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def where(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the model is; tensors are made on the CPU by default, as in scripts."""
    yield request.param
    if request.param == "cuda":
        torch.cuda.set_sync_debug_mode("default")


class Block(nn.Module):
    """Attention and a feed-forward net, each after a norm and round a residual."""

    def __init__(self, dropout: float = 0.0, *, again: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout, self.again = dropout, again

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.again and torch.is_grad_enabled():
            done: Tensor = checkpoint(self.run, x, mask, use_reentrant=False)
            return done
        return self.run(x, mask)

    def run(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        p = self.dropout if self.training else 0.0
        causal = mask is None
        seen = F.scaled_dot_product_attention(q, k, v, mask, p, is_causal=causal)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        wide = F.dropout(F.gelu(self.up(self.norms[1](x))), self.dropout, self.training)
        return x + self.down(wide)


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, **kind: Any) -> None:
        super().__init__()
        self.tokens = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList(Block(**kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(x)
        return logits


class Images(nn.Module):
    """Convolutions, batch norms and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(a, b, 3, 2, 1) for a, b in ((3, 32), (32, 64))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (32, 64))
        self.head = nn.Linear(64, 128)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).relu()
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def ids(where: str, seed: int = 0, length: int = 32) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randint(0, 128, (8, length), generator=made).to(where)


def pixels(where: str, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(8, 3, 32, 32, generator=made).to(where)


def loss_of(model: nn.Module, x: Tensor, *more: Any) -> Tensor:
    logits = model(x, *more).float()
    target = x if logits.dim() == 3 else torch.arange(len(x), device=x.device)
    return F.cross_entropy(logits.reshape(-1, 128), target.reshape(-1))


def gradients(model: nn.Module, *given: Any, scale: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    (loss_of(model, *given) * scale).backward()
    found = [p.grad / scale for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def under_autocast(model: nn.Module, where: str, low: torch.dtype) -> nn.Module:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, *given: Any) -> Any:
            with torch.autocast(where, low):
                return self.inner(*given)

    return Inside()


def converted(model: nn.Module, precision: str, **options: Any) -> Any:
    if precision == "fp16":
        options.setdefault("loss_scale", 256.0)
    return autoamp.convert(model, precision=precision, **{**ALL, **options})


def no_worse(make: Callable[[], nn.Module], where: str, low: str, *given: Any) -> None:
    """Gradients are at most as far from fp32's as those under autocast."""
    torch.manual_seed(0)
    model = make().to(where)
    copies = [copy.deepcopy(model) for _ in range(2)]
    exact = gradients(model, *given)
    scale = 256.0 if low == "fp16" else 1.0
    rough = gradients(under_autocast(copies[0], where, LOWS[low]), *given, scale=scale)
    ours = gradients(converted(copies[1], low), *given)
    assert len(ours) == len(exact)
    assert all(
        one.device == other.device for one, other in zip(ours, exact, strict=True)
    )
    error, bound = relative_error(ours, exact), relative_error(rough, exact)
    assert 0 < error <= 1.05 * bound, (error, bound)


@both
@pytest.mark.parametrize("kind", [{}, {"again": True}], ids=str)
def test_gradients(where: str, precision: str, kind: dict[str, Any]) -> None:
    no_worse(lambda: Net(**kind), where, precision, ids(where))


@both
def test_a_checkpoint_draws_again_what_it_drew(where: str, precision: str) -> None:
    """Not held against fp32: a GPU's dropout has another mask in each dtype."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = converted(Net(dropout=0.1, again=again).to(where), precision)
        gradients(model, ids(where))
        found.append(gradients(model, ids(where)))
    assert relative_error(*found) < near(precision)


@both
@pytest.mark.parametrize("kind", ["bool", "zeros", "float", "heads"])
def test_attention_masks(where: str, precision: str, kind: str) -> None:
    seen = torch.ones(32, 32, dtype=torch.bool, device=where).tril()
    mask = {
        "bool": seen,
        "zeros": torch.zeros(32, 32, device=where),
        "float": torch.zeros(32, 32, device=where).masked_fill(~seen, -1e9),
        "heads": torch.randn(8, HEADS, 32, 32, device=where),
    }[kind]
    no_worse(Net, where, precision, ids(where), mask)


@both
@pytest.mark.parametrize("last", [False, True])
def test_convolutions(where: str, precision: str, last: bool) -> None:
    layout = torch.channels_last if last else torch.contiguous_format
    images = pixels(where).to(memory_format=layout)
    no_worse(lambda: Images().to(memory_format=layout), where, precision, images)


@pytest.mark.parametrize("kind", ["MATH", "EFFICIENT_ATTENTION", "FLASH_ATTENTION"])
def test_a_kernel_of_attention_that_the_user_chose(where: str, kind: str) -> None:
    """The choice is a global switch: a graph captured before must heed it."""
    model = converted(Net().to(where), "bf16")
    free = gradients(model, ids(where))
    with sdpa_kernel([getattr(SDPBackend, kind), SDPBackend.MATH]):
        chosen = gradients(model, ids(where))
    assert relative_error(chosen, free) < near("bf16")


@pytest.mark.parametrize("first", ["convert", "move"])
def test_moved_before_and_after(where: str, first: str) -> None:
    torch.manual_seed(0)
    model = Net()
    if first == "move":
        model.to(where)
    model = converted(model, "bf16")
    if first == "convert":
        loss_of(model, ids("cpu")).backward()
        model.zero_grad()
        model.to(where)
    found = gradients(model, ids(where))
    assert all(g.device.type == where and g.isfinite().all() for g in found)
    assert all(p.dtype == torch.float32 for p in model.parameters())


@both
@pytest.mark.parametrize("fused", [False, True])
def test_no_step_waits_for_the_gpu(where: str, precision: str, fused: bool) -> None:
    model = converted(Net().to(where), precision, loss_scale="dynamic")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    batches = [ids(where, seed) for seed in range(12)]
    losses = []
    for number, batch in enumerate(batches):
        # The first steps of a loss scale look at the sizes of gradients, and wait.
        if where == "cuda" and number > 7 and fused:
            torch.cuda.set_sync_debug_mode("error")
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if where == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()


def trained(model: nn.Module, where: str, steps: int) -> list[float]:
    """The losses of a model that is trained."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for _ in range(steps):
        loss = loss_of(model, ids(where))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@both
def test_training_follows_fp32(where: str, precision: str) -> None:
    torch.manual_seed(0)
    plain = Net().to(where)
    ours = converted(copy.deepcopy(plain), precision, loss_scale="dynamic")
    found, exact = (trained(model, where, 60) for model in (ours, plain))
    assert found[-1] < 0.2 * found[0]
    assert found[-1] < exact[-1] + 0.05 * exact[0]


@both
def test_scripts_own_scaler_and_autocast(where: str, precision: str) -> None:
    """A script with `torch.autocast` and `GradScaler` of its own goes on as it was."""
    model = converted(Net().to(where), precision, loss_scale="auto")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(where)
    losses = []
    for _ in range(10):
        with torch.autocast(where, LOWS[precision]):
            loss = loss_of(model, ids(where))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert 0 < scaler.get_scale() < float("inf")


@both
@pytest.mark.usefixtures("off_again")
def test_the_automatic_mode(where: str, precision: str) -> None:
    autoamp.enable(precision=precision, do_no_harm=False)
    model = Net().to(where)
    losses = trained(model, where, 20)
    assert losses[-1] < losses[0]
    assert autoamp.is_converted(model)
    assert autoamp.report(model).runs


@both
def test_inductor(where: str, precision: str) -> None:
    torch.manual_seed(0)
    model = Net().to(where)
    exact = gradients(model, ids(where))
    ours = converted(model, precision, backend="inductor")
    error = relative_error(gradients(ours, ids(where)), exact)
    assert 0 < error < near(precision)


@both
def test_inference_modes(where: str, precision: str) -> None:
    model = Net().to(where).eval()
    exact = model(ids(where)).detach()
    ours = converted(copy.deepcopy(model), precision)
    for mode in (torch.no_grad, torch.inference_mode):
        for length in (32, 1, 7, 32):
            with mode():
                found = ours(ids(where, length=length))
            assert found.device.type == where
        assert relative_error(found, exact) < near(precision)


def test_a_cuda_graph_of_a_step(where: str) -> None:
    if where == "cpu":
        pytest.skip("CUDA graphs are a GPU's")
    model = converted(Net().to(where), "bf16")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, capturable=True)
    batch = ids(where)

    def step() -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    seen = []
    for seed in range(30):
        batch.copy_(ids(where, seed % 2))
        graph.replay()
        seen.append(loss.item())
    assert seen[-1] < 0.8 * seen[0], seen
    # What the replays did to the weights is seen by calls outside of the graph.
    after = loss_of(model, batch).item()
    assert after == pytest.approx(seen[-1], rel=0.2)


def test_a_cuda_graph_of_inference(where: str) -> None:
    if where == "cpu":
        pytest.skip("CUDA graphs are a GPU's")
    model = converted(Net().to(where).eval(), "bf16")
    batch = ids(where)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(batch)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(batch)
        batch.copy_(ids(where, 5))
        graph.replay()
        assert torch.equal(out, model(ids(where, 5)))
        model.head.weight.mul_(2.0)
        graph.replay()
        twice = out.clone()
        assert relative_error(twice, model(ids(where, 5))) < near("bf16")


def test_another_stream(where: str) -> None:
    if where == "cpu":
        pytest.skip("streams are a GPU's")
    model = converted(Net().to(where), "bf16")
    expected = gradients(model, ids(where))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = gradients(model, ids(where))
    torch.cuda.current_stream().wait_stream(stream)
    assert relative_error(found, expected) < near("bf16")


def test_a_copy_refreshed_on_one_stream_is_read_on_another(where: str) -> None:
    if where == "cpu":
        pytest.skip("streams are a GPU's")
    model = converted(nn.Linear(4096, 4096).to(where), "bf16")
    x = torch.randn(64, 4096, device=where)
    stream = torch.cuda.Stream()
    for number in range(20):
        with torch.no_grad():
            model.weight.copy_(torch.full_like(model.weight, float(number)))
            torch.cuda.synchronize()
            here = model(x)
            with torch.cuda.stream(stream):
                there = model(x)
            torch.cuda.synchronize()
        assert torch.equal(here, there)


def test_questions(where: str, tmp_path: Path) -> None:
    model = Net().to(where)
    batch = ids(where)
    options = {"precision": "bf16", "do_no_harm": False}

    def loss(logits: Any) -> Tensor:
        return F.cross_entropy(logits.float().reshape(-1, 128), batch.reshape(-1))

    report = autoamp.explain(model, batch, **options)
    assert report.headline.seconds is not None or where == "cpu"
    print(autoamp.compare(model, batch, **options, loss_fn=loss))
    fp16 = {**options, "precision": "fp16"}
    print(autoamp.find_overflow(model, batch, loss_fn=loss, **fp16))
    found = autoamp.bench(
        model, batch, loss_fn=loss, **options, rounds=2, steps=2, seconds=5
    )
    print(found)
    report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size


def test_calibration(where: str, tmp_path: Path, monkeypatch) -> None:
    if where == "cpu":
        pytest.skip("CPUs are measured in tests/passes/speeds")
    monkeypatch.setenv("AUTOAMP_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(speeds, "_known", {})
    model = autoamp.convert(Net().to(where), precision="bf16", strict=True)
    loss_of(model, ids(where)).backward()
    print(autoamp.report(model))
    assert list(tmp_path.rglob("*.json"))


def test_export(where: str) -> None:
    model = Net().to(where).eval()
    program = autoamp.export(model, (ids(where),), precision="bf16")
    found = program.module()(ids(where))
    assert relative_error(found, model(ids(where))) < near("bf16")


def test_data_parallel_state_dict_and_revert(where: str, tmp_path: Path) -> None:
    model = converted(Net().to(where), "bf16")
    gradients(model, ids(where))
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    other = Net().to(where)
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    plain = autoamp.revert(model)
    with torch.no_grad():
        assert torch.equal(other(ids(where)), plain(ids(where)))
