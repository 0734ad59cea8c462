"""The public questions about a model: `explain`, `compare`, `tune` and others."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoamp.report.report import Report
from autoamp.runtime.examine import options_for, refuse_options
from autoamp.tools.bench import Bench
from autoamp.tools.bench_measure import bench_model
from autoamp.tools.bench_ways import KINDS
from autoamp.tools.compare import Comparison, compare_model
from autoamp.tools.explain import explain_model
from autoamp.tools.find_overflow import Overflow, find_overflow_model
from autoamp.tools.replay import find_overflow_in
from autoamp.tools.tune import Tuning, tune_model


def explain(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    device: str | None = None,
    **kwargs: Any,
) -> Report:
    """Reports what `convert` would do to `model`, which is not changed.

    The model is called once, in fp32, on the given arguments.  A model on the meta
    device needs no weights.

    Args:
        model: any `torch.nn.Module`, converted or not.
        *args: the arguments of a call of the model.
        options: keyword arguments of `convert`; by default those that the model was
            converted with.
        device: the device to explain for, which this machine may lack: "cuda:sm_90", or
            sm_70, sm_75, sm_80, sm_86, sm_89 or sm_100, "cpu:amx", "cpu:avx512_bf16",
            "cpu:plain", or "cpu" or "cuda" for this machine's own device.  By default,
            the device of the model.
        **kwargs: keyword arguments of the call.

    Raises:
        AutoampError: the model, an option or the device cannot be used.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> report = autoamp.explain(model, torch.randn(32, 64), device="cuda:sm_90")
        >>> [op.precision for op in report.ops]
        ['fp32', 'fp32']
    """
    refuse_options("explain", model, kwargs)
    return explain_model(model, args, kwargs, options_for(model, options), device)


def compare(
    model: nn.Module,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float | None = None,
    **kwargs: Any,
) -> Comparison:
    """Measures the errors of mixed precision on one call, by node and by module.

    The model is called on copies of the arguments, in fp32 and as rewritten, with the
    same random numbers, and is not changed.  In training mode the backward runs too.
    The call is then repeated with one module at a time put back into fp32.

    Args:
        model: any `torch.nn.Module`, converted or not.
        *args: the arguments of a call of the model.
        options: keyword arguments of `convert`; by default those that the model was
            converted with.
        loss_fn: gives a tensor of one element from the model's output; by default the
            output's `loss`, or the sum of the output's float tensors.
        tolerance: the largest relative error that outputs and gradients may have.  The
            result then names a minimal set of modules to keep in fp32 to reach it.
        **kwargs: keyword arguments of the call.

    Raises:
        AutoampError: the model or an option cannot be used, or the model would stay in
            fp32 anyway.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> options = {"precision": "bf16", "do_no_harm": False}
        >>> found = autoamp.compare(model, torch.randn(32, 64), options=options)
        >>> 0 < found.errors.output < 0.01
        True
    """
    refuse_options("compare", model, kwargs)
    chosen = options_for(model, options)
    return compare_model(
        model, args, kwargs, chosen, loss_fn=loss_fn, tolerance=tolerance
    )


def find_overflow(
    model: nn.Module,
    *args: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    snapshot: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Overflow:
    """Finds the first number, forward or backward, that leaves its dtype's range.

    The model is called on copies of the arguments, as rewritten, node by node.  In
    training mode, or with a `loss_fn`, the backward runs too, at the loss scale in
    force.  If a number leaves its range, remedies (`deny=`, `keep=`) are tried until
    one works.  The model is not changed by a bit; the call needs memory for a copy of
    its weights, and calls the model's own hooks.

    Args:
        model: any `torch.nn.Module`, converted or not.
        *args: the arguments of a call of the model.
        loss_fn: gives a tensor of one element from the model's output; by default the
            output's `loss`, or the sum of the output's float tensors.
        options: keyword arguments of `convert`; by default those that the model was
            converted with, or fp16 if it was not converted.
        snapshot: a folder that `record=` has written to.  The weights, arguments,
            random generators and options of its newest snapshot are used, and `*args`
            and `**kwargs` are needed only for arguments that it could not hold.
        **kwargs: keyword arguments of the call.

    Returns:
        The number that left its range, its place, its size, and the remedy.  If no
        number left its range, the result is falsy and names the number that came
        nearest.

    Raises:
        AutoampError: the model, an argument or an option cannot be used, or the loss is
            not a tensor of one element.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
        >>> found = autoamp.find_overflow(model, torch.full((4, 8), 1e6))
        >>> found.kind, found.name, found.largest
        ('input', 'input', 1000000.0)
        >>> bool(autoamp.find_overflow(model, torch.ones(4, 8), loss_fn=torch.mean))
        False
    """
    refuse_options("find_overflow", model, kwargs)
    if snapshot is not None:
        return find_overflow_in(model, snapshot, (args, kwargs), options, loss_fn)[0]
    return find_overflow_model(model, args, kwargs, options, loss_fn)


def tune(
    model: nn.Module,
    *args: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Tuning:
    """Measures which way to run `model` is fastest here, and converts it in place.

    Each op and cast of the model's graphs is timed in both precisions, on operands like
    the model's.  Whole calls are then timed in turn: in fp32, under `torch.autocast`,
    with the casts that `convert` places by predicted times, with casts placed by the
    measured times, and with one kernel after the other switched off.  The fastest way
    is kept, even if that is fp32.  No way rounds a number that autocast does not round.

    In training mode the backward is timed as well, and each call is timed like the
    first call after an optimizer step.  Weights, gradients, buffers, random state and
    arguments stay as they were.  Times of ops are kept in `~/.cache/autoamp`, or in the
    folder that `AUTOAMP_CACHE_DIR` names; a later tuning measures only other ops.

    Args:
        model: any `torch.nn.Module`, converted or not, in the mode (training or eval)
            in which it will be used.
        *args: the arguments of a call of the model, with the sizes of later calls.
        loss_fn: gives a tensor of one element from the model's output; by default the
            output's `loss`, or the sum of the output's float tensors.
        options: keyword arguments of `convert`; by default those that the model was
            converted with.
        **kwargs: keyword arguments of the call.

    Returns:
        The ways with their times, and the way that was kept.

    Raises:
        AutoampError: the model or an option cannot be used; nothing was changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
        >>> tuning = autoamp.tune(model, torch.randn(32, 64))
        >>> tuning.ways[0].name, any(w.name == tuning.chosen for w in tuning.ways)
        ('fp32', True)
    """
    refuse_options("tune", model, kwargs)
    return tune_model(model, args, kwargs, options_for(model, options), loss_fn)


def bench(
    model: Any,
    *args: Any,
    options: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
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
    **kwargs: Any,
) -> Bench:
    """Measures whether mixed precision helps a model: time, memory, bytes and losses.

    Each way to run the model gets a deep copy; the model is not changed.  A step is a
    forward, a backward and an optimizer step in training mode.  The ways are timed in
    turn, in one process, if memory allows.  A way that fails only loses its row.

    Args:
        model: any `torch.nn.Module`, or a function without arguments that returns
            `(model, args)`, `(model, args, kwargs)` or `(model, args, kwargs, data)`.
        *args: the arguments of a call of the model.
        options: keyword arguments of `convert`.
        loss_fn: gives a tensor of one element from the model's output; by default the
            output's `loss`, an output of one element, or the mean squared distance of
            the output's float tensors from fixed random numbers.
        optimizer: makes an optimizer of a list of parameters; AdamW by default.
        data: batches, each the arguments of a call: a tuple or list of positional
            arguments, a dict of keyword arguments, or a tuple of both.  The wait for a
            batch is timed too.  The data must be iterable more than once.
        infer: whether a step is a call in eval mode, without a backward.
        generate: how many tokens a step generates by `model.generate`; 0 for a call.
        ways: any of "fp32" (always measured), "tf32", "autocast", "autoamp", "tuned"
            (as `autoamp.tune` leaves the model) and "half" (`.bfloat16()`, `.half()`).
        compiled: whether each way is measured compiled by inductor too.
        rounds: how many steps are timed; by default at least 5, until `seconds` have
            passed or the spread of the ratios is small.
        seconds: the time after which no further round begins.
        steps: the number of steps after which losses are compared.
        sweep: batch sizes to measure; the samples of the arguments are repeated.
        memory: an amount of memory, in bytes or as a text such as "8GiB".  The result
            then has the largest batch of each way that fits into this memory.
        grams_per_kwh: grams of CO2 per kilowatt-hour, to show CO2 beside the energy.
        **kwargs: keyword arguments of the call.

    Returns:
        The figures of each way; `print(bench)` shows them, and `bench.to_json()`,
        `bench.to_markdown()` and `bench.to_svg()` write them.

    Raises:
        AutoampError: the model, its arguments or an option cannot be used.
        KeyboardInterrupt: after Ctrl-C; its `bench` holds the figures so far.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> found = autoamp.bench(model, torch.randn(32, 64), rounds=2, ways=["half"])
        >>> [row.way for row in found.rows]
        ['fp32', '.bfloat16()']
    """
    refuse_options("bench", model, kwargs)
    return bench_model(
        model,
        args,
        kwargs,
        options=options,
        loss_fn=loss_fn,
        optimizer=optimizer,
        data=data,
        infer=infer,
        generate=generate,
        ways=ways,
        compiled=compiled,
        rounds=rounds,
        seconds=seconds,
        steps=steps,
        sweep=sweep,
        memory=memory,
        grams_per_kwh=grams_per_kwh,
    )
