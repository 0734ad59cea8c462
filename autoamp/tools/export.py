"""`export`: a model as an exported program with its plan, or as a file.

program.py     the model's code as one graph, rewritten, with weights of its own
results.py     results beside those of fp32, and of the converted model
plan.py        the plan, which goes into every file
targets.py     what each runtime takes
files.py       the file of a target
members.py     the size and the hash of each part of a file
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch
from torch import nn

from autoamp.dtypes import parse_low_dtype
from autoamp.messages import class_name, log_once
from autoamp.passes.decide.devices import named_device
from autoamp.passes.kernels.table import CHANNELS_LAST
from autoamp.reports.report import Report
from autoamp.reports.reporting import report_of
from autoamp.runtime.conversion import conversion_of
from autoamp.runtime.eligible import (
    choose_precision,
    for_model,
    not_converted,
)
from autoamp.runtime.examine import checked_model
from autoamp.runtime.module_state import left_as_it_is
from autoamp.tools.export_files import check_path, write
from autoamp.tools.export_plan import held_by, keep_plan, plan_of
from autoamp.tools.export_program import (
    Call,
    Captured,
    MixedModel,
    captured,
    placed,
    weights_of,
)
from autoamp.tools.export_results import (
    check_as_true,
    check_finite,
    check_same,
    check_weights,
    compare_with_converted,
)
from autoamp.tools.export_targets import SUFFIXES, Target, target_of
from autoamp.tools.named import given
from autoamp.training.options import Options
from autoamp_said import logger_of

logger = logger_of(__name__)


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
    if model.training:
        log_once(
            logger,
            logging.WARNING,
            f"autoamp: {class_name(model)} is exported in training mode, with its "
            "dropout and its batch statistics; call model.eval() before to export it "
            "for inference",
        )
    with left_as_it_is(model):
        program = _exported(model, call, options, runtime)
    if out is not None:
        write(program, runtime, out)
    return program


def _exported(
    model: nn.Module, call: Call, options: Options, target: Target
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
    if target.kind != "pt2":  # runtimes other than torch choose layouts themselves
        options = options.without_kernels(CHANNELS_LAST)
    device = None if target.device is None else named_device(target.device, low)
    exact = call.results_of(graph.program)
    rewritten = placed(graph, options, low, device=device)
    check_finite(class_name(model), rewritten.results, exact, low)
    mixed = MixedModel(graph, rewritten.prepared.gm)
    program = mixed.export(call)
    read = {spec.target for spec in program.graph_signature.input_specs if spec.target}
    check_weights(held_by(program), read, mixed.sources, weights_of(model))
    results = call.results_of(program)
    check_same(results, rewritten.results)
    if target.one_dtype:
        program = mixed.export(call, one_dtype=True)
        results = call.results_of(program)
        check_as_true(results, rewritten.results, exact)
    report = report_of(rewritten.record, model, "" if device is None else device.name)
    _keep_plan(program, report, target, mixed.sources)
    if conversion_of(model) is not None:
        compare_with_converted(
            class_name(model),
            results,
            call.results(model),
            exact,
            to_the_bit=SUFFIXES[target.kind] == ".pt2",
            strict=options.strict,
        )
    return program


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
    keep_plan(program, plan.to_dict())
