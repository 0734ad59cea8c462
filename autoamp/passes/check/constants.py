"""Checks that an exported program holds the model's weights, and each of them once.

The check reads the numbers of the weights, and takes nothing from the code that made
the program but the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from autoamp.errors import VerificationError


def check_weights(
    held: Iterable[tuple[str, Tensor]],
    read: Iterable[str],
    sources: Mapping[str, str],
    weights: Mapping[str, Tensor],
) -> None:
    """Checks each weight of a program against the weight of the model.

    Args:
        held: the weights of the program by their names.
        read: the names of those that some op reads.
        sources: for each weight of the program, the path of the model's weight.
        weights: the model's parameters and buffers by their paths.

    Raises:
        VerificationError: a weight is not the model's, rounded once to its dtype; or no
            op reads it; or the program holds it twice in one dtype.
    """
    seen: dict[tuple[str, torch.dtype], str] = {}
    used = set(read)
    for name, value in held:
        if name not in used:
            raise VerificationError(f"the program holds {name}, which no op reads")
        path = sources.get(name, "")
        if path not in weights:
            continue  # a constant of the program's own
        key = (path, value.dtype)
        if key in seen:
            raise VerificationError(
                f"the program holds {path} twice in {value.dtype}: as {seen[key]} and "
                f"as {name}"
            )
        seen[key] = name
        if not _equal(value, weights[path]):
            raise VerificationError(
                f"{name} of the program is not {path} of the model in {value.dtype}"
            )


def _equal(value: Tensor, source: Tensor) -> bool:
    """Whether `value` is `source` in the dtype of `value`; NaN equals NaN."""
    meant = source.detach().to(value.dtype)
    if meant.shape != value.shape:
        return False
    if meant.is_meta or value.is_meta or meant.layout is not torch.strided:
        return True  # no numbers to read
    return bool(((meant == value) | (meant.isnan() & value.isnan())).all())
