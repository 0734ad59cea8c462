"""The functions a rewritten graph calls that are not ATen ops.

Each of these functions is one node: tracing never looks inside, so a rewritten graph
can be rewritten again, printed, and executed from its printed code.  The functions of
kernels (attention, norms, rotary) are listed here with the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoamp.passes.functions.attention import attention, traced_attention
from autoamp.passes.functions.casts import (
    BOTH_WAYS,
    STATE,
    WITH_FP32_STATE,
    dtypes_in,
    laid_out,
    low_uses,
    low_weight,
    low_weight_unscaled,
    low_weights,
    low_weights_unscaled,
    op_with_its_state,
    saturating_cast,
    scaled_result,
    unscale_half,
    unscaled_weights,
    with_dtypes,
)
from autoamp.passes.functions.depthwise import depthwise
from autoamp.passes.functions.dtensor_crossings import (
    MESH_CALLS,
    gather_low,
    gathered_low,
)
from autoamp.passes.functions.edge import scale_grad, unscale_grad, unscale_grad_
from autoamp.passes.functions.index_add import index_add, index_add_
from autoamp.passes.functions.made_again import made_again, noted
from autoamp.passes.functions.norms import layer_norm, rms_norm, softmax
from autoamp.passes.functions.products import product
from autoamp.passes.functions.rotary import rotary
from autoamp.passes.functions.traceable import (
    FOR_COMPILERS,
    checkpoint_as_python_does,
    checkpointed,
    traced_scale_grad_,
    traced_scale_grad_apart,
)

LEAF_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    {
        attention,
        traced_attention,
        checkpointed,
        depthwise,
        gather_low,
        gathered_low,
        index_add,
        index_add_,
        laid_out,
        layer_norm,
        low_uses,
        low_weight,
        low_weight_unscaled,
        low_weights,
        low_weights_unscaled,
        made_again,
        noted,
        product,
        rms_norm,
        rotary,
        saturating_cast,
        scaled_result,
        scale_grad,
        softmax,
        unscale_grad,
        unscale_grad_,
        traced_scale_grad_,
        traced_scale_grad_apart,
        unscale_half,
        unscaled_weights,
        with_dtypes,
        *FOR_COMPILERS.values(),
        *MESH_CALLS.values(),
        *WITH_FP32_STATE.values(),
    }
)
