"""The one door to the inside for the tests of this folder: what they ask of it."""

from __future__ import annotations

from autoamp.check.always import check_always, footprint
from autoamp.check.changes import KERNELS
from autoamp.check.compare import differences
from autoamp.check.numbers import check_alike, check_same_calls
from autoamp.check.standin import Memo, StandIns
from autoamp.check.strides import check_strides
from autoamp.check.verify import Verifier
from autoamp.pipeline import checks, passes
from autoamp.rewrite.copied import clean_up
from autoamp.rewrite.edge.scale_edge import scale_edge
from autoamp.rewrite.layouts import FORMATS
from autoamp.rewrite.rewritten import Rewritten
from autoamp.trace.normalise import normalise

__all__ = [
    "FORMATS", "KERNELS", "Memo", "Rewritten", "StandIns", "Verifier",
    "check_alike", "check_always", "check_same_calls", "check_strides", "checks",
    "clean_up", "differences", "footprint", "normalise", "passes", "scale_edge",
]  # fmt: skip
