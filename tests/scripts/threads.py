"""A model that answers requests from eight threads at once."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import nn

THREADS = 8

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 4)
).eval()
requests = [torch.randn(8, 16) for _ in range(4 * THREADS)]
together = Barrier(THREADS)


@torch.no_grad()
def answer(request):
    return model(request)


def serve(first):
    together.wait()
    return [answer(request) for request in requests[first::THREADS]]


# The model's first calls ever come from all threads at the same moment.
with ThreadPoolExecutor(THREADS) as pool:
    served = list(pool.map(serve, range(THREADS)))
answers = [served[i % THREADS][i // THREADS] for i in range(len(requests))]
alone = [answer(request) for request in requests]

RESULT = {
    "losses": [one.square().mean().item() for one in answers],
    "same": all(map(torch.equal, answers, alone)),
    "params": list(model.parameters()),
}
