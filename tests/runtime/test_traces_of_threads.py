"""A trace in one thread while another thread calls a converted model."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoamp
from tests.small_models import BF16

LIMIT = 60.0


class Trace(threading.Thread):
    """A trace that holds Dynamo's lock, as all of ours do, until it is told to end."""

    def __init__(self) -> None:
        super().__init__()
        self.is_under_way, self.may_end = threading.Event(), threading.Event()

    def run(self) -> None:
        def traced(x: Tensor) -> Tensor:
            self.is_under_way.set()
            self.may_end.wait(LIMIT)
            return 2 * x

        with autoamp.compat.frames.lock():
            make_fx(traced)(torch.ones(2))


def test_a_call_waits_for_the_trace_and_runs_its_graph() -> None:
    torch._dynamo.reset()
    model, x = autoamp.convert(nn.Linear(8, 8).eval(), **BF16), torch.randn(4, 8)
    wanted = model(x)
    trace, found = Trace(), []
    call = threading.Thread(target=lambda: found.append(model(x)))
    trace.start()
    assert trace.is_under_way.wait(LIMIT)
    call.start()
    call.join(0.2)
    assert call.is_alive()
    trace.may_end.set()
    for each in (trace, call):
        each.join(LIMIT)
    assert torch.equal(found[0], wanted)
    report = autoamp.report(model)
    assert (report.runs, report.skipped) == (2, [])
