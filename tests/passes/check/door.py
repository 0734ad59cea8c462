"""The one door to the inside for the tests of this folder: what they ask of it."""

from __future__ import annotations

from autoamp.passes import list as passes
from autoamp.passes.check import checks
from autoamp.passes.check.always import check_always, footprint
from autoamp.passes.check.changes import KERNELS
from autoamp.passes.check.compare import differences
from autoamp.passes.check.numbers import check_alike, check_same_calls
from autoamp.passes.check.standin import Memo, StandIns
from autoamp.passes.check.strides import check_strides
from autoamp.passes.check.verify import Verifier
from autoamp.passes.record import Rewritten
from autoamp.passes.see.normalise import normalise
from autoamp.passes.write.copied import clean_up
from autoamp.passes.write.layouts import FORMATS
from autoamp.passes.write.scale_edge import scale_edge

__all__ = [
    "FORMATS", "KERNELS", "Memo", "Rewritten", "StandIns", "Verifier",
    "check_alike", "check_always", "check_same_calls", "check_strides", "checks",
    "clean_up", "differences", "footprint", "normalise", "passes", "scale_edge",
]  # fmt: skip
