"""The three lines of autocast and GradScaler beside the one line of autoamp.

A loop for mixed precision has `autocast()` round the forward, and a `GradScaler` that
scales the loss, steps the optimizer and updates itself.  The loop of a converted model
is the fp32 loop.  Both train the same network on the same batches, and so does fp32.

The network has eight convolutions with residual blocks and two dense layers; it learns
without labels, from two views of each sample of 2 x 500 numbers: the two views of one
sample are to be more alike than those of different samples.

    python examples/three_lines.py
    python examples/three_lines.py --full      # the published batches: 512 and 256

fp16 on a GPU, bf16 on a CPU.  The exit status is 1 unless the converted loop saves the
share of memory that was published (27 % and 33 %), and its losses agree with fp32.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import autoamp

SIZES = {"2.5 M": (112, 512, 0.27), "8 M": (256, 256, 0.33)}
"""Parameters: channels, the published batch and share of memory saved."""


class Block(nn.Module):
    """Two convolutions, and the input added to what they make of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(width, width, 9, padding=4)
        self.second = nn.Conv1d(width, width, 9, padding=4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def make_model(width: int) -> nn.Module:
    """Eight convolutions and two dense layers, the same weights in each run."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, width, 9, stride=4, padding=4),
        nn.ReLU(),
        Block(width),
        nn.Conv1d(width, width, 9, stride=4, padding=4),
        nn.ReLU(),
        Block(width),
        Block(width),
        nn.Flatten(),
        nn.Linear(32 * width, 14 * 32),
        nn.ReLU(),
        nn.Linear(14 * 32, 64),
    )


def alike(codes: Tensor) -> Tensor:
    """The loss: each sample's second view is to be picked out by its first."""
    first, second = normalize(codes.float(), dim=1).chunk(2)
    likeness = first @ second.T
    return cross_entropy(likeness, torch.arange(len(first), device=codes.device))


class Kept:
    """Counts the bytes kept for the backward; the weights themselves are left out."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.storages: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in self.weights:
            self.storages[address] = tensor.detach()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for t in self.storages.values())


def memory(forward: Callable[[], Tensor], model: nn.Module) -> int:
    """Bytes: a GPU's peak over forward and backward, or what a CPU's backward keeps."""
    kept, on_gpu = Kept(model), next(model.parameters()).is_cuda
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
        loss = forward()
    counted = kept.bytes
    if on_gpu:
        kept.storages.clear()
        loss.backward()
        counted = torch.cuda.max_memory_allocated()
    model.zero_grad()
    return counted


def train(
    way: str,
    width: int,
    data: Sequence[Tensor],
    *,
    epochs: int,
    low: torch.dtype,
    published: int,
) -> tuple[float, float, list[float]]:
    """Bytes of memory, seconds of the last epoch, the mean loss of each epoch.

    Memory grows by as much with each sample: from two measured batches follows that of
    the published batch, which would take a small CPU minutes.
    """
    device = data[0].device.type
    model = make_model(width).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    if way == "autoamp":  # the one line
        autoamp.convert(model, optimizer, precision=low, do_no_harm=False)
    scaling = way == "autocast" and low is torch.float16
    scaler = torch.amp.GradScaler(device, enabled=scaling)

    def forward(views: Tensor) -> Tensor:
        if way != "autocast":
            return alike(model(views))
        with torch.autocast(device, low):  # the first of the three lines
            return alike(model(views))

    means, seconds = [], 0.0
    for _ in range(epochs):
        losses, start = [], time.perf_counter()
        for views in data:
            optimizer.zero_grad()
            loss = forward(views)
            if way == "autocast":
                scaler.scale(loss).backward()  # the second
                scaler.step(optimizer)  # the third, with the line below
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - start
        means.append(sum(losses) / len(losses))
    batch = len(data[0]) // 2
    half = data[0].unflatten(0, (2, batch))[:, : batch // 2].flatten(0, 1)
    few, many = (memory(lambda x=x: forward(x), model) for x in (half, data[0]))
    each = (many - few) / (batch - batch // 2)  # what a sample adds
    return many + each * (published - batch), seconds, means


def main(argv: list[str] | None = None) -> int:
    """Trains three ways at two sizes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--full", action="store_true", help="the published sizes")
    parser.add_argument("--epochs", type=int, help="10 with --full, else 2")
    given = parser.parse_args(argv)
    epochs = given.epochs or (10 if given.full else 2)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    low = torch.float16 if device == "cuda" else torch.bfloat16
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    print(f"{str(low)[6:]} on {machine}\n")
    # Cosines are at most 1, so that rounding moves one by eps / 2 and a loss by twice
    # that.  In fp16 that is the third decimal, to which the published losses agree.
    bound = torch.finfo(low).eps

    right = True
    for size, (width, batch, saved) in SIZES.items():
        count, samples = (20, batch) if given.full else (2, 2)
        generator = torch.Generator().manual_seed(1)
        data = []
        for _ in range(count):
            sample = torch.randn(samples, 2, 500, generator=generator)
            noise = torch.randn(2 * samples, 2, 500, generator=generator)
            data.append((torch.cat([sample, sample]) + noise / 2).to(device))
        found = {}
        for way in ("fp32", "autocast", "autoamp"):
            found[way] = train(
                way, width, data, epochs=epochs, low=low, published=batch
            )
            kept, seconds, losses = found[way]
            shown = ", ".join(f"{loss:.3f}" for loss in losses)
            print(
                f"{size} {way:<9} memory at batch {batch} {kept / 1e6:6.1f} MB "
                f"({kept / found['fp32'][0] - 1:+4.0%}), last epoch {seconds:.2f} s, "
                f"losses {shown}"
            )
        pairs = zip(found["autoamp"][2], found["fp32"][2], strict=True)
        apart = max(abs(ours - exact) for ours, exact in pairs)
        less = found["autoamp"][0] <= (1 - saved) * found["fp32"][0]
        print(f"  losses of autoamp and fp32 differ by {apart:.4f}\n")
        right = right and less and apart < bound
    print("Right." if right else "NOT right.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
