"""Every private or recent torch API this package uses, each with its fallback.

torch 2.13 is what the project is tested on; 2.11 must work.  Nothing outside this
sub-package reaches into `torch._*` (a test enforces it), so that a new torch breaks one
place.  Nothing here changes global state outside the call that asks for it.
"""

from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoamp.compat.capture import (
    capture_errors_suppressed,
    compile_entry,
    compile_with,
    is_capture_error,
    resolved_backend,
    tracing_backend,
    transforms_active,
)
from autoamp.compat.device import (
    any_autocast,
    autocast_off,
    cpu_low_precision_units,
)
from autoamp.compat.gradients import (
    accumulate_in,
    active_ddp_group,
    backward_id,
    check_finite,
    direct_apply,
    inside_backward,
    optimizers_and_scalers,
    reduced_by_ddp,
    stepped_by_grad_scaler,
    unscale_and_check,
    update_scale,
)
from autoamp.compat.names import (
    CHECKPOINT,
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GET_DATA,
    MODE_CHANGES,
    SET_GRAD,
)
from autoamp.compat.tensors import (
    copy_all,
    data_address,
    data_addresses,
    end_lazy_clone,
    held_alone,
    is_resizable,
    lazy_clone,
    storage_id,
    version_kept,
)
from autoamp.compat.tracing import (
    current_fake_mode,
    fake_inputs,
    hint,
    module_proxy,
    new_fake_mode,
    outside_trace,
    placeholder_sources,
    proxy_node,
    record_call,
    recorded_proxy,
    split_identity,
    told_apart,
    trace_pre_dispatch,
    with_parameters,
)

__all__ = [
    "CHECKPOINT",
    "ENTER_AUTOCAST",
    "EXIT_AUTOCAST",
    "GET_DATA",
    "MODE_CHANGES",
    "SET_GRAD",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "accumulate_in",
    "active_ddp_group",
    "any_autocast",
    "autocast_off",
    "backward_id",
    "capture_errors_suppressed",
    "check_finite",
    "compile_entry",
    "compile_with",
    "copy_all",
    "cpu_low_precision_units",
    "current_fake_mode",
    "data_address",
    "data_addresses",
    "direct_apply",
    "end_lazy_clone",
    "fake_inputs",
    "held_alone",
    "hint",
    "inside_backward",
    "is_capture_error",
    "is_resizable",
    "lazy_clone",
    "module_proxy",
    "new_fake_mode",
    "optimizers_and_scalers",
    "outside_trace",
    "placeholder_sources",
    "proxy_node",
    "record_call",
    "recorded_proxy",
    "reduced_by_ddp",
    "resolved_backend",
    "split_identity",
    "stepped_by_grad_scaler",
    "storage_id",
    "told_apart",
    "trace_pre_dispatch",
    "tracing_backend",
    "transforms_active",
    "unscale_and_check",
    "update_scale",
    "version_kept",
    "with_parameters",
]
