"""Which modules of a model stay fp32: by `keep=`, and by the model's own word."""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import re
from collections.abc import Collection, Iterator

import torch
from torch import nn

from autoamp import compat
from autoamp.dtypes import needs_loss_scale
from autoamp.errors import OptionError
from autoamp.options import Options
from autoamp.printable import class_name

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
    # Rules take 30 ms to read, which a model without tied modules needs not yet.
    read = options.resolve_rules(low).keep if low and others else ()
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
            given = vars(module).get(attribute, getattr(type(module), attribute, None))
            names = [given] if isinstance(given, str) else given
            if not isinstance(names, list | tuple | set | frozenset):
                continue
            for name in sorted(n for n in names if isinstance(n, str) and n):
                start = f"{prefix}." if prefix else ""
                said = f"kept in fp32 by the model: {attribute} names {name!r}"
                for path in _named(module, name):
                    yield f"{start}{path}", said


def _named(root: nn.Module, name: str) -> Iterator[str]:
    """The paths in `root` of the modules, and of the parameters' layers, of a name."""
    body = re.escape(name).replace(r"\*", ".*")
    named = re.compile(rf"(^|\.){body}($|\.)")
    found: dict[str, None] = {}
    for path, module in root.named_modules():
        if path and named.search(path):
            found[path] = None
        elif next(module.children(), None) is None:
            # "gate.weight": the layer is kept that computes with the weight.
            own = [n for n, _ in module.named_parameters(recurse=False)]
            if path and any(named.search(f"{path}.{each}") for each in own):
                found[path] = None
    yield from found
