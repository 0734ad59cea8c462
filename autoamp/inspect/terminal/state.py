"""What has happened in the calls and steps of a model so far, in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from autoamp.inspect.text import counted
from autoamp.loss_scale import NoLossScale

_LISTED = 8


def covered(shares: Mapping[str, Any]) -> Text:
    """How many calls ran rewritten graphs, and how many flops ran in low precision."""
    ran = shares["calls"] - shares["calls_aside"]
    text = f"\n{ran:,} of {counted(shares['calls'], 'call')} ran rewritten graphs"
    if shares["calls_in_part"]:
        text += f", {shares['calls_in_part']:,} of them beside graphs that stayed fp32"
    if shares["flops"]:
        text += f"; {shares['share_of_flops']:.1%} of their flops in low precision"
    return Text(f"{text}.")


def copied_anew(count: int) -> Text:
    """Why a model copies weights at every call, and what the user can do about it."""
    weights = counted(count, "weight")
    lines = (
        f"\nThe last call copied {weights} anew, and so will the next: something else",
        "holds their memory (a NumPy array, a file, a state_dict, another tensor), or",
        "they are written to unannounced.  For memory that nobody else needs:",
        "p.data = p.data.clone()",
    )
    return Text("\n".join(lines))


def loss_scaling(state: Mapping[str, Any]) -> Text:
    """The state of loss scaling, for people who wonder why steps were skipped."""
    if state["foreign"]:
        return Text(
            "\nLoss scaling: left to the GradScaler that steps the model's optimizer."
        )
    skipped = f"{counted(state['skipped_steps'], 'step')} skipped"
    if state["kind"] == NoLossScale.__name__:
        lines = [f"\nNo loss scale; {skipped} for gradients that are not finite."]
        return Text("\n".join([*lines, *_last(state["skips"])]))
    scale = f"\nLoss scale {state['scale']:,g} ({state['kind']})"
    steps = f"{counted(state['growth_tracker'], 'step')} since it last moved"
    return Text("\n".join([f"{scale}, {steps}; {skipped}.", *_last(state["skips"])]))


def _last(skips: Sequence[str]) -> list[str]:
    return [f"  {why}" for why in skips[-_LISTED:]]
