"""The runtimes that a model is exported for: what each takes, and what stays fp32.

The facts stand in `targets.toml`, each with its source.
"""

from __future__ import annotations

import importlib.util
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from autoamp.dtypes import LOW_DTYPES, short_name
from autoamp.errors import ExportError, OptionError
from autoamp.passes.rules import Category, Rule, Rules
from autoamp.removed import TARGETS as REMOVED_TARGETS
from autoamp.training.options import Options

Kind = Literal["pt2", "aoti", "onnx"]

TargetName = Literal[
    "pt2",
    "aoti",
    "onnx",
    "onnxruntime-cpu",
    "onnxruntime-cuda",
    "tensorrt",
]
"""The names that `target=` takes; `targets.toml` has their facts."""

SUFFIXES: dict[Kind, str] = {
    "pt2": ".pt2",
    "aoti": ".pt2",
    "onnx": ".onnx",
}
"""The name of a file of each kind ends like this; torch's loaders ask for it."""


@dataclass(frozen=True)
class Target:
    """One runtime; the head of `targets.toml` explains the fields.

    Attributes:
        name: the name in `target=`.
    """

    name: str
    kind: Kind
    dtypes: tuple[str, ...]
    source: str
    one_dtype: bool = False
    device: str | None = None
    packages: tuple[str, ...] = ()
    opsets: Mapping[str, int] = field(default_factory=dict)
    no_gain: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    fp32: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def takes(self, low: torch.dtype, options: Options) -> str:
        """Why a model in `low` is not exported for this runtime; "" if it is.

        Raises:
            ExportError: the runtime cannot run `low`.
        """
        name = short_name(low)
        if name not in self.dtypes:
            others = ", ".join(options.advice("precision", n) for n in self.dtypes)
            raise ExportError(
                f"target={self.name!r} cannot run {name}: {self.refused[name]} "
                f"({self.source}). Give {others}, or another target"
            )
        if options.do_no_harm and name in self.no_gain:
            return (
                f"{self.no_gain[name]}: it would be slower than fp32. Use "
                f"{options.advice('do_no_harm', False)} to export it in {name} anyway"
            )
        return ""

    def rules(self, options: Options, low: torch.dtype) -> Options:
        """`options`, with the ops denied that the runtime cannot run in `low`."""
        kept = self.fp32.get(short_name(low), {})
        if not kept:
            return options
        rules = {
            op: Rule(op, Category.DENY, why, origin=f"target {self.name}")
            for op, why in kept.items()
        }
        laid = options.resolve_rules(low).merge(Rules(f"target {self.name}", rules))
        # All lists of the options are in `laid`.
        return options.replace(rules=laid, allow=(), deny=(), infer=(), clear=())

    def check_packages(self) -> None:
        """Checks that what writes the file is installed.

        Raises:
            ExportError: a package is missing.
        """
        for package in self.packages:
            check_installed(package, f"target={self.name!r}")


def check_installed(package: str, what: str) -> None:
    """Checks that a package of an extra can be imported.

    Raises:
        ExportError: it cannot; the message says that `what` needs it.
    """
    if importlib.util.find_spec(package) is None:
        raise ExportError(
            f"{what} needs the package {package}, which is not installed here: "
            "pip install 'autoamp[onnx]'"
        )


@cache
def targets() -> Mapping[str, Target]:
    """Every target by its name, in the order of the table."""
    text = Path(__file__).with_name("targets.toml").read_text(encoding="utf-8")
    table: dict[str, Target] = {}
    for name, row in tomllib.loads(text).items():
        like = table.get(row.pop("like", ""))
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in row.items()
        }
        if like is None:
            table[name] = Target(name, **fields)
        else:
            fields = {"no_gain": {}, "refused": {}, "device": None, **fields}
            table[name] = replace(like, name=name, **fields)
    for target in table.values():
        undecided = LOW_DTYPES.keys() - target.dtypes - target.refused.keys()
        assert not undecided, f"{target.name} says nothing of {undecided}"
    return table


def target_of(name: str | None) -> Target:
    """The target of a name; None is an exported program for torch.

    Raises:
        OptionError: there is no such target.
    """
    all_targets = targets()
    if name in REMOVED_TARGETS:
        raise OptionError(f"target={name!r} was removed: {REMOVED_TARGETS[name]}")
    if name is None:
        return all_targets["pt2"]
    if not isinstance(name, str) or name not in all_targets:
        raise OptionError(
            f"target={name!r} is unknown; the targets are {', '.join(all_targets)}"
        )
    return all_targets[name]
