"""Every private or recent torch API this package uses.

CI tests torch 2.13, and torch 2.11 must work (`make test-oldest`): a name that either
lacks has a fallback, with the version beside it.  Nothing outside
this sub-package reaches into `torch._*` (a test enforces it), so that a new torch
breaks one place.  Nothing here changes global state outside the call that asks for it.
The names imported below are the ones that the package uses.
"""

from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from autoamp.compat.calls import end_calls, end_watch, watch_calls
from autoamp.compat.capture import (
    any_batch,
    as_dynamo_gave,
    compile_with,
    dispatch_mode,
    dynamo_disabled,
    forward_mode,
    fx_tracing,
    hides_calls,
    inductor_permutes,
    inside_jit_trace,
    is_asked_by_dynamo,
    is_batch,
    is_capture_error,
    is_compiled_module,
    is_exporting,
    is_inductor,
    jit_tracing,
    needs_plain_ops,
    other_tracing,
    resolved_backend,
    tracing_backend,
    transforms_active,
    uncompiled,
    unwrapped_backend,
)
from autoamp.compat.counting import CountingDispatch, has_kernel, kept_by_function
from autoamp.compat.device import (
    cpu_attention,
    cpu_low_precision_units,
    is_capturing,
    runs_one_kernel,
    safe_softmax,
    softmax_gradient,
)
from autoamp.compat.distributed.ddp import (
    active_ddp,
    forget_feedback,
    has_communication_hook,
    in_buckets,
    is_joining,
    reduced_by_ddp,
    without_buckets,
)
from autoamp.compat.distributed.dtensors import (
    from_local,
    hides_mesh_call,
    may_send_back,
    mesh_call,
    moves_bytes,
    only_gathers,
    own_memory,
    scattered_sum,
    share_computed,
    share_held,
    with_memory,
)
from autoamp.compat.distributed.fsdp import (
    gather_low,
    gather_wide,
    gathered,
    may_gather_low,
    sharded_parameters,
    uses_fsdp,
    whole_parameter,
)
from autoamp.compat.distributed.groups import (
    are_several,
    begin_fake_group,
    default_store,
    has_ranks,
    is_distributed,
    is_distributed_type,
    local_part,
    own_rank,
    reached_on,
    shard_groups,
    stage_groups,
)
from autoamp.compat.dynamo.amount import Amount
from autoamp.compat.dynamo.authored import traced_in_widening
from autoamp.compat.dynamo.entry import CompiledEntry
from autoamp.compat.dynamo.frames import Left, never_a_graph_by_itself, said_in_a_line
from autoamp.compat.dynamo.places import (
    around_now,
    module_path,
    modules_in,
    note_paths,
    path_where_run,
    paths_in,
    paths_where_run,
)
from autoamp.compat.encoder import (
    ENCODER_LAYERS,
    encoder_layer,
    is_encoder_layer,
)
from autoamp.compat.exporting import (
    PLAN_KEY,
    classes_of,
    compile_package,
    flat_graph,
    note_of,
    onnx_program,
    open_package,
    plan_in,
    set_plan,
    with_note,
)
from autoamp.compat.fp32_precision import tf32_kinds
from autoamp.compat.gradients import (
    accumulate_in,
    any_not_finite,
    backward_id,
    casts_gradients,
    check_finite,
    clear_flag,
    direct_apply,
    inside_backward,
    never_captured,
    optimizers_and_scalers,
    saved_tensors_hooks_off,
    scaler_uses,
    seen_as,
    stepped_by_grad_scaler,
    unscale_and_check,
    update_scale,
    written_in,
)
from autoamp.compat.hooks import (
    HOOKS,
    has_hooks,
    hook_after_node,
    hook_gradient,
    hook_node,
    hooks_everywhere,
    hooks_of_others,
    mark_stepped,
    set_hooks_after_step,
    step_hooks,
)
from autoamp.compat.inductor_casts import (
    INSIDE,
    PARTLY,
    REMOVED,
    WRITTEN,
    CastReading,
)
from autoamp.compat.listening import (
    Heard,
    has_autocast_kernel,
    op_heard,
    passed_under_autocast,
    registered_dtype,
)
from autoamp.compat.losses import (
    history,
    running_losses,
)
from autoamp.compat.modes.autocast import (
    AutocastState,
    any_autocast,
    autocast_enabled,
    autocast_nesting,
    autocast_off,
    autocast_state,
    in_autocast,
    on_real_numbers,
)
from autoamp.compat.modes.process import Generators, Modes, frame_callback
from autoamp.compat.names import (
    CHECKPOINT,
    COND,
    CUSTOM_FUNCTION,
    ENTER_AUTOCAST,
    EXIT_AUTOCAST,
    GET_DATA,
    MAP,
    MODE_CHANGES,
    SCAN,
    SET_GRAD,
    TOTAL_NORM,
    TRANSFORM_ENTRIES,
    TRANSFORM_EXITS,
    WHILE_LOOP,
    WRAP,
    in_custom_fwd,
    under_custom_fwd,
)
from autoamp.compat.quick_nodes import quick_copy, quick_node
from autoamp.compat.recording import (
    aliased,
    forget_since,
    module_proxy,
    outside_trace,
    proxy_node,
    record_as,
    record_call,
    record_op,
    record_value,
    recorded_input,
    recorded_inputs,
    recorded_proxy,
    recorded_since,
    recorded_so_far,
    restrided,
    split_identity,
    without_torch_function,
)
from autoamp.compat.recurrent import (
    PACKED,
    is_packed,
    onednn_has_bf16,
    packed_result,
)
from autoamp.compat.stack import with_room
from autoamp.compat.tensors import (
    Holders,
    Memory,
    buffers_here,
    children_here,
    copy_all,
    data_address,
    data_addresses,
    end_lazy_clone,
    held_alone,
    held_number,
    holders,
    is_functional,
    is_resizable,
    lazy_clone,
    lies_in,
    memory_of,
    modules_of,
    named_modules_of,
    parameters_here,
    storage_id,
    storage_span,
    version,
    version_kept,
    watch_memory,
    whole,
)
from autoamp.compat.tracing import (
    as_traced,
    current_fake_mode,
    expression,
    fake_inputs,
    fake_on,
    forget_inputs,
    free_name,
    graph_module,
    hint,
    inputs_of,
    is_plain_fake,
    like,
    make_code,
    new_fake_mode,
    placeholder_sources,
    schema,
    size_symbols,
    size_with,
    told_apart,
    trace_pre_dispatch,
    with_parameters,
)
from autoamp.compat.transforms import (
    attention_in_one_dtype,
    gradients_by_torch,
    mend_batched_norms,
    on_whole_batch,
    past_transforms,
)
