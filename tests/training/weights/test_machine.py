"""Any order of calls, steps and writes: no call reads an old weight.

Nor is any write lost, whichever memory a weight lies in and whatever else holds it; and
the backward of a graph reads what its own forward read.
"""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import autoamp
from autoamp.training.sentinels import STEPS
from tests.metrics import relative_error
from tests.small_models import WIDTH, converted, mlp
from tests.training.weights.test_weights import CLOSE, MODES, error_now

Write = Callable[[nn.Module], Any]

# -- where weights lie -----------------------------------------------------------------


def numpy_memory(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = torch.from_numpy(p.detach().numpy().copy())


def mapped_file(model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.pt"
        torch.save(model.state_dict(), path)
        loaded = torch.load(path, mmap=True)
    for key, p in model.named_parameters():
        p.data = loaded[key]


def flat_buffer(model: nn.Module) -> None:
    """All parameters are views of one buffer, as FSDP makes them."""
    parameters = list(model.parameters())
    flat = torch.cat([p.detach().flatten() for p in parameters])
    pieces = flat.split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.data = piece.view_as(p)


MEMORIES: dict[str, Write] = {
    "of its own": lambda _: None,
    "numpy": numpy_memory,
    "a file": mapped_file,
    "shared": lambda model: model.share_memory(),
    "one buffer": flat_buffer,
}

# -- what else holds a weight's memory -------------------------------------------------

HOLDERS: dict[str, Callable[[Tensor], Tensor]] = {
    "an alias": lambda p: p.data,
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "numpy by dlpack": lambda p: torch.from_numpy(np.from_dlpack(p.detach())),
    "another parameter": lambda p: nn.Parameter(p.detach()),
}
LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "address": lambda p: p.data_ptr(),
    "numpy": lambda p: p.detach().numpy().sum(),
    "storage": lambda p: p.untyped_storage().data_ptr(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()).sum(),
}

# -- writes ----------------------------------------------------------------------------


def each(write: Callable[[Tensor], Any], guard: Any = torch.no_grad) -> Write:
    def run(model: nn.Module) -> None:
        with guard():
            for p in model.parameters():
                write(p)

    return run


def by_optimizer(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.SGD(model.parameters(), 1.0).step()
    model.zero_grad()


def load_state_dict(model: nn.Module) -> None:
    state = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    model.load_state_dict(state)


def from_vector(model: nn.Module) -> None:
    vector = torch.randn_like(parameters_to_vector(model.parameters()))
    vector_to_parameters(vector, model.parameters())


def to_storage(p: Tensor) -> None:
    p.untyped_storage().copy_(
        torch.randn(p.untyped_storage().size() // 4).untyped_storage()
    )


WRITES: dict[str, Write] = {
    "optimizer": by_optimizer,
    "load_state_dict": load_state_dict,
    "from a vector": from_vector,
    "in place": each(lambda p: p.add_(torch.randn_like(p))),
    "in inference mode": each(lambda p: p.normal_(), torch.inference_mode),
    ".data.copy_": each(lambda p: p.data.copy_(torch.randn_like(p))),
    ".data.mul_": each(lambda p: p.data.mul_(-1)),
    "numpy": each(lambda p: np.negative(a := p.numpy(), out=a)),
    "storage": each(to_storage),
}


def swap(p: Tensor) -> None:
    torch.utils.swap_tensors(p, nn.Parameter(0.5 * p.detach()))


def emptied_and_filled(p: Tensor) -> None:
    """As FSDP does with weights that it gathers."""
    value, storage = torch.randn_like(p), p.untyped_storage()
    size = storage.size()
    storage.resize_(0)
    storage.resize_(size)
    p.copy_(value)


MOVES: dict[str, Write] = {
    ".data =": each(lambda p: setattr(p, "data", torch.randn_like(p))),
    "swap_tensors": each(swap),
}
"""Writes that give a weight other memory, which no holder sees."""


# -- the calls of others ---------------------------------------------------------------


def in_a_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=model, args=(torch.ones(4, WIDTH),))
    thread.start()
    thread.join()


def a_deep_copy(model: nn.Module) -> None:
    copy.deepcopy(model)(torch.ones(4, WIDTH))


OTHERS = [in_a_thread, a_deep_copy]


class AsTheWeightsAre(RuleBasedStateMachine):
    """What may happen to the weights of a converted model."""

    base: nn.Module
    """A converted model, of which each run trains a copy."""

    @initialize(memory=st.sampled_from(sorted(MEMORIES)))
    def begin(self, memory: str) -> None:
        torch.manual_seed(0)
        self.model: Any = copy.deepcopy(self.base)
        self.x = torch.randn(3, WIDTH)
        self.held: list[tuple[Tensor, Tensor]] = []
        self.graphs: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        self.memory = memory
        MEMORIES[memory](self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.02)

    def check(self, mode: str) -> None:
        with MODES[mode]():
            assert error_now(self.model, self.x) < CLOSE

    @rule(mode=st.sampled_from(sorted(MODES)), training=st.booleans())
    def call(self, mode: str, training: bool) -> None:
        self.model.train(training)
        self.check(mode)

    @rule(by=st.sampled_from(OTHERS), mode=st.sampled_from(sorted(MODES)))
    def call_of_others(self, by: Write, mode: str) -> None:
        by(self.model)
        self.check(mode)

    @rule(how=st.sampled_from(sorted(LOOKS)))
    def look(self, how: str) -> None:
        for p in self.model.parameters():
            LOOKS[how](p)

    @precondition(lambda self: len(self.held) < 3)
    @rule(
        how=st.sampled_from(sorted(HOLDERS)),
        at=st.sampled_from([0, 2]),
        mode=st.sampled_from(sorted(MODES)),
    )
    def hold(self, how: str, at: int, mode: str) -> None:
        weight = self.model[at].weight
        self.held.append((weight, HOLDERS[how](weight)))
        self.check(mode)
        self.write_of_a_holder(mode)

    @precondition(lambda self: self.held)
    @rule()
    def let_go(self) -> None:
        self.held.pop(0)

    @precondition(lambda self: self.held)
    @rule(mode=st.sampled_from(sorted(MODES)))
    def write_of_a_holder(self, mode: str) -> None:
        self.graphs.clear()
        with torch.no_grad():
            self.held[-1][1].normal_()
        self.check(mode)

    @rule(how=st.sampled_from(sorted(WRITES)), mode=st.sampled_from(sorted(MODES)))
    def write(self, how: str, mode: str) -> None:
        self.graphs.clear()
        if how == "storage" and self.memory != "of its own":
            return
        WRITES[how](self.model)
        self.check(mode)

    @rule(how=st.sampled_from(sorted(MOVES)), mode=st.sampled_from(sorted(MODES)))
    def move(self, how: str, mode: str) -> None:
        self.graphs.clear()
        self.held.clear()
        MOVES[how](self.model)
        self.check(mode)

    @precondition(lambda self: self.memory == "of its own" and not self.held)
    @rule(mode=st.sampled_from(sorted(MODES)))
    def empty_and_fill(self, mode: str) -> None:
        self.graphs.clear()
        each(emptied_and_filled)(self.model)
        self.check(mode)

    @rule(
        count=st.sampled_from([1, STEPS + 2]),
        micro_batches=st.sampled_from([1, 2]),
        announced=st.booleans(),
    )
    def steps(self, count: int, micro_batches: int, announced: bool) -> None:
        self.graphs.clear()
        for _ in range(count):
            for _ in range(micro_batches):
                self.model(self.x).mean().backward()
            if announced:
                self.optimizer.step()
            else:
                for p in self.model.parameters():
                    p.data -= 0.02 * p.grad
            self.model.zero_grad()
        self.check("training")

    @precondition(lambda self: len(self.graphs) < 2)
    @rule()
    def forward(self) -> None:
        x = self.x.clone().requires_grad_()
        with autoamp.disabled():
            exact = self.model(x).square().sum()
            wanted = torch.autograd.grad(exact, [x, *self.model.parameters()])
        self.graphs.append((self.model(x).square().sum(), x, list(wanted)))

    @precondition(lambda self: self.graphs)
    @rule(last=st.booleans())
    def backward(self, last: bool) -> None:
        loss, x, wanted = self.graphs.pop(-1 if last else 0)
        found = torch.autograd.grad(loss, [x, *self.model.parameters()])
        assert relative_error(found, wanted) < CLOSE

    @rule(
        by_copy=st.booleans(),
        mode=st.sampled_from(sorted(MODES)),
    )
    def exchange_and_put_back(self, by_copy: bool, mode: str) -> None:
        """As moving averages are, for an evaluation."""
        params = list(self.model.parameters())
        kept = [p.detach().clone() if by_copy else p.data for p in params]
        for put in ([5 * torch.randn_like(p) for p in params], kept):
            for p, value in zip(params, put, strict=True):
                if by_copy:
                    p.data.copy_(value)
                else:
                    p.data = value
            self.check(mode)

    @invariant()
    def holders_see_what_was_written(self) -> None:
        for weight, holder in self.held:
            assert torch.equal(weight.detach(), holder.detach())


def test_no_call_reads_an_old_weight_and_no_write_is_lost() -> None:
    AsTheWeightsAre.base = converted(mlp())
    run_state_machine_as_test(
        AsTheWeightsAre,
        settings=settings(max_examples=12, stateful_step_count=16, deadline=None),
    )
