"""The predicted gains of low precision, in the words that every view of a report uses.

`print(report)` and the page take names, units and rounding of the figures from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoamp.inspect.costs import bytes_text, seconds_text
from autoamp.inspect.sections.headline import Headline
from autoamp.inspect.text import counted
from autoamp.messages import advice

WAYS = ("fp32", "torch.autocast*", "autoamp")
"""The columns of the table; the footnote explains the star."""

FOOTNOTE = (
    "* the same graphs as torch.autocast would place them: predicted, not measured."
)

ERROR = (
    "The error of rounding is not predicted: autoamp.compare(model, x) measures it "
    "beside fp32 and torch.autocast."
)


@dataclass(frozen=True)
class Gains:
    """The table of predicted gains, ready to be shown.

    Attributes:
        title: the question that the table answers, and the device of the prediction.
        rows: a name, and a figure for each of `WAYS`; empty if nothing is predicted.
        sentence: the speed-ups, or why no time is predicted.
    """

    title: str
    rows: tuple[tuple[str, ...], ...]
    sentence: str


def gains_of(found: Headline, low: str) -> Gains:
    """The predicted gains of a report.

    Args:
        low: the short name of the compute dtype.
    """
    source = f" (predicted for {found.device})" if found.device else ""
    rows: list[tuple[str, ...]] = []
    if found.seconds is not None:
        assert found.seconds_fp32 is not None
        assert found.seconds_autocast is not None
        work = "time of forward and backward" if found.trains else "time of a forward"
        times = (found.seconds_fp32, found.seconds_autocast, found.seconds)
        rows.append((work, *map(seconds_text, times)))
    if found.trains:
        sizes = (found.kept_fp32, found.kept_autocast, found.kept)
        rows.append(("values kept for the backward", *map(bytes_text, sizes)))
    return Gains(
        f"What it should gain here{source}", tuple(rows), _sentence(found, low)
    )


def runs_low_sentence(found: Headline, low: str) -> str:
    """How many ops run low, and their share of the fp32 time."""
    share = ""
    if found.share_of_time_low:
        share = f"; in fp32 they take {found.share_of_time_low:.0%} of the time"
    ops = counted(found.float_ops, "float op")
    return f"{found.low_ops:,} of {ops} run in {low}{share}."


def _sentence(found: Headline, low: str) -> str:
    if found.speed_up is not None:
        return (
            f"{found.speed_up:.2f} times as fast as fp32, "
            f"{found.speed_up_over_autocast:.2f} times as fast as torch.autocast."
        )
    if found.pays:
        return 'No time is predicted under objective="memory".'
    return (
        f"No time is predicted: {low} is no faster than fp32 on this device, and runs "
        f"only because of {advice('do_no_harm', False, by_variables=False)}."
    )
