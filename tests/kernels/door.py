"""The one door to the inside for the tests of kernels: what they ask of it."""

from __future__ import annotations

from autoamp.kernels import proved
from autoamp.kernels.algebra import Algebra, UnknownError, read
from autoamp.kernels.chains import chains_in
from autoamp.kernels.functions.attention import LONG, WRITTEN_ATTENTION, Kind, attention
from autoamp.kernels.functions.norms import layer_norm, rms_norm
from autoamp.kernels.functions.rotary import rotary
from autoamp.kernels.meaning import exp, log, root, row_sum, tanh
from autoamp.kernels.proved import Recognised, recognised
from autoamp.place.devices import Device

__all__ = [
    "LONG", "WRITTEN_ATTENTION", "Algebra", "Device", "Kind", "Recognised",
    "UnknownError", "attention", "chains_in", "exp", "layer_norm", "log", "proved",
    "read", "recognised", "rms_norm", "root", "rotary", "row_sum", "tanh",
]  # fmt: skip
