"""Checks the arguments of `autoamp.bench`, and measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from autoamp.ask.examine import checked_model, options_for
from autoamp.benchmark.clock import Length
from autoamp.benchmark.largest import bytes_in
from autoamp.benchmark.measure import Measurement, Plan
from autoamp.benchmark.result import Bench
from autoamp.benchmark.step.batch import resized
from autoamp.benchmark.step.task import Task, adamw
from autoamp.benchmark.step.ways import KINDS, precision_for, ways_for
from autoamp.errors import OptionError, UnsupportedModelError


def bench_model(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    options: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], Any] | None = None,
    optimizer: Callable[..., Any] | None = None,
    data: Iterable[Any] | None = None,
    infer: bool = False,
    generate: int = 0,
    ways: Iterable[str] = KINDS,
    compiled: bool = False,
    rounds: int | None = None,
    seconds: float = 10.0,
    steps: int = 5,
    sweep: Sequence[int] = (),
    memory: int | str | None = None,
    grams_per_kwh: float | None = None,
) -> Bench:
    """See `autoamp.bench`.

    Raises:
        AutoampError: the model, its arguments or an option cannot be used.
        BenchInterrupted: by Ctrl-C; holds the measurements so far.
    """
    if not isinstance(model, nn.Module):
        model, args, kwargs, data = made_by(model, args, kwargs, data)
    model = checked_model(model)
    _check_numbers(generate, rounds, seconds, steps)
    if (sweep or memory is not None) and data is not None:
        raise OptionError(
            "sweep= and memory= resize the arguments of a call, but batches of data= "
            "cannot be resized: give data=, or sweep= and memory="
        )
    budget = None if memory is None else bytes_in(memory)
    call = (tuple(args), dict(kwargs))
    for size in [*sweep, *([1] if memory is not None else [])]:
        resized(call, size)
    kind = "generate" if generate else "inference" if infer else "training"
    task = Task(kind, call, generate, loss_fn, optimizer or adamw, data)
    chosen = options_for(model, options)
    low = precision_for(model, chosen)
    found = ways_for(model, low, chosen, ways, compiled=compiled)
    plan = Plan(
        found, task, Length(rounds, seconds), steps, sweep, budget, grams_per_kwh
    )
    return Measurement(model, plan).run()


def made_by(
    factory: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], data: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any], Any]:
    """The model, arguments and data that a factory returns.

    Raises:
        UnsupportedModelError: `factory` is not callable, or returns something else.
        OptionError: arguments of the call are given as well.
    """
    if not callable(factory):
        raise UnsupportedModelError(
            "bench() takes a torch.nn.Module, or a function that returns (model, "
            f"args), not {type(factory).__name__}"
        )
    if args or kwargs:
        raise OptionError(
            "the factory returns the arguments of the call; give bench() none"
        )
    returned = factory()
    match returned:
        case (nn.Module() as model, tuple() as found):
            return model, found, {}, data
        case (nn.Module() as model, tuple() as found, dict() as named):
            return model, found, named, data
        case (nn.Module() as model, tuple() as found, dict() as named, batches):
            return model, found, named, batches if data is None else data
    raise UnsupportedModelError(
        f"the factory returned {type(returned).__name__}; it must return (model, args),"
        " (model, args, kwargs) or (model, args, kwargs, data)"
    )


def _check_numbers(
    generate: int, rounds: int | None, seconds: float, steps: int
) -> None:
    for name, value, least in (
        ("generate", generate, 0),
        ("rounds", 1 if rounds is None else rounds, 1),
        ("seconds", seconds, 0),
        ("steps", steps, 1),
    ):
        if not value >= least:
            raise OptionError(f"{name}={value} is too small: give at least {least}")
