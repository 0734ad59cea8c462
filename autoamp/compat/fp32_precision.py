"""The formats in which torch is allowed to multiply fp32 numbers."""

from __future__ import annotations

import operator
from typing import Any

import torch

KINDS = ("matmul", "conv", "rnn")
"""The kinds of products for which torch has a switch each."""

_SWITCHES = {"matmul": "cuda.matmul", "conv": "cudnn.conv", "rnn": "cudnn.rnn"}
"""The object in `torch.backends` that has `fp32_precision` for a kind of products."""


def tf32_kinds() -> frozenset[str]:
    """The kinds of products that CUDA kernels may compute in TF32, as torch is set now.

    The switches are read and never set; they can be read where there is no GPU.  Torch
    leaves TF32 on for convolutions and recurrent layers, and off for matrix products
    (https://docs.pytorch.org/docs/stable/notes/cuda.html, "TensorFloat-32").
    """
    return frozenset(kind for kind in KINDS if _allows_tf32(kind))


def _allows_tf32(kind: str) -> bool:
    switch: Any = operator.attrgetter(_SWITCHES[kind])(torch.backends)
    return bool(switch.fp32_precision == "tf32")
