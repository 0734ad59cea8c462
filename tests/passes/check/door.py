"""The one door to the inside for the tests of this folder: what they ask of it."""

from __future__ import annotations

from autoamp.passes import list as passes
from autoamp.passes.check import checks
from autoamp.passes.check.allowed_changes import BINDINGS, KERNELS, May
from autoamp.passes.check.compare import Region, differences
from autoamp.passes.check.flowing import flowing_in
from autoamp.passes.check.invariants import check_always, footprint
from autoamp.passes.check.saved_bytes import bytes_held, storage_key, tensors_saved
from autoamp.passes.check.standin import Memo, StandIns, where
from autoamp.passes.check.strides import check_strides
from autoamp.passes.check.verify import Verifier
from autoamp.passes.graph_record import Rewritten
from autoamp.passes.see.nodes import tensors_of
from autoamp.passes.see.normalise import normalise
from autoamp.passes.write.copied import clean_up
from autoamp.passes.write.layouts import FORMATS
from autoamp.passes.write.scale_edge import scale_edge

__all__ = [
    "BINDINGS", "FORMATS", "KERNELS", "May", "Memo", "Region", "Rewritten", "StandIns",
    "Verifier", "bytes_held", "check_always", "check_strides", "checks", "clean_up",
    "differences", "flowing_in", "footprint", "normalise", "passes", "scale_edge",
    "storage_key", "tensors_of", "tensors_saved", "where",
]  # fmt: skip
