"""One step of a model in fp32, under `torch.autocast` and with autoamp."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, short_name
from autoamp.passes.check.saved import storage_key
from autoamp.passes.decide.devices import Device
from autoamp.passes.kernels.table import TOGETHER
from autoamp.passes.record import Prepared
from autoamp.report.report import Report
from autoamp.report.reporting import report_of
from autoamp.runtime.eligible import parameters_of
from autoamp.runtime.examine import examined
from autoamp.runtime.kept import capture_now, left_as_it_is
from autoamp.runtime.stand_in import Call, default_loss, floats_of
from autoamp.tools.count_traffic import tensors_of
from autoamp.tools.plan_step import StepWatch, own_part, places_of, without_memory
from autoamp.training.options import Options

FP32, AUTOCAST, AUTOAMP = "fp32", "torch.autocast", "autoamp"
WAYS = (FP32, AUTOCAST, AUTOAMP)

Tell = Callable[[str], None]
Boundary = tuple[int, str]
"""Bytes and dtype of what one layer gives to the next."""


@dataclass(frozen=True)
class Setting:
    """What a step is planned with; times are those of `device`.

    Attributes:
        low: the compute dtype.
        trains: whether a step has a backward.
        on_mesh: whether the step is one rank's.  Gradients then arrive one by one, and
            each step runs again with the gradients of another.
    """

    options: Options
    low: torch.dtype
    device: Device
    trains: bool = True
    on_mesh: bool = False


@dataclass(frozen=True)
class WayStep:
    """A step in one way.

    Attributes:
        first: the step, without gradients before it.
        again: on a mesh the same step where the gradients of another are held.
        copies: bytes of low copies that autoamp keeps; 0 in the other ways.
        boundary: what one layer gives to the next; (0, "") where it was not asked for.
        report: the report on what `convert` would do, with autoamp.
        rewritten: whether all of autoamp's graphs are rewritten.
    """

    first: StepWatch
    again: StepWatch
    copies: int = 0
    boundary: Boundary = (0, "")
    report: Report | None = None
    rewritten: bool = True


def steps_of(
    model: nn.Module,
    call: Call,
    setting: Setting,
    *,
    tell: Tell = lambda _: None,
    layer: nn.Module | None = None,
    names: Iterable[str] = WAYS,
) -> dict[str, WayStep]:
    """A step in each way; the model is left as it was.

    Args:
        tell: called with a description of each stage as it begins.
        layer: a layer whose result is the boundary between two stages.
        names: the ways that are wanted.
    """
    found = {}
    with left_as_it_is(model), without_memory(model, call) as given:
        model.train(setting.trains)
        for name in names:
            tell(f"running a step {_WORDS[name]}")
            if name == AUTOAMP:
                found[name] = _with_autoamp(model, given, setting)
            else:
                found[name] = _with_own_code(model, given, setting, name, layer)
    return found


_WORDS = {FP32: "in fp32", AUTOCAST: "under torch.autocast", AUTOAMP: "with autoamp"}

_Region = contextlib.AbstractContextManager[Any]


def _with_own_code(
    model: nn.Module, call: Call, setting: Setting, name: str, layer: nn.Module | None
) -> WayStep:
    """A step of the model's own code, in fp32 or under `torch.autocast`."""
    boundary: Boundary = 0, ""

    def gave(_: Any, __: Any, result: Any) -> None:
        nonlocal boundary
        for each in floats_of(result)[:1]:
            part = own_part(each)
            boundary = part.nbytes, short_name(part.dtype)

    def region() -> _Region:
        return contextlib.nullcontext() if name == FP32 else _autocast(setting)

    hook = None if layer is None else layer.register_forward_hook(gave)
    try:
        first, again = _watched(model, call, setting, region)
    finally:
        if hook is not None:
            hook.remove()
    return WayStep(first, again, boundary=boundary)


