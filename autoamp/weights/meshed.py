"""Low copies of weights that are DTensors: of each weight, what this rank holds of it.

The memory that a rank holds is a plain tensor, whose copy is made as any weight's is;
the copy is then put on the mesh as the weight is.  Where gradients are recorded, the
memory is copied at every call: a weight that is trained is written to after every call,
and a sentinel (`copies.py`) would cost a copy of the weight at each write.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autoamp import compat
from autoamp.weights.copies import WeightCopies


class MeshedCopies(WeightCopies):
    """The copies of one graph, some of whose weights are DTensors."""

    def __init__(
        self,
        low: torch.dtype,
        *,
        kept: bool = True,
        layouts: Sequence[torch.memory_format] = (),
    ) -> None:
        """Makes no copy yet; arguments as for `WeightCopies`."""
        super().__init__(low, kept=kept, layouts=layouts)
        self._kept = WeightCopies(low, kept=kept)

    def fresh(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Up-to-date copies of `weights` (fp32, any shapes) in the low dtype.

        The copy of a DTensor is a DTensor with the same placements.
        """
        meshed = [w for w in weights if compat.is_distributed(w)]
        held = [compat.own_memory(w) for w in meshed]
        if torch.is_grad_enabled():
            lows = self._anew(held)
        else:
            lows = self._kept.fresh(held)
        with torch.no_grad():
            made = map(compat.with_memory, meshed, lows)
            plain = [w for w in weights if not compat.is_distributed(w)]
            others = iter(super().fresh(plain) if plain else ())
            return [
                next(made) if compat.is_distributed(w) else next(others)
                for w in weights
            ]

    def _anew(self, held: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies in new memory, by one multi-tensor copy."""
        with torch.inference_mode(False), torch.no_grad():
            lows = [torch.empty_like(each, dtype=self.low) for each in held]
            compat.copy_all(lows, held)
        self.refreshed += len(lows)
        return lows
