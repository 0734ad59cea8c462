"""The public functions on models and graphs: `convert`, `report`, `rewrite`, ..."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack, overload

import torch
from torch import fx, nn
from torch.optim import Optimizer

from autoamp import compat
from autoamp.dtypes import Precision, parse_low_dtype
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import class_name, log_once
from autoamp.passes.given_graph import rewrite_given
from autoamp.passes.options import (
    Backend,
    Objective,
    PassOptions,
    Placement,
    RewriteOptions,
)
from autoamp.passes.rules import Rules
from autoamp.passes.see.nodes import graph_paths
from autoamp.reports.report import Report
from autoamp.reports.reporting import report_on
from autoamp.runtime.conversion import REVERTED, conversion_of
from autoamp.runtime.convert import convert_model, revert_model
from autoamp.runtime.eligible import choose_graph_precision, fits, unfitting
from autoamp.runtime.examine import call_keywords, options_for
from autoamp.tools.bench import Bench
from autoamp.tools.bench_measure import bench_model
from autoamp.tools.bench_ways import KINDS, WayName
from autoamp.tools.compare import Comparison, compare_model
from autoamp.tools.explain import explain_model
from autoamp.tools.export import export_model
from autoamp.tools.export_files import load as load_file
from autoamp.tools.export_program import Call
from autoamp.tools.export_targets import TargetName
from autoamp.tools.find_overflow import Overflow, find_overflow_model
from autoamp.training import foreign_engines
from autoamp.training.boundary import params_of
from autoamp.training.options import (
    NOT_OF_REWRITE,
    ConvertOptions,
    ExpertOptions,
    Masters,
    Options,
)
from autoamp.training.scale import LossScale, LossScaleName
from autoamp_said import logger_of

logger = logger_of(__name__)

Model = TypeVar("Model", bound=nn.Module)
Optimizers = TypeVar("Optimizers", bound=Optimizer | Sequence[Optimizer])


@overload
def convert(
    model: Model,
    optimizer: None = None,
    *,
    example_inputs: tuple[Any, ...] | None = ...,
    **options: Unpack[ConvertOptions],
) -> Model: ...


@overload
def convert(
    model: Model,
    optimizer: Optimizers,
    *,
    example_inputs: tuple[Any, ...] | None = ...,
    **options: Unpack[ConvertOptions],
) -> tuple[Model, Optimizers]: ...


def convert(
    model: Any,
    optimizer: Any = None,
    *,
    precision: Precision | torch.dtype = "auto",
    keep: Sequence[str] = (),
    allow: Sequence[str] = (),
    deny: Sequence[str] = (),
    infer: Sequence[str] = (),
    clear: Sequence[str] = (),
    rules: Rules | str | os.PathLike[str] | None = None,
    loss_scale: LossScaleName | float | LossScale = "auto",
    masters: Masters = "auto",
    placement: Placement = "optimal",
    objective: Objective = "time",
    backend: Backend | Callable[..., Any] = "eager",
    do_no_harm: bool = True,
    strict: bool = False,
    example_inputs: tuple[Any, ...] | None = None,
    **options: Unpack[ExpertOptions],
) -> Any:
    """Turns on mixed precision for `model`, in place, on its call path only.

    The model stays the same object with the same class, fp32 parameters, buffers, hooks
    and `state_dict` keys.  It is captured at its first call.

    Args:
        model: any `torch.nn.Module`.
        optimizer: an optimizer or a list of optimizers, returned beside the model.
            Half-precision weights that an optimizer trains get fp32 master weights.
        precision: "auto", "fp16", "bf16" or the torch dtype.  "auto" is fp16 on a GPU
            and bf16 on a CPU with bf16 units; otherwise a warning says that the model
            is not converted.
        keep: module-path patterns that stay fp32 ("head", "encoder.layer.0.*"), beside
            the modules that the model itself names (transformers' lists
            `_keep_in_fp32_modules`, which holds in fp16, and its `_strict` form).
        allow, deny, infer, clear: op names moved to that list ("linear", "aten::exp").
        rules: the path of a rules file, whose rules are added to the built-in rules;
            one of the complete sets "torch-cuda", "torch-cpu", "tensorflow"; or a
            `Rules`, which replaces the built-in rules and must allow at least one op
            that these allow.
        loss_scale: "auto" (dynamic for fp16, none for bf16), "dynamic", "off", a
            number, or a `LossScale`, which may be shared by several models.
        masters: "auto": half-precision weights that a named optimizer trains get fp32
            master weights (docs/loss-scaling.md).  A master costs 2 bytes beside a bf16
            weight, which is its upper half, if the optimizer steps each weight by
            itself, and otherwise 4 bytes.  "split": the same, and a line names the
            weights whose masters cost 4 bytes.  "fp32": all masters cost 4 bytes.
            "off": the optimizer updates the half-precision weights themselves.
        placement: "optimal" (least cost), "tensorflow", "promote" or "forced".
        objective: "time", the fastest placement that keeps no more for the backward
            than autocast's (nor is slower than fp32), or "memory", the fastest of those
            that keep least.
        backend: "eager", which runs the rewritten graph as it is, "inductor", which
            compiles it, or any Dynamo backend or its name in torch ("aot_eager").
        do_no_harm: whether ops that are predicted to gain nothing stay in fp32.
        strict: whether to raise an error instead of falling back to fp32.
        example_inputs: arguments to capture with at once, not at the first call.
        **options: options for experts; `autoamp.ExpertOptions` explains them.

    Returns:
        `model`, or `(model, optimizer)` when an optimizer is given.

    Raises:
        AutoampError: the model or an option cannot be used; nothing was changed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> model = autoamp.convert(model, precision="bf16", do_no_harm=False)
        >>> model(torch.randn(8, 64)).dtype
        torch.float32
        >>> autoamp.report(model).ops[0].precision
        'bf16'
    """
    chosen = Options().replace(
        precision=precision,
        keep=keep,
        allow=allow,
        deny=deny,
        infer=infer,
        clear=clear,
        rules=rules,
        loss_scale=loss_scale,
        masters=masters,
        placement=placement,
        objective=objective,
        backend=backend,
        do_no_harm=do_no_harm,
        strict=strict,
        **options,
    )
    if chosen.exact_casts and chosen.backend == "eager":
        log_once(
            logger,
            logging.WARNING,
            "autoamp: exact_casts=True changes nothing with backend='eager', which "
            "rounds at each cast anyway",
        )
    optimizers = _checked_optimizers(optimizer, model)
    convert_model(model, chosen, optimizers, example_inputs)
    return model if optimizer is None else (model, optimizer)


def revert(model: Model) -> Model:
    """Undoes `convert`: `model` runs in fp32 again, bit for bit as before.

    Raises:
        UnsupportedModelError: `model` is not a `torch.nn.Module`.

    Example:
        >>> model = autoamp.convert(torch.nn.Linear(8, 8), do_no_harm=False)
        >>> autoamp.is_converted(model), autoamp.is_converted(autoamp.revert(model))
        (True, False)
    """
    revert_model(model)
    return model


def is_converted(model: object) -> bool:
    """Whether calls of `model` go through rewritten graphs."""
    state = conversion_of(model)
    return state is not None and state.engine is not None and state.bound is not None


def report(model: nn.Module) -> Report:
    """The report on converted `model`, with every graph captured so far.

    Raises:
        UnsupportedModelError: `model` was never converted, or was reverted.
    """
    answer = report_on(model)
    if answer is not None:
        return answer
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"report() takes a torch.nn.Module, not {class_name(model)}"
        )
    if any(each in REVERTED for each in model.modules()):
        raise UnsupportedModelError(
            f"{class_name(model)} is converted no more, and its report is gone: "
            "autoamp.revert or autoamp.disable was called, or the run of a trainer's "
            "plugin has ended; take the report before that (with Lightning in "
            "on_train_end)"
        )
    raise UnsupportedModelError(
        f"{class_name(model)} is not converted; call autoamp.convert first"
    )


def rewrite(
    gm: fx.GraphModule | torch.export.ExportedProgram,
    example_inputs: Sequence[Any],
    **options: Unpack[RewriteOptions],
) -> fx.GraphModule:
    """The compiler pass alone: a mixed-precision `GraphModule` made from `gm`.

    `gm` is not changed; the new graph shares the parameters of `gm`.  Weights are cast
    inside the graph.  `do_no_harm=True` (the default) may leave every op in fp32.

    The new graph takes what `gm` takes, of any size and number, and gives results in
    the containers of `gm`.  It is written for the dtypes, the ranks, the flags and the
    other values of `example_inputs`, and for the relations between sizes that the trace
    relied on (two equal sizes that one op combines): another input is a `CaptureError`
    at the call, which names that input.  `train()` and `eval()` come before.

    Args:
        gm: a `torch.fx.GraphModule` or a `torch.export.ExportedProgram`.
        example_inputs: one value per input of the graph; a container stays one value.
        **options: as for `convert`, except `backend`, `exact_casts`, `guard`,
            `loss_scale`, `masters` and `weight_copies`, which are for a model
            that is called and trained.

    Raises:
        AutoampError: the graph or an option cannot be used, or a pass failed.

    Example:
        >>> gm = torch.fx.symbolic_trace(torch.nn.Linear(64, 64))
        >>> options = {"precision": "bf16", "do_no_harm": False}
        >>> low = autoamp.rewrite(gm, (torch.randn(8, 64),), **options)
        >>> low(torch.randn(8, 64)).dtype
        torch.float32
    """
    refused = sorted(options.keys() & NOT_OF_REWRITE)
    if refused:
        raise OptionError(
            f"rewrite() has no option {' or '.join(refused)}, because other code "
            "compiles and trains its graph; these are options of autoamp.convert()"
        )
    chosen = PassOptions().replace(**options)
    if isinstance(gm, torch.export.ExportedProgram):
        gm = gm.module()
    if not isinstance(gm, fx.GraphModule):
        raise UnsupportedModelError(
            f"rewrite() takes a GraphModule or an ExportedProgram, not "
            f"{type(gm).__name__}; for a model use autoamp.convert()"
        )
    paths = graph_paths(gm)
    for pattern in chosen.keep:
        if not fits(pattern, paths):
            raise unfitting(pattern, paths, "the graph")
    low = choose_graph_precision(gm, example_inputs, chosen)
    rewritten = rewrite_given(gm, example_inputs, chosen, low)
    # The fake modes of the trace hold weak references to the weights, and
    # `torch.utils.swap_tensors` refuses a tensor that has one.
    compat.forget_inputs(rewritten)
    return rewritten


def export(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: TargetName | None = None,
    out: str | os.PathLike[str] | None = None,
    **options: Unpack[RewriteOptions],
) -> torch.export.ExportedProgram:
    """A mixed-precision model as an exported program, and as a file where one is named.

    What is exported of a converted model is what the model runs: its options, its
    rules, its modules in fp32.  The program takes and returns what the model
    does, holds torch's own ops alone, and holds each weight once, in the precision in
    which ops read it.  It is for inference: gradients and loss scaling stay behind.
    `model` is not changed; a converted model is called once, to compare its results
    with the program's.

    The program carries its plan, which is the report and the dtype of each node.
    `torch.export.save` keeps the plan, `autoamp.load` checks it, and `autoamp diff`
    compares plans.

    Args:
        model: any `torch.nn.Module` that `torch.export` takes, converted or not.
        args, kwargs: the arguments of one call.
        dynamic_shapes: the sizes that may change, as for `torch.export.export`.
        target: the runtime: "pt2" (torch, the default), "aoti", "onnx",
            "onnxruntime-cpu", "onnxruntime-cuda" or "tensorrt".  Ops that
            the runtime lacks stay fp32 (docs/out-of-process.md has the table).
        out: the path of the file to write: the program for "pt2", a compiled package
            for "aoti", ONNX for the other targets.
        **options: as for `convert`, except those that are for a model that is called
            and trained (`backend`, `loss_scale`, `guard`, ...).  They are added to the
            options of a converted model.

    Raises:
        AutoampError: the model or an option cannot be used, or the target cannot run
            the precision.  Nothing is changed and nothing is written.

    Example:
        >>> model, x = torch.nn.Linear(64, 64).eval(), torch.randn(8, 64)
        >>> program = autoamp.export(model, (x,), precision="bf16", do_no_harm=False)
        >>> {name: weight.dtype for name, weight in program.state_dict.items()}
        {'weight': torch.bfloat16, 'bias': torch.bfloat16}
    """
    refused = sorted(options.keys() & NOT_OF_REWRITE)
    if refused:
        raise OptionError(
            f"export() has no option {' or '.join(refused)}, because an exported model "
            "is neither trained nor compiled here; autoamp.convert() has it"
        )
    if not isinstance(args, tuple):
        raise OptionError("args must be a tuple of the model's arguments")
    call = Call(args, call_keywords("export", kwargs, options), dynamic_shapes)
    chosen = options_for(model, options)
    return export_model(model, call, chosen, target=target, out=out)


def load(path: str | os.PathLike[str]) -> Any:
    """Loads what `export` wrote to a file, and checks it against the plan in the file.

    Each part must have the size and the hash that it was written with, and each node
    and weight the dtype that was planned.  Of a compiled package only the parts and the
    plan are checked.  Torch's loaders unpickle
    parts of a .pt2 file: open files that you trust.

    Args:
        path: a .pt2 or .onnx file.

    Returns:
        A `torch.export.ExportedProgram`, whose `module()` is called as the model is;
        a compiled package, which is called itself; or an `onnx.ModelProto` without
        the weights that are in a second file.

    Raises:
        ExportError: the file holds no plan, or another program than its plan says, or
            it was changed after it was written.
        OptionError: the file cannot be read, or is damaged.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt2")
        >>> model, x = torch.nn.Linear(64, 64).eval(), torch.randn(8, 64)
        >>> options = {"precision": "bf16", "do_no_harm": False}
        >>> program = autoamp.export(model, (x,), out=path, **options)
        >>> torch.equal(autoamp.load(path).module()(x), program.module()(x))
        True
    """
    return load_file(path)


def _checked_optimizers(optimizer: Any, model: Any) -> list[torch.optim.Optimizer]:
    """The optimizers given.

    Raises:
        OptionError: one of them is not an optimizer, or holds no weight of `model`.
    """
    if optimizer is None:
        return []
    several = isinstance(optimizer, Sequence) and not isinstance(optimizer, str)
    optimizers = list(optimizer) if several else [optimizer]
    for each in optimizers:
        name = type(each).__name__
        # The optimizer of an engine may be no `torch.optim.Optimizer`: the reason comes
        # before the type.
        engine = foreign_engines.engine_of_optimizer(each)
        if engine:
            raise OptionError(f"optimizer={name} cannot be taken. {engine}")
        if not isinstance(each, torch.optim.Optimizer):
            raise OptionError(
                f"optimizer={name} is not a torch.optim.Optimizer: the second argument "
                "of convert() is the model's optimizer, or a list of them. Options are "
                f"keywords: {_as_option(each)}"
            )
        if not isinstance(model, nn.Module):
            continue  # convert_model raises the error
        # By id, since `==` of two tensors compares their elements.
        ids = {id(p) for p in model.parameters()}
        if not any(id(p) in ids for p in params_of(each)):
            raise OptionError(
                f"the {name} holds none of the parameters of {type(model).__name__}; "
                f"make it from this model, {name}(model.parameters(), ...), or leave "
                "it out: autoamp finds an optimizer by itself at its first step"
            )
    return optimizers


def _as_option(given: Any) -> str:
    """The call in which an object that was given as the optimizer is an option."""
    if isinstance(given, Mapping):
        return "convert(model, **options)"
    if parse_low_dtype(given) is not None or given == "auto":
        shown = given if isinstance(given, torch.dtype) else f'"{given}"'
        return f"convert(model, precision={shown})"
    return 'convert(model, precision="bf16")'


# -- questions about a model, which is not changed -------------------------------------


def explain(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    device: str | None = None,
    **options: Unpack[ConvertOptions],
) -> Report:
    """Reports what `convert` would do to `model`, which is not changed.

    The model is called once, in fp32, on the given arguments.  A model on the meta
    device needs no weights.

    Args:
        model: any `torch.nn.Module`, converted or not.
        *args, kwargs: the arguments of a call of the model.
        device: the device to explain for, which this machine may lack: a GPU's name
            ("h100", "a100", "rtx4090") or compute capability ("sm_120"), "cpu:amx",
            "cpu:avx512_bf16", "cpu:plain", or "cpu" or "cuda" for this machine's own
            device.  By default, the device of the model.
        **options: as for `convert`; they are added to the options of a converted
            model.

    Raises:
        AutoampError: the model, an option or the device cannot be used.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> report = autoamp.explain(model, torch.randn(32, 64), device="cuda:sm_90")
        >>> [op.precision for op in report.ops]
        ['fp32', 'fp32']
    """
    named = call_keywords("explain", kwargs, options)
    return explain_model(model, args, named, options_for(model, options), device)


def compare(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    tolerance: float | None = None,
    **options: Unpack[ConvertOptions],
) -> Comparison:
    """Measures the errors of mixed precision on one call, by node and by module.

    The model is called on copies of the arguments, in fp32 and as rewritten, with the
    same random numbers, and is not changed.  In training mode the backward runs too.
    The call is then repeated with one module at a time put back into fp32.

    Args:
        model: any `torch.nn.Module`, converted or not.
        *args, kwargs: the arguments of a call of the model.
        loss_fn: gives a tensor of one element from the model's output; by default the
            output's `loss`, or the sum of the output's float tensors.
        tolerance: the largest relative error that outputs and gradients may have.  The
            result then names a minimal set of modules to keep in fp32 to reach it.
        **options: as for `convert`; they are added to the options of a converted
            model.

    Raises:
        AutoampError: the model or an option cannot be used, or the model would stay in
            fp32 anyway.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> options = {"precision": "bf16", "do_no_harm": False}
        >>> found = autoamp.compare(model, torch.randn(32, 64), **options)
        >>> 0 < found.errors.output < 0.01
        True
    """
    named = call_keywords("compare", kwargs, options)
    chosen = options_for(model, options)
    return compare_model(
        model, args, named, chosen, loss_fn=loss_fn, tolerance=tolerance
    )


def find_overflow(
    model: nn.Module,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    **options: Unpack[ConvertOptions],
) -> Overflow:
    """Finds the first number, forward or backward, that leaves its dtype's range.

    The model is called on copies of the arguments, as rewritten, node by node.  With a
    `loss_fn`, and in training mode with a loss in the output, the backward runs too, at
    the loss scale in force; otherwise the answer is about the forward alone.  If a
    number leaves its range, remedies (`deny=`, `keep=`) are tried until one works.  The
    model is not changed by a bit; the call needs memory for a copy of its weights, and
    calls the model's own hooks.

    Args:
        model: any `torch.nn.Module`, converted or not.
        *args, kwargs: the arguments of a call of the model.
        loss_fn: gives a tensor of one element from the model's output; by default the
            output's `loss`, if it has one.
        **options: as for `convert`; they are added to the options of a converted
            model, and to fp16 for another.

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
    named = call_keywords("find_overflow", kwargs, options)
    return find_overflow_model(model, args, named, options, loss_fn)


