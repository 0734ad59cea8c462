"""Layers whose result is returned as it is: its strides are those of fp32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from tests.spelled.chains import SPELLINGS, Function, gelu_new, softmax, spelling
from tests.spelled.layers import Layer, Spelling
from tests.spelled.rotary_embeddings import ROTARY, turned_alone

RMS, LAYER_NORM = (SPELLINGS[name][1] for name in ("rms_t5", "layer_norm_var"))

ALONE: dict[str, Function] = {
    "every other": lambda x: x[:, ::2],
    "every other feature": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(1, 2),
    "gelu of every other": lambda x: gelu_new(x[:, ::2]),
    "gelu transposed": lambda x: gelu_new(x.transpose(1, 2)),
    "every other of gelu": lambda x: gelu_new(x)[..., ::2],
    "softmax transposed": lambda x: softmax(x.transpose(1, 2)),
    "softmax of every other": lambda x: softmax(x[:, ::2]),
    "norm of batch last": lambda x, w, b: LAYER_NORM(x.transpose(0, 1), w, b),
    "rms of every other": lambda x, w: RMS(x[:, ::2], w),
    "rms of batch last": lambda x, w: RMS(x.transpose(0, 1), w),
    "expanded": lambda x: x[:, :1].expand_as(x),
    "viewed": lambda x: gelu_new(x).transpose(0, 1).contiguous().view(-1, 32),
}


def heads_first(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def torchs(m: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def spellings() -> dict[str, Spelling]:
    found = {name: spelling(way, bare=True) for name, way in ALONE.items()}
    for name in ("llama", "raw_view"):
        alone = turned_alone(ROTARY[name])
        found[f"rotary, {name}"] = Spelling(alone, single=True, bare=True)
    for attend in (heads_first, torchs):
        found[attend.__name__] = Spelling(attend, 3, bare=True)
    return {f"layout/{name}": spelling for name, spelling in found.items()}
