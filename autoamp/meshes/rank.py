"""Makes one rank of a model, and finds its figures at small depths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autoamp.ask.stand_in import Call
from autoamp.dtypes import short_name
from autoamp.errors import OptionError
from autoamp.meshes.agree import first_difference
from autoamp.meshes.layers import FEWEST, stack_of, with_layers
from autoamp.meshes.lines import DEPTHS, Figures, Line, line_of, whole
from autoamp.meshes.one_rank import as_rank, parallelized
from autoamp.meshes.predict import Rank, Weights
from autoamp.meshes.ways import Setting, WayStep, steps_of
from autoamp.model.eligible import parameters_of
from autoamp.planning.fakes import bytes_of
from autoamp.planning.memory import own_part
from autoamp.planning.optimizer import Make, OptimizerCost, optimizer_cost
from autoamp.planning.ways import AUTOAMP, AUTOCAST, FP32

Made = Callable[[], tuple[nn.Module, Call]]
"""Makes the model, and a call of it."""


@dataclass(frozen=True)
class Found:
    """What is known of one rank, and how it was found.

    Attributes:
        rank: its figures.
        linear: whether they were extrapolated.
        rewritten: whether autoamp's graphs are rewritten.
        cost: the optimizer of the rank.
        difference: where two ranks part; "" if nowhere.
    """

    rank: Rank
    linear: bool
    rewritten: bool
    cost: OptimizerCost
    difference: str


def found_for(
    make: Made,
    size: int,
    setting: Setting,
    optimizer: str | Make,
    tell: Callable[[str], None],
) -> Found:
    """The figures of rank 0 of `size`, and whether the other ranks run the same ops.

    Args:
        make: makes the model; called once for each rank.
        tell: called with a description of each stage as it begins.
    """
    with as_rank(0, size):
        tell(f"making rank 0 of {size}")
        model, call = make()
        parallelized(model, size)
        stack = stack_of(model)
        steps, linear, ops = _steps(model, call, setting, stack, tell)
        parameters = [nn.Parameter(own_part(p), p.requires_grad) for p in _own(model)]
        cost = optimizer_cost(parameters, optimizer)
        rank = Rank(
            len(stack) if stack is not None else 0,
            _weights(model, stack, cost),
            {name: figures for name, (figures, _) in steps.items()},
            _boundaries({name: step for name, (_, step) in steps.items()}),
            steps[AUTOAMP][1].rewritten and size == 1,
            short_name(setting.low),
            setting.device.bytes_per_ns,
        )
        rewritten = steps[AUTOAMP][1].rewritten
    others = [_ops(make, each, size, setting, tell) for each in range(1, size)]
    return Found(rank, linear, rewritten, cost, first_difference([ops, *others]))


def _steps(
    model: nn.Module,
    call: Call,
    setting: Setting,
    stack: Any,
    tell: Callable[[str], None],
) -> tuple[dict[str, tuple[Line | Figures, WayStep]], bool, list[str]]:
    """For each way its figures and one of the steps, and whether they are lines.

    The last are the ops of autoamp's step with as many layers as `_ops` runs.
    """
    layer = None if stack is None else stack[0]
    ops: list[str] | None = None
    if stack is not None and len(stack) >= FEWEST:
        seen = []
        for depth in DEPTHS:
            tell(f"running a step of {depth} of {len(stack)} layers")
            with with_layers(stack, depth):
                seen.append(steps_of(model, call, setting, layer))
        lines = {name: line_of([each[name] for each in seen]) for name in seen[0]}
        found = {n: (line, seen[-1][n]) for n, line in lines.items() if line}
        ops = seen[0][AUTOAMP].first.ops
        if len(found) == len(lines):
            return dict(found), True, ops
    tell("running a step of all layers")
    steps = steps_of(model, call, setting, layer)
    ops = steps[AUTOAMP].first.ops if ops is None else ops
    return {name: (whole(step), step) for name, step in steps.items()}, False, ops


def _boundaries(steps: dict[str, WayStep]) -> dict[str, tuple[int, str]]:
    """Autoamp's graphs give results in the dtypes of the model's fp32 code."""
    return {
        FP32: steps[FP32].boundary,
        AUTOCAST: steps[AUTOCAST].boundary,
        AUTOAMP: steps[FP32 if steps[AUTOAMP].rewritten else AUTOCAST].boundary,
    }


def _ops(
    make: Made,
    rank: int,
    size: int,
    setting: Setting,
    tell: Callable[[str], None],
) -> list[str]:
    """The ops of one rank with autoamp, with two of many layers."""
    tell(f"comparing rank {rank} of {size}")
    with as_rank(rank, size):
        model, call = make()
        stack = stack_of(model)
        is_deep = stack is not None and len(stack) >= FEWEST
        with with_layers(stack if is_deep else None, DEPTHS[0]):
            parallelized(model, size)
            step = steps_of(model, call, setting, None, [AUTOAMP], again=False)
    return step[AUTOAMP].first.ops


def _weights(model: nn.Module, stack: Any, cost: OptimizerCost) -> Weights:
    """Bytes of weights and buffers before, inside and after the layers."""
    inside = set(map(id, _tensors(stack))) if stack is not None else set()
    groups: list[list[Tensor]] = [[], []]
    met = False
    for each in _tensors(model):
        if id(each) in inside:
            met = True
        else:
            groups[met].append(each)
    layer = _tensors(stack[0]) if stack is not None else []
    sets = (groups[0], layer, groups[1])
    trained = [bytes_of([t for t in each if t.requires_grad]) for each in sets]
    count = len(stack) if stack is not None else 1
    total = trained[0] + count * trained[1] + trained[2]
    return Weights(
        bytes_of(groups[0]),
        bytes_of(layer),
        bytes_of(groups[1]),
        (trained[0], trained[1], trained[2]),
        cost.state / max(total, 1),
        cost.moved / max(total, 1),
    )


def _tensors(module: nn.Module) -> list[Tensor]:
    """Weights and buffers in the order of the modules that hold them."""
    found: dict[int, Tensor] = {}
    for each in module.modules():
        for tensor in (*each.parameters(recurse=False), *each.buffers(recurse=False)):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _own(model: nn.Module) -> Iterable[nn.Parameter]:
    return parameters_of(model)


def check_stages(found: Found, stages: int, name: str) -> None:
    """Refuses more stages than a model has layers.

    Raises:
        OptionError: there are too few layers, or they are not alike.
    """
    layers = found.rank.layers
    if stages > 1 and not found.linear:
        raise OptionError(
            f"pp={stages}: the layers of {name} are not alike, or fewer than {FEWEST}, "
            "so that no stages can be made of them; give pp=1"
        )
    if stages > max(layers, 1):
        raise OptionError(
            f"pp={stages} is more than the {layers} layers of {name}; give at most "
            f"pp={layers}"
        )
