"""The first minute with autoamp, beside `torch.autocast`, on this machine's CPU.

1. A small GPT reads one text without gradients, then takes training steps: in fp32,
   under autocast and with autoamp, in turns.
2. A network that overflows in fp16: the op is found, and a rule cures it.
3. The gradient of a LayerNorm's bias under autocast on CPUs, where the truth is known.
4. The norm weights of a model that is bf16 throughout, in training.

Nothing is downloaded.  Run `make demo`, or `python examples/demo.py --help`.  The exit
status is 1 if anything that is shown of autoamp is not as it should be: no rewritten
graph, a gradient further from fp32's than 1.1 times autocast's, no cure, a wrong sum,
or norm weights that stand still.  Times are shown and not judged.
"""

from __future__ import annotations

import argparse
import copy
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import autoamp
from autoamp.tools.count import count_ops

VOCABULARY, LENGTH, PROMPT = 2000, 256, 16
WAYS = ("fp32", "autocast", "autoamp")

MORE_ERROR = 1.1
"""The error of autoamp's gradient may be this multiple of autocast's."""

NO_UNITS = """\
  This CPU has no units for bf16: times here would mean nothing and are left
  out. Left to itself, autoamp would keep this model in fp32 on this CPU."""

NEXT = """[bold]Your own code next[/]
  autoamp run train.py               your script, without changing a line
  autoamp bench pkg.module:factory   would it pay for your model, here?
  print(autoamp.report(model))       what runs low, and why the rest does not
  docs/quick-start.md                the first steps, for GPUs too"""


# -- an ordinary model, written as many are ------------------------------------------


class RMSNorm(nn.Module):
    """Root mean square norm, written out as in Llama."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def gelu(x: Tensor) -> Tensor:
    """GELU, written out as in GPT-2."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1 + torch.tanh(inner))


class Block(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows = (*x.shape[:2], self.heads, -1)
        q, k, v = (
            part.view(rows).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        read = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(read.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm_2(x))))


