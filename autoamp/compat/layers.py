"""Layers of torch.nn whose own code Dynamo, or a trace, cannot go through.

**Layers called from code left to Python.**  A graph break in a loop, or inside a `with`
or `try`, makes Dynamo leave the whole function to Python.  Dynamo then looks at the
calls in the function, but starts no graph in a file of torch's own: a head called there
(`self.lm_head(x)`), or a list of `nn.TransformerEncoderLayer`, would run in fp32.

**Recurrent layers.**  Torch's kernels for fake tensors make every operation of every
step.  For a packed sequence, a tensor says how many rows still run at each step, and
those kernels read that tensor, so that no graph can hold the call.  The shapes of the
results depend on neither the operations nor that tensor.

**`nn.TransformerEncoderLayer`** has a fast path: one private op for a whole layer.
Torch takes it for inference, and not under autocast.  In 16 bits the op would round the
residual stream and the norms, which autocast keeps in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch._dynamo.convert_frame
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import functional

_RESUME = "torch_dynamo_resume"
_IN_TORCH = "frame is in the Dynamo skipfiles list"


def layer_left(frame: Any, found: Any) -> bool:
    """Whether `frame` is a layer's, and Dynamo, which gave `found`, passed over it."""
    if hasattr(found, "skip_reason"):
        passed_over = found.skip_reason == _IN_TORCH
    else:  # torch 2.11 gives no reason
        in_torch = torch._dynamo.trace_rules.check(frame.f_code)
        passed_over = found.guarded_code is None and in_torch
    if not passed_over:
        return False
    layer = frame.f_locals.get("self")
    if not isinstance(layer, nn.Module):
        return False
    try:
        forward: Any = type(layer).forward
    except AttributeError:  # TorchScript has none
        return False
    code = getattr(forward, "__code__", None)
    return (
        (code is frame.f_code or _goes_on(layer, frame.f_code, code))
        and forward.__module__.startswith("torch.nn.modules.")
        and any(p.is_floating_point() for p in layer.parameters())
    )


def _goes_on(layer: nn.Module, code: Any, forward: Any) -> bool:
    """Whether `code` comes after a graph break in a recurrent layer's `forward`."""
    # Other layers have no work left after a graph break: a batch-norm whose momentum is
    # a new number at every step.
    if not isinstance(layer, nn.RNNBase):
        return False
    # A layer that is itself the model runs a copy of its `forward`, with equal code.
    if code == forward:
        return True
    # On a packed sequence there are two graph breaks before the kernel is called.
    resumes = code.co_name.startswith(f"{_RESUME}_in_{forward.co_name}_at_")
    return bool(resumes and code.co_filename == forward.co_filename)


def layer_captured(callback: Any, frame: Any, cache_entry: Any, state: Any) -> Any:
    """Dynamo's result for a layer's frame; None where Dynamo is not to capture.

    The caller holds the lock under which Dynamo compiles.
    """
    dynamo: Any = torch._dynamo.convert_frame
    inner = callback._torchdynamo_orig_backend
    watched = dynamo.is_in_any_mode_without_ignore_compile_internals()
    if torch._dynamo.config.disable or watched:
        return None
    with dynamo._disable_current_modes():
        return inner(frame, cache_entry, callback.hooks, state, skip=1)


_NAMES = ("gru", "lstm", "rnn_relu", "rnn_tanh")

_States = torch.Tensor | Sequence[torch.Tensor]

PACKED: dict[Callable[..., Any], OpOverload] = {
    getattr(torch, name): getattr(torch.ops.aten, name).data for name in _NAMES
}
"""Maps the functions that layers of torch.nn call to the ops for packed sequences."""

_SIZES_AT = 1
"""The position of the tensor of batch sizes in the arguments of `PACKED`'s ops."""


def onednn_has_bf16() -> bool:
    """Whether oneDNN, which runs layers of an LSTM as one kernel each, has bf16 here.

    Its answer is for this machine and for `torch.backends.mkldnn.enabled`.
    """
    mkldnn = torch.backends.mkldnn
    if not (mkldnn.is_available() and mkldnn.enabled):
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def is_packed(args: Sequence[Any]) -> bool:
    """Whether these are the arguments of a layer on a packed sequence."""
    sizes = args[_SIZES_AT] if len(args) > _SIZES_AT else None
    return isinstance(sizes, torch.Tensor) and sizes.dtype == torch.int64


def packed_result(
    data: torch.Tensor,
    _batch_sizes: torch.Tensor,
    hx: _States,
    params: Sequence[torch.Tensor],
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """A layer's results for packed fake tensors: one state per row, and the last."""
    *_, bidirectional = options
    states = _all(hx)
    output = states[0].new_zeros(data.shape[0], _width(states, bidirectional))
    return _with_history([output, *map(torch.zeros_like, states)], data, params)


def sequence_result(
    data: torch.Tensor,
    hx: _States,
    params: Sequence[torch.Tensor],
    *options: Any,
) -> tuple[torch.Tensor, ...]:
    """A layer's results for padded fake tensors: one state per step, and the last.

    Raises:
        RuntimeError: the operands have several dtypes, which no kernel takes.
    """
    *_, bidirectional, batch_first = options
    states = _all(hx)
    dtypes = {each.dtype for each in (data, *states, *params)}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(data.device.type):
        message = f"a recurrent layer of tensors of {sorted(map(str, dtypes))}"
        raise RuntimeError(message)
    steps, batch = (data.shape[1], data.shape[0]) if batch_first else data.shape[:2]
    output = states[0].new_zeros(steps, batch, _width(states, bidirectional))
    if batch_first:
        output = output.transpose(0, 1)
    return _with_history([output, *map(torch.zeros_like, states)], data, params)


def _all(hx: _States) -> list[torch.Tensor]:
    return [hx] if isinstance(hx, torch.Tensor) else list(hx)


def _width(states: Sequence[torch.Tensor], bidirectional: bool) -> int:
    return int(states[0].shape[-1]) * (2 if bidirectional else 1)


def _with_history(
    made: Sequence[torch.Tensor], data: torch.Tensor, params: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """`made`, as if computed from the rest: later code may ask for a gradient."""
    flows = sum((p.sum() for p in params), data.sum())
    return tuple(each + flows.to(each.dtype) for each in made)


_RESULTS: dict[OpOverload, Callable[..., Any]] = {
    **dict.fromkeys(PACKED.values(), packed_result),
    **{getattr(torch.ops.aten, name).input: sequence_result for name in _NAMES},
}


@contextlib.contextmanager
def recurrent_results() -> Iterator[None]:
    """A region where fake tensors pass through recurrent layers without their steps.

    It changes torch's ops for all threads: the caller holds Dynamo's lock.
    """
    keys = (
        torch._C.DispatchKey.CompositeImplicitAutograd,
        torch._C.DispatchKey.Autograd,
    )
    before = {op: dict(op.py_kernels) for op in _RESULTS}
    try:
        for op, result in _RESULTS.items():
            op.py_kernels.update(dict.fromkeys(keys, result))
            op._dispatch_cache.clear()
        yield
    finally:
        for op, known in before.items():
            op.py_kernels.clear()
            op.py_kernels.update(known)
            op._dispatch_cache.clear()


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
