"""`python -m benchmarks.curves`: training in fp32, under autocast and converted.

Within a seed every mode starts from the same weights and sees the same batches and the
same dropout masks; differences to fp32 are of the same seed.  How much of them is
chance, the mode "fp32 nudged" says: fp32 from weights moved by 1e-6 of themselves.
Each run is on one thread of its own process: figures do not depend on the core count.

Both tasks are small, train in seconds and end at a figure worth comparing.  Nothing is
downloaded: the data are scikit-learn's digits and the source of Python's standard
library.  Sizes are bounded by fp16, in which a CPU trains even this small convolutional
net six times slower than in fp32: five seeds of every mode are to end in about a
quarter of an hour on two cores.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import math
import multiprocessing
import shlex
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional

import autoamp

from . import report
from .report import said
from .setting import capability

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


# -- training -------------------------------------------------------------------------

BASELINE = "fp32"
CHECKPOINTS = (0.1, 0.25, 0.5, 1.0)  # of a run, where the table shows the loss
BLOCK = 10  # steps, whose mean training loss is one point of a curve


@dataclass(frozen=True)
class Mode:
    """A way to train: fp32 as it is, under autocast, or converted."""

    name: str
    autocast: torch.dtype | None = None
    convert: str | None = None
    nudge: float = 0.0

    def context(self) -> AbstractContextManager[Any]:
        """What the documented recipe runs the forward and the loss in."""
        low = self.autocast
        return nullcontext() if low is None else torch.autocast("cpu", low)


MODES = (
    Mode(BASELINE),
    Mode("fp32 nudged", nudge=1e-6),
    Mode("autocast fp16", autocast=torch.float16),
    Mode("autocast bf16", autocast=torch.bfloat16),
    Mode("autoamp fp16", convert="fp16"),
    Mode("autoamp bf16", convert="bf16"),
)

HEADER = ("task", "mode", "final", "same weights in fp32", "difference to fp32")
HEADER += ("skipped steps", *(f"loss at {part:.0%}" for part in CHECKPOINTS))


class Stepper:
    """Backward, clipping and step, the way the mode's users write it."""

    def __init__(self, task: Task, mode: Mode, model: nn.Module) -> None:
        self.clip, self.model = task.clip, model
        self.optimizer = task.optimizer(model.parameters())
        if mode.convert is not None:
            options = {"precision": mode.convert, "do_no_harm": False, "strict": True}
            self.model, self.optimizer = autoamp.convert(
                model, self.optimizer, **options
            )
        fp16 = mode.autocast == torch.float16
        self.scaler = torch.amp.GradScaler("cpu") if fp16 else None

    def step(self, loss: Tensor) -> bool:
        """Makes one step; whether the optimizer's was skipped."""
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self._clip()
            self.optimizer.step()
            return bool(getattr(self.optimizer, "step_was_skipped", False))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self._clip()
        self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        return self.scaler.get_scale() < before

    def _clip(self) -> None:
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)


def train(task: Task, mode: Mode, seed: int) -> dict[str, Any]:
    """One run: its curve, its skipped steps, its metric in its mode and in fp32."""
    model = task.start(seed, mode.nudge)
    stepper = Stepper(task, mode, model)
    rate = torch.optim.lr_scheduler.LambdaLR(stepper.optimizer, task.rate)
    batches = task.batches(torch.Generator().manual_seed(seed))
    torch.manual_seed(seed)  # dropout's; the conversion may have drawn
    losses, skipped = list[float](), list[int]()
    for step, (inputs, targets) in zip(range(task.steps), batches, strict=False):
        with mode.context():
            loss = mean_loss(stepper.model(inputs), targets)
        if stepper.step(loss):
            skipped.append(step)
        rate.step()
        losses.append(loss.item())
    plain = task.build()
    plain.load_state_dict(model.state_dict())
    points = torch.tensor(losses).view(-1, BLOCK).mean(1).tolist()
    return {
        "seed": seed,
        "metric": task.evaluate(stepper.model, mode.context),
        "metric_in_fp32": task.evaluate(plain, nullcontext),
        "skipped_steps": skipped,
        "curve": [round(point, 4) for point in points],
    }


