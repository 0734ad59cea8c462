"""Each pass that edits a graph, shown on tiny programs: the graph before, and after.

A program is a function of tensors; `w` and `v` are its weights.  The texts are printed
by `texts.py`, whose docstring says how to read a line.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

from autoamp.pipeline.passes import PASSES
from autoamp.place.devices import Device
from tests.pipeline.texts import Example, texts


def weight(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(sizes))


ROWS, IMAGE, HEADS = torch.zeros(2, 8), torch.zeros(4, 3, 64, 64), (1, 2, 4, 8)
LAYER = {"x": ROWS, "w": weight(8, 8)}


def layer(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def rms_norm(x: Tensor, w: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def softmax(x: Tensor, w: Tensor) -> Tensor:
    scores = F.linear(x, w)
    shares = torch.exp(scores)
    return F.linear(shares / shares.sum(-1, keepdim=True), w)


def sum_of_layers(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(F.linear(x, w) + F.linear(x, v), -1)


@fx.wrap
def frozen(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        return F.linear(x, w)


def two_frozen(x: Tensor, w: Tensor) -> Tensor:
    return frozen(frozen(x, w), w)


def twice(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w), w)


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.sum(x * w)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def halves(x: Tensor, w: Tensor) -> Tensor:
    parts = F.linear(x, w).view(2, 2, 4)
    return parts.select(1, 0) * parts.select(1, 1)


def normed(x: Tensor, w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(F.linear(x, w), (8,), scale, bias)


def rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    queries = F.linear(x, w)
    first, second = queries[..., :4], queries[..., 4:]
    turned = torch.cat((-second, first), -1)
    return F.linear(queries * cos + turned * sin, w)


def convolutions(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    x = F.conv2d(x, w, padding=1).relu()
    return F.adaptive_avg_pool2d(F.conv2d(x, v, padding=1), 1)


def convolution(x: Tensor, w: Tensor) -> Tensor:
    return F.conv2d(x, w, padding=1)


def mean_of_layer(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).relu().mean()


def logits(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    result = F.linear(x, w)
    return result, torch.logsumexp(result, -1)


def gathered(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.redistribute(placements=(Replicate(),)), w)


def handed_twice(x: Tensor, w: Tensor) -> Tensor:
    one = x.redistribute(placements=(Replicate(),))
    return F.linear(one, w) * x.redistribute(placements=(Replicate(),))


def handed_on(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).to_local()


EXAMPLES: tuple[Example, ...] = (
    Example(
        "kernels",
        gelu,
        {"x": ROWS},
        before="""
    x: f32
    mul: f32 = aten.mul(x, 0.5)
    div: f32 = aten.div(x, 1.4142135623730951)
    erf: f32 = aten.erf(div)
    add: f32 = aten.add(erf, 1)
    mul_1: f32 = aten.mul(mul, add)
    return mul_1
    """,
        after="""
    x: f32
    gelu_default: f32 = aten.gelu(x)
    return gelu_default
    """,
    ),
    Example(
        "kernels",
        rms_norm,
        {"x": ROWS, "w": weight(8)},
        before="""
    x: f32
    w: f32
    mul: f32 = aten.mul(x, x)
    mean: f32 = aten.mean(mul, [-1], True)
    add: f32 = aten.add(mean, 1e-06)
    rsqrt: f32 = aten.rsqrt(add)
    mul_1: f32 = aten.mul(x, rsqrt)
    mul_2: f32 = aten.mul(mul_1, w)
    return mul_2
    """,
        after="""
    x: f32
    w: f32
    rms_norm_default: f32 = aten.rms_norm(x, [8], w, 1e-06)
    return rms_norm_default
    """,
    ),
    Example(
        "calls once",
        handed_twice,
        LAYER,
        before="""
    x: f32
    w: f32
    redistribute: f32 = autoamp.redistribute(x, [2, 8], [8, 1])
    linear: f32 = aten.linear(redistribute, w)
    redistribute_1: f32 = autoamp.redistribute(x, [2, 8], [8, 1])
    mul: f32 = aten.mul(linear, redistribute_1)
    return mul
    """,
        after="""
    x: f32
    w: f32
    redistribute: f32 = autoamp.redistribute(x, [2, 8], [8, 1])
    linear: f32 = aten.linear(redistribute, w)
    mul: f32 = aten.mul(linear, redistribute)
    return mul
    """,
        on_mesh={"x": Shard(0), "w": Replicate()},
    ),
    Example(
        "casts",
        layer,
        LAYER,
        before="""
    x: f32
    w: f32
    linear: f32 = aten.linear(x, w)
    return linear
    """,
        after="""
    x: f32
    w: f32
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16: bf16 = aten._to_copy(w, dtype=bf16)
    linear: bf16 = aten.linear(x_bf16, w_bf16)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    return linear_fp32
    """,
    ),
    Example(
        "casts",
        sum_of_layers,
        {**LAYER, "v": weight(8, 8)},
        before="""
    x: f32
    w: f32
    v: f32
    linear: f32 = aten.linear(x, w)
    linear_1: f32 = aten.linear(x, v)
    add: f32 = aten.add(linear, linear_1)
    softmax: f32 = aten.softmax(add, -1)
    return softmax
    """,
        after="""
    x: f32
    w: f32
    v: f32
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16: bf16 = aten._to_copy(w, dtype=bf16)
    linear: bf16 = aten.linear(x_bf16, w_bf16)
    v_bf16: bf16 = aten._to_copy(v, dtype=bf16)
    linear_1: bf16 = aten.linear(x_bf16, v_bf16)
    add: bf16 = aten.add(linear, linear_1)
    softmax: bf16 = aten.softmax(add, -1)
    softmax_fp32: f32 = aten._to_copy(softmax, dtype=f32)
    return softmax_fp32
    """,
    ),
    Example(
        "clean up",
        two_frozen,
        LAYER,
        before="""
    x: f32
    w: f32
    _set_grad_enabled = _set_grad_enabled(False)
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16: bf16 = aten._to_copy(w, dtype=bf16)
    linear: bf16 = aten.linear(x_bf16, w_bf16)
    _set_grad_enabled_1 = _set_grad_enabled(True)
    _set_grad_enabled_2 = _set_grad_enabled(False)
    w_bf16_1: bf16 = aten._to_copy(w, dtype=bf16)
    linear_1: bf16 = aten.linear(linear, w_bf16_1)
    _set_grad_enabled_3 = _set_grad_enabled(True)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
        after="""
    x: f32
    w: f32
    _set_grad_enabled = _set_grad_enabled(False)
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16: bf16 = aten._to_copy(w, dtype=bf16)
    linear: bf16 = aten.linear(x_bf16, w_bf16)
    w_bf16_1: bf16 = aten._to_copy(w, dtype=bf16)
    linear_1: bf16 = aten.linear(linear, w_bf16_1)
    _set_grad_enabled_3 = _set_grad_enabled(True)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
    ),
    Example(
        "hoist",
        layer,
        LAYER,
        before="""
    x: f32
    w: f32
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16: bf16 = aten._to_copy(w, dtype=bf16)
    linear: bf16 = aten.linear(x_bf16, w_bf16)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    return linear_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    return linear_fp32
    """,
    ),
    Example(
        "hoist",
        twice,
        LAYER,
        before="""
    x: f32
    w: f32
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16: bf16 = aten._to_copy(w, dtype=bf16)
    w_bf16_use: bf16 = low_weight(w, w_bf16)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    w_bf16_use_1: bf16 = low_weight(w, w_bf16)
    linear_1: bf16 = aten.linear(linear, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    w_bf16_use_1: bf16 = low_weight(w, w_copy)
    linear_1: bf16 = aten.linear(linear, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
    ),
    Example(
        "gathers",
        gathered,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: bf16
    redistribute: f32 = autoamp.redistribute(x, [2, 8], [8, 1])
    redistribute_bf16: bf16 = aten._to_copy(redistribute, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(redistribute_bf16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    return linear_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    redistribute_bf16: bf16 = gathered_low(x, bf16, 1)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(redistribute_bf16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    return linear_fp32
    """,
        on_mesh={"x": Shard(0), "w": Replicate()},
    ),
    Example(
        "edge",
        layer,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: f16
    x_fp16: f16 = aten._to_copy(x, dtype=f16)
    w_copy_use: f16 = low_weight(w, w_copy)
    linear: f16 = aten.linear(x_fp16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    return linear_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: f16
    loss_scale: f32
    inv_loss_scale: f32
    found_inf: f32
    x_fp16: f16 = aten._to_copy(x, dtype=f16)
    w_copy_use: f16 = low_weight_unscaled(w, w_copy, inv_loss_scale, found_inf)
    linear: f16 = aten.linear(x_fp16, w_copy_use)
    scaled_result: f32 = scaled_result(linear, loss_scale)
    return scaled_result
    """,
        precision="fp16",
        scaled=True,
    ),
    Example(
        "edge",
        product,
        {"x": ROWS, "w": weight(8)},
        before="""
    x: f32
    w: f32
    mul: f32 = aten.mul(x, w)
    sum_1: f32 = aten.sum(mul)
    return sum_1
    """,
        after="""
    x: f32
    w: f32
    loss_scale: f32
    inv_loss_scale: f32
    found_inf: f32
    w_unscaled: f32 = unscale_grad(w, inv_loss_scale, found_inf)
    mul: f32 = aten.mul(x, w_unscaled)
    sum_1: f32 = aten.sum(mul)
    sum_1_scaled: f32 = scale_grad(sum_1, loss_scale)
    return sum_1_scaled
    """,
        precision="fp16",
        scaled=True,
    ),
    Example(
        "attention",
        attention,
        {"q": weight(*HEADS), "k": torch.zeros(HEADS), "v": torch.zeros(HEADS)},
        before="""
    q: f32
    k: f32
    v: f32
    q_copy: bf16
    k_bf16: bf16 = aten._to_copy(k, dtype=bf16)
    v_bf16: bf16 = aten._to_copy(v, dtype=bf16)
    q_copy_use: bf16 = low_weight(q, q_copy)
    sdpa: bf16 = aten.sdpa(q_copy_use, k_bf16, v_bf16)
    sdpa_fp32: f32 = aten._to_copy(sdpa, dtype=f32)
    return sdpa_fp32
    """,
        after="""
    q: f32
    k: f32
    v: f32
    q_copy: bf16
    k_bf16: bf16 = aten._to_copy(k, dtype=bf16)
    v_bf16: bf16 = aten._to_copy(v, dtype=bf16)
    q_copy_use: bf16 = low_weight(q, q_copy)
    sdpa: bf16 = attention(q_copy_use, k_bf16, v_bf16)
    sdpa_fp32: f32 = aten._to_copy(sdpa, dtype=f32)
    return sdpa_fp32
    """,
    ),
    Example(
        "attention",
        attention,
        {"q": weight(*HEADS), "k": torch.zeros(HEADS), "v": torch.zeros(HEADS)},
        before="""
    q: f32
    k: f32
    v: f32
    q_copy: bf16
    k_bf16: bf16 = aten._to_copy(k, dtype=bf16)
    v_bf16: bf16 = aten._to_copy(v, dtype=bf16)
    q_copy_use: bf16 = low_weight(q, q_copy)
    sdpa: bf16 = aten.sdpa(q_copy_use, k_bf16, v_bf16)
    sdpa_fp32: f32 = aten._to_copy(sdpa, dtype=f32)
    return sdpa_fp32
    """,
        after="""
    q: f32
    k: f32
    v: f32
    q_copy: bf16
    k_bf16: bf16 = aten._to_copy(k, dtype=bf16)
    v_bf16: bf16 = aten._to_copy(v, dtype=bf16)
    q_copy_use: bf16 = low_weight(q, q_copy)
    sdpa: bf16 = traced_attention(q_copy_use, k_bf16, v_bf16)
    sdpa_fp32: f32 = aten._to_copy(sdpa, dtype=f32)
    return sdpa_fp32
    """,
        backend="inductor",
    ),
    Example(
        "softmax",
        softmax,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    softmax_int: bf16 = aten.softmax(linear, -1)
    w_bf16_use_1: bf16 = low_weight(w, w_copy)
    linear_1: bf16 = aten.linear(softmax_int, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    softmax_int: bf16 = softmax(linear, -1)
    w_bf16_use_1: bf16 = low_weight(w, w_copy)
    linear_1: bf16 = aten.linear(softmax_int, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
    ),
    Example(
        "norms",
        normed,
        {**LAYER, "scale": weight(8), "bias": weight(8)},
        before="""
    x: f32
    w: f32
    scale: f32
    bias: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    layer_norm: bf16 = aten.layer_norm(linear, [8], scale, bias)
    layer_norm_fp32: f32 = aten._to_copy(layer_norm, dtype=f32)
    return layer_norm_fp32
    """,
        after="""
    x: f32
    w: f32
    scale: f32
    bias: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    layer_norm: bf16 = layer_norm(linear, [8], scale, bias)
    layer_norm_fp32: f32 = aten._to_copy(layer_norm, dtype=f32)
    return layer_norm_fp32
    """,
    ),
    Example(
        "rotary",
        rotary,
        {**LAYER, "cos": torch.zeros(2, 8), "sin": torch.zeros(2, 8)},
        before="""
    x: f32
    w: f32
    cos: f32
    sin: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    slice_1: bf16 = aten.slice(linear, 1, 0, 4)
    slice_2: bf16 = aten.slice(linear, 1, 4, 9223372036854775807)
    neg: bf16 = aten.neg(slice_2)
    cat: bf16 = aten.cat([neg, slice_1], -1)
    mul: f32 = aten.mul(linear, cos)
    mul_1: f32 = aten.mul(cat, sin)
    add: f32 = aten.add(mul, mul_1)
    add_bf16: bf16 = aten._to_copy(add, dtype=bf16)
    w_bf16_use_1: bf16 = low_weight(w, w_copy)
    linear_1: bf16 = aten.linear(add_bf16, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
        after="""
    x: f32
    w: f32
    cos: f32
    sin: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    add: bf16 = rotary(linear, cos, sin, bf16, -1, False, False)
    w_bf16_use_1: bf16 = low_weight(w, w_copy)
    linear_1: bf16 = aten.linear(add, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
    ),
    Example(
        "unbind",
        halves,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    view: bf16 = aten.view(linear, [2, 2, 4])
    select: bf16 = aten.select(view, 1, 0)
    select_1: bf16 = aten.select(view, 1, 1)
    mul: bf16 = aten.mul(select, select_1)
    mul_fp32: f32 = aten._to_copy(mul, dtype=f32)
    return mul_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    view: bf16 = aten.view(linear, [2, 2, 4])
    unbind_int = aten.unbind(view, 1)
    select: bf16 = getitem(unbind_int, 0)
    select_1: bf16 = getitem(unbind_int, 1)
    mul: bf16 = aten.mul(select, select_1)
    mul_fp32: f32 = aten._to_copy(mul, dtype=f32)
    return mul_fp32
    """,
    ),
    Example(
        "layouts",
        convolutions,
        {"x": IMAGE, "w": weight(8, 3, 3, 3), "v": weight(8, 8, 3, 3)},
        before="""
    x: f32
    w: f32
    v: f32
    w_copy: bf16
    v_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    conv2d: bf16 = aten.conv2d(x_bf16, w_copy_use, None, [1, 1], [1, 1])
    relu: bf16 = aten.relu(conv2d)
    v_copy_use: bf16 = low_weight(v, v_copy)
    conv2d_1: bf16 = aten.conv2d(relu, v_copy_use, None, [1, 1], [1, 1])
    adaptive_avg_pool2d: bf16 = aten.adaptive_avg_pool2d(conv2d_1, [1, 1])
    adaptive_avg_pool2d_fp32: f32 = aten._to_copy(adaptive_avg_pool2d, dtype=f32)
    return adaptive_avg_pool2d_fp32
    """,
        after="""
    x: f32
    w: f32
    v: f32
    w_copy: bf16 channels_last
    v_copy: bf16 channels_last
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    laid_out: bf16 = laid_out(x_bf16, channels_last, contiguous_format)
    w_copy_use: bf16 = low_weight(w, w_copy)
    conv2d: bf16 = aten.conv2d(laid_out, w_copy_use, None, [1, 1], [1, 1])
    relu: bf16 = aten.relu(conv2d)
    v_copy_use: bf16 = low_weight(v, v_copy)
    conv2d_1: bf16 = aten.conv2d(relu, v_copy_use, None, [1, 1], [1, 1])
    adaptive_avg_pool2d: bf16 = aten.adaptive_avg_pool2d(conv2d_1, [1, 1])
    laid_out_1: bf16 = laid_out(adaptive_avg_pool2d, contiguous_format, channels_last)
    adaptive_avg_pool2d_fp32: f32 = aten._to_copy(laid_out_1, dtype=f32)
    return adaptive_avg_pool2d_fp32
    """,
    ),
    Example(
        "layouts",
        convolution,
        {"x": IMAGE, "w": weight(8, 3, 3, 3)},
        before="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    conv2d: bf16 = aten.conv2d(x_bf16, w_copy_use, None, [1, 1], [1, 1])
    conv2d_fp32: f32 = aten._to_copy(conv2d, dtype=f32)
    return conv2d_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16 channels_last
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    conv2d: bf16 = aten.conv2d(x_bf16, w_copy_use, None, [1, 1], [1, 1])
    conv2d_fp32: f32 = aten._to_copy(conv2d, dtype=f32)
    return conv2d_fp32
    """,
        backend="inductor",
    ),
    Example(
        "together",
        sum_of_layers,
        {"x": ROWS, "w": weight(8, 8), "v": weight(8, 8)},
        before="""
    x: f32
    w: f32
    v: f32
    w_copy: f16
    v_copy: f16
    loss_scale: f32
    inv_loss_scale: f32
    found_inf: f32
    x_fp16: f16 = aten._to_copy(x, dtype=f16)
    w_copy_use: f16 = low_weight_unscaled(w, w_copy, inv_loss_scale, found_inf)
    linear: f16 = aten.linear(x_fp16, w_copy_use)
    v_copy_use: f16 = low_weight_unscaled(v, v_copy, inv_loss_scale, found_inf)
    linear_1: f16 = aten.linear(x_fp16, v_copy_use)
    add: f16 = aten.add(linear, linear_1)
    softmax: f16 = aten.softmax(add, -1)
    scaled_result: f32 = scaled_result(softmax, loss_scale)
    return scaled_result
    """,
        after="""
    x: f32
    w: f32
    v: f32
    w_copy: f16
    v_copy: f16
    loss_scale: f32
    inv_loss_scale: f32
    found_inf: f32
    x_fp16: f16 = aten._to_copy(x, dtype=f16)
    low_weights_unscaled = low_weights_unscaled(inv_loss_scale, found_inf, w, v, w_copy, v_copy)
    w_copy_use: f16 = getitem(low_weights_unscaled, 0)
    linear: f16 = aten.linear(x_fp16, w_copy_use)
    v_copy_use: f16 = getitem(low_weights_unscaled, 1)
    linear_1: f16 = aten.linear(x_fp16, v_copy_use)
    add: f16 = aten.add(linear, linear_1)
    softmax: f16 = aten.softmax(add, -1)
    scaled_result: f32 = scaled_result(softmax, loss_scale)
    return scaled_result
    """,  # noqa: E501
        precision="fp16",
        scaled=True,
    ),
    Example(
        "together",
        twice,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_bf16_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    w_bf16_use_1: bf16 = low_weight(w, w_copy)
    linear_1: bf16 = aten.linear(linear, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    low_weights = low_weights(w, w, w_copy, w_copy)
    w_bf16_use: bf16 = getitem(low_weights, 0)
    linear: bf16 = aten.linear(x_bf16, w_bf16_use)
    w_bf16_use_1: bf16 = getitem(low_weights, 1)
    linear_1: bf16 = aten.linear(linear, w_bf16_use_1)
    linear_1_fp32: f32 = aten._to_copy(linear_1, dtype=f32)
    return linear_1_fp32
    """,
    ),
    Example(
        "meshes",
        handed_on,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    to_local: f32 = autoamp.to_local(linear_fp32, [2, 8], [8, 1])
    return to_local
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    to_local: f32 = to_local(linear_fp32)
    return to_local
    """,
        on_mesh={"x": Replicate(), "w": Shard(0)},
    ),
    Example(
        "bindings",
        mean_of_layer,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    relu: bf16 = aten.relu(linear)
    mean: bf16 = aten.mean(relu)
    mean_fp32: f32 = aten._to_copy(mean, dtype=f32)
    return mean_fp32
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = to(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = linear(x_bf16, w_copy_use)
    relu: bf16 = relu(linear)
    mean: bf16 = aten.mean(relu)
    mean_fp32: f32 = to(mean, dtype=f32)
    return mean_fp32
    """,
    ),
    Example(
        "for compilers",
        layer,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: f16
    loss_scale: f32
    inv_loss_scale: f32
    found_inf: f32
    x_fp16: f16 = aten._to_copy(x, dtype=f16)
    w_copy_use: f16 = low_weight_unscaled(w, w_copy, inv_loss_scale, found_inf)
    linear: f16 = aten.linear(x_fp16, w_copy_use)
    scaled_result: f32 = scaled_result(linear, loss_scale)
    return scaled_result
    """,
        after="""
    x: f32
    w: f32
    w_copy: f16
    loss_scale: f32
    inv_loss_scale: f32
    found_inf: f32
    x_fp16: f16 = aten._to_copy(x, dtype=f16)
    w_copy_use: f16 = traced_low_weight_unscaled(w, w_copy, inv_loss_scale, found_inf)
    linear: f16 = aten.linear(x_fp16, w_copy_use)
    scaled_result: f32 = traced_scaled_result(linear, loss_scale)
    return scaled_result
    """,
        precision="fp16",
        scaled=True,
        backend="inductor",
    ),
    Example(
        "for compilers",
        logits,
        LAYER,
        before="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    logsumexp: f32 = aten.logsumexp(linear_fp32, [-1])
    return [linear_fp32, logsumexp]
    """,
        after="""
    x: f32
    w: f32
    w_copy: bf16
    x_bf16: bf16 = aten._to_copy(x, dtype=bf16)
    w_copy_use: bf16 = low_weight(w, w_copy)
    linear: bf16 = aten.linear(x_bf16, w_copy_use)
    linear_fp32: f32 = aten._to_copy(linear, dtype=f32)
    unsqueeze_default = aten.unsqueeze(linear, 0)
    _to_copy_default = aten._to_copy(unsqueeze_default, dtype=f32)
    squeeze_dim = aten.squeeze(_to_copy_default, 0)
    low_weight: f32 = low_weight(linear_fp32, squeeze_dim)
    logsumexp: f32 = aten.logsumexp(linear_fp32, [-1])
    return [low_weight, logsumexp]
    """,
        backend="inductor",
    ),
)
"""The examples in the order of the list of passes.  Everything that may run low does,
on a CPU for which bf16 has units, so that no text depends on the machine."""


def name_of(example: Example) -> str:
    backend = example.backend.removeprefix("eager")
    return " ".join(filter(None, (example.of, example.program.__name__, backend)))


@pytest.mark.usefixtures("bf16_units")
@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_pass_makes_the_graph_after_of_the_graph_before(
    example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoamp.compat.inductor_permutes", lambda: True)
    monkeypatch.setattr(Device, "starts_kernels", example.of == "together")
    before, after = texts(example)
    assert before == example.expected[0], f"the graph before {example.of}"
    assert after == example.expected[1], f"the graph after {example.of}"
    assert before != after


def test_every_pass_that_edits_a_graph_is_shown() -> None:
    edits = {each.name for each in PASSES if each.check is not None}
    assert {example.of for example in EXAMPLES} == edits
