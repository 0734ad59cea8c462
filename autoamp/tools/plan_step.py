"""Runs a step on tensors without data, and notes what it holds, takes and sends.

Fake tensors of the CPU stand in for weights, buffers and arguments.  Tensors of the
meta device cannot be used: `torch.autocast` does not cast them, and attention on them
keeps the matrix of scores, which torch's kernels for CPUs and GPUs do not keep.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, short_name
from autoamp.errors import OptionError
from autoamp.messages import class_name, printable_line
from autoamp.passes.check.saved import kept_by_functions, storage_key
from autoamp.passes.decide.devices import Device
from autoamp.runtime.stand_in import Call
from autoamp.tools.count_flops import flops_of
from autoamp.tools.count_traffic import tensors_of

PHASES = ("forward", "backward")

ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"
REDUCE_SCATTER, ALL_TO_ALL, SEND = "reduce-scatter", "all-to-all", "send"

_COLLECTIVES = {
    "all_reduce": ALL_REDUCE,
    "allreduce_": ALL_REDUCE,
    "all_gather_into_tensor": ALL_GATHER,
    "_allgather_base_": ALL_GATHER,
    "reduce_scatter_tensor": REDUCE_SCATTER,
    "_reduce_scatter_base_": REDUCE_SCATTER,
    "all_to_all_single": ALL_TO_ALL,
    "alltoall_base_": ALL_TO_ALL,
}
"""The collectives that are counted, by the name of torch's op."""

_FREE = ("empty", "new_empty", "lift_fresh", "detach", "alias", "_local_scalar")
_LOOKUPS = ("embedding", "index", "gather")


class Sent(NamedTuple):
    """A collective of a step; `size` is the bytes of the whole tensor.

    That is the larger of what goes in and what comes out.
    """

    phase: str
    kind: str
    dtype: str
    size: int


class StepWatch(compat.CountingDispatch):
    """Follows the storages that ops allocate until they are freed, and notes each op.

    Of a DTensor the part of this rank counts, which the ops inside it make.

    Attributes:
        copies: bytes of the storages of low copies of weights that are held now.
        now: the bytes that are held now besides what existed before the step.
        most: the most bytes that were held at one time, including low copies.
        saved: after `run`, bytes kept for the backward, without weights and low copies.
        low: after `run`, bytes of low copies of weights at the end of the forward.
        held: for each phase the bytes held after each op.
        nanoseconds: for each phase the predicted time of the ops.
        sent: each collective, in order.
        ops: each op with its shapes and dtypes, in order.
    """

    def __init__(
        self,
        weights: Iterable[Tensor],
        given: Iterable[Tensor],
        copies: Iterable[Tensor],
        device: Device,
    ) -> None:
        """Weights, other tensors and low copies of weights exist before the step."""
        super().__init__()
        self._weights = {storage_key(own_part(each)) for each in weights}
        self._before = self._weights | {storage_key(own_part(each)) for each in given}
        self._known = set(self._before)
        self._device = device
        self.copies: dict[tuple[str, int], int] = {}
        self.now = self.most = self.saved = self.low = 0
        self.held: dict[str, list[int]] = {phase: [] for phase in PHASES}
        self.nanoseconds = dict.fromkeys(PHASES, 0.0)
        self.sent: list[Sent] = []
        self.ops: list[str] = []
        for each in copies:
            self._allocated(own_part(each), is_copy=True)

    def run(
        self,
        forward: Callable[[], Tensor],
        region: contextlib.AbstractContextManager[Any],
        *,
        trains: bool,
    ) -> None:
        """Runs a forward, which gives the loss, and its backward where it trains."""
        saved: dict[tuple[str, int], int] = {}

        def note(tensor: Tensor) -> None:
            part = own_part(tensor)
            saved.setdefault(storage_key(part), part.untyped_storage().nbytes())

        def pack(tensor: Tensor) -> Tensor:
            note(tensor)
            # An op that saved its own result would hold itself.
            return tensor.detach()

        with self, torch.set_grad_enabled(trains):
            with region:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    loss = forward()
                low = dict(self.copies)  # autocast drops its copies after its region
            for tensor in kept_by_functions(loss):
                note(tensor)
            if trains:
                loss.backward()
        self.low = sum(low.values())
        self.saved = sum(
            size
            for key, size in saved.items()
            if key not in low and key not in self._before
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(compat.is_distributed_type, types)):
            # The ops on this rank's parts come here by themselves.
            return NotImplemented
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        is_copy = (
            func is torch.ops.aten._to_copy.default
            and result.dtype in LOW_DTYPES.values()
            and storage_key(args[0]) in self._weights
        )
        for each in tensors_of(result):
            self._allocated(each, is_copy=is_copy)
        if isinstance(func, torch._ops.OpOverload):
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        kind = _COLLECTIVES.get(name)
        if space == "prim" or (space.startswith("_c10d") and kind is None):
            return
        phase = PHASES[compat.inside_backward()]
        taken, made = tensors_of((args, kwargs)), tensors_of(result)
        if space not in ("_c10d_functional", "c10d"):
            took = _nanoseconds(func, args, kwargs, result, self._device)
            self.nanoseconds[phase] += took
        elif kind is not None:
            whole = max((*taken, *made), key=lambda tensor: tensor.nbytes)
            self.sent.append(Sent(phase, kind, short_name(whole.dtype), whole.nbytes))
        self.held[phase].append(self.now)
        self.ops.append(f"{phase} {space}::{name} {_shapes(taken)} -> {_shapes(made)}")

    def _allocated(self, tensor: Tensor, *, is_copy: bool) -> None:
        key = storage_key(tensor)
        if key in self._known:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self._known.add(key)
        if is_copy:
            self.copies[key] = size
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: tuple[str, int], size: int) -> None:
        self.now -= size
        self._known.discard(key)
        self.copies.pop(key, None)


