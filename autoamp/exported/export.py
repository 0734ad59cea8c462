"""`export`: a model as an exported program with its plan, or as a file.

captured.py     the model's own code as one graph
placed.py       the passes, the checks and the lock, as `convert` runs them
in_range.py     rules that keep results finite
baked.py        weights of its own, each in the precision that it is read in
spelled.py      torch's ops alone
compared.py     the results beside those of the converted model
plan.py         the plan, which goes into every file
files.py        the file of a target
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from autoamp import compat
from autoamp.ask.examine import checked_model
from autoamp.capture.keep import for_model
from autoamp.capture.locked import check_declined
from autoamp.capture.record import Record
from autoamp.capture.thread import disabled
from autoamp.check.constants import check_weights
from autoamp.dtypes import parse_low_dtype
from autoamp.errors import (
    ExportError,
    LockError,
    UnsupportedModelError,
    VerificationError,
)
from autoamp.exported.baked import baked
from autoamp.exported.captured import Call, Captured, captured
from autoamp.exported.compared import Made, compare_with_converted, first_difference
from autoamp.exported.files import check_path, write
from autoamp.exported.in_range import (
    cause,
    differs_in_whole_numbers,
    overflow_in,
    rules_for,
    spoiled,
)
from autoamp.exported.placed import placed
from autoamp.exported.plan import held_by, plan_of
from autoamp.exported.spelled import spelled
from autoamp.exported.targets import Target, target_of
from autoamp.inspect.report import Report
from autoamp.kernels.table import ATTENTION, CHANNELS_LAST
from autoamp.messages import log_once
from autoamp.model.conversion import conversion_of
from autoamp.model.eligible import choose_precision, not_converted, unsupported
from autoamp.model.kept import left_as_it_is
from autoamp.model.reporting import report_of
from autoamp.options import Options
from autoamp.overflow.remedy import Remedy
from autoamp.pipeline.prepared import Prepared
from autoamp.place.devices import named_device
from autoamp.printable import class_name

logger = logging.getLogger(__name__)


def export_model(
    model: nn.Module,
    call: Call,
    options: Options,
    *,
    target: str | None,
    out: str | os.PathLike[str] | None,
) -> torch.export.ExportedProgram:
    """The exported program of a model, whose file is written too; see `autoamp.export`.

    Args:
        options: the options given, added to those of the model's conversion.

    Raises:
        AutoampError: the model cannot be exported, and nothing was written.
    """
    runtime = target_of(target)
    if out is not None:
        runtime.check_packages()
        check_path(runtime, out)
    model = checked_model(model)
    reason = unsupported(model)
    if reason is not None:
        raise UnsupportedModelError(reason)
    if model.training:
        log_once(
            logger,
            logging.WARNING,
            f"autoamp: {class_name(model)} is exported in training mode, with its "
            "dropout and its batch statistics; call model.eval() before to export it "
            "for inference",
        )
    with left_as_it_is(model):
        made = _exported(model, call, options, runtime)
        program = made.program
        engine = None if (state := conversion_of(model)) is None else state.engine
        if target is None and engine is not None and made.gm is not None:
            compare_with_converted(model, engine, call, made)
    if out is not None:
        write(program, runtime, out)
    return program


def _exported(model: nn.Module, call: Call, options: Options, target: Target) -> Made:
    asked = parse_low_dtype(options.precision)
    why_not = "" if asked is None else target.takes(asked, options)
    graph = captured(model, call)
    low, why_here = choose_precision(model, options, target.device)
    if low is not None and asked is None:
        why_not = target.takes(low, options)
    why_not = why_not or why_here
    if low is None or why_not:
        return Made(_in_fp32(model, graph, options, why_not, target))
    options = target.rules(for_model(model, options, low), low)
    options = _for_file(options, target)
    device = None if target.device is None else named_device(target.device, low)
    state = conversion_of(model)
    price = None
    if device is None and state is not None and state.engine is not None:
        price = state.engine.price
    place = partial(placed, graph, model, low=low, device=device, price=price)
    with disabled():  # the automatic mode would meet the program's module
        exact = call.results(graph.program.module())
    (record, prepared, results), rule = _in_range(graph, model, options, exact, place)
    own = baked(prepared.gm, model)
    program = spelled(graph, own.gm, call)
    read = {spec.target for spec in program.graph_signature.input_specs if spec.target}
    check_weights(held_by(program), read, own.sources, _weights(model))
    _check_same(program, call, results)
    if target.one_dtype:
        program = spelled(graph, own.gm, call, one_dtype=True)
        _check_as_true(program, call, results, exact)
    report = report_of(record, model, "" if device is None else device.name)
    plan = plan_of(program, report.to_json(), own.sources, target.name)
    compat.set_plan(program, plan.to_dict())
    return Made(program, prepared.gm, pytree.tree_leaves(results), rule)


_Placed = tuple[Record, Prepared, tuple[Any, ...]]


def _in_range(
    graph: Captured,
    model: nn.Module,
    options: Options,
    exact: list[Any],
    place: Callable[..., _Placed],
) -> tuple[_Placed, Remedy | None]:
    """What `place` gives, with ops kept in fp32 where results would not be finite.

    Args:
        exact: the results of fp32.

    Returns:
        It, and the rule that keeps those ops in fp32; None where none is needed.

    Raises:
        ExportError: no rule makes the results finite, or a lock forbids all rules; or
            one does, and the options are strict.
    """
    made = place(options)
    harm = spoiled(made[2], exact) is not None
    if not harm and not differs_in_whole_numbers(made[2], exact):
        return made, None
    assert made[1].rewritten is not None
    found = overflow_in(graph, model, made[1].rewritten, options, any_harm=harm)
    if not harm and (not found or found.rule is None):
        return made, None
    for rule in rules_for(found, options):
        made = place(rule.on(options))
        if spoiled(made[2], exact) is not None:
            continue
        if options.strict:
            raise ExportError(
                f"{class_name(model)}: {cause(found)}. Export it with {rule}"
            )
        made[0].note(f"{cause(found)}; it is exported with {rule}")
        return made, rule
    raise ExportError(
        f"{class_name(model)}: {cause(found)}, even with keep=['*']; this is a bug in "
        "autoamp, please report it. torch.export exports the model as it is"
    )


def _for_file(options: Options, target: Target) -> Options:
    """`options` without the kernels that the program of a target cannot have.

    Attention that was written out runs by a kernel whose result decides whether the
    kernel may be used, for data that a graph cannot know.  Runtimes other than torch
    choose layouts themselves.
    """
    off = [ATTENTION] if target.kind == "pt2" else [ATTENTION, CHANNELS_LAST]
    return options.replace(unfused=tuple(dict.fromkeys([*options.unfused, *off])))


def _in_fp32(
    model: nn.Module, graph: Captured, options: Options, why_not: str, target: Target
) -> torch.export.ExportedProgram:
    """The program of a model of which nothing runs low, which is said."""
    label = class_name(model)
    if options.locked is not None:
        differs = check_declined(options.locked, label, why_not)
        if differs:
            raise LockError(differs)
    log_once(
        logger,
        logging.WARNING,
        f"autoamp: {label} is exported as it is: it {not_converted(model, why_not)}",
    )
    report = Report(label, (), (), [(label, why_not)])
    plan = plan_of(graph.program, report.to_json(), {}, target.name)
    compat.set_plan(graph.program, plan.to_dict())
    return graph.program


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(nn.Module.named_parameters(model, remove_duplicate=False)),
        **dict(nn.Module.named_buffers(model, remove_duplicate=False)),
    }


def _check_same(
    program: torch.export.ExportedProgram, call: Call, results: tuple[Any, ...]
) -> None:
    """Checks that a program gives the results that the rewritten graph gave.

    Raises:
        VerificationError: a result differs in a bit.
    """
    with disabled():
        given = call.results(program.module())
    at = first_difference(given, pytree.tree_leaves(results))
    if at is not None:
        raise VerificationError(
            f"output {at} of the exported program is not that of the rewritten graph; "
            "this is a bug in autoamp, please report it"
        )


def _check_as_true(
    program: torch.export.ExportedProgram,
    call: Call,
    results: tuple[Any, ...],
    exact: list[Any],
) -> None:
    """Checks that a program in another spelling is as near to fp32 as the graph was.

    Raises:
        VerificationError: a result is farther off, by more than a tenth.
    """
    with disabled():
        given = call.results(program.module())
    at = spoiled(given, exact)
    if at is not None:
        raise VerificationError(
            f"output {at} of the program is not finite: another spelling of its norms "
            "computes something else; this is a bug in autoamp, please report it"
        )
    for at, (one, was, true) in enumerate(zip(given, results, exact, strict=True)):
        if not (isinstance(true, Tensor) and true.is_floating_point()):
            continue
        finite = one.isfinite() & was.isfinite() & true.isfinite()
        now, then, exactly = (t.double()[finite] for t in (one, was, true))
        size = float(exactly.norm())
        ours, before = (float((t - exactly).norm()) for t in (now, then))
        if ours > _NO_LESS_TRUE * before + _ROUNDING * size:
            raise VerificationError(
                f"output {at} of the program is {ours:.3g} from that in fp32, and the "
                f"rewritten graph's was {before:.3g}: another spelling of its norms "
                "computes something else; this is a bug in autoamp, please report it"
            )


_NO_LESS_TRUE = 1.1
"""How much larger an error may be: the bound of docs/accuracy.md."""

_ROUNDING = 1e-6
"""Of the size of a result: the rounding of fp32 itself, where nothing is low."""
