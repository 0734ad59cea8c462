"""Two processes under torchrun: DDP, and FSDP of both generations."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

OPTIONS = {"mixed": "no", "bad": "-1", **dict(a.split("=", 1) for a in sys.argv[1:])}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.wide, self.back = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.back(nn.functional.gelu(self.wide(self.norm(x))))


def wrapped(model):
    if OPTIONS["wrap"] == "ddp":
        return DistributedDataParallel(model)
    if OPTIONS["wrap"].startswith("fsdp1"):
        own = OPTIONS["wrap"] == "fsdp1_orig"
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, device_id=cpu, use_orig_params=own)
    if OPTIONS["wrap"] == "fsdp2_blocks":
        fully_shard(model[1])
        fully_shard(model[2])
    return fully_shard(model)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def sum_of_weights(model):
    total = sum(whole(p.detach()).double().sum() for p in model.parameters())
    if OPTIONS["wrap"].startswith("fsdp1"):  # whose parameters are this rank's shard
        dist.all_reduce(total)
    return total.item()


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(10, 2, 8, 16)
y = x[..., :4].roll(1, -1) * x[..., 4:8]
model = nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 4))
model = wrapped(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

losses, weights = [], [sum_of_weights(model)]
for step in range(10):
    with torch.autocast("cpu", enabled=OPTIONS["mixed"] == "bf16"):
        loss = nn.functional.mse_loss(model(x[step, rank]), y[step, rank])
    # One rank alone sees the bad batch, where one is asked for.
    bad = rank == 1 and step == int(OPTIONS["bad"])
    (loss * torch.inf if bad else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    weights.append(sum_of_weights(model))

dtypes = {str(p.dtype) for p in model.parameters()}
RESULT = {"losses": losses, "weights": weights, "dtypes": sorted(dtypes)}
torch.save(RESULT, f"{OPTIONS['folder']}/{rank}.pt")
# What holds the group goes first, or its threads may outlive it and abort the process.
del model, optimizer
dist.barrier()
dist.destroy_process_group()