def _nanoseconds(
    func: Any, args: Any, kwargs: Any, result: Any, device: Device
) -> float:
    """The predicted time of one op: a launch, and the longer of bytes and flops."""
    name = func.overloadpacket.__name__
    taken, made = tensors_of((args, kwargs)), tensors_of(result)
    if name.startswith(_FREE) or _is_view(func, taken, made):
        return 0.0
    written = sum(map(_bytes, made))
    read = written if name in _LOOKUPS else sum(map(_bytes, taken))
    moving = (read + written) / device.bytes_per_ns
    formula = flops_of(func)
    flops = formula(*args, **kwargs, out_val=result) if formula else 0
    if not flops:
        return device.launch_ns + moving
    low = any(each.dtype in LOW_DTYPES.values() for each in taken)
    kind = "conv" if "conv" in name else "matmul" if "mm" in name else "batched"
    rate = device.flops_per_ns(kind, float("inf"), low=low)
    return device.launch_ns + max(moving, flops / rate)


def _is_view(func: Any, taken: list[Tensor], made: list[Tensor]) -> bool:
    known = {storage_key(own_part(each)) for each in taken}
    aliases = all(storage_key(own_part(each)) in known for each in made)
    return aliases and not compat.schema(func).is_mutable


def _bytes(tensor: Tensor) -> int:
    """The bytes of a tensor in memory; an expanded tensor has those of its source."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _shapes(tensors: Iterable[Tensor]) -> str:
    return " ".join(f"{short_name(t.dtype)}{[*t.shape]}" for t in tensors)


# -- tensors ---------------------------------------------------------------------------


def own_part(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, or `tensor` itself."""
    with torch.no_grad():
        return compat.local_part(tensor)


def bytes_of(tensors: Any) -> int:
    """Bytes of the distinct storages of nested tensors, of this rank's parts."""
    parts = [*map(own_part, tensors_of(tensors))]
    sizes = {storage_key(each): each.untyped_storage().nbytes() for each in parts}
    return sum(sizes.values())


def places_of(model: nn.Module) -> list[Any]:
    """The dicts in which a model's modules hold their weights and buffers."""
    return [
        place
        for each in compat.modules_of(model)
        for place in (compat.parameters_here(each), compat.buffers_here(each))
    ]


@contextlib.contextmanager
def without_memory(model: nn.Module, call: Call) -> Iterator[Call]:
    """A region where `model` has fake weights and buffers; yields `call`, fake too.

    A tensor that stands in several places, such as a tied weight, is one fake tensor.
    """
    mode = compat.FakeTensorMode(allow_non_fake_inputs=True)
    # Real tensors are kept as well, so that no `id` is given to another tensor.
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(real: Tensor) -> Tensor:
        if id(real) not in made:
            made[id(real)] = real, _fake_like(real, mode)
        return made[id(real)][1]

    places = places_of(model)
    before = [dict(place) for place in places]
    try:
        for place in places:
            for name, tensor in place.items():
                if tensor is not None:
                    place[name] = fake(tensor)
        given: Call = pytree.tree_map_only(Tensor, fake, call)
        yield given
    finally:
        for place, held in zip(places, before, strict=True):
            place.clear()
            place.update(held)


def _fake_like(real: Tensor, mode: compat.FakeTensorMode) -> Tensor:
    part = own_part(real)
    with mode:
        made: Tensor = compat.like(part, device="cpu", symbolic=True)
    if part is not real:
        made = compat.with_memory(real, made).detach()
    if isinstance(real, nn.Parameter):
        return nn.Parameter(made, requires_grad=real.requires_grad)
    return made.requires_grad_(real.requires_grad)


# -- the optimizer ---------------------------------------------------------------------

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


OptimizerName = Literal["adamw", "sgd", "none"]

OPTIMIZERS: dict[OptimizerName, Make | None] = {
    "adamw": torch.optim.AdamW,
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "none": None,
}
"""The names that `optimizer=` takes."""


class OptimizerCost(NamedTuple):
    """The class of an optimizer, the bytes of its state, and those that a step moves.

    A step reads and writes each weight and each state, and reads each gradient.
    """

    name: str = "no optimizer"
    state: int = 0
    moved: int = 0


def optimizer_cost(
    parameters: Sequence[nn.Parameter], optimizer: str | Make
) -> OptimizerCost:
    """The cost of an optimizer, by its name or by a function that makes it.

    Raises:
        OptionError: there is no such optimizer, or it cannot step on the meta device.
    """
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise OptionError(
            f"optimizer={optimizer!r} is not one of {', '.join(OPTIMIZERS)}; give one "
            "of these, or a function from a list of parameters to an optimizer"
        )
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    trained = [_on_meta(each) for each in parameters if each.requires_grad]
    if make is None or not trained:
        return OptimizerCost()
    try:
        made = make(trained)
        made.step()
    except Exception as error:
        raise OptionError(
            f"the optimizer cannot step on the meta device: {said_by(error)}; give "
            'optimizer="none", or an optimizer with foreach=False and fused=False'
        ) from error
    state, size = bytes_of(list(made.state.values())), bytes_of(trained)
    return OptimizerCost(class_name(made), state, 2 * (size + state) + size)


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def said_by(error: Exception) -> str:
    """The class and the text of an error, on one line of a message."""
    return printable_line(f"{type(error).__name__}: {error}", 300)
