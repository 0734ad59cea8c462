"""Two small tasks that train in seconds and end at a figure worth comparing.

Nothing is downloaded: the data are scikit-learn's digits and the source of Python's
standard library.  Sizes are bounded by fp16, in which a CPU trains even this small
convolutional net six times slower than in fp32: five seeds of every mode of
`benchmarks.curves` are to end in about a quarter of an hour on two cores.
"""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """A model, its data, how it is trained, and what it is judged by.

    A subclass adds `build()`, `optimizer(parameters)`, `data()`, which names the data,
    `batches(generator)`, which never ends, `held_out()`, batches of equal
    size, and `judge(logits, targets)`, the metric of one of them.
    """

    steps: int

    name: ClassVar[str]
    metric: ClassVar[str]
    unit: ClassVar[str]
    """Of differences of the metric: "points", or "%" of fp32's metric."""
    limit: ClassVar[float]
    """How far the mean over seeds may be from fp32's, in `unit`."""
    batch: ClassVar[int]
    warmup: ClassVar[int]
    clip: ClassVar[float | None]

    def start(self, seed: int, nudge: float = 0.0) -> nn.Module:
        """A new model, each weight moved by about `nudge` of itself."""
        torch.manual_seed(seed)
        model = self.build()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in model.parameters() if nudge else ():
                noise = torch.randn(weight.shape, generator=generator)
                weight.mul_(1 + nudge * noise)
        return model

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine to zero, so that runs end settled."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, context: Callable[[], AbstractContextManager[Any]]
    ) -> float:
        """The metric of `model`, called in `context`."""
        model.eval()
        judged = []
        for inputs, targets in self.held_out():
            with context():
                logits = model(inputs)
            judged.append(self.judge(logits.float(), targets))
        return statistics.mean(judged)

    def differences(self, metrics: list[float], baseline: list[float]) -> list[float]:
        """Of each pair, in `unit`."""
        pairs = zip(metrics, baseline, strict=True)
        return [100 * (m / b - 1) if self.unit == "%" else m - b for m, b in pairs]

    def tell(self, found: dict[str, Any]) -> str:
        """The mean difference and its standard error."""
        mean, error = found["difference_mean"], found["difference_standard_error"]
        return f"{mean:+.2f} ± {error:.2f} {self.unit}"


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross entropy of (..., classes) logits, in nats."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


class Digits(Task):
    """8 by 8 images; SGD, whose steps follow the magnitude of the gradients."""

    name, metric, unit, limit = "digits", "test accuracy, %", "points", 0.5
    batch, warmup, clip = 64, 14, None

    def build(self) -> nn.Module:
        def conv(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
            layer = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
            return [layer, nn.BatchNorm2d(outputs), nn.ReLU()]

        layers = [*conv(1, 8, 1), *conv(8, 16, 2), *conv(16, 16, 2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 2 * 2, 10))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters, 0.05, momentum=0.9, weight_decay=5e-4, nesterov=True
        )

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        images, labels = _images()[0]
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for chosen in order.split(self.batch)[: len(order) // self.batch]:
                yield images[chosen], labels[chosen]

    def held_out(self) -> Iterable[Batch]:
        return [_images()[1]]

    def judge(self, logits: Tensor, targets: Tensor) -> float:
        return 100 * (logits.argmax(-1) == targets).float().mean().item()

    def data(self) -> str:
        return "scikit-learn's, half of them for the test"


@functools.cache
def _images() -> tuple[Batch, Batch]:
    """Train and test, half each: of 899 test images a point is nine."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    train, test = train_test_split(
        range(len(labels)), test_size=0.5, random_state=0, stratify=found.target
    )
    return (images[train], labels[train]), (images[test], labels[test])


class Chars(Task):
    """A character-level GPT on Python source; dropout, AdamW, clipped gradients."""

    name, metric, unit, limit = "chars", "held-out loss, nats", "%", 1.0
    batch, warmup, clip = 8, 80, 1.0

    def build(self) -> nn.Module:
        return CharGPT(_text()[2])

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, 3e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def batches(self, generator: torch.Generator) -> Iterator[Batch]:
        text = _text()[0]
        while True:
            places = (len(text) - CONTEXT, (self.batch,))
            yield _windows(text, torch.randint(*places, generator=generator))

    def held_out(self) -> Iterable[Batch]:
        text = _text()[1]
        starts = torch.linspace(0, len(text) - CONTEXT - 1, 1024).long()
        return (_windows(text, part) for part in starts.split(64))

    def judge(self, logits: Tensor, targets: Tensor) -> float:
        return mean_loss(logits, targets).item()

    def data(self) -> str:
        text, held_out, _ = _text()
        entropy = torch.distributions.Categorical(text.bincount().double()).entropy()
        return (
            f"{len(text)} + {len(held_out)} characters, unigram entropy {entropy:.2f} "
            f"nats, sha256 {hashlib.sha256(text.numpy().tobytes()).hexdigest()[:12]}"
        )


@functools.cache
def _text() -> tuple[Tensor, Tensor, int]:
    """Codes of the training text and of the held-out text; how many codes there are.

    Every third module of the standard library's top folder, ASCII only; of these every
    tenth is held out.  (What `sysconfig` generated is of the machine, and left out.)
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for f in folder.glob("*.py") if "_sysconfigdata" not in f.name)
    texts = [file.read_bytes().decode("ascii", "ignore") for file in files[::3]]
    code = {c: i for i, c in enumerate(sorted(set("".join(texts))))}

    def encode(parts: list[str]) -> Tensor:
        return torch.tensor([code[c] for c in "".join(parts)])

    train = [text for i, text in enumerate(texts) if i % 10 != 9]
    return encode(train), encode(texts[9::10]), len(code)


def _windows(text: Tensor, starts: Tensor) -> Batch:
    window = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, 1:]


CONTEXT, WIDTH, HEADS, BLOCKS, DROPOUT = 64, 96, 4, 2, 0.1


class Block(nn.Module):
    """Pre-norm causal attention and a feed-forward layer, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        hidden = functional.gelu(self.up(self.norm2(x)))
        return x + self.dropout(self.down(hidden))


class CharGPT(nn.Module):
    """Logits of the next character, for each character of (batch, length)."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, characters, bias=False)
        for table in (self.token, self.position):
            nn.init.normal_(table.weight, std=0.02)  # GPT-2's

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1])
        x = self.dropout(self.token(characters) + self.position(places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits
