"""The kernels that replace chains of calls: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from autoamp.passes.kernels.algebra import Form
from autoamp.passes.kernels.meaning import (
    erf,
    exp,
    log,
    root,
    row_mean,
    row_sum,
    row_variance,
    tanh,
)

_ATEN = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Kernel:
    """A function of one tensor that torch has a kernel for.

    Attributes:
        name: the name by which `fuse=` switches the kernel off.
        op: the kernel.
        meaning: the function that the kernel computes of the data (and of the epsilon,
            if it takes one) before weight and bias: a chain has to be proved to
            compute this function too.
        takes: the arguments of the kernel after the tensor: "dimension" (the last),
            "sizes" (of the last dimension), "weight" and "bias" (both may be None),
            "epsilon".
        keywords: the keyword arguments.
        keeps_result: whether the backward needs the result, to which no later call
            may write.
    """

    name: str
    op: Callable[..., Any]
    meaning: Callable[..., Form]
    takes: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    keeps_result: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether the kernel computes rows, and not each element by itself."""
        return bool(self.takes)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The tensors that the kernel takes besides its data."""
        return tuple(name for name in self.takes if name in ("weight", "bias"))

    def form(
        self,
        data: Form,
        weight: Form | None = None,
        bias: Form | None = None,
        epsilon: Fraction = Fraction(0),
    ) -> Form:
        """The function that the kernel computes, in algebra."""
        takes_one = "epsilon" in self.takes
        result = self.meaning(data, epsilon) if takes_one else self.meaning(data)
        result = result if weight is None else result * weight
        return result if bias is None else result + bias

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


def _gelu(x: Form) -> Form:
    return x * (1 + erf(x / root(x.algebra.number(2)))) / 2


def _gelu_tanh(x: Form) -> Form:
    # Read as sqrt(2 / pi), as the same number in a chain is.
    factor = x.algebra.number(_ROOT_OF_2_BY_PI)
    return x * (1 + tanh(factor * (x + 0.044715 * x**3))) / 2


def _silu(x: Form) -> Form:
    return x / (1 + exp(-x))


def _mish(x: Form) -> Form:
    return x * tanh(log(1 + exp(x)))


def _softmax(x: Form) -> Form:
    # Without the shift by the row's maximum, which cancels in algebra.
    return exp(x) / row_sum(exp(x))


def _log_softmax(x: Form) -> Form:
    return x - log(row_sum(exp(x)))


def _layer_norm(x: Form, epsilon: Fraction) -> Form:
    return (x - row_mean(x)) / root(row_variance(x) + epsilon)


def _rms_norm(x: Form, epsilon: Fraction) -> Form:
    return x / root(row_mean(x * x) + epsilon)


_ROOT_OF_2_BY_PI = 0.7978845608028654
_TANH = {"approximate": "tanh"}
_LAST = ("dimension",)
_NORM = ("sizes", "weight", "bias", "epsilon")
_RMS = ("sizes", "weight", "epsilon")

KERNELS: tuple[Kernel, ...] = (
    Kernel("gelu", _ATEN.gelu.default, _gelu),
    Kernel("gelu_tanh", _ATEN.gelu.default, _gelu_tanh, keywords=_TANH),
    Kernel("silu", _ATEN.silu.default, _silu),
    Kernel("mish", _ATEN.mish.default, _mish),
    Kernel("softmax", _ATEN.softmax.int, _softmax, _LAST, keeps_result=True),
    Kernel(
        "log_softmax", _ATEN.log_softmax.int, _log_softmax, _LAST, keeps_result=True
    ),
    Kernel("layer_norm", _ATEN.layer_norm.default, _layer_norm, _NORM),
    Kernel("rms_norm", _ATEN.rms_norm.default, _rms_norm, _RMS),
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
graph (`passes/write/together.py`)."""

ACCUMULATORS = "accumulators"
"""Products that give the fp32 sums of their kernels, on GPUs and where no compiler runs
the graph (`passes/write/accumulators.py`)."""

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