class SmallGPT(nn.Module):
    """Predicts the next token; returns the loss in training, else its scores."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        x = self.norm(self.blocks(x))
        if not self.training:
            return self.head(x[:, -1])
        scores = self.head(x)[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


# -- 1: a call and a training step, three ways ---------------------------------------


@dataclass
class Run:
    """A model with its optimizer, run one way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    context: Callable[[], AbstractContextManager[object]]

    def forward(self, *args: Tensor) -> Tensor:
        with self.context():
            result: Tensor = self.model(*args)
        return result

    def step(self, *args: Tensor) -> None:
        self.optimizer.zero_grad()
        self.forward(*args).backward()
        self.optimizer.step()

    def gradient(self, *args: Tensor) -> Tensor:
        """All gradients of one backward in one row, in float64."""
        self.optimizer.zero_grad()
        self.forward(*args).backward()
        rows = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        return torch.cat(rows).double()

    def kept_bytes(self, *args: Tensor) -> int:
        """Bytes that the forward keeps for the backward, the fp32 weights left out."""
        weights = {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        kept: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.detach()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = self.forward(*args)
        sizes = [kept[key].untyped_storage().nbytes() for key in kept.keys() - weights]
        del loss
        return sum(sizes)

    @torch.no_grad()
    def read(self, *args: Tensor) -> None:
        """A call without gradients, as for each token of a text that is generated."""
        self.model.eval()
        self.forward(*args)
        self.model.train()

    def casts(self, *args: Tensor) -> float:
        """Casts of one call without gradients, the first one left out."""
        self.read(*args)
        counts = count_ops(lambda: self.read(*args), [*self.model.parameters()])
        return counts.casts.total() + counts.refreshed


def runs_of(model: nn.Module, *, pays: bool) -> dict[str, Run]:
    """A copy of the model for each of `WAYS`."""
    found = {}
    for way in WAYS:
        own = copy.deepcopy(model)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(own.parameters(), lr=1e-3)
        context: Callable[[], AbstractContextManager[object]] = nullcontext
        if way == "autocast":
            context = bf16_autocast
        elif way == "autoamp":
            forced = {} if pays else {"do_no_harm": False}
            own, optimizer = autoamp.convert(own, optimizer, precision="bf16", **forced)
        found[way] = Run(own, optimizer, context)
    return found


def bf16_autocast() -> AbstractContextManager[object]:
    """The context of the ways under autocast."""
    return torch.autocast("cpu", torch.bfloat16)


def converts_by_itself(model: nn.Module, *args: Tensor) -> bool:
    """Whether autoamp, left to itself, would convert the model on this CPU."""
    own = autoamp.convert(copy.deepcopy(model), precision="bf16")
    own(*args)
    return bool(autoamp.report(own).graphs)


def seconds(
    runs: dict[str, Run], call: Callable[[Run], None], rounds: int
) -> dict[str, list[float]]:
    """Seconds of a call of each way in each round; the ways take turns."""
    taken: dict[str, list[float]] = {way: [] for way in runs}
    for turn in range(rounds + 2):
        for way, run in runs.items():
            start = time.perf_counter()
            call(run)
            if turn >= 2:  # the first two warm up
                taken[way].append(time.perf_counter() - start)
    return taken


def table() -> Table:
    """An empty table of the three ways."""
    empty = Table(box=None, pad_edge=False)
    for name in ("", "fp32", "autocast", "autoamp", "autoamp / autocast"):
        empty.add_column(name, justify="right" if name else "left", no_wrap=True)
    return empty


def add_row(
    rows: Table, title: str, values: dict[str, float], form: str, ratio: float
) -> None:
    """Adds a row of each way's value."""
    cells = [form.format(values[way]) for way in WAYS]
    rows.add_row(f"  {title}", *cells, f"{ratio:.2f}")


def add_times(rows: Table, title: str, taken: dict[str, list[float]]) -> None:
    """Adds a row of median times, and the median of their ratios."""
    both = zip(taken["autoamp"], taken["autocast"], strict=True)
    medians = {way: 1e3 * statistics.median(each) for way, each in taken.items()}
    add_row(
        rows, title, medians, "{:.0f} ms", statistics.median(a / b for a, b in both)
    )


def reading(runs: dict[str, Run], ids: Tensor, rounds: int, *, pays: bool) -> Table:
    """The table of calls without gradients."""
    prompt, rows = ids[:1, :PROMPT], table()
    if pays:
        taken = seconds(runs, lambda run: run.read(prompt), 2 * rounds)
        add_times(rows, "time of a call", taken)
    casts = {way: run.casts(prompt) for way, run in runs.items()}
    add_row(
        rows, "casts in a call", casts, "{:.0f}", casts["autoamp"] / casts["autocast"]
    )
    return rows


def training(
    runs: dict[str, Run], ids: Tensor, rounds: int, *, pays: bool
) -> tuple[Table, dict[str, float]]:
    """The table of training steps, and the error of each way's gradient."""
    rows, gradients = table(), {way: run.gradient(ids) for way, run in runs.items()}
    truth = gradients["fp32"]
    if pays:
        taken = seconds(runs, lambda run: run.step(ids), rounds)
        add_times(rows, "time of a step", taken)
    kept = {way: run.kept_bytes(ids) / 1e6 for way, run in runs.items()}
    ratio = kept["autoamp"] / kept["autocast"]
    add_row(rows, "memory kept for backward", kept, "{:.0f} MB", ratio)
    errors = {
        way: ((gradient - truth).norm() / truth.norm()).item()
        for way, gradient in gradients.items()
    }
    return rows, errors


# -- 2: an overflow ------------------------------------------------------------------


class TextureNet(nn.Module):
    """Classifies an image, pixels 0 to 255, by how its features vary together."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.head = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 10))

    def forward(self, pixels: Tensor) -> Tensor:
        features = torch.relu(self.features(pixels))
        products = features.transpose(1, 2) @ features
        return self.head((products / 8).flatten(1))


def overflow() -> tuple[list[str], bool]:
    """What is told of the overflow, and whether the cure cures it."""
    torch.manual_seed(0)
    model, pixels = TextureNet(), 255 * torch.rand(32, 8, 8)
    fp16 = {"precision": "fp16", "do_no_harm": False}  # fp16 is for GPUs
    before = autoamp.convert(copy.deepcopy(model), **fp16)(pixels)
    labels = torch.arange(32) % 10
    found = autoamp.find_overflow(
        model, pixels, loss_fn=lambda out: functional.cross_entropy(out, labels)
    )
    if found.rule is None:
        return ["  no cure was found"], False
    rule = {"deny": found.rule.deny, "keep": found.rule.keep}
    after = autoamp.convert(copy.deepcopy(model), **fp16, **rule)(pixels)
    cured = bool(after.isfinite().all()) and not before.isfinite().all()
    lines = [
        f"  {found.op} made {found.largest:,.0f}; fp16 ends at 65,504.",
        f"  find_overflow names the op and a cure: {found.proposal}",
        f"  finite outputs: {share(before)} before, {share(after)} with it",
    ]
    return lines, cured


def share(values: Tensor) -> str:
    """How many of the values are finite."""
    return f"{int(values.isfinite().sum())} of {values.numel()}"


# -- 3 and 4: sums and updates that bf16 loses ---------------------------------------


def bias_gradient(way: str, rows: int = 1000) -> float:
    """The gradient of a LayerNorm's bias, to which each row adds 1.

    Each thread adds up rows of its own; one thread shows where a sum in bf16 ends.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _bias_gradient(way, rows)
    finally:
        torch.set_num_threads(threads)


def _bias_gradient(way: str, rows: int) -> float:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    bias = model.get_parameter("1.bias")
    if way == "autoamp":
        model = autoamp.convert(model, precision="bf16", do_no_harm=False)
    with bf16_autocast() if way == "autocast" else nullcontext():
        out = model(torch.randn(rows, 8))
    out.float().sum().backward()
    assert bias.grad is not None
    return bias.grad[0].item()


def norm_weights_moved(*, converted: bool, steps: int = 100) -> tuple[int, int]:
    """How many norm weights of a bf16 model a training moves, and of how many."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(64, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 10)
    ).bfloat16()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, weight_decay=0.0
    )
    if converted:
        model, optimizer = autoamp.convert(model, optimizer, do_no_harm=False)
    weight = model.get_parameter("1.weight")
    before = weight.detach().clone()
    x, y = torch.randn(128, 64).bfloat16(), torch.randint(0, 10, (128,))
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x).float(), y).backward()
        optimizer.step()
    return int((weight != before).sum()), weight.numel()


# -- what is shown -------------------------------------------------------------------


def machine() -> str:
    """One line of this machine."""
    return (
        f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )


def main(argv: list[str] | None = None) -> int:
    """Shows the four parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for name, default, told in [
        ("--rounds", 15, "timed steps of each"),
        ("--width", 256, "of the small GPT, a multiple of its 4 heads"),
        ("--layers", 4, "of the small GPT"),
        ("--batch", 8, "texts of 256 tokens"),
    ]:
        parser.add_argument(name, type=int, default=default, help=told)
    options = parser.parse_args(argv)
    if min(vars(options).values()) < 1 or options.width % 4:
        parser.error("every number is 1 or more, and the width a multiple of 4")
    console = Console(highlight=False)
    console.print(f"[bold]autoamp beside torch.autocast[/] on {machine()}\n")

    torch.manual_seed(0)
    model = SmallGPT(options.width, options.layers)
    ids = torch.randint(0, VOCABULARY, (options.batch, LENGTH))
    pays = converts_by_itself(model, ids)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    batch = f"{options.batch} x {LENGTH} tokens"
    console.print(f"[bold]1. A GPT of {size:.1f} M parameters in bf16[/]")
    runs = runs_of(model, pays=pays)
    console.print(f"\n  One text of {PROMPT} tokens, no gradients:")
    console.print(reading(runs, ids, options.rounds, pays=pays))
    if pays:
        console.print("  Under autocast every call casts the weights again.")
    console.print(f"\n  Training with {batch}:")
    trained, errors = training(runs, ids, options.rounds, pays=pays)
    console.print(trained)
    theirs, ours = errors["autocast"], errors["autoamp"]
    console.print(
        f"  Its gradient is {ours:.2%} away from fp32's, under autocast {theirs:.2%}."
    )
    said = "  Times: medians of rounds, in which the three take turns."
    console.print(said if pays else NO_UNITS)
    good = ours <= MORE_ERROR * theirs
    rewritten = bool(autoamp.report(runs["autoamp"].model).graphs)

    console.print("\n[bold]2. An overflow in fp16, found and cured[/]")
    lines, cured = overflow()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)

    sums = {way: bias_gradient(way) for way in WAYS}
    true, lossy, exact = (f"{sums[way]:.0f}" for way in WAYS)
    console.print(
        "\n[bold]3. The gradient of a LayerNorm's bias over 1000 rows, one thread[/]"
    )
    console.print(f"  truth {true}; autocast, on CPUs, {lossy}; autoamp {exact}")
    console.print("  (autocast adds up in bf16, in which 256 + 1 is 256)")

    plain, of = norm_weights_moved(converted=False)
    moved, _ = norm_weights_moved(converted=True)
    console.print("\n[bold]4. A model in bf16 throughout, 100 steps of AdamW[/]")
    console.print(
        f"  norm weights that moved: {plain} of {of} as it is; {moved} of {of} with\n"
        "  [bold]model, optimizer = autoamp.convert(model, optimizer)[/]\n"
    )
    console.print(NEXT)
    right = sums["autoamp"] == sums["fp32"] and moved > plain
    return 0 if good and rewritten and cured and right else 1


if __name__ == "__main__":
    sys.exit(main())
