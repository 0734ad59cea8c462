"""Why a call went past the rewritten graphs, in words."""

RAN_NOTHING = (
    "a call ran no rewritten graph, so it was fp32: Dynamo stepped aside (vmap, "
    "torch.func, torch.jit or torch.export tracing, an active TorchDispatchMode, the "
    "recompile limit, a hook or code it cannot trace) or the model computes nothing; "
    "TORCH_LOGS=graph_breaks,recompiles tells which"
)

TRACED = (
    "torch.fx has traced it (symbolic_trace, make_fx), and what it traced is the "
    "model's own code, in fp32; convert what the tracer returns, or let its "
    "`is_leaf_module` say that this model is a leaf"
)

INSTEAD = "calls run under torch.autocast instead of rewritten graphs, because "
