"""What tests of reports ask of the inside: counts, prices, a solver to compare with."""

from autoamp.counted.ops import Counts, count_ops
from autoamp.inspect.casts import cast_counts
from autoamp.inspect.page.drawing import MOST_NODES
from autoamp.inspect.rows import ALL_FP32
from autoamp.inspect.text import FULL_WIDTH, WIDTH, bytes_text, seconds_text
from autoamp.inspect.why import Flips
from autoamp.model.conversion import conversion_of
from autoamp.place.mincut import energy
from autoamp.place.policies import POLICIES, project
from autoamp.weights.sentinels import copies_of

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
