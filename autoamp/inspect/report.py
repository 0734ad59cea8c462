"""`Report`: everything that was done to a model, to read, to query and to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import networkx as nx
from rich.console import Console, ConsoleOptions, RenderResult
from torch import fx

from autoamp.dtypes import short_name
from autoamp.inspect import export, model_explorer, why
from autoamp.inspect.costs import Costs, costs_of
from autoamp.inspect.coverage import Coverage
from autoamp.inspect.page.document import document_of
from autoamp.inspect.page.html import page_of
from autoamp.inspect.rows import (
    CastRow,
    OpRow,
    Section,
    cast_rows,
    op_rows,
    sections_of,
)
from autoamp.inspect.sections.advice import advice_of
from autoamp.inspect.sections.because import because_of
from autoamp.inspect.sections.bounds import Bounds, bounds_of
from autoamp.inspect.sections.cast_counts import CastCounts, cast_counts
from autoamp.inspect.sections.dimensions import Misfit, misfits_of
from autoamp.inspect.sections.headline import (
    Headline,
    Stayed,
    headline_of,
    stayed_groups,
)
from autoamp.inspect.sections.islands import Island, islands_of
from autoamp.inspect.sections.loss_scaling import LossScaleReport
from autoamp.inspect.sections.prediction import Prediction, predict
from autoamp.inspect.sections.weights import Range, WeightRow, weight_rows
from autoamp.inspect.terminal import full, screen
from autoamp.inspect.terminal.parts import WIDTH, as_text, recording
from autoamp.inspect.writing import written
from autoamp.place.policies import POLICIES
from autoamp.rewrite.rewritten import Rewritten


@dataclass(frozen=True, repr=False, eq=False)
class Report:
    """Everything that was done to a model, graph by graph, with the reasons.

    `print(report)` shows a summary that fits a screen, and `print(report.full())` all.

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
        ranges: the magnitudes in the weights, by their paths; empty where they need
            not be known.
        explained_for: the device for which `explain` made the report; "" where the
            model is converted.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Softmax(-1))
        >>> options = {"precision": "bf16", "do_no_harm": False}
        >>> report = autoamp.explain(model, torch.randn(8, 64), options=options)
        >>> [(op.op, op.precision) for op in report.ops]
        [('aten::linear.default', 'bf16'), ('aten::softmax.int', 'bf16')]
    """

    label: str
    rewritten: Sequence[Rewritten]
    graphs: Sequence[fx.GraphModule]
    skipped: Sequence[tuple[str, str]] = ()
    runs: int = 0
    loss_scale: LossScaleReport | None = None
    unwatched: int = 0
    coverage: Coverage | None = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    explained_for: str = ""

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
    def cast_counts(self) -> CastCounts:
        """The number of casts that one forward and one backward over the graphs run."""
        return cast_counts(self.sections)

    @cached_property
    def islands(self) -> list[Island]:
        """Connected ops in fp32, with the ops that decided it, the largest first."""
        return islands_of(self.sections)

    @cached_property
    def weights(self) -> list[WeightRow]:
        """One row per weight read in low precision: its shape, whether it fits."""
        return weight_rows(self.sections, self.ranges)

    @cached_property
    def misfits(self) -> list[Misfit]:
        """Sizes of low products on a GPU that tensor cores do not like."""
        return misfits_of(self.sections)

    @cached_property
    def prediction(self) -> Prediction | None:
        """Predicted times by class of op; None under `objective="memory"`."""
        return predict(self.sections)

    @cached_property
    def costs(self) -> tuple[Costs, ...]:
        """The costs of each section."""
        return tuple(costs_of(section.rewritten) for section in self.sections)

    @cached_property
    def headline(self) -> Headline:
        """The figures of the summary: what is low, and the predicted gain."""
        return headline_of(self.sections, self.ops, self.costs)

    @cached_property
    def bounds(self) -> Bounds | None:
        """What bounds the predicted time; None where none is predicted."""
        if self.prediction is None:
            return None
        return bounds_of(self.sections, self.prediction.casts)

    @cached_property
    def because(self) -> str:
        """Why the predicted speed-up is what it is, and what would raise it most."""
        return because_of(self.bounds, self.headline, self.misfits)

    @cached_property
    def stayed(self) -> tuple[Stayed, ...]:
        """The ops in fp32 by reason, the reason that costs most first."""
        return stayed_groups(self.sections, self.ops)

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """What to do next: one or two sentences."""
        return advice_of(self)

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
            "coverage": self.coverage.counts_and_shares() if self.coverage else None,
            "cost": self.cost,
            "optimal_cost": self.optimal_cost,
            "regret": self.regret,
            "headline": self.headline.figures() if self.rewritten else None,
        }
        return written(export.to_json(head, self.sections, self.skipped), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one page for a browser, which loads nothing from a network.

        The page shows the graphs, before and after the casts, grouped by module, with
        the reason and the cost of each precision.

        Args:
            path: a file that the page is written to as well, whole or not at all.

        Raises:
            OptionError: `path` cannot be written; an older file there is as it was.

        Example:
            >>> import os, tempfile
            >>> report = autoamp.explain(torch.nn.Linear(8, 8), torch.ones(4, 8))
            >>> path = os.path.join(tempfile.mkdtemp(), "report.html")
            >>> page = report.to_html(path)
        """
        return written(page_of(document_of(self)), path)

    def to_model_explorer(self, path: str | Path | None = None) -> str:
        """The graphs for Model Explorer, a viewer of model graphs; as JSON.

        Modules are layers; colours are precisions; the graph before the casts and the
        graph after are side by side.  `model-explorer FILE` opens the file (of the
        package ai-edge-model-explorer).

        Args:
            path: a file that the JSON is written to as well, whole or not at all.

        Raises:
            OptionError: `path` cannot be written; an older file there is as it was.
        """
        return written(model_explorer.to_model_explorer(document_of(self)), path)

    def to_networkx(self) -> nx.DiGraph:
        """The rewritten graphs as one `networkx.DiGraph`; casts are nodes in it."""
        return export.to_networkx(self.sections)

    def to_dot(self) -> str:
        """The rewritten graphs for Graphviz: `dot -Tsvg`."""
        return export.to_dot(self.sections)

    def full(self) -> str:
        """Everything, as text: each graph with its ops, casts, reasons and costs."""
        sections, runs = self.sections, self.runs
        parts = full.render(self.label, sections, self.costs, self.skipped, runs)
        return as_text([*parts, *screen.details_of(self)])

    def __str__(self) -> str:
        return as_text([self], WIDTH)

    def _repr_html_(self) -> str:
        """The summary for a notebook."""
        console = recording()
        console.print(self)
        page = '<pre style="line-height:1.25;overflow-x:auto">{code}</pre>'
        return console.export_html(inline_styles=True, code_format=page)

    def __repr__(self) -> str:
        return (
            f"<autoamp.Report of {self.label}: {len(self.graphs)} graphs, "
            f"{sum(row.is_low for row in self.ops)} of {len(self.ops)} float ops in "
            f"{self.compute_dtype or 'low precision'}>"
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        yield from screen.summary_of(self)
