"""Trains under torchrun from its newest checkpoint; a rank may kill itself once.

`killed.py FOLDER STEP`: rank 1 dies in the middle of that step (-1: in none), in the
first run of the job.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import autoamp
from tests.distributed.test_fsdp import sharded
from tests.distributed.training import Net, batch, steps

STEPS, EVERY = 8, 2

folder, dies = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
rank = dist.get_rank()
torch.manual_seed(0)
scale = autoamp.DynamicLossScale()
net = autoamp.convert(
    sharded(net=Net()), precision="fp16", loss_scale=scale, do_no_harm=False
)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
if done:
    model, states = get_state_dict(net, optimizer)
    dcp.load({"model": model, "optimizer": states}, checkpoint_id=folder / str(done))
    set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=states)

first_run = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
for step in range(done, STEPS):
    if step == dies and rank == 1 and first_run:
        # Between its forward and its backward: the other rank waits in the reduction.
        net(batch(step, rank)[0])
        os.kill(os.getpid(), signal.SIGKILL)
    trained = steps(net, optimizer, [batch(step, rank)], bad=[0] if step == 1 else ())
    if (step + 1) % EVERY == 0:
        model, states = get_state_dict(net, optimizer)
        saved = {"model": model, "optimizer": states}
        dcp.save(saved, checkpoint_id=folder / f"draft-{step + 1}")
        dist.barrier()
        if rank == 0:  # a checkpoint is there as a whole or not at all
            (folder / f"draft-{step + 1}").rename(folder / str(step + 1))
        dist.barrier()

torch.save((trained.weights, scale.state_dict()), folder / f"end-{rank}.pt")
dist.barrier()
dist.destroy_process_group()
