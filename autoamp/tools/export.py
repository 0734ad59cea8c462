"""`export`: a model as an exported program with its plan, or as a file.

program.py     the model's code as one graph, rewritten, with weights of its own
results.py     results beside those of fp32, and of the converted model
plan.py        the plan, which goes into every file
targets.py     what each runtime takes
files.py       the file of a target
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import parse_low_dtype
from autoamp.errors import ExportError, UnsupportedModelError
from autoamp.messages import class_name, log_once
from autoamp.passes.check.held import Held
from autoamp.passes.decide.devices import named_device
from autoamp.passes.kernels.table import ATTENTION, CHANNELS_LAST
from autoamp.passes.node_by_node import Runner
from autoamp.passes.record import Rewritten
from autoamp.report.report import Report
from autoamp.report.reporting import report_of
from autoamp.runtime.conversion import conversion_of
from autoamp.runtime.eligible import (
    choose_precision,
    for_model,
    not_converted,
    unsupported,
)
from autoamp.runtime.examine import checked_model, replanned
from autoamp.runtime.kept import left_as_it_is
from autoamp.tools.export_files import check_path, write
from autoamp.tools.export_plan import held_by, plan_of
from autoamp.tools.export_program import (
    Call,
    Captured,
    MixedModel,
    Placed,
    captured,
    placed,
    weights_of,
)
from autoamp.tools.export_results import (
    check_as_true,
    check_same,
    check_weights,
    compare_with_converted,
    differs_in_whole_numbers,
    spoiled,
)
from autoamp.tools.export_targets import Target, target_of
from autoamp.tools.find_overflow import Overflow, RecordedCall, Search
from autoamp.tools.named import given
from autoamp.training.options import Options
from autoamp.training.recorder import Recorder
from autoamp.training.remedy import EVERYTHING, Remedy
from autoamp.training.trail import Trail

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
    made = given("export", model, call.args, call.kwargs, trains=False, caches=False)
    model = checked_model(made.model)
    call = replace(call, args=made.args, kwargs=made.kwargs)
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
        program = _exported(model, call, options, runtime, compares=target is None)
    if out is not None:
        write(program, runtime, out)
    return program


def _exported(
    model: nn.Module, call: Call, options: Options, target: Target, *, compares: bool
) -> torch.export.ExportedProgram:
    asked = parse_low_dtype(options.precision)
    why_not = "" if asked is None else target.takes(asked, options)
    graph = captured(model, call)
    low, why_here = choose_precision(model, options, target.device)
    if low is not None and asked is None:
        why_not = target.takes(low, options)
    why_not = why_not or why_here
    if low is None or why_not:
        return _in_fp32(graph, why_not, target)
    options = target.rules(for_model(model, options, low), low)
    options = _for_file(options, target)
    device = None if target.device is None else named_device(target.device, low)
    state = conversion_of(model)
    engine = None if state is None else state.engine
    place = partial(placed, graph, low=low, device=device)
    exact = call.results_of(graph.program)
    made = _in_range(graph, options, exact, place)
    mixed = MixedModel(graph, made.prepared.gm)
    program = mixed.export(call)
    read = {spec.target for spec in program.graph_signature.input_specs if spec.target}
    check_weights(held_by(program), read, mixed.sources, weights_of(model))
    check_same(call.results_of(program), made.results)
    if target.one_dtype:
        program = mixed.export(call, one_dtype=True)
        check_as_true(call.results_of(program), made.results, exact)
    report = report_of(made.record, model, "" if device is None else device.name)
    _keep_plan(program, report, target, mixed.sources)
    if compares and engine is not None:
        compare_with_converted(graph, engine, call, made)
    return program


def _for_file(options: Options, target: Target) -> Options:
    """`options` without the kernels that the program of a target cannot have.

    Attention that was written out runs by a kernel whose result decides whether the
    kernel may be used, for data that a graph cannot know.  Runtimes other than torch
    choose layouts themselves.
    """
    off = [ATTENTION] if target.kind == "pt2" else [ATTENTION, CHANNELS_LAST]
    return options.without_kernels(*off)


def _in_fp32(
    graph: Captured, why_not: str, target: Target
) -> torch.export.ExportedProgram:
    """The program of a model of which nothing runs low, which is said."""
    label = class_name(graph.model)
    log_once(
        logger,
        logging.WARNING,
        f"autoamp: {label} is exported as it is: it {not_converted(why_not)}",
    )
    _keep_plan(graph.program, Report(label, (), (), [(label, why_not)]), target, {})
    return graph.program


def _keep_plan(
    program: torch.export.ExportedProgram,
    report: Report,
    target: Target,
    sources: dict[str, str],
) -> None:
    plan = plan_of(program, report.to_json(), sources, target.name)
    compat.set_plan(program, plan.to_dict())


# -- results that are finite where those of fp32 are -----------------------------------


def _in_range(
    graph: Captured,
    options: Options,
    exact: list[Any],
    place: Callable[[Options], Placed],
) -> Placed:
    """What `place` gives, with ops kept in fp32 where results would not be finite.

    `find_overflow`'s search names the smallest rule that cures it.

    Args:
        exact: the results of fp32.

    Raises:
        ExportError: no rule makes the results finite, or one does, and the options are
            strict.
    """
    made = place(options)
    harm = spoiled(made.results, exact) is not None
    if not harm and not differs_in_whole_numbers(made.results, exact):
        return made
    assert made.prepared.rewritten is not None
    player = _Player(graph, made.prepared.rewritten, options)
    # Where no float result was spoiled, each overflow that fp32 does not have counts.
    label, low = class_name(graph.model), made.record.low
    search = Search(player, options, label, low, any_harm=harm)
    found = search.answer(player.recorded(options, 1.0))
    if not harm and (not found or found.rule is None):
        return made
    everything = Remedy(keep=(EVERYTHING,))
    for rule in dict.fromkeys([found.rule or everything, everything]):
        made = place(rule.on(options))
        if spoiled(made.results, exact) is not None:
            continue
        if options.strict:
            raise ExportError(f"{label}: {_cause(found)}. Export it with {rule}")
        made.record.note(f"{_cause(found)}; it is exported with {rule}")
        return made._replace(rule=rule)
    raise ExportError(
        f"{label}: {_cause(found)}, even with keep=['*']; this is a bug in "
        "autoamp, please report it. torch.export exports the model as it is"
    )


def _cause(found: Overflow) -> str:
    """Why a model cannot be exported as it was placed."""
    if not found:
        return "results on the example are not finite where those of fp32 are"
    return f"results on the example differ from those of fp32, because {found.headline}"


class _Player:
    """Runs the rewritten graph of an export node by node, under options."""

    def __init__(self, graph: Captured, rewritten: Rewritten, options: Options) -> None:
        self.graph = graph
        self._known = options, rewritten

    def records(self, options: Options) -> list[Rewritten]:
        if options != self._known[0]:
            with torch.no_grad():
                self._known = options, replanned(self._known[1], options)
        return [self._known[1]]

    def recorded(self, options: Options, scale: float) -> RecordedCall:  # noqa: ARG002
        trail = Trail()
        (record,) = self.records(options)
        with left_as_it_is(self.graph.model), torch.no_grad():
            run = Runner(record.gm, [Held(), Recorder(trail, exact=True)])
            run.run(*self.graph.copied_values())
        return RecordedCall(trail)
