"""The one door to the inside for the tests of kernels: what they ask of it."""

from __future__ import annotations

from autoamp.passes.decide.devices import Device
from autoamp.passes.functions import product
from autoamp.passes.functions.attention import LONG, Kind, attention
from autoamp.passes.functions.casts import scaled_and_rounded
from autoamp.passes.functions.depthwise import depthwise
from autoamp.passes.functions.index_add import index_add, index_add_
from autoamp.passes.functions.norms import layer_norm, rms_norm, softmax
from autoamp.passes.functions.rotary import rotary
from autoamp.passes.kernels.chains import chains_in
from autoamp.passes.kernels.spelled import (
    Recognised,
    function_recognised,
    recognised,
)
from autoamp.passes.kernels.table import KERNELS

__all__ = [
    "KERNELS", "LONG", "Device", "Kind", "Recognised", "attention", "chains_in",
    "depthwise", "function_recognised", "index_add", "index_add_", "layer_norm",
    "product", "recognised", "rms_norm", "rotary", "scaled_and_rounded", "softmax",
]  # fmt: skip
