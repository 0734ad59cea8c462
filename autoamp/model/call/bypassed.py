"""Says why a call ran no rewritten graph."""

from __future__ import annotations

from autoamp import compat
from autoamp.capture.program import Program

TRACED = (
    "torch.fx has traced it (symbolic_trace, make_fx): the trace holds the model's own "
    "code, in fp32; convert the traced module, or let the tracer's `is_leaf_module` "
    "return True for this model"
)

AS_WRITTEN = "calls run in fp32, as they are written, because "
INSTEAD = "calls run under torch.autocast instead of rewritten graphs, because "

FORWARD_MODE = (
    "calls in forward-mode AD (jvp, jacfwd, dual numbers) run in fp32, because its "
    "tangents do not follow low precision"
)


def ran_nothing(method: str, program: Program | None, has_many: bool) -> str:
    """Says that a call ran no rewritten graph, and why.

    Args:
        method: the name of the method that was called.
        program: the compiled method during the call.
        has_many: whether Dynamo makes no more graphs of the method.
    """
    why = _in_the_callers_hands() or _left_by_dynamo(program, has_many)
    return f"a call of {method!r} ran no rewritten graph, so it ran in fp32: {why}"


def _in_the_callers_hands() -> str:
    if compat.transforms_active():
        return "vmap, torch.func or forward-mode AD transforms the call"
    if compat.is_exporting():
        return (
            "torch.export records the model's own code; autoamp.export(model, args) "
            "exports what a converted model runs"
        )
    if compat.jit_tracing():
        return "torch.jit.trace traces the call"
    mode = compat.dispatch_mode()
    if mode:
        return f"it was called in the dispatch mode {mode}, where Dynamo steps aside"
    return "a dispatch mode is active" if compat.hides_calls() else ""


def _left_by_dynamo(program: Program | None, has_many: bool) -> str:
    if compat.dynamo_disabled():
        return "Dynamo is switched off (TORCHDYNAMO_DISABLE, torch._dynamo.config)"
    if has_many:
        return (
            "Dynamo is at the recompile limit (torch._dynamo.config.recompile_limit), "
            "because each kind of call needs a graph of its own; TORCH_LOGS=recompiles "
            "shows how the calls differ"
        )
    left = program.skipped if program is not None else []
    error = next((each.error for each in left if each.error), "")
    if error:
        return f"Dynamo failed to trace the method: {error}"
    broken = next((each for each in left if each.is_broken), None)
    if broken is not None:
        return (
            "Dynamo cannot go on after a graph break in the method "
            f"({broken.broke_at or 'in a loop, a `with`, a `try`'}); "
            "TORCH_LOGS=graph_breaks tells where"
        )
    if any(each.is_empty for each in left):
        return "Dynamo met no tensor op to capture"
    return "Dynamo captured nothing; TORCH_LOGS=graph_breaks,recompiles tells why"
