"""One rank of tp of a model: its weights, and a step of it at each number of layers.

The other ranks do not exist: the process group is torch's fake one, whose collectives
do nothing.  A model of transformers is parallelized by the plan of its own class.

Layers are alike, so bytes, collectives and times are linear in the number of layers.
That is proved on a third depth for each model: bytes and collectives must lie on the
line of the first two exactly, times to rounding.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from autoamp import compat
from autoamp.errors import OptionError
from autoamp.messages import class_name
from autoamp.runtime.eligible import parameters_of
from autoamp.runtime.stand_in import Call
from autoamp.tools.plan_step import (
    PHASES,
    Make,
    Sent,
    bytes_of,
    optimizer_cost,
    own_part,
)
from autoamp.tools.plan_ways import (
    AUTOAMP,
    AUTOCAST,
    FP32,
    Boundary,
    Setting,
    Tell,
    WayStep,
    steps_of,
)

DEPTHS = (2, 3, 4)
"""The depths that are captured.  With one layer no layer lies between two others."""

FEWEST = 6
"""The fewest layers of a stack that is captured at smaller depths."""

_PLACES = ("index", "idx", "layer_id", "layer_number", "block_id")
"""Parts of names of attributes that say where in the stack a layer stands."""

Maker = Callable[[], tuple[nn.Module, Call]]
"""Makes a model and a call of it, on the process group that is up."""

_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "intermediate_size",
)
"""Numbers of a configuration that the devices of a layer must share evenly."""

_WHOLE = "replicated_with_grad_allreduce"
"""The style of a module that each device has whole, such as a norm of heads."""


# -- a rank that does not exist -------------------------------------------------------


@contextlib.contextmanager
def as_rank(rank: int, size: int) -> Iterator[None]:
    """A region in which this process is rank `rank` of `size` that do not exist.

    Raises:
        OptionError: a process group is up, or this torch has no fake one.
    """
    if size == 1:
        yield
        return
    if distributed.is_available() and distributed.is_initialized():
        raise OptionError(
            "a process group is up, and a mesh needs a pretended one: plan in a "
            "process of its own, before init_process_group"
        )
    if not (distributed.is_available() and compat.begin_fake_group(rank, size)):
        raise OptionError(
            f"this torch ({torch.__version__}) cannot pretend ranks; give a mesh "
            "with tp=1"
        )
    try:
        yield
    finally:
        distributed.destroy_process_group()


def parallelized(model: nn.Module, size: int) -> None:
    """Splits a model over `size` devices, as the plan of its class says.

    A model that holds DTensors has been split by its maker and stays as it is.

    Raises:
        OptionError: the model has no plan, the plan has an unknown style, or `size`
            does not divide heads or widths.
    """
    if size == 1:
        return
    config: Any = getattr(model, "config", None)
    for name in _SIZES:
        value = getattr(config, name, None)
        if isinstance(value, int) and value % size:
            raise OptionError(
                f"tp={size} does not divide {name}={value} of {class_name(model)}; "
                "give a tp that does"
            )
    if any(map(compat.is_distributed, model.parameters())):
        return
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise OptionError(
            f"{class_name(model)} has no plan of tensor parallelism: give tp=1, or a "
            "MODULE:FACTORY that calls parallelize_module itself"
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    styles = {
        name: _style(name, style, model)
        for name, style in plan.items()
        if style != _WHOLE
    }
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, styles, src_data_rank=None)


def _style(name: str, style: str, model: nn.Module) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
    )

    whole = Replicate()
    known: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=whole),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=whole),
        "rowwise": RowwiseParallel,
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=whole),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=whole),
        "sequence_parallel": SequenceParallel,
    }
    if style not in known:
        raise OptionError(
            f"{class_name(model)} splits {name} in the style {style!r}, which is not "
            f"planned (planned are {', '.join([*known, _WHOLE])}): give tp=1, or a "
            "MODULE:FACTORY that calls parallelize_module itself"
        )
    return known[style]()


# -- the layers of a model -------------------------------------------------------------

Stack = nn.ModuleList | nn.Sequential


def stack_of(model: nn.Module) -> Stack | None:
    """The longest list of modules that are alike; None if there is none."""
    found = [
        each
        for each in compat.modules_of(model)
        if isinstance(each, Stack) and len(each) > 1 and _are_alike(each)
    ]
    return max(found, key=len, default=None)


@contextlib.contextmanager
def with_layers(stack: Stack | None, count: int) -> Iterator[None]:
    """A region in which a stack has its first `count` layers alone."""
    if stack is None:
        yield
        return
    held = list(stack)
    del stack[count:]
    try:
        yield
    finally:
        for each in held[count:]:
            stack.append(each)


def _are_alike(stack: Stack) -> bool:
    first, *others = map(_facts, stack)
    has_weights = any(True for _ in stack[0].parameters())
    return has_weights and all(each == first for each in others)


def _facts(layer: nn.Module) -> list[object]:
    """What tells layers apart: classes, shapes of weights, plain attributes."""
    facts: list[object] = [
        (name, tuple(each.shape), each.dtype, each.requires_grad)
        for name, each in layer.named_parameters()
    ]
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str | None)
            and not any(part in key for part in _PLACES)
        }
        facts.append((name, type(module), settings))
    return facts


# -- the figures of a step by the number of layers -------------------------------------


@dataclass(frozen=True)
class Figures:
    """A step of some layers in one way.

    Attributes:
        saved: bytes kept for the backward, without weights and their low copies.
        low: bytes of low copies of weights at the end of the forward.
        copies: the part of `low` that autoamp keeps from step to step.
        most: the most bytes held at one time besides weights.
        again: the same, besides gradients that were there before.
        forward, backward: predicted nanoseconds of the ops.
        sent: how often each collective runs.
    """

    saved: int
    low: int
    copies: int
    most: int
    again: int
    forward: float
    backward: float
    sent: dict[Sent, int]


class Peak(NamedTuple):
    """The most bytes held in a part of a step; `figure` is "most" or "again"."""

    figure: str
    part: str


Key = str | Peak | Sent
"""The name of another of the `Figures`, a peak, or a collective."""


@dataclass(frozen=True)
class Line:
    """Figures that are linear in the number of layers.

    Attributes:
        at_zero: what a model has without layers.
        slope: what each layer adds; empty where the whole model was captured.
    """

    at_zero: Mapping[Key, float]
    slope: Mapping[Key, float]

    def at(self, layers: int, *, edges: bool = True) -> Figures:
        """The figures of a number of layers.

        Args:
            edges: whether the figures of all that surrounds the layers count.
                Without it the peaks still hold the temporary values of the whole,
                which is too much.
        """
        named: dict[str, Any] = {"most": 0, "again": 0}
        sent: dict[Sent, Any] = {}
        for key, start in self.at_zero.items():
            value = self.slope.get(key, 0) * layers
            value += start if edges or isinstance(key, Peak) else 0
            if isinstance(key, Peak):
                named[key.figure] = max(named[key.figure], value)
            elif isinstance(key, str):
                named[key] = value
            elif value:
                sent[key] = value
        return Figures(**named, sent=dict(sorted(sent.items())))


def line_of(steps: Sequence[WayStep]) -> Line | None:
    """The line of the steps at `DEPTHS`; None if the third does not lie on it."""
    a, b, c = ({key: len(held) for key, held in _held(step).items()} for step in steps)
    if any(b[key] - a[key] != c[key] - b[key] for key in a):
        return None
    # The ops of one layer and of all that surrounds the layers.
    windows = {key: b[key] - DEPTHS[0] * (b[key] - a[key]) for key in a}
    points = [_values(step, windows) for step in steps]
    keys = {key for point in points for key in point}
    first, second, third = ({key: each.get(key, 0) for key in keys} for each in points)
    slope = {key: second[key] - first[key] for key in keys}
    for key in keys:
        predicted = second[key] + slope[key]
        near = math.isclose if isinstance(predicted, float) else operator.eq
        if not near(predicted, third[key]):
            return None
    return Line({key: first[key] - DEPTHS[0] * slope[key] for key in keys}, slope)


def whole(step: WayStep) -> Line:
    """The figures of a model that was captured in all its depth."""
    return Line(_values(step, {}), {})


def _held(step: WayStep) -> dict[Peak, list[int]]:
    """The bytes held after each op, by the figure that they count for and the phase."""
    watches = {"most": step.first, "again": step.again}
    return {
        Peak(figure, phase): watch.held[phase]
        for figure, watch in watches.items()
        for phase in PHASES
    }


def _values(step: WayStep, windows: Mapping[Peak, int]) -> dict[Any, float]:
    """The figures of a step that are linear.

    A peak is the most of three lines: the forward rises to its last ops; the backward
    holds most where it begins, or where it ends and all gradients are there.  Between,
    what is held is linear in the layer, so that no layer inside holds more than both.
    """
    values: dict[Any, float] = {
        "saved": step.first.saved,
        "low": step.first.low,
        "copies": step.copies,
        **step.first.nanoseconds,
        **Counter(step.first.sent),
    }
    for (figure, phase), held in _held(step).items():
        size = windows.get(Peak(figure, phase), len(held))
        values[Peak(figure, phase)] = max(held[-size:], default=0)
        if phase == "backward":
            values[Peak(figure, "begin")] = max(held[:size], default=0)
    return values


# -- the whole rank --------------------------------------------------------------------


class Around(NamedTuple):
    """Bytes before the layers, of one layer, and after the layers."""

    before: int
    layer: int
    after: int


@dataclass(frozen=True)
class Rank:
    """One rank of tp of the whole model.

    Attributes:
        layers: the number of layers; 0 if they are not known.
        weights, trained: bytes of weights and buffers, and of the trained ones.
        steps: the figures of each way by the number of layers.
        boundary: what a layer gives to the next, in each way.
        rewritten: whether autoamp's graphs are rewritten.
        state, moved: bytes of the optimizer's state, and of what a step of it moves,
            for each byte of a trained weight.
        optimizer: the class of the optimizer.
        difference: where another rank runs another op; "" if nowhere.
    """

    setting: Setting
    layers: int
    weights: Around
    trained: Around
    steps: Mapping[str, Line]
    boundary: Mapping[str, Boundary]
    rewritten: bool
    state: float
    moved: float
    optimizer: str = ""
    difference: str = ""

    @property
    def linear(self) -> bool:
        """Whether `steps` were extrapolated from a few layers."""
        return any(line.slope for line in self.steps.values())


def rank_of(
    make: Maker, size: int, setting: Setting, optimizer: str | Make, tell: Tell
) -> Rank:
    """Rank 0 of `size`, compared with the other ranks.

    Args:
        make: makes the model and a call of it; it may parallelize the model itself, on
            the process group that is up when it is called.
    """
    with as_rank(0, size):
        tell(f"making rank 0 of {size}")
        model, call = make()
        parallelized(model, size)
        stack = stack_of(model)
        seen, lines = _steps(model, call, setting, stack, tell)
        parameters = parameters_of(model)
        parts = [nn.Parameter(own_part(p), p.requires_grad) for p in parameters]
        cost = optimizer_cost(parts, optimizer)
    steps, ops = seen[-1], seen[0][AUTOAMP].first.ops
    weights, trained = _weights(model, stack)
    layers = len(stack) if stack is not None else 0
    total = max(trained.before + max(layers, 1) * trained.layer + trained.after, 1)
    rewritten = steps[AUTOAMP].rewritten
    # Autoamp's graphs give results in the dtypes of the model's fp32 code.
    like = FP32 if rewritten else AUTOCAST
    boundary = {name: steps[name].boundary for name in (FP32, AUTOCAST)}
    return Rank(
        setting=setting,
        layers=layers,
        weights=weights,
        trained=trained,
        steps=lines,
        boundary={**boundary, AUTOAMP: boundary[like]},
        rewritten=rewritten,
        state=cost.state / total,
        moved=cost.moved / total,
        optimizer=cost.name,
        difference=_difference(make, size, setting, ops, tell),
    )


def _steps(
    model: nn.Module, call: Call, setting: Setting, stack: Stack | None, tell: Tell
) -> tuple[list[dict[str, WayStep]], dict[str, Line]]:
    """Steps at each depth that was captured, and the line of each way.

    Where no depth predicts another, the lines are those of a step of all layers.
    """
    layer = None if stack is None else stack[0]
    seen: list[dict[str, WayStep]] = []
    if stack is not None and len(stack) >= FEWEST:
        for depth in DEPTHS:
            tell(f"running a step of {depth} of {len(stack)} layers")
            with with_layers(stack, depth):
                seen.append(steps_of(model, call, setting, layer=layer))
        lines = {name: line_of([each[name] for each in seen]) for name in seen[0]}
        found = {name: line for name, line in lines.items() if line is not None}
        if len(found) == len(lines):
            return seen, found
    tell("running a step of all layers")
    seen.append(steps_of(model, call, setting, layer=layer))
    return seen, {name: whole(step) for name, step in seen[-1].items()}


def _difference(
    make: Maker, size: int, setting: Setting, first: list[str], tell: Tell
) -> str:
    """The first op in which a rank differs from rank 0; "" if there is none.

    Ranks of many layers run two of them with autoamp.
    """
    for number in range(1, size):
        tell(f"comparing rank {number} of {size}")
        with as_rank(number, size):
            model, call = make()
            stack = stack_of(model)
            is_deep = stack is not None and len(stack) >= FEWEST
            with with_layers(stack if is_deep else None, DEPTHS[0]):
                parallelized(model, size)
                step = steps_of(model, call, setting, names=[AUTOAMP])
        for at, (one, other) in enumerate(zip_longest(first, step[AUTOAMP].first.ops)):
            if one != other:
                return (
                    f"rank 0 and rank {number} differ in op {at}: "
                    f"{one or 'nothing'}, but {other or 'nothing'}"
                )
    return ""


def _weights(model: nn.Module, stack: Stack | None) -> tuple[Around, Around]:
    """Bytes of weights and buffers around and in the layers, and of the trained."""
    layers = nn.ModuleList() if stack is None else stack
    every, inside = _tensors(model), set(map(id, _tensors(layers)))
    is_inside = [id(each) in inside for each in every]
    start = is_inside.index(True) if inside else len(every)
    after = [each for each in every[start:] if id(each) not in inside]
    groups = every[:start], [] if stack is None else _tensors(stack[0]), after
    trained = [[each for each in group if each.requires_grad] for group in groups]
    return Around(*map(bytes_of, groups)), Around(*map(bytes_of, trained))


def _tensors(module: nn.Module) -> list[Tensor]:
    """Weights and buffers in the order of the modules that hold them."""
    found: dict[int, Tensor] = {}
    for each in module.modules():
        for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)):
            found.setdefault(id(tensor), tensor)
    return list(found.values())
