"""The kernels that replace chains of calls: one row each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoamp.passes.kernels.normal_forms import (
    Form,
    erf,
    exp,
    log,
    logsumexp,
    mean,
    row_sum,
    sigmoid,
    softplus,
    tanh,
    variance,
)

_ATEN = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function of one tensor that torch has a kernel for.

    Attributes:
        name: the name by which `fuse=` switches the kernel off.
        op: the kernel.
        spellings: the kernel's function of the data (and of the epsilon, if it takes
            one) before weight and bias, in each way in which libraries write it.
        takes: the arguments of the kernel after the tensor: "dimension" (the last),
            "sizes" (of the last dimension), "weight" and "bias" (both may be None),
            "epsilon".
        keywords: the keyword arguments.
        keeps_result: whether the backward needs the result, to which no later call
            may write.
        slope: the derivative, as custom Functions with this kernel's result write it.
    """

    name: str
    op: Callable[..., Any]
    spellings: tuple[Callable[..., Form], ...]
    takes: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    keeps_result: bool = False
    slope: Callable[[Form], Form] | None = None

    @property
    def by_rows(self) -> bool:
        """Whether the kernel computes rows, and not each element by itself."""
        return bool(self.takes)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The tensors that the kernel takes besides its data."""
        return tuple(name for name in self.takes if name in ("weight", "bias"))

    def arguments(
        self, size: int, weight: Any = None, bias: Any = None, epsilon: float = 0.0
    ) -> tuple[Any, ...]:
        """The positional arguments after the tensor, whose last dimension is `size`."""
        every = {
            "dimension": -1,
            "sizes": [size],
            "weight": weight,
            "bias": bias,
            "epsilon": epsilon,
        }
        return tuple(every[name] for name in self.takes)

    def __call__(self, data: Tensor, *given: Any) -> Tensor:
        """The kernel's result; `given` are the later arguments of `arguments`."""
        arguments = self.arguments(data.shape[-1], *given)
        return self.op(data, *arguments, **self.keywords)  # type: ignore[no-any-return]


_ROOT = math.sqrt(2 / math.pi)


def _gelu(x: Form) -> Form:
    """BERT's."""
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def _new_gelu(x: Form) -> Form:
    """GPT-2's, by `tanh` of a cubic."""
    return 0.5 * x * (1 + tanh(_ROOT * (x + 0.044715 * x**3)))


def _fast_gelu(x: Form) -> Form:
    """FastGELUActivation of transformers, and the GELU of BLOOM and Megatron."""
    return 0.5 * x * (1 + tanh(_fast_inner(x)))


def _fast_inner(x: Form) -> Form:
    return _ROOT * x * (1 + 0.044715 * x * x)


def _gelu_by_sigmoid(x: Form) -> Form:
    """Written for hardware without `tanh`."""
    return x * sigmoid(2 * _ROOT * (x + 0.044715 * x**3))


def _fast_gelu_slope(x: Form) -> Form:
    """BLOOM's and Megatron's."""
    t = tanh(_fast_inner(x))
    inner = (1 - t * t) * (_ROOT + 3 * 0.044715 * _ROOT * x * x)
    return 0.5 * x * inner + 0.5 * (1 + t)


def _silu(x: Form) -> Form:
    return x * sigmoid(x)


def _silu_by_exp(x: Form) -> Form:
    return x / (1 + exp(-x))


def _silu_slope(x: Form) -> Form:
    """EfficientNet's and YOLOv5's, which keep the input alone."""
    return sigmoid(x) * (1 + x * (1 - sigmoid(x)))


def _mish(x: Form) -> Form:
    return x * tanh(softplus(x))


def _mish_slope(x: Form) -> Form:
    """YOLOv5's and timm's."""
    t = tanh(softplus(x))
    return t + x * sigmoid(x) * (1 - t * t)


def _softmax(x: Form) -> Form:
    """Of data that may be less its maximum, which is no part of the chain."""
    return exp(x) / row_sum(exp(x))


def _softmax_by_one(x: Form) -> Form:
    """Of the weights of experts and of hashed keys in transformers."""
    return exp(x - logsumexp(x))


def _log_softmax(x: Form) -> Form:
    return x - log(row_sum(exp(x)))


def _log_softmax_by_one(x: Form) -> Form:
    return x - logsumexp(x)


def _layer_norm(x: Form, epsilon: float) -> Form:
    return (x - mean(x)) / (variance(x) + epsilon) ** 0.5


def _rms_norm(x: Form, epsilon: float) -> Form:
    return x / (mean(x * x) + epsilon) ** 0.5


_TANH = {"approximate": "tanh"}
_LAST = ("dimension",)
_NORM = ("sizes", "weight", "bias", "epsilon")
_RMS = ("sizes", "weight", "epsilon")

KERNELS: tuple[Kernel, ...] = (
    Kernel("gelu", _ATEN.gelu.default, (_gelu,)),
    Kernel(
        "gelu_tanh",
        _ATEN.gelu.default,
        (_new_gelu, _fast_gelu, _gelu_by_sigmoid),
        keywords=_TANH,
        slope=_fast_gelu_slope,
    ),
    Kernel("silu", _ATEN.silu.default, (_silu, _silu_by_exp), slope=_silu_slope),
    Kernel("mish", _ATEN.mish.default, (_mish,), slope=_mish_slope),
    Kernel(
        "softmax",
        _ATEN.softmax.int,
        (_softmax, _softmax_by_one),
        _LAST,
        keeps_result=True,
    ),
    Kernel(
        "log_softmax",
        _ATEN.log_softmax.int,
        (_log_softmax, _log_softmax_by_one),
        _LAST,
        keeps_result=True,
    ),
    Kernel("layer_norm", _ATEN.layer_norm.default, (_layer_norm,), _NORM),
    Kernel("rms_norm", _ATEN.rms_norm.default, (_rms_norm,), _RMS),
)
"""Each computes in fp32 inside, and reads and writes 16 bits where it runs low."""

ATTENTION_BACKWARD = "attention_backward"
"""Attention whose backward computes in fp32, on CPUs and where no compiler runs the
graph (`functions/attention.py`)."""

CAUSAL_MASK = "causal_mask"
"""Attention whose mask is causal: a flag replaces the mask (`causal_mask.py`)."""

NO_MASK = "no_mask"
"""Attention whose mask hides no key, which gets none (`causal_mask.py`)."""

ROTARY = "rotary"
"""Rotary position embedding, where no compiler runs the graph (`rotary.py`)."""

CHANNELS_LAST = "channels_last"
"""Convolutions with the channels last, where no compiler runs the graph
(`passes/write/layouts.py`)."""

TOGETHER = "together"
"""Gradients of several weights cast by one call, on GPUs and where no compiler runs the
graph (`passes/write/grouped_weight_casts.py`)."""

ACCUMULATORS = "accumulators"
"""Products that give the fp32 sums of their kernels, on GPUs and where no compiler runs
the graph (`passes/write/fp32_sums.py`)."""

KERNEL_NAMES: tuple[str, ...] = (
    *(kernel.name for kernel in KERNELS),
    ATTENTION_BACKWARD,
    CAUSAL_MASK,
    NO_MASK,
    ROTARY,
    CHANNELS_LAST,
    TOGETHER,
    ACCUMULATORS,
)
"""The names that `fuse=` takes."""
