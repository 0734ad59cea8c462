"""`Report`: everything that was done to a model, to read, to query and to save."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
from rich.console import Console, ConsoleOptions, RenderResult
from torch import fx

from autoamp.dtypes import short_name
from autoamp.inspect import export, table, why
from autoamp.inspect.costs import Costs, costs_of
from autoamp.inspect.coverage import Coverage
from autoamp.inspect.rows import (
    CastRow,
    OpRow,
    Section,
    cast_rows,
    op_rows,
    sections_of,
)
from autoamp.pipeline import Rewritten
from autoamp.place.policies import POLICIES

WIDTH = 100
"""Columns of `str(report)`, which has no terminal to ask for a width."""


@dataclass(frozen=True)
class LossScaleReport:
    """The loss scaling of a model at the moment of the report.

    Attributes:
        kind: "DynamicLossScale" or "StaticLossScale".
        scale: the factor by which gradients are multiplied inside the graphs.
        growth_tracker: steps without an overflow since the scale last moved.
        skipped_steps: number of steps skipped so far because of an overflow.
        skips: for each skipped step, as far as known, which step it was and the op
            whose gradient overflowed.
        foreign: whether an enabled GradScaler steps the model's optimizer, so that
            autoamp's loss scale is not in force.
    """

    kind: str
    scale: float
    growth_tracker: int
    skipped_steps: int
    skips: tuple[str, ...] = ()
    foreign: bool = False


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """Everything that was done to a model, graph by graph, with the reasons.

    `print(report)` shows it as a table.

    Attributes:
        label: the model's class name.
        rewritten: the records of the pass, one per graph.
        graphs: the graphs that run, as `GraphModule`s, in order of capture.
        skipped: parts that were not converted, as (what, why).
        runs: number of executions of rewritten graphs so far.
        unwatched: number of weights that are copied at every call, because torch cannot
            tell when their memory is written to.
        loss_scale: the loss scaling; None where there is none, as for bf16.
        coverage: the shares of calls and of flops that were converted; None for a
            model that was not converted.
    """

    label: str
    rewritten: Sequence[Rewritten]
    graphs: Sequence[fx.GraphModule]
    skipped: Sequence[tuple[str, str]] = ()
    runs: int = 0
    loss_scale: LossScaleReport | None = None
    unwatched: int = 0
    coverage: Coverage | None = None

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """The graphs, each followed by its bodies: checkpointed regions, loops."""
        return sections_of(self.rewritten, self.graphs)

    @cached_property
    def ops(self) -> list[OpRow]:
        """One row per float op, with category, precision, reason and source line."""
        return [row for section in self.sections for row in op_rows(section)]

    @cached_property
    def casts(self) -> list[CastRow]:
        """One row per inserted cast, with kind and bytes."""
        return [row for section in self.sections for row in cast_rows(section)]

    @cached_property
    def costs(self) -> tuple[Costs, ...]:
        """The costs of each section."""
        return tuple(costs_of(section.rewritten) for section in self.sections)

    @property
    def compute_dtype(self) -> str | None:
        """Short name of the low dtype; None where nothing was rewritten."""
        return short_name(self.rewritten[0].low) if self.rewritten else None

    @property
    def cost(self) -> int:
        """The cost of the placement over all graphs, in units of 0.1 ns.

        Under `objective="memory"` the unit is bytes.  Under `do_no_harm=False` each
        allow op left in fp32 adds a reward not received, larger than all other costs
        together.
        """
        return sum(costs.ours.cost for costs in self.costs)

    @property
    def optimal_cost(self) -> int:
        """The least `cost` of any legal placement."""
        return sum(costs.optimal_cost for costs in self.costs)

    @property
    def regret(self) -> dict[str, int]:
        """Each other policy to its cost above the optimum, over all graphs."""
        return {
            name: sum(costs.regret[name] for costs in self.costs) for name in POLICIES
        }

    def why(self, node: str | fx.Node, graph: int | str = 0) -> str:
        """Why `node` has its precision, and what the other precision would cost.

        Args:
            node: a name as in `graphs[graph].print_readable()` and in `ops`.
            graph: index of the graph, or "0/body_0" for a body in it.

        Raises:
            OptionError: there is no such node or graph; the message lists close names.
        """
        name = node.name if isinstance(node, fx.Node) else node
        return why.explain(why.find_section(self.sections, graph), name)

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON, deterministic to the byte; also written to `path`."""
        head: dict[str, Any] = {
            "model": self.label,
            "compute_dtype": self.compute_dtype,
            "runs": self.runs,
            "unwatched": self.unwatched,
            "loss_scale": asdict(self.loss_scale) if self.loss_scale else None,
            "coverage": self._shares(),
            "cost": self.cost,
            "optimal_cost": self.optimal_cost,
            "regret": self.regret,
        }
        text = export.to_json(head, self.sections, self.skipped)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def _shares(self) -> dict[str, float | None] | None:
        found = self.coverage
        if found is None:
            return None
        shares = {n: getattr(found, n) for n in ("share_of_calls", "share_of_flops")}
        return {**asdict(found), **shares}

    def to_networkx(self) -> nx.DiGraph:
        """The rewritten graphs as one `networkx.DiGraph`; casts are nodes in it."""
        return export.to_networkx(self.sections)

    def to_dot(self) -> str:
        """The rewritten graphs for Graphviz: `dot -Tsvg`."""
        return export.to_dot(self.sections)

    def __str__(self) -> str:
        file = io.StringIO()
        console = Console(
            file=file,
            width=WIDTH,
            color_system=None,
            force_terminal=False,
            force_jupyter=False,
            legacy_windows=False,
        )
        console.print(self)
        lines = (line.rstrip() for line in file.getvalue().splitlines())
        return "\n".join(lines).rstrip()

    def __repr__(self) -> str:
        return (
            f"<autoamp.Report of {self.label}: {len(self.graphs)} graphs, "
            f"{sum(row.is_low for row in self.ops)} of {len(self.ops)} float ops in "
            f"{self.compute_dtype or 'low precision'}>"
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from table.render(
            self.label, self.sections, self.costs, self.skipped, self.runs
        )
        if self.coverage is not None and self.coverage.calls:
            yield table.covered(self._shares() or {})
        if self.unwatched:
            yield table.copied_anew(self.unwatched)
        if self.loss_scale is not None:
            yield table.loss_scaling(asdict(self.loss_scale))
