"""`torch.autocast` as on a GPU, for tensors on the CPU.

The lists of ops differ: on GPUs autocast runs norms, exponentials and losses in fp32,
on CPUs in the dtype of their operands.  A build of torch for CPUs cannot train tensors
of a GPU, not even fake ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autoamp.dtypes import LOW_DTYPES

IN_FP32 = frozenset(
    {
        "__pow__",
        "__rdiv__",
        "__rpow__",
        "__rtruediv__",
        "acos",
        "asin",
        "binary_cross_entropy_with_logits",
        "cosh",
        "cosine_embedding_loss",
        "cdist",
        "cosine_similarity",
        "cross_entropy",
        "cumprod",
        "cumsum",
        "dist",
        "erfinv",
        "exp",
        "expm1",
        "group_norm",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "layer_norm",
        "log",
        "log10",
        "log_softmax",
        "log1p",
        "log2",
        "margin_ranking_loss",
        "mse_loss",
        "multilabel_margin_loss",
        "multi_margin_loss",
        "nll_loss",
        "norm",
        "normalize",
        "pdist",
        "poisson_nll_loss",
        "pow",
        "prod",
        "reciprocal",
        "rsqrt",
        "sinh",
        "smooth_l1_loss",
        "soft_margin_loss",
        "softmax",
        "softmin",
        "softplus",
        "sum",
        "renorm",
        "tan",
        "triplet_margin_loss",
        "rms_norm",
    }
)
"""The functions that autocast runs in fp32 on GPUs, by torch's documentation."""


class CudaAutocast(TorchFunctionMode):
    """Inside autocast of the CPU, runs the functions `IN_FP32` in fp32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in IN_FP32 and torch.is_autocast_enabled(
            "cpu"
        ):
            args, kwargs = pytree.tree_map_only(Tensor, _in_fp32, (args, kwargs))
        return func(*args, **kwargs)


def _in_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_DTYPES.values() else tensor
