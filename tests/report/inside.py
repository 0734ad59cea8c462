"""What tests of reports ask of the inside: counts, prices, a solver to compare with."""

from autoamp.messages import FULL_WIDTH, WIDTH, bytes_text, seconds_text
from autoamp.passes.decide.mincut import energy
from autoamp.passes.decide.policies import POLICIES, project
from autoamp.passes.report_rows import ALL_FP32
from autoamp.reports.casts import cast_counts
from autoamp.reports.page.drawing import MOST_NODES
from autoamp.reports.why import Flips
from autoamp.runtime.conversion import conversion_of
from autoamp.tools.count import Counts, count_ops
from autoamp.training.sentinels import copies_of

WIDTHS = WIDTH, FULL_WIDTH
"""The widths of a report that is printed short, and in full."""

__all__ = [
    "ALL_FP32",
    "MOST_NODES",
    "POLICIES",
    "WIDTHS",
    "Counts",
    "Flips",
    "bytes_text",
    "cast_counts",
    "conversion_of",
    "copies_of",
    "count_ops",
    "energy",
    "project",
    "seconds_text",
]
