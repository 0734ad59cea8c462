"""Any order of calls, steps and writes: no call reads an old weight.

Nor is any write lost, whichever memory a weight lies in and whatever else holds it; and
the backward of a graph reads what its own forward read.

A plain model goes through each program beside the converted one.  Its weights, and what
it refuses, are the right answers: torch refuses some writes too, and others give a
weight new memory, which no holder sees.
"""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
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

from tests.metrics import relative_error
from tests.small_models import WIDTH, converted, mlp
from tests.training.weights.test_weights import CLOSE, MODES

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


def swap(p: Tensor) -> None:
    torch.utils.swap_tensors(p, nn.Parameter(0.5 * p.detach()))


def emptied_and_filled(p: Tensor) -> None:
    """As FSDP does with weights that it gathers."""
    value, storage = torch.randn_like(p), p.untyped_storage()
    size = storage.size()
    if size != p.nbytes:  # what else lies there would be lost
        return
    storage.resize_(0)
    storage.resize_(size)
    p.copy_(value)


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
    "empty and fill": each(emptied_and_filled),
    ".data =": each(lambda p: setattr(p, "data", torch.randn_like(p))),
    "swap_tensors": each(swap),
}


# -- the calls of others ---------------------------------------------------------------


def in_a_thread(model: nn.Module) -> None:
    thread = threading.Thread(target=model, args=(torch.ones(4, WIDTH),))
    thread.start()
    thread.join()


def a_deep_copy(model: nn.Module) -> None:
    copy.deepcopy(model)(torch.ones(4, WIDTH))


OTHERS = [in_a_thread, a_deep_copy]