def bench(
    model: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    data: Iterable[Any] | None = None,
    inference: bool = False,
    generate: int = 0,
    ways: Iterable[WayName] = KINDS,
    compiled: bool = False,
    rounds: int | None = None,
    seconds: float = 10.0,
    steps: int = 5,
    **options: Unpack[ConvertOptions],
) -> Bench:
    """Measures whether mixed precision helps a model: time, memory, error and casts.

    Each way to run the model gets a deep copy; the model is not changed.  A step is a
    forward, a backward and an optimizer step in training mode.  The ways are timed in
    turn, in one process, if memory allows.  A way that fails only loses its row.

    Args:
        model: any `torch.nn.Module`, or a function without arguments that returns
            `(model, args)`, `(model, args, kwargs)` or `(model, args, kwargs, data)`.
        *args, kwargs: the arguments of a call of the model.
        loss_fn: gives a tensor of one element from the model's output; by default the
            output's `loss`, an output of one element, or the mean squared distance of
            the output's float tensors from fixed random numbers.
        optimizer: makes an optimizer of a list of parameters; AdamW by default.
        data: batches, each the arguments of a call: a tuple or list of positional
            arguments, a dict of keyword arguments, or a tuple of both.  The wait for a
            batch is timed too.  The data must be iterable more than once.
        inference: whether a step is a call in eval mode, without a backward.
        generate: how many tokens a step generates by `model.generate`; 0 for a call.
        ways: any of "fp32" (always measured), "tf32", "autocast", "autoamp"
            and "half" (`.bfloat16()`, `.half()`).
        compiled: whether each way is measured compiled by inductor too.
        rounds: how many steps are timed; by default at least 5, until `seconds` have
            passed or the spread of the ratios is small.
        seconds: the time after which no further round begins.
        steps: the number of steps after which losses are compared.
        **options: as for `convert`.

    Returns:
        The figures of each way; `print(bench)` shows them, and `bench.to_json()` and
        `bench.to_markdown()` write them.

    Raises:
        AutoampError: the model, its arguments or an option cannot be used.
        KeyboardInterrupt: after Ctrl-C; its `bench` holds the figures so far.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> found = autoamp.bench(model, torch.randn(32, 64), rounds=2, ways=["half"])
        >>> [row.way for row in found.rows]
        ['fp32', '.bfloat16()']
    """
    named = call_keywords("bench", kwargs, options)
    return bench_model(
        model,
        args,
        named,
        options=options,
        loss_fn=loss_fn,
        optimizer=optimizer,
        data=data,
        infer=inference,
        generate=generate,
        ways=ways,
        compiled=compiled,
        rounds=rounds,
        seconds=seconds,
        steps=steps,
    )
