"""The report as one document: everything that the views of a report show.

The text, the JSON, the page and the graph exports are functions of a
`Document`, so that all of them show the same figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import fx

from autoamp.dtypes import short_name
from autoamp.inspect.costs import Costs
from autoamp.inspect.coverage import Coverage
from autoamp.inspect.nodes.node import Nodes
from autoamp.inspect.rows import CastRow, OpRow, Section, sections_of
from autoamp.inspect.sections.because import because_of
from autoamp.inspect.sections.bounds import Bounds, bounds_of
from autoamp.inspect.sections.cast_counts import CastCounts, cast_counts
from autoamp.inspect.sections.compiled_casts import CompiledCasts, compiled_casts
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
from autoamp.place.frontier import Frontier
from autoamp.place.policies import POLICIES
from autoamp.rewrite.rewritten import Rewritten


@dataclass(frozen=True, repr=False, eq=False)
class Document:
    """What was done to a model; `Report` describes the attributes."""

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

    def section_of(self, row: OpRow) -> Section:
        """The section that a row belongs to."""
        place = row.graph, row.body
        return next(s for s in self.sections if (s.graph, s.body) == place)

    @cached_property
    def ops(self) -> list[OpRow]:
        """One row per float op, with category, precision, reason and source line."""
        return [row for section in self.sections for row in section.ops]

    @cached_property
    def casts(self) -> list[CastRow]:
        """One row per inserted cast, with kind and bytes."""
        return [row for section in self.sections for row in section.casts]

    @cached_property
    def frontier(self) -> Frontier | None:
        """What a budget for error was met with; None without `budget=`."""
        options = [each.options for each in self.rewritten]
        choices = [each.chosen for each in options if each is not None and each.chosen]
        return next((each.frontier for each in choices), None)

    @cached_property
    def nodes(self) -> tuple[Nodes, ...]:
        """The nodes of each section, before and after the pass."""
        return tuple(Nodes(section, self.label) for section in self.sections)

    @cached_property
    def cast_counts(self) -> CastCounts:
        """The number of casts that one forward and one backward over the graphs run."""
        return cast_counts(self.sections)

    @cached_property
    def compiled_casts(self) -> CompiledCasts | None:
        """What inductor makes of the casts; None where it compiles no graph."""
        return compiled_casts(self.sections)

    @cached_property
    def islands(self) -> list[Island]:
        """Connected ops in fp32, with the ops that decided it, the largest first."""
        return islands_of(self.sections)

    @cached_property
    def weights(self) -> list[WeightRow]:
        """One row per weight read in low precision: its shape, and whether it fits."""
        return weight_rows(self.sections, self.ranges)

    @cached_property
    def misfits(self) -> list[Misfit]:
        """Sizes of low products on a GPU that are no multiple for tensor cores."""
        return misfits_of(self.sections)

    @cached_property
    def prediction(self) -> Prediction | None:
        """Predicted times by class of op; None under `objective="memory"`."""
        return predict(self.sections)

    @cached_property
    def costs(self) -> tuple[Costs, ...]:
        """The costs of each section."""
        return tuple(section.costs for section in self.sections)

    @cached_property
    def headline(self) -> Headline:
        """The figures of the summary: what is low, and the predicted gain."""
        return headline_of(self.sections, self.prediction)

    @cached_property
    def bounds(self) -> Bounds | None:
        """What bounds the predicted time; None where no time is predicted."""
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
        return stayed_groups(self.sections)

    @property
    def compute_dtype(self) -> str | None:
        """Short name of the low dtype; None where nothing was rewritten."""
        return short_name(self.rewritten[0].low) if self.rewritten else None

    @property
    def cost(self) -> int:
        """The cost of the placement over all graphs, in units of 0.1 ns.

        Under `objective="memory"` the unit is bytes.  Under `do_no_harm=False` each
        allow op that is left in fp32 adds a penalty larger than all other costs
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
