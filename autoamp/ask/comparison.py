"""`Comparison`: the errors of mixed precision, by node and by region."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoamp.dtypes import short_name
from autoamp.errors import OptionError
from autoamp.inspect.text import as_text, counted, op_title, plain_table, shorten
from autoamp.messages import advice

LISTED = 10


@dataclass(frozen=True)
class Errors:
    """Relative errors against fp32: ||mixed - fp32|| / ||fp32||.

    Attributes:
        output: the error of the output's float tensors together.
        gradients: the error of the gradients of all parameters together; 0 if the model
            is in eval mode or has no gradients.
    """

    output: float
    gradients: float

    @property
    def worst(self) -> float:
        """The larger of the two; NaN and infinity are larger than any number."""
        pair = (self.output, self.gradients)
        return max(pair, key=lambda e: math.inf if math.isnan(e) else e)


@dataclass(frozen=True)
class NodeError:
    """The error of one op.

    Attributes:
        graph, body, name: the op's node.
        op, precision, module, source: as in `OpRow`.
        error: the relative error of the result, including errors of its operands.
        added: the relative error that the op itself adds: the error of its result on
            exact operands, rounded to the dtype the op reads.  0 for an fp32 op, and
            for an op that draws random numbers.
        gradient: the relative error of the result's gradient; 0 if it has none.
    """

    graph: int
    body: str
    name: str
    op: str
    precision: str
    module: str
    source: str
    error: float
    added: float
    gradient: float


@dataclass(frozen=True)
class RegionError:
    """The low ops of one module, put back into fp32 by themselves.

    Attributes:
        module: the module's path; "" for ops of the model itself.
        ops: how many low ops the module has.
        errors: the errors of the model with these ops in fp32.
        gives_back: by how much the worst error falls; below 0 where it rises.
    """

    module: str
    ops: int
    errors: Errors
    gives_back: float


@dataclass(frozen=True, repr=False)
class Comparison:
    """Mixed precision beside fp32 on one call and its backward.

    `print(comparison)` shows it.

    Attributes:
        label: the model's class name.
        precision: the compute dtype.
        errors: the errors of the model as converted.
        autocast: the errors under `torch.autocast` in the same dtype; None where
            autocast raises on the model.
        nodes: each float op; the op that adds most error comes first.
        regions: each module with low ops; the module whose return to fp32 removes most
            error comes first.
        tolerance: the error asked for, or None.
        keep: the modules to keep in fp32 for `tolerance`: a minimal set, from which no
            module can be left out.  None if no set reaches the tolerance.
        kept_errors: the errors of the model converted with `keep`; None if `keep` is
            empty or None.
    """

    label: str
    precision: torch.dtype
    errors: Errors
    autocast: Errors | None
    nodes: Sequence[NodeError]
    regions: Sequence[RegionError]
    tolerance: float | None = None
    keep: tuple[str, ...] | None = ()
    kept_errors: Errors | None = None

    def with_keep(
        self,
        keep: tuple[str, ...] | None,
        tolerance: float,
        errors: Errors | None = None,
    ) -> Comparison:
        """A copy with the set found for a tolerance, and the errors that remain."""
        return replace(self, keep=keep, tolerance=tolerance, kept_errors=errors)

    def to_rules(self, path: str | Path) -> Path:
        """Writes `keep` as a rules file: `convert(model, rules=path)`.

        Raises:
            OptionError: no tolerance was given, or no set of modules reaches it.
        """
        if self.tolerance is None or self.keep is None:
            raise OptionError(
                "there are no modules to write: give compare() a tolerance that some "
                "set of modules reaches"
            )
        lines = [
            "[meta]",
            f'description = "{self.label}: an error of at most {self.tolerance:g}"',
            "",
            "[keep]",
            "modules = [",
            *(f"    {json.dumps(name)}," for name in self.keep),
            "]",
        ]
        target = Path(path)
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return target

    def __str__(self) -> str:
        return as_text([self])

    def __repr__(self) -> str:
        return (
            f"<autoamp.Comparison of {self.label}: output error "
            f"{self.errors.output:.2e}, gradient error {self.errors.gradients:.2e} in "
            f"{short_name(self.precision)}>"
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        low = short_name(self.precision)
        title = f"autoamp compare: {self.label}, {low} against fp32"
        yield Text(title, "bold")
        table = plain_table("relative error of", numbers=("output", "gradients"))
        table.add_row("autoamp", *_pair(self.errors))
        if self.autocast is not None:
            table.add_row("torch.autocast", *_pair(self.autocast))
        else:
            table.add_row("torch.autocast", "raises", "raises")
        yield Padding(table, (1, 0, 0, 2))
        yield from self._ops()
        yield from self._modules()
        yield from self._answer()

    def _ops(self) -> Iterator[RenderableType]:
        adding = [node for node in self.nodes if node.added][:LISTED]
        if not adding:
            return
        yield Text("\nOps that add most error", "bold")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        table.add_column("op", min_width=6, max_width=18, no_wrap=True)
        table.add_column("module", max_width=30)
        for name in ("adds", "has", "gradient"):
            table.add_column(name, justify="right", min_width=8, no_wrap=True)
        table.add_column("source", no_wrap=True, overflow="ellipsis", max_width=30)
        for node in adding:
            errors = (node.added, node.error, node.gradient)
            cells = [f"{each:.1e}" for each in errors]
            where = Text(_line_of(node.source))
            table.add_row(op_title(node.op), Text(node.module), *cells, where)
        yield Padding(table, (0, 0, 0, 2))

    def _modules(self) -> Iterator[RenderableType]:
        if not self.regions:
            return
        yield Text("\nModules that give most error back, kept in fp32", "bold")
        names = ("low ops", "output", "gradients", "gives back")
        table = plain_table("module", numbers=names)
        for region in self.regions[:LISTED]:
            back = f"{region.gives_back:+.1e}"
            name = Text(region.module or "(the model itself)")
            table.add_row(name, str(region.ops), *_pair(region.errors), back)
        yield Padding(table, (0, 0, 0, 2))
        if len(self.regions) > LISTED:
            yield Text(f"  and {counted(len(self.regions) - LISTED, 'more module')}")

    def _answer(self) -> Iterator[RenderableType]:
        if self.tolerance is None:
            return
        wanted = f"\nFor an error of at most {self.tolerance:g}"
        if self.keep is None:
            yield Text(f"{wanted}: no set of modules kept in fp32 is enough.")
        elif not self.keep:
            yield Text(f"{wanted}: no module needs to be kept in fp32.")
        else:
            rule = advice("keep", [*self.keep], by_variables=False)
            yield Text(f"{wanted}: {rule}; to_rules(path) or --to-rules writes it.")
            if self.kept_errors is not None:
                output, gradients = _pair(self.kept_errors)
                yield Text(f"Errors with that: {output} output, {gradients} gradients.")


def _pair(errors: Errors) -> tuple[str, str]:
    return f"{errors.output:.2e}", f"{errors.gradients:.2e}"


def _line_of(source: str) -> str:
    """`file.py:12` of a source line, without the folder and the code."""
    place = shorten(source).partition(": ")[0]
    return place.rpartition("/")[2]
