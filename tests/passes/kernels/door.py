"""The one door to the inside for the tests of kernels: what they ask of it."""

from __future__ import annotations

from autoamp.passes.decide.devices import Device
from autoamp.passes.functions import product
from autoamp.passes.functions.attention import LONG, Kind, attention
from autoamp.passes.functions.casts import scaled_and_rounded
from autoamp.passes.functions.convolutions import depthwise
from autoamp.passes.functions.norms import layer_norm, rms_norm, softmax
from autoamp.passes.functions.rotary import rotary
from autoamp.passes.kernels import proved
from autoamp.passes.kernels.algebra import Algebra, UnknownError, read
from autoamp.passes.kernels.chains import chains_in
from autoamp.passes.kernels.meaning import exp, log, root, row_sum, tanh
from autoamp.passes.kernels.proved import Recognised, recognised

__all__ = [
    "LONG", "Algebra", "Device", "Kind", "Recognised",
    "UnknownError", "attention", "chains_in", "depthwise", "exp", "layer_norm", "log",
    "product", "proved", "read", "recognised", "rms_norm", "root", "rotary", "row_sum",
    "scaled_and_rounded", "softmax", "tanh",
]  # fmt: skip
