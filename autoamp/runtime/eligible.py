"""Whether a model can be converted, to which precision, and which modules stay fp32."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import LOW_DTYPES, needs_loss_scale, parse_low_dtype, short_name
from autoamp.errors import OptionError, UnsupportedModelError
from autoamp.messages import CANNOT_PAY, class_name
from autoamp.passes.decide.devices import (
    KINDS,
    Device,
    device_of,
    full_name,
    kind_of,
    named_device,
)
from autoamp.passes.options import PassOptions
from autoamp.training import foreign_engines
from autoamp.training.options import Options

NAME_IT = (
    "; name its optimizer, autoamp.convert(model, optimizer), to train it with fp32 "
    "masters"
)
"""Advice to the user of a half-precision model, outside the automatic mode."""


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of `model`, even if its class overrides `parameters()`."""
    return _parameters_in(compat.modules_of(model))


def _parameters_in(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    held = (compat.parameters_here(each).values() for each in modules)
    every = [p for of in held for p in of if p is not None]
    return [*{id(parameter): parameter for parameter in every}.values()]


def unsupported(model: Any, *, around: bool = False) -> str | None:
    """Why `model` cannot be converted, with what to do instead; None if it can.

    A model on the meta device can: weights may come after `convert`, or at each call.

    Args:
        around: whether a model inside an engine of another library cannot, either.
    """
    if not isinstance(model, nn.Module):
        return (
            f"convert() takes a torch.nn.Module, not {type(model).__name__}; for a "
            "GraphModule or an ExportedProgram outside training use autoamp.rewrite()"
            if not callable(model)
            else f"convert() takes a torch.nn.Module, not the {type(model).__name__} "
            f"{getattr(model, '__name__', '')!r}; wrap it in a module"
        )
    name = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule):
        return f"{name} is a TorchScript module; convert the model it was made from"
    if compat.uncompiled(model) is not model:
        return (
            f"{name} is already compiled; convert the model inside it "
            "(model._orig_mod) and compile the result, or pass backend='inductor'"
        )
    if not any(map(_has_forward, compat.modules_of(model))):
        return (
            f"{name} has no forward, and no module in it has one, so that there is no "
            "call to capture; give it a forward that computes"
        )
    # The engine around a model is searched for among all objects, and comes last.
    engine = foreign_engines.engine_of(model, around=around)
    return f"{name} cannot be converted. {engine}" if engine else None


def _has_forward(module: nn.Module) -> bool:
    of_class = getattr(type(module), "forward", None)  # TorchScript has none
    return "forward" in vars(module) or of_class is not nn.Module.forward


def home_of(model: nn.Module) -> torch.device:
    """The device of the model's first weight with data.

    A model without one is expected on a GPU if there is one, otherwise on the CPU.
    """
    weights = parameters_of(model)
    for weight in weights:
        if not weight.is_meta:
            return weight.device
    return torch.device("cuda" if weights and torch.cuda.is_available() else "cpu")


def choose_precision(
    model: nn.Module, options: Options, device: str | None = None
) -> tuple[torch.dtype | None, str]:
    """The compute dtype for `model`, or None and the reason it stays as it is.

    Args:
        device: as for `named_device`; by default the device of the model.
    """
    modules = compat.modules_of(model)
    reason = _quantised(model, modules) or _nothing_to_convert(_parameters_in(modules))
    if reason:
        return None, reason
    return choose_device_precision(device or home_of(model), options)


def required_precision(
    model: nn.Module,
    options: Options,
    device: str | None = None,
    *,
    even_at_a_loss: bool = False,
) -> tuple[torch.dtype, Options]:
    """The compute dtype, and the options that convert to that dtype.

    Args:
        device: as for `choose_precision`.
        even_at_a_loss: whether to convert even where low precision does not pay.

    Raises:
        UnsupportedModelError: the model has nothing to convert.
    """
    low, why_not = choose_precision(model, options, device)
    if low is None and even_at_a_loss:
        options = options.replace(do_no_harm=False)
        low, why_not = choose_precision(model, options, device)
    if low is None:
        raise UnsupportedModelError(f"{class_name(model)} {not_converted(why_not)}")
    return low, options


