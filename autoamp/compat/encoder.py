"""The fast path of `nn.TransformerEncoderLayer`: one private op for a whole layer.

Torch takes that path for inference, and not under autocast.  In 16 bits the op would
round the residual stream and the norms, which autocast keeps in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_ATEN: Any = torch.ops.aten._transformer_encoder_layer_fwd
ENCODER_LAYERS: frozenset[Callable[..., Any]] = frozenset(
    [torch._transformer_encoder_layer_fwd, _ATEN, _ATEN.default]
)
"""The functions and ops of the fast path."""


def is_encoder_layer(target: Any, args: Sequence[Any]) -> bool:
    """Whether a call computes a whole layer, of a tensor that is not nested."""
    if isinstance(target, str) or target not in ENCODER_LAYERS or not args:
        return False
    return isinstance(args[0], Tensor) and not args[0].is_nested


def encoder_layer(*args: Any) -> Tensor:
    """The layer of torch's op, in the ops that the op calls: the same to the bit.

    Source: aten/src/ATen/native/transformers/transformer.cpp of torch 2.13, function
    `transformer_encoder_layer_forward`.

    Args:
        *args: the arguments of torch's op in their order.
    """
    src, embed_dim, num_heads, *projections, use_gelu, norm_first, eps = args[:10]
    norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2 = args[10:14]
    ffn_weight_1, ffn_bias_1, ffn_weight_2, ffn_bias_2 = args[14:18]
    mask, mask_type = (*args[18:], None, None)[:2]

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(x, (embed_dim,), weight, bias, eps)

    x = norm(src, norm_weight_1, norm_bias_1) if norm_first else src
    attend: Any = torch._native_multi_head_attention
    x, _ = attend(
        x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type
    )
    x = x + src
    if not norm_first:
        x = norm(x, norm_weight_1, norm_bias_1)
    residual = x
    if norm_first:
        x = norm(x, norm_weight_2, norm_bias_2)
    act = functional.gelu if use_gelu else functional.relu
    x = functional.linear(x, ffn_weight_1, ffn_bias_1)
    x = functional.linear(act(x), ffn_weight_2, ffn_bias_2) + residual
    return x if norm_first else norm(x, norm_weight_2, norm_bias_2)
