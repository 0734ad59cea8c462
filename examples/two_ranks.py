"""Train on two ranks under torchrun, with DDP and with FSDP2: one line is autoamp's.

    python examples/two_ranks.py                          # starts torchrun itself
    torchrun --standalone --nproc-per-node 2 examples/two_ranks.py     # the same

The ranks talk by nccl where there is a GPU for each, and by gloo on CPUs otherwise.
Each rank trains on its own half of every batch.

The exit status is 1 unless, under both wrappers, the ranks end with equal weights, the
loss falls, and more than half of the flops ran in bf16.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import autoamp

RANKS = 2
OPTIONS: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
"""`do_no_harm=False` converts on any machine, even where bf16 cannot pay."""


def start_torchrun(arguments: list[str], seconds: float) -> int:
    """Runs this file on two ranks; ends them, with status 1, after some seconds."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", str(RANKS), __file__, *arguments]
    torchrun = subprocess.Popen(command)
    try:
        return torchrun.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"The ranks did not end in {seconds:.0f} s.", file=sys.stderr)
        return 1
    finally:
        torchrun.terminate()  # torchrun ends its ranks first
        torchrun.wait(30)


def make_model(width: int) -> nn.Sequential:
    """The same weights on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 4)
    )


def wrapped(model: nn.Sequential, wrapper: str, device: torch.device) -> nn.Module:
    """The model under DDP, or sharded by FSDP2 layer by layer."""
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device.type, (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, device: torch.device, steps: int) -> list[float]:
    """An ordinary loop; the losses of this rank."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        x = torch.randn(64, 32, generator=generator).to(device)
        loss = nn.functional.mse_loss(model(x), x[:, :4] * x[:, 4:8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether the ranks hold equal weights, bit for bit; a shard is gathered first."""
    equal = True
    for parameter in model.parameters():
        value: Any = parameter.detach()
        mine: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        first = mine.clone()
        dist.broadcast(first, src=0)
        equal = equal and torch.equal(first, mine)
    agreed = torch.tensor(float(equal), device=mine.device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)


def check(wrapper: str, device: torch.device, steps: int, width: int) -> bool:
    """Trains under one wrapper, prints, and tells whether all is right."""
    model = autoamp.convert(make_model(width).to(device), **OPTIONS)
    losses = train(wrapped(model, wrapper, device), device, steps)
    equal = same_on_all_ranks(model)
    coverage = autoamp.report(model).coverage
    low = (coverage.share_of_flops or 0.0) if coverage is not None else 0.0
    tenth = max(steps // 10, 1)
    first, last = (sum(part) / tenth for part in (losses[:tenth], losses[-tenth:]))
    if dist.get_rank() == 0:
        print(
            f"{wrapper}: {low:.0%} of the flops in bf16, loss {first:.3f} -> "
            f"{last:.3f}, weights of all ranks equal: {'yes' if equal else 'NO'}"
        )
    return equal and last < first and low > 0.5


def main(argv: list[str] | None = None) -> int:
    """Starts the ranks, or is one; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=128, help="features of a layer")
    parser.add_argument("--timeout", type=float, default=240, help="seconds for all")
    given = parser.parse_args(argv)
    if "RANK" not in os.environ:
        return start_torchrun(sys.argv[1:] if argv is None else argv, given.timeout)

    rank, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count() >= RANKS
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    waiting = timedelta(seconds=given.timeout)
    dist.init_process_group("nccl" if gpus else "gloo", timeout=waiting)
    wrappers = ("DDP", "FSDP2")
    right = [check(each, device, given.steps, given.width) for each in wrappers]
    dist.destroy_process_group()
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
