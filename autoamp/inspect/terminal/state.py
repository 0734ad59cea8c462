"""Sentences on the calls and steps of a model so far."""

from __future__ import annotations

from rich.text import Text

from autoamp.inspect.coverage import Coverage
from autoamp.inspect.sections.loss_scaling import LossScaleReport
from autoamp.inspect.text import counted
from autoamp.training.scale import NoLossScale

_LISTED = 8


def covered(shares: Coverage) -> str:
    """How many calls ran rewritten graphs, and how many flops ran in low precision."""
    ran = shares.calls - shares.calls_aside
    text = f"{ran:,} of {counted(shares.calls, 'call')} ran rewritten graphs"
    if shares.calls_in_part:
        text += f", {shares.calls_in_part:,} of them graphs that stayed fp32 as well"
    if shares.share_of_flops is not None:
        flops, left = "their flops", ""
        if shares.parts_not_captured:
            parts = counted(shares.parts_not_captured, "part")
            were = "was" if shares.parts_not_captured == 1 else "were"
            flops, left = "the flops in them", f" ({parts} {were} not captured)"
        text += f"; {shares.share_of_flops:.1%} of {flops} ran in low precision{left}"
    return f"{text}."


def copied_anew(count: int) -> Text:
    """Says why a model copies weights at every call, and how the user can avoid it."""
    weights = counted(count, "weight")
    lines = (
        f"\nEach call copies {weights} to the low dtype again, because other code may",
        "hold their memory (a NumPy array, a file, a state_dict, another tensor), or",
        "writes to it between steps.  If no other code needs the memory:",
        "p.data = p.data.clone()",
    )
    return Text("\n".join(lines))


def loss_scaling(state: LossScaleReport) -> str:
    """The loss scale, and the number of skipped steps."""
    if state.foreign:
        return "Loss scaling is left to the GradScaler that steps the optimizer."
    were = "was" if state.skipped_steps == 1 else "were"
    skipped = f"{counted(state.skipped_steps, 'step')} {were} skipped"
    if state.kind == NoLossScale.__name__:
        return f"There is no loss scale; {skipped} for gradients that are not finite."
    since = counted(state.growth_tracker, "step")
    scale = f"The loss scale is {state.scale:,g} ({state.kind})"
    return f"{scale}, unchanged for {since}; {skipped}."


def skips(state: LossScaleReport) -> list[str]:
    """The reasons of the steps that were skipped last."""
    if state.foreign:
        return []
    return [f"  {why}" for why in state.skips[-_LISTED:]]