def not_converted(why_not: str) -> str:
    """Says why a model is not converted; the text follows the model's name.

    Args:
        why_not: the reason that `choose_precision` gave.
    """
    return (
        f"{'stays in fp32' if CANNOT_PAY in why_not else 'is left as it is'}: {why_not}"
    )


def choose_device_precision(
    device: torch.device | str, options: PassOptions
) -> tuple[torch.dtype | None, str]:
    """The compute dtype for `device`, or None and the reason there is none.

    Args:
        device: a device of this machine, or a name as for `named_device`.
    """
    low = parse_low_dtype(options.precision)
    if low is None:
        name = device if isinstance(device, torch.device) else full_name(device)
        low = kind_of(name).usual_dtype

    def profile_in(dtype: torch.dtype) -> Device:
        if isinstance(device, torch.device):
            return device_of(device, dtype)
        return named_device(device, dtype)

    profile = profile_in(low)
    if profile.pays or not options.do_no_harm:
        return low, ""
    where, instead = profile.name, ""
    for other in LOW_DTYPES.values():
        if profile_in(other).pays:
            where = f"{profile_in(other).name}, which has no {short_name(low)} units"
            better = options.advice("precision", short_name(other))
            instead = f"Use {better}, which pays here, or "
    return None, (
        f"{short_name(low)} {CANNOT_PAY} ({where}): it would be slower than fp32. "
        f"{instead or 'Use '}{options.advice('do_no_harm', False)} to convert it anyway"
    )


def _quantised(model: nn.Module, modules: Iterable[nn.Module]) -> str:
    """Says which of the modules of `model` is quantised, or ""."""
    packages = {type(module): type(module).__module__.split(".") for module in modules}
    kinds = [
        kind
        for kind, package in packages.items()
        if "quantized" in package and package[0] in ("torch", "torchao")
    ]
    if not kinds:
        return ""
    path, layer = next((p, m) for p, m in model.named_modules() if type(m) in kinds)
    return f"{path or 'the model'} is quantised ({type(layer).__name__})"


def _nothing_to_convert(parameters: Sequence[nn.Parameter]) -> str:
    """Says why a model with these parameters has nothing to lower, or ""."""
    floats = {p.dtype for p in parameters if p.is_floating_point()}
    half = floats & set(LOW_DTYPES.values())
    if half and torch.float32 not in floats:
        names = ", ".join(sorted(short_name(d) for d in half))
        return f"its parameters are {names} already{NAME_IT}"
    if floats and torch.float32 not in floats:
        names = ", ".join(sorted(short_name(d) for d in floats))
        return f"its parameters are {names}; only fp32 is ever lowered"
    if not floats and any(p.is_complex() for p in parameters):
        return "its parameters are complex; only fp32 is ever lowered"
    return ""


def own_precision(model: nn.Module) -> torch.dtype | None:
    """The half-precision dtype of the model's parameters, or of some of them, or None.

    If some parameters are bf16 and some fp16, the dtype is fp16, whose range is
    narrower.
    """
    dtypes = {p.dtype for p in parameters_of(model)}
    return next((d for d in LOW_DTYPES.values() if d in dtypes), None)


def choose_graph_precision(
    gm: nn.Module, example_inputs: Any, options: PassOptions
) -> torch.dtype:
    """The compute dtype for a graph: the one asked for, or the device's usual one."""
    low = parse_low_dtype(options.precision)
    if low is not None:
        return low
    tensors = [*gm.parameters(), *(t for t in example_inputs if torch.is_tensor(t))]
    # Sizes and scalar inputs may be on a CPU beside a GPU's tensors: the GPU computes.
    kinds = [kind_of(t.device) for t in tensors]
    return next((k for k in kinds if k.is_asynchronous), KINDS["cpu"]).usual_dtype


_OWN = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Attributes in which models of transformers name the modules to keep in fp32.