def _with_autoamp(model: nn.Module, call: Call, setting: Setting) -> WayStep:
    """A step of the graphs that `convert` would make.

    Graphs that cannot be rewritten run as captured; on a mesh under autocast, as
    `convert` runs them.
    """
    # The few numbers that loss scaling adds to a graph's inputs are left out.
    options = setting.options.replace(loss_scale="off")
    if setting.on_mesh:
        options = options.without_kernels(TOGETHER)
    with examined(model, options, setting.low, setting.device) as (twin, engine):
        copies = _LowCopies(setting.low)
        engine.play = copies.play
        as_captured = engine.as_captured

        def by_autocast(prepared: Any, args: Any) -> Any:
            with _autocast(setting):
                return as_captured(prepared, args)

        if setting.on_mesh:
            engine.as_captured = by_autocast  # type: ignore[method-assign]
        capture_now(twin, *call)
        graphs = engine.record.graphs
        rewritten = bool(graphs) and all(each.rewritten is not None for each in graphs)
        made = [*copies.made.values()]
        first, again = _watched(twin, call, setting, contextlib.nullcontext, made)
        report = report_of(engine.record, None, setting.device.name)
    kept = sum(own_part(each).nbytes for each in made)
    return WayStep(first, again, kept, report=report, rewritten=rewritten)


def _watched(
    model: nn.Module,
    call: Call,
    setting: Setting,
    region: Callable[[], _Region],
    copies: Iterable[Tensor] = (),
) -> tuple[StepWatch, StepWatch]:
    """Runs a step, and on a mesh again with its own gradients."""
    parameters, (args, kwargs) = parameters_of(model), call
    held = [each for place in places_of(model) for each in place.values()]

    def watched() -> StepWatch:
        given = tensors_of([call, [each.grad for each in parameters]])
        watch = StepWatch(tensors_of(held), given, copies, setting.device)
        watch.run(
            lambda: default_loss(model(*args, **kwargs)),
            region(),
            trains=setting.trains,
        )
        return watch

    # DTensors run each kind of op once on the shapes of the whole, to learn those of
    # results.  So the steps of DTensors run twice, and the first are left out.
    is_split = any(map(compat.is_distributed, parameters))
    for _ in range(2 if is_split else 1):
        try:
            first = again = watched()
            if setting.on_mesh:
                again = watched()
        finally:
            for parameter in parameters:
                parameter.grad = None
    return first, again


class _LowCopies:
    """Runs rewritten graphs with one low copy of each weight.

    Attributes:
        made: the copies by the weight's storage and shape and the copy's memory format.
    """

    def __init__(self, low: torch.dtype) -> None:
        self.made: dict[Any, Tensor] = {}
        self._low = low

    def play(self, prepared: Prepared, args: tuple[Any, ...]) -> Any:
        """Runs one graph on the arguments of a call."""
        slots = prepared.weights
        layouts = prepared.layouts or (torch.preserve_format,) * len(slots)
        copies = [self._copy(args[i], k) for i, k in zip(slots, layouts, strict=True)]
        return prepared.run(*args, *copies)

    def _copy(self, weight: Tensor, layout: torch.memory_format) -> Tensor:
        key = storage_key(weight), tuple(weight.shape), layout
        if key not in self.made:
            self.made[key] = torch.empty_like(
                weight.detach(), dtype=self._low, memory_format=layout
            )
        return self.made[key]


# -- autocast of a GPU on the CPU ------------------------------------------------------

_NAMES_IN_FP32 = """
    __pow__ __rdiv__ __rpow__ __rtruediv__ acos asin binary_cross_entropy_with_logits
    cdist cosh cosine_embedding_loss cosine_similarity cross_entropy cumprod cumsum dist
    erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10
    log1p log2 log_softmax margin_ranking_loss mse_loss multi_margin_loss
    multilabel_margin_loss nll_loss norm normalize pdist poisson_nll_loss pow prod
    reciprocal renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax
    softmin softplus sum tan triplet_margin_loss
"""
IN_FP32 = frozenset(_NAMES_IN_FP32.split())
"""The functions that autocast runs in fp32 on GPUs, by torch's documentation.

On CPUs they run in the dtype of their operands.  A build of torch for CPUs cannot train
tensors of a GPU, not even fake ones, so autocast of the CPU stands in.
"""


@contextlib.contextmanager
def _autocast(setting: Setting) -> Iterator[None]:
    is_cuda = setting.device.type == "cuda"
    inner = _CudaAutocast() if is_cuda else contextlib.nullcontext()
    with torch.autocast("cpu", dtype=setting.low), inner:
        yield


class _CudaAutocast(TorchFunctionMode):
    """Inside autocast of the CPU, runs the functions `IN_FP32` in fp32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in IN_FP32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = pytree.tree_map_only(Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_DTYPES.values() else tensor