class Side:
    """A model, and what the program has made of it so far."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.02)
        self.holders: list[Tensor] = []

    @property
    def weights(self) -> list[Tensor]:
        return list(self.model.parameters())


def refusal(do: Callable[[Side], Any], side: Side, mode: str, state: Tensor) -> str:
    """What torch says where it refuses; "" where it does not."""
    torch.set_rng_state(state)
    with MODES[mode]():
        try:
            do(side)
        except RuntimeError as error:
            return str(error)
    return ""


class AsTheWeightsAre(RuleBasedStateMachine):
    """What may happen to the weights of a converted model."""

    plain: nn.Module
    converted: nn.Module
    """The same model twice, of which each run trains copies."""

    @initialize(memory=st.sampled_from(sorted(MEMORIES)))
    def begin(self, memory: str) -> None:
        torch.manual_seed(0)
        self.sides = [Side(copy.deepcopy(m)) for m in (self.plain, self.converted)]
        self.right, self.ours = self.sides
        self.x = torch.randn(3, WIDTH)
        self.graphs: list[tuple[Tensor, Tensor, list[Tensor]]] = []
        self.ours.model(self.x)  # an optimizer of a model that nobody calls is an error
        self.both(lambda side: MEMORIES[memory](side.model))

    def both(self, do: Callable[[Side], Any], mode: str = "training") -> None:
        """Does the same to both models, which refuse the same."""
        state = torch.get_rng_state()
        wanted, found = (refusal(do, side, mode, state) for side in self.sides)
        assert found == wanted

    def write_to_both(self, do: Callable[[Side], Any], mode: str) -> None:
        self.graphs.clear()
        self.both(do, mode)
        self.check(mode)

    @property
    def can_train(self) -> bool:
        """Whether no weight was made under inference mode: torch trains no such."""
        return not any(p.is_inference() for p in self.right.weights)

    def check(self, mode: str) -> None:
        if mode == "training" and not self.can_train:
            return
        with MODES[mode]():
            try:
                wanted = self.right.model(self.x)
            except (
                RuntimeError
            ):  # torch refuses weights that were swapped in some modes
                return
            found = self.ours.model(self.x)
        assert relative_error([found], [wanted]) < CLOSE

    @rule(mode=st.sampled_from(sorted(MODES)), training=st.booleans())
    def call(self, mode: str, training: bool) -> None:
        self.ours.model.train(training)
        self.check(mode)

    @precondition(lambda self: self.can_train)
    @rule(by=st.sampled_from(OTHERS), mode=st.sampled_from(sorted(MODES)))
    def call_of_others(self, by: Write, mode: str) -> None:
        by(self.ours.model)
        self.check(mode)

    @rule(how=st.sampled_from(sorted(LOOKS)), mode=st.sampled_from(sorted(MODES)))
    def look(self, how: str, mode: str) -> None:
        self.both(lambda side: [LOOKS[how](p) for p in side.weights], mode)

    @precondition(lambda self: len(self.ours.holders) < 3)
    @rule(
        how=st.sampled_from(sorted(HOLDERS)),
        at=st.sampled_from([0, 2]),
        mode=st.sampled_from(sorted(MODES)),
    )
    def hold(self, how: str, at: int, mode: str) -> None:
        self.both(
            lambda side: side.holders.append(HOLDERS[how](side.model[at].weight)), mode
        )
        self.check(mode)
        if self.ours.holders:  # torch may have refused this one
            self.write_of_a_holder(mode)

    @precondition(lambda self: self.ours.holders)
    @rule()
    def let_go(self) -> None:
        for side in self.sides:
            side.holders.pop(0)

    @precondition(lambda self: self.ours.holders)
    @rule(mode=st.sampled_from(sorted(MODES)))
    def write_of_a_holder(self, mode: str) -> None:
        def write(side: Side) -> None:
            with torch.no_grad():
                side.holders[-1].normal_()

        self.write_to_both(write, mode)

    @rule(how=st.sampled_from(sorted(WRITES)), mode=st.sampled_from(sorted(MODES)))
    def write(self, how: str, mode: str) -> None:
        # Memory that DLPack has shown may be freed while a holder still reads it.
        if how != "empty and fill" or not self.ours.holders:
            self.write_to_both(lambda side: WRITES[how](side.model), mode)

    @precondition(lambda self: self.can_train)
    @rule(
        count=st.sampled_from([1, 3]),
        micro_batches=st.sampled_from([1, 2]),
        announced=st.booleans(),
    )
    def steps(self, count: int, micro_batches: int, announced: bool) -> None:
        def step(side: Side) -> None:
            for p, gradient in zip(side.weights, gradients, strict=True):
                p.grad = gradient
            if announced:
                side.optimizer.step()
            else:
                for p in side.weights:
                    p.data -= 0.02 * p.grad
            side.model.zero_grad()

        self.graphs.clear()
        for _ in range(count):
            for _ in range(micro_batches):
                self.ours.model(self.x).mean().backward()
            gradients = [p.grad for p in self.ours.weights]
            self.both(step)
        self.check("training")

    @precondition(lambda self: len(self.graphs) < 2 and self.can_train)
    @rule()
    def forward(self) -> None:
        x = self.x.clone().requires_grad_()
        exact = self.right.model(x).square().sum()
        wanted = torch.autograd.grad(exact, [x, *self.right.weights])
        self.graphs.append((self.ours.model(x).square().sum(), x, list(wanted)))

    @precondition(lambda self: self.graphs)
    @rule(last=st.booleans())
    def backward(self, last: bool) -> None:
        loss, x, wanted = self.graphs.pop(-1 if last else 0)
        found = torch.autograd.grad(loss, [x, *self.ours.weights])
        assert relative_error(found, wanted) < CLOSE

    @rule(
        by_copy=st.booleans(),
        mode=st.sampled_from(sorted(MODES)),
    )
    def exchange_and_put_back(self, by_copy: bool, mode: str) -> None:
        """As moving averages are, for an evaluation."""

        def put(values: dict[Side, list[Tensor]]) -> None:
            def write(side: Side) -> None:
                for p, value in zip(side.weights, values[side], strict=True):
                    if by_copy:
                        p.data.copy_(value)
                    else:
                        p.data = value

            self.write_to_both(write, mode)

        others = [5 * torch.randn_like(p) for p in self.right.weights]
        kept = {
            side: [p.detach().clone() if by_copy else p.data for p in side.weights]
            for side in self.sides
        }
        put({side: [value.clone() for value in others] for side in self.sides})
        put(kept)

    @invariant()
    def weights_and_holders_are_as_those_of_a_plain_model(self) -> None:
        right, ours = ([*side.weights, *side.holders] for side in self.sides)
        assert all(map(torch.equal, ours, right))


@pytest.fixture(scope="module")
def machine() -> type[AsTheWeightsAre]:
    """The state machine, with its two models."""
    AsTheWeightsAre.plain = mlp()
    AsTheWeightsAre.converted = converted(copy.deepcopy(AsTheWeightsAre.plain))
    return AsTheWeightsAre


@pytest.mark.hypothesis
@pytest.mark.one_model
def test_no_call_reads_an_old_weight_and_no_write_is_lost(
    machine: type[AsTheWeightsAre],
) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=12, stateful_step_count=16, deadline=None),
    )


@pytest.mark.one_model
@pytest.mark.parametrize(
    ("memory", "holder", "mode", "way"),
    [
        ("a file", "an alias", "inference_mode", "from a vector"),
        ("of its own", "numpy", "no_grad", "empty and fill"),
        ("of its own", "dlpack", "inference_mode", "in place"),
    ],
    ids=["the weight leaves its holder", "torch refuses a resize", "seen by DLPack"],
)
def test_a_found_program_goes_as_in_plain_torch(
    memory: str, holder: str, mode: str, way: str, machine: type[AsTheWeightsAre]
) -> None:
    state = machine()
    state.begin(memory=memory)
    state.hold(how=holder, at=0, mode=mode)
    state.weights_and_holders_are_as_those_of_a_plain_model()
    if way == "empty and fill":
        state.let_go()
    state.write(how=way, mode=mode)
    state.weights_and_holders_are_as_those_of_a_plain_model()


@pytest.mark.one_model
@pytest.mark.parametrize("mode", ["inference_mode", "training"])
def test_weights_that_torch_itself_refuses_are_no_finds(
    mode: str, machine: type[AsTheWeightsAre]
) -> None:
    state = machine()
    state.begin(memory="a file")
    state.call(mode="inference_mode", training=False)
    state.write(how="swap_tensors", mode="inference_mode")
    state.exchange_and_put_back(by_copy=False, mode=mode)
    state.hold(how="another parameter", at=2, mode="no_grad")
    state.weights_and_holders_are_as_those_of_a_plain_model()
