"""`Overflow`: the node at which a number left its range, and the remedy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from autoamp.dtypes import largest, short_name
from autoamp.inspect.text import as_text, shorten
from autoamp.overflow.location import INPUT, OUTSIDE, WEIGHT, Location
from autoamp.overflow.remedy import Remedy
from autoamp.overflow.trail import Step


@dataclass(frozen=True, repr=False)
class Overflow:
    """The first number that left the range of its dtype; falsy if no number did.

    `print(overflow)` shows it.

    Attributes:
        label: the model's class name.
        precision: the compute dtype.
        found: whether a number left its range.  If not, the other attributes describe
            the number that came nearest to its limit.
        direction: "forward" or "backward".
        kind: "op", "input", "weight", or "outside" for code outside of the model's
            graphs, such as the loss function; "" for a call without float values.
        op: the op's full name; "" for an input or weight.
        name: the name of the input or weight; "" for an op.
        module: the path of the module; "" for the model itself.
        source: the line of source, `model.py:12: x = self.fc(x)`, or "".
        reader: the op that reads the value in `dtype`, if the value was computed in
            another dtype, in whose range it is; else "".
        largest: the largest magnitude, as fp32 computes it; infinite or NaN if fp32
            gives that too, or cannot compute it.
        dtype: the dtype whose range counts.
        loss_scale: the loss scale in force; 1 without loss scaling.
        in_fp32: whether fp32 gives an infinity or NaN too, which no option can cure.
        harmless: whether the loss and all gradients are finite in spite of it.
        rule: the options of `convert` that keep the number in range, or None.
        notes: what a snapshot tells beside it; empty without a snapshot.
    """

    label: str
    precision: torch.dtype
    found: bool
    direction: str = "forward"
    kind: str = ""
    op: str = ""
    name: str = ""
    module: str = ""
    source: str = ""
    reader: str = ""
    largest: float = 0.0
    dtype: torch.dtype = torch.float32
    loss_scale: float = 1.0
    in_fp32: bool = False
    harmless: bool = False
    rule: Remedy | None = None
    notes: tuple[str, ...] = ()

    @property
    def limit(self) -> float:
        """The largest finite number of `dtype`."""
        return largest(self.dtype)

    @property
    def proposal(self) -> str:
        """`rule` as it is written in a call of `convert`; "" without a rule."""
        return "" if self.rule is None else str(self.rule)

    def __bool__(self) -> bool:
        return self.found

    def __str__(self) -> str:
        return as_text([self])

    def __repr__(self) -> str:
        return f"<autoamp.Overflow of {self.label}: {self.headline}>"

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if not self.found:
            return self._nothing()
        what = self._what()
        if self.direction == "backward":
            what = f"the gradient of {what}"
        return f"{what} left the range of {short_name(self.dtype)}: {self._size()}"

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> RenderResult:
        low = short_name(self.precision)
        yield Text(f"autoamp find_overflow: {self.label}, {low}", "bold")
        yield Text(f"  {self.headline}")
        if self.source:
            yield Text(f"  at      {shorten(self.source)}")
        if self.reader:
            yield Text(f"  read by {self.reader}, in {short_name(self.dtype)}")
        for line in self._advice() if self.found else ():
            yield Text(f"  {line}")
        for note in self.notes:
            yield Text(f"  note    {note}")

    # -- sentences -----------------------------------------------------------------

    def _what(self) -> str:
        if self.kind in (INPUT, WEIGHT):
            return f"{self.kind} {self.name}"
        where = f" in {self.module}" if self.module else ""
        if self.kind == OUTSIDE:
            where = ", outside of the model's graphs,"
        return f"{self.op or self.name}{where}"

    def _size(self) -> str:
        if math.isnan(self.largest):
            return "it is NaN"
        if math.isinf(self.largest):
            return "it is infinite"
        times = self.largest / self.limit
        return (
            f"magnitude {self.largest:.4g}, {times:.3g} times the limit {self.limit:g}"
        )

    def _nothing(self) -> str:
        if not self.kind:
            return "no number left its range: the call computed no float values"
        gradient = "the gradient of " if self.direction == "backward" else ""
        times = self.limit / self.largest if self.largest else math.inf
        return (
            f"no number left its range; nearest is {gradient}{self._what()} with "
            f"magnitude {self.largest:.4g} in {short_name(self.dtype)}, "
            f"{times:.3g} times below the limit {self.limit:g}"
        )

    def _advice(self) -> list[str]:
        found = []
        if self.in_fp32:
            found.append("fp32 gives an infinity or NaN there too: no option cures it")
        elif self.rule is not None:
            found.append(
                f"cure    autoamp.convert(model, {self.rule}) - tried: it works"
            )
        else:
            found.append("no option was found that cures it")
        if self.direction == "backward" and self.loss_scale != 1 and not self.in_fp32:
            lower = self._lower_scale()
            scale = f"loss scale {self.loss_scale:g}"
            found.append(
                f"at {scale}; a loss scale of {lower:g} would work as well"
                if lower
                else f"at {scale}"
            )
        if self.harmless:
            found.append("nevertheless the loss and all gradients are finite")
        return found

    def _lower_scale(self) -> float:
        """The largest power of two at which the gradient is in range; 0 if unknown."""
        if not math.isfinite(self.largest) or not self.largest:
            return 0.0
        return float(
            2.0 ** math.floor(math.log2(self.loss_scale * self.limit / self.largest))
        )


def overflow_at(
    step: Step, label: str, precision: torch.dtype, *, found: bool, scale: float
) -> Overflow:
    """The facts about one step as an `Overflow`, without a remedy."""
    location: Location = step.location
    size = step.wide if step.wide is not None else step.largest
    return Overflow(
        label,
        precision,
        found,
        direction="backward" if step.is_backward else "forward",
        kind=location.kind,
        op=location.op,
        name=location.name,
        module=location.module,
        source=location.source,
        largest=size,
        dtype=step.dtype,
        loss_scale=scale,
    )
