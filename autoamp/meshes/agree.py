"""Shows that all ranks of tp run the same ops, or says where two of them part."""

from __future__ import annotations

from itertools import zip_longest


def first_difference(ranks: list[list[str]]) -> str:
    """The first op in which a rank differs from rank 0; "" if there is none.

    Args:
        ranks: for each rank its ops with shapes and dtypes, in order.
    """
    for number, ops in enumerate(ranks[1:], 1):
        for at, (ours, theirs) in enumerate(zip_longest(ranks[0], ops)):
            if ours != theirs:
                return (
                    f"rank 0 and rank {number} differ in op {at}: "
                    f"{ours or 'nothing'}, but {theirs or 'nothing'}"
                )
    return ""