Transformers reads the first when it loads a model in fp16, and the second in bf16 too
(`_get_dtype_plan` in modeling_utils.py of version 5.23), and so does autoamp."""

_STRICT = ("_keep_in_fp32_modules_strict",)
"""The attributes for a dtype with the range of fp32, as bf16 is."""


def for_model(model: nn.Module, options: Options, low: torch.dtype | None) -> Options:
    """`options`, with the modules added that the model itself keeps in fp32.

    Args:
        low: the compute dtype; None where the model is not converted.

    Raises:
        OptionError: a pattern of `keep=` fits no module of the model.
        RulesError: the rules are unusable for the dtype.
    """
    first = {id(module): path for path, module in compat.modules_in(model)}
    named = [
        (path, first[id(module)]) for path, module in compat.named_modules_of(model)
    ]
    paths = {path for path, _ in named} | set(first.values())
    for pattern in options.keep:
        if fits(pattern, paths):
            if options.unmet is not None:
                options.unmet.discard(pattern)
        elif options.unmet is None:
            raise unfitting(pattern, paths, class_name(model))
    own = dict(_own(model, low))
    others = [(path, own_path) for path, own_path in named if path != own_path]
    # Rules take 30 ms to read, which a model without tied modules needs not yet; given
    # rules may be unusable for the dtype.
    needed = bool(others) or options.rules is not None
    read = options.resolve_rules(low).keep if low and needed else ()
    for pattern in (*options.keep, *read):
        for path, own_path in others:
            if fits(pattern, (path,)):
                own.setdefault(own_path, f"kept in fp32 by keep={pattern!r}")
    return dataclasses.replace(options, own_keep=tuple(own.items()))


def fits(pattern: str, paths: Collection[str]) -> bool:
    """Whether a pattern of `keep=` fits one of the module paths."""
    return pattern in paths or any(fnmatch.fnmatchcase(path, pattern) for path in paths)


def unfitting(pattern: str, paths: Collection[str], where: str) -> OptionError:
    """The error about a pattern that fits no module, which names the nearest one."""
    stem, star = pattern, ""
    if pattern.endswith(".*"):
        stem, star = pattern[:-2], ".*"
    close = difflib.get_close_matches(stem, sorted(filter(None, paths)), 1, 0.0)
    # A module without modules in it is named by its path.
    star *= bool(close) and close[0] != stem
    hint = f"did you mean {close[0] + star!r}?" if close else "it has no modules"
    return OptionError(
        f"keep={pattern!r} fits no module of {where}; {hint} A pattern is the path of "
        "a module, as in named_modules(), in which * stands for anything"
    )


def _own(model: nn.Module, low: torch.dtype | None) -> Iterator[tuple[str, str]]:
    """The modules that a model, or a model in it, keeps in fp32; each with the reason.

    A name stands for whole parts of a path, as in transformers: "wo" is in
    "layer.0.wo" and not in "layer.0.word".
    """
    for prefix, module in compat.named_modules_of(model):
        for attribute in _OWN if low is None or needs_loss_scale(low) else _STRICT:
            listed = vars(module).get(attribute, getattr(type(module), attribute, None))
            names = [listed] if isinstance(listed, str) else listed
            if not isinstance(names, list | tuple | set | frozenset):
                continue
            for name in sorted(n for n in names if isinstance(n, str) and n):
                start = f"{prefix}." if prefix else ""
                reason = f"kept in fp32 by the model: {attribute} names {name!r}"
                for path in _named(module, name):
                    yield f"{start}{path}", reason


def _named(root: nn.Module, name: str) -> Iterator[str]:
    """The paths in `root` of the modules, and of the parameters' layers, of a name."""
    body = re.escape(name).replace(r"\*", ".*")
    named = re.compile(rf"(^|\.){body}($|\.)")
    paths: dict[str, None] = {}
    for path, module in root.named_modules():
        if path and named.search(path):
            paths[path] = None
        elif next(module.children(), None) is None:
            # "gate.weight": the layer is kept that computes with the weight.
            parameters = [n for n, _ in module.named_parameters(recurse=False)]
            if path and any(named.search(f"{path}.{each}") for each in parameters):
                paths[path] = None
    yield from paths
