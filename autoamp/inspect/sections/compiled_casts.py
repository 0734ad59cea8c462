"""What inductor makes of the casts of a report, as inductor's own schedule says.

The kernels of inductor compute in fp32.  A cast down and the ops that read the cast may
come into one kernel: the value stays fp32 there, and is not rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoamp import compat
from autoamp.inspect.rows import CastRow, Section
from autoamp.inspect.text import counted
from autoamp.pass_options import PassOptions

_FATES = {
    compat.WRITTEN: "written to memory",
    compat.PARTLY: "written and also read before that",
    compat.INSIDE: "inside a kernel only",
    compat.REMOVED: "removed",
}


@dataclass(frozen=True)
class CompiledCasts:
    """The casts of the graphs that inductor compiles.

    Weight copies that are kept between calls are not among them: these are made outside
    of the graphs.

    Attributes:
        casts: the casts that inductor tells of.
        told: the number of graphs of which inductor tells what it makes of casts.
        untold: the number of graphs of which it does not tell.
        exact: whether the kernels of all graphs told of round at each cast.
        advice: the option that has kernels round, as the user would set it.
    """

    casts: tuple[CastRow, ...]
    told: int
    untold: int
    exact: bool
    advice: str

    @property
    def unrounded(self) -> tuple[CastRow, ...]:
        """The casts down at which all readers, or some, read an unrounded value."""
        fates = () if self.exact else (compat.PARTLY, compat.INSIDE)
        return tuple(c for c in self.casts if c.kind != "up" and c.compiled in fates)


UNABLE = "the inductor of this torch cannot be told to round on CPUs"
"""Said where `exact_casts=True` was asked for and a kernel rounds no value."""


def compiled_casts(sections: Sequence[Section]) -> CompiledCasts | None:
    """What inductor makes of casts; None where it compiles no graph."""
    compiled = [section for section in sections if section.is_compiled]
    if not compiled:
        return None
    told = [section for section in compiled if section.exact_casts is not None]
    options = compiled[0].rewritten.options or PassOptions()
    return CompiledCasts(
        tuple(cast for section in told for cast in section.casts if cast.compiled),
        len(told),
        len(compiled) - len(told),
        all(section.exact_casts for section in told),
        "" if options.exact_casts else options.advice("exact_casts", True),
    )


def compiled_text(found: CompiledCasts | None) -> Iterator[str]:
    """The sentences of a report on casts in compiled graphs."""
    if found is None:
        return
    fates = [cast.compiled for cast in found.casts]
    counts = ((fates.count(fate), what) for fate, what in _FATES.items())
    shares = ", ".join(f"{count:,} {what}" for count, what in counts if count)
    if shares:
        yield f"Inductor, of {counted(len(fates), 'cast')}: {shares}."
    if found.told and found.exact:
        yield "Inductor's kernels round at each cast, as eager does."
    elif found.told:
        names = [cast.name for cast in found.unrounded]
        at = f" (at {_some(names)})" if names else ""
        way = f"{found.advice} has it round" if found.advice else UNABLE
        yield (
            f"Inside a kernel inductor computes in fp32 and rounds no value{at}; {way}."
        )
    if found.untold:
        yield (
            f"Of {counted(found.untold, 'compiled graph')} inductor does not tell "
            "which casts it keeps inside a kernel, where it may round no value."
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more
