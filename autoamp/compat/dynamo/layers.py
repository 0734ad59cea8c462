"""Layers of torch.nn that are called from code left to Python.

A graph break in a loop, or inside a `with` or `try`, makes Dynamo leave the whole
function to Python.  Dynamo then looks at the calls in the function, but starts no graph
in a file of torch's own: a head called there (`self.lm_head(x)`), or a list of
`nn.TransformerEncoderLayer`, would run in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo.convert_frame
from torch import nn

_RESUME = "torch_dynamo_resume"
_IN_TORCH = "frame is in the Dynamo skipfiles list"


def layer_left(frame: Any, found: Any) -> bool:
    """Whether `frame` is a layer's, and Dynamo has passed over it as torch's own.

    Args:
        frame: the frame that Dynamo's callback was given.
        found: the callback's result.
    """
    if hasattr(found, "skip_reason"):
        passed_over = found.skip_reason == _IN_TORCH
    else:  # torch 2.11 gives no reason
        passed_over = found.guarded_code is None and _passed_over(frame.f_code)
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


def _passed_over(code: Any) -> bool:
    """Whether Dynamo starts no graph in the file that `code` is from."""
    return bool(torch._dynamo.trace_rules.check(code))


def _goes_on(layer: nn.Module, code: Any, forward: Any) -> bool:
    """Whether `code` comes after a graph break in a recurrent layer's `forward`.

    On a packed sequence there are two graph breaks before the kernel is called.  Other
    layers have no work left after a graph break (a batch-norm whose momentum is a new
    number at every step).  A layer that is itself the model runs a copy of its
    `forward`, with equal code.
    """
    if not isinstance(layer, nn.RNNBase):
        return False
    if code == forward:
        return True
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
