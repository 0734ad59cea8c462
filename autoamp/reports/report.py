"""`Report`: all changes to a model, to read, to query and to save."""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import networkx as nx
from rich.console import Console, ConsoleOptions, RenderResult
from torch import fx

from autoamp.files import write_whole
from autoamp.messages import WIDTH, as_text, plain_console, printable
from autoamp.reports import export, why
from autoamp.reports.figures import Document
from autoamp.reports.findings import advice_of, because_of
from autoamp.reports.page.data import page_of
from autoamp.reports.terminal import full_of, summary_of


@dataclass(frozen=True, repr=False, eq=False)
class Report(Document):
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
        loss_scale: the loss scaling; None without loss scaling, as for bf16.
        coverage: the shares of calls and of flops that were converted; None for a
            model that was not converted.
        ranges: the magnitudes in the weights, by their paths; empty unless the compute
            dtype is fp16.
        explained_for: the device for which `explain` made the report; "" where the
            model is converted.
        updates: for each kind of half-precision weights without fp32 masters, the share
            of the optimizer's updates that moves them; sampled while the model trains.
        memory: the memory of a training step; None where `explain` did not make the
            report, or the call has no backward.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU())
        >>> options = {"precision": "bf16", "do_no_harm": False}
        >>> report = autoamp.explain(model, torch.randn(8, 64), **options)
        >>> [(op.op, op.precision) for op in report.ops]
        [('aten::linear.default', 'bf16'), ('aten::gelu.default', 'bf16')]
    """

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """What to do next: one or two sentences."""
        return advice_of(self)

    @cached_property
    def because(self) -> str:
        """Why the predicted speed-up is what it is, and what would raise it most."""
        return because_of(self)

    def why(self, node: str | fx.Node, graph: int | str | None = None) -> str:
        """Why `node` has its precision, and what the other precision would cost.

        Args:
            node: a name as in `graphs[graph].print_readable()` and in `ops`.
            graph: index of the graph, or "0/body_0" for a body in it; by default the
                first that has the node.

        Raises:
            OptionError: the report has no such node or graph; the message lists similar
                names.
        """
        name = node.name if isinstance(node, fx.Node) else node
        return printable(why.answer(self.sections, name, graph))

    def to_json(self, path: str | Path | None = None) -> str:
        """The report as JSON, deterministic to the byte.

        docs/report.schema.json describes the keys.

        Args:
            path: a file that the JSON is written to as well, whole or not at all.

        Raises:
            OptionError: `path` cannot be written; an older file is left unchanged.
        """
        return _written(export.to_json(self), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as one page for a browser, which loads nothing from a network.

        The page shows the graphs, before and after the casts, grouped by module, with
        the reason and the cost of each precision.

        Args:
            path: a file that the page is written to as well, whole or not at all.

        Raises:
            OptionError: `path` cannot be written; an older file is left unchanged.

        Example:
            >>> import os, tempfile
            >>> report = autoamp.explain(torch.nn.Linear(8, 8), torch.ones(4, 8))
            >>> path = os.path.join(tempfile.mkdtemp(), "report.html")
            >>> page = report.to_html(path)
        """
        return _written(page_of(self, lambda: self.advice), path)

    def to_networkx(self) -> nx.DiGraph:
        """The rewritten graphs as one `networkx.DiGraph`; casts are nodes in it."""
        return export.to_networkx(self)

    def to_dot(self) -> str:
        """The rewritten graphs for Graphviz: `dot -Tsvg`."""
        return export.to_dot(self)

    def full(self) -> str:
        """Everything, as text: each graph with its ops, casts, reasons and costs."""
        return as_text([*full_of(self)])

    def __str__(self) -> str:
        return as_text([self], WIDTH)

    def _repr_html_(self) -> str:
        """The summary for a notebook."""
        options = {"color_system": "truecolor", "record": True}
        console = plain_console(io.StringIO(), WIDTH, **options)
        console.print(self)
        page = f'<pre style="{_MONOSPACED}">{{code}}</pre>'
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
        yield from summary_of(self, lambda: self.advice)


_MONOSPACED = (
    "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
    "line-height:1.25;overflow-x:auto"
)
"""The style of the summary, whose columns stand below each other."""


def _written(text: str, path: str | Path | None) -> str:
    """`text`, which is also written to `path` where one is given."""
    if path is not None:
        write_whole(path, text)
    return text