def run(job: tuple[Task, Mode, int]) -> dict[str, Any]:
    """What `train` returns, on one thread; of a failing run only "failed"."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    try:
        return train(*job)
    except Exception as error:  # noqa: BLE001 - told in the table, beside the others
        return {"failed": said(error)}


def summary(task: Task, runs: list[Any], baseline: list[Any]) -> dict[str, Any]:
    """Means and spreads over seeds; only "failed" if a run that it needs failed."""
    if failed := [r for r in [*runs, *baseline] if "failed" in r]:
        return dict(failed[0])
    metrics = [r["metric"] for r in runs]
    apart = task.differences(metrics, [r["metric"] for r in baseline])
    ends = [max(1, round(part * len(runs[0]["curve"]))) for part in CHECKPOINTS]
    return {
        "metric_mean": statistics.mean(metrics),
        "metric_spread": _spread(metrics),
        "metric_in_fp32_mean": statistics.mean(r["metric_in_fp32"] for r in runs),
        "difference_mean": statistics.mean(apart),
        "difference_standard_error": _spread(apart) / math.sqrt(len(apart)),
        "losses": [statistics.mean(r["curve"][end - 1] for r in runs) for end in ends],
        "runs": runs,
    }


def _spread(values: list[float]) -> float:
    return torch.tensor(values).double().std().item() if len(values) > 1 else math.nan


def measure(
    tasks: Sequence[Task], modes: Sequence[Mode], seeds: int, processes: int | None
) -> list[tuple[Task, Mode, dict[str, Any]]]:
    """The summary of each task and mode, of which the first is the baseline."""
    jobs = list(itertools.product(tasks, modes, range(seeds)))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        runs = list(track(pool.map(run, jobs), "training", total=len(jobs)))
    found = []
    for task in tasks:
        baseline = runs[:seeds]
        for mode in modes:
            mine, runs = runs[:seeds], runs[seeds:]
            found.append((task, mode, summary(task, mine, baseline)))
    return found


def row(task: Task, mode: Mode, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    start = [f"{task.name}: {task.metric}", mode.name]
    if "failed" in found:
        return [*start, "failed", *[""] * (len(HEADER) - 3)]
    return [
        *start,
        f"{found['metric_mean']:.3f} ± {found['metric_spread']:.3f}",
        f"{found['metric_in_fp32_mean']:.3f}",
        task.tell(found),
        " ".join(str(len(r["skipped_steps"])) for r in found["runs"]),
        *(f"{loss:.4f}" for loss in found["losses"]),
    ]


def verdict(task: Task, mode: Mode, found: dict[str, Any]) -> tuple[bool, str]:
    """Whether the mean is within the task's limit, and whether that is sure."""
    start = f"{task.name}, {mode.name}: "
    if "failed" in found:
        return False, f"{start}failed, {found['failed']}"
    room = task.limit - abs(found["difference_mean"])
    close = abs(room) <= 2 * found["difference_standard_error"]
    end = f"{task.limit}{', by less than two standard errors' if close else ''}"
    within = "within" if room >= 0 else "NOT within"
    return room >= 0, f"{start}{task.tell(found)}, {within} {end}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes it beside its JSON; 1 if a converted mode missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--modes", default="", help="comma-separated (all)")
    parser.add_argument("--quick", action="store_true", help="few steps, no verdict")
    parser.add_argument("--processes", type=int, help="at a time (one a core)")
    parser.add_argument("--out", type=Path, default=report.RESULTS)
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    names = [n.strip() for n in options.modes.split(",") if n.strip()]
    if unknown := set(names) - {mode.name for mode in MODES}:
        parser.error(f"unknown modes {unknown}; there are {[m.name for m in MODES]}")
    modes = [m for m in MODES if not names or m.name in (BASELINE, *names)]
    tasks = [Digits(60), Chars(40)] if options.quick else [Digits(700), Chars(2000)]
    found = measure(tasks, modes, options.seeds, options.processes)
    command = shlex.join(["python", "-m", "benchmarks.curves", *given])
    notes = [
        f"{capability('cpu')}; each run on one thread of its own; `{command}`",
        *(f"{t.name}: {t.steps} steps of batch {t.batch}; {t.data()}" for t in tasks),
        f"{options.seeds} seeds: mean ± spread; difference's mean ± standard error",
    ]
    results = [{"task": t.name, "mode": m.name, **f} for t, m, f in found]
    data = {"notes": notes, "judged": not options.quick, "results": results}
    stem = options.out / ("curves-quick" if options.quick else "curves")
    report.write(stem, text(data), data)
    print(text(data))
    return int(any(mode.convert and not good for mode, good, _ in judged(data)))


def _found(data: dict[str, Any]) -> list[tuple[Task, Mode, dict[str, Any]]]:
    tasks = {task.name: task for task in (Digits(700), Chars(2000))}
    modes = {mode.name: mode for mode in MODES}
    return [(tasks[f["task"]], modes[f["mode"]], f) for f in data["results"]]


def judged(data: dict[str, Any]) -> list[tuple[Mode, bool, str]]:
    """The verdict on every mode but the baseline; of a quick run there is none."""
    found = _found(data) if data.get("judged", True) else []
    return [(f[1], *verdict(*f)) for f in found if f[1].name != BASELINE]


def text(data: dict[str, Any]) -> str:
    """The page: notes, the table, and a verdict on each mode."""
    table = report.markdown(HEADER, [row(*each) for each in _found(data)])
    lines = [line for _, _, line in judged(data)]
    return "\n\n".join([*data["notes"], table, *lines]) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
