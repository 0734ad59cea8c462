"""Serve a converted model from a pool of threads, ready at its first request.

A model is captured at its first call, which takes longer than all later calls: the
first request would wait.  With `example_inputs`, `autoamp.convert` captures at once.

Two servers of the same model get the same requests, one server warmed and one not.
Each request is answered by whichever thread is free.

    python examples/serve.py

The exit status is 1 unless the warmed server captures nothing while it serves, and all
threads' answers equal, bit for bit, the answers of a single thread.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import autoamp

OPTIONS: dict[str, Any] = {"precision": "bf16", "do_no_harm": False}
"""`do_no_harm=False` converts on any machine, even where bf16 cannot pay."""


def make_model(width: int) -> nn.Module:
    """A small network, in evaluation mode."""
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        for _ in range(4)
    ]
    return nn.Sequential(*layers, nn.Linear(width, 10)).eval()


@torch.inference_mode()
def answer(model: nn.Module, request: Tensor) -> tuple[Tensor, float]:
    """The model's answer to one request, and the seconds that it took."""
    start = time.perf_counter()
    result = model(request).cpu()
    return result, time.perf_counter() - start


def serve(model: nn.Module, requests: list[Tensor], threads: int) -> list[Any]:
    """The first request, then all others at once on the threads of a pool."""
    with ThreadPoolExecutor(threads) as pool:
        first = pool.submit(answer, model, requests[0]).result()
        rest = pool.map(lambda request: answer(model, request), requests[1:])
        return [first, *rest]


def main(argv: list[str] | None = None) -> int:
    """Serves twice, compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="features of a layer")
    given = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    torch.manual_seed(1)
    requests = [
        torch.randn(32, given.width, device=device) for _ in range(given.requests)
    ]

    # The first capture of a process loads torch's compiler; both servers find it there.
    autoamp.explain(make_model(8), torch.randn(1, 8), **OPTIONS)

    right = True
    for name in ("not warmed", "warmed"):
        model = make_model(given.width).to(device)
        start = time.perf_counter()
        # Within inference mode, as the requests are: a graph is captured for each mode.
        with torch.inference_mode():
            warm = (requests[0],) if name == "warmed" else None
            autoamp.convert(model, example_inputs=warm, **OPTIONS)
        converting = time.perf_counter() - start
        before = len(autoamp.report(model).graphs)

        served = serve(model, requests, given.threads)
        report = autoamp.report(model)
        alone = [answer(model, request)[0] for request in requests]

        equal = sum(torch.equal(a, b) for (a, _), b in zip(served, alone, strict=True))
        low = sum(op.precision == "bf16" for op in report.ops)
        print(
            f"{name}: convert {converting:.2f} s, first request {served[0][1]:.3f} s, "
            f"slowest later request {max(t for _, t in served[1:]):.3f} s ({machine})"
        )
        print(
            f"  graphs captured before the first request: {before}, after the last: "
            f"{len(report.graphs)}; {low} of {len(report.ops)} ops in bf16"
        )
        print(
            f"  {equal} of {len(requests)} answers of {given.threads} threads equal "
            "those of one thread, bit for bit"
        )
        right = right and equal == len(requests) and low > 0
        if name == "warmed":
            right = right and before == len(report.graphs) > 0
    print("Warmed and right." if right else "NOT right.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
