"""`Tuning`: the ways to run a model, their times, and the way that was kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.text import Text

from autoamp.calibrate.clock import surely_less
from autoamp.dtypes import short_name
from autoamp.inspect.text import as_text, plain_table


@dataclass(frozen=True)
class Timed:
    """The time of one way to run a model.

    Attributes:
        name: the way.
        seconds: the median time of a call, with its backward in training mode; None if
            the model fails in this way.
        share: the median over all rounds of the way's time over fp32's time.
        note: why the way could not be kept; "" if it could.
        times: the way's time in each round.
    """

    name: str
    seconds: float | None
    share: float | None
    note: str = ""
    times: tuple[float, ...] = ()

    def scattered(self) -> str:
        """The name of the way with its median, least and largest time."""
        assert self.seconds is not None
        said = f"{self.name} ({_milliseconds(self.seconds)} ms"
        if not self.times:
            return f"{said})"
        least, most = map(_milliseconds, (min(self.times), max(self.times)))
        return f"{said}, from {least} to {most})"


@dataclass(frozen=True, repr=False)
class Tuning:
    """The measurements of `autoamp.tune` and the way it kept; `print(tuning)` shows it.

    Attributes:
        label: the model's class name.
        precision: the compute dtype.
        device: the hardware.
        training: whether each call was timed with its backward.
        chosen: the name of the way that was kept.
        ways: all ways, fp32 first.
        measured: how many times of ops and casts were measured.
        remembered: how many times of ops and casts an earlier tuning had stored.
        seconds: how long the tuning took.
    """

    label: str
    precision: torch.dtype
    device: str
    training: bool
    chosen: str
    ways: tuple[Timed, ...]
    measured: int
    remembered: int
    seconds: float

    @property
    def share(self) -> float:
        """The time of the way that was kept, over fp32's time."""
        return self._kept.share or 1.0

    @property
    def _kept(self) -> Timed:
        """The way that was kept."""
        return next(w for w in self.ways if w.name == self.chosen)

    def sentence(self) -> str:
        """Says which way was kept, and how its time compares."""
        others = [w for w in self.ways if w.share is not None and w.name != self.chosen]
        shares = [f"{self.share / w.share:.2f} of {w.name}" for w in others if w.share]
        kept = self._kept
        rivals = [
            w for w in others if not w.note and not surely_less(kept.times, w.times)
        ]
        said = f"kept {self.chosen}: on this call "
        if rivals:
            times = " or ".join(w.scattered() for w in (kept, *rivals))
            said += (
                f"{len(kept.times)} rounds could not tell which is faster, {times}. "
                "If the times lie far apart, another program was running: tune again "
                "when no other program runs"
            )
        elif any(w.note and w.share and w.share < self.share for w in others):
            said += "no way that can be kept is faster"
        else:
            said += "no way is faster"
        return f"{said}. Its time is {', '.join(shares)}"

    def __str__(self) -> str:
        return as_text([self])

    def __repr__(self) -> str:
        return (
            f"<autoamp.Tuning of {self.label}: {self.chosen}, {self.share:.2f} of the "
            "time of fp32>"
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        low = short_name(self.precision)
        what = "a call and its backward" if self.training else "a call"
        yield Text(
            f"autoamp tune: {self.label}, {low}, {what} on {self.device}", "bold"
        )
        table = plain_table("way", numbers=("ms", "of fp32"))
        for way in self.ways:
            cells = ["fails", ""]
            if way.seconds is not None:
                cells = [_milliseconds(way.seconds), f"{way.share:.2f}"]
            kept = way.name == self.chosen
            table.add_row(Text(way.name, "bold" if kept else ""), *cells)
        yield Padding(table, (1, 0, 0, 2))
        for way in self.ways:
            if way.note:
                yield Text(f"  {way.name}: {way.note}")
        sentence = self.sentence()
        yield Text(f"\n{sentence[0].upper()}{sentence[1:]}.")
        yield Text(
            f"Times of ops and casts: {self.measured:,} measured, {self.remembered:,} "
            f"known from before. {self.seconds:.0f} s in all."
        )


def _milliseconds(seconds: float) -> str:
    """Three digits, or all digits before the point: 0.0123, 26.3, 2630."""
    value = 1e3 * seconds
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
