"""Folds repeated blocks: layers that are alike get one box around them, "h.0 to h.11".

The input is the module path of each node; in the output the path of a node in such a
block has one more segment, a fold, before the segment of the block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

LEAST = 3
"""The least number of blocks that are folded."""


@dataclass(frozen=True)
class Fold:
    """A box around blocks that are alike: the first, the last and their number."""

    first: str
    last: str
    count: int

    def label(self, above: str) -> str:
        """The text of the box; `above` is the name of the module around it, or ""."""
        start = f"{above}." if above else ""
        times = f"\N{MULTIPLICATION SIGN}{self.count}"
        return f"{start}{self.first}\N{EN DASH}{start}{self.last} {times}"


Path = tuple[str, ...]
"""The names of the modules around a node, the outermost first."""

FoldedPath = tuple[str | Fold, ...]
"""A path in which each fold stands before the block that it holds."""


def folded(
    homes: Mapping[str, Path],
    order: Sequence[str],
    like: Callable[[str], Hashable],
    loops: Callable[[Sequence[str], Sequence[str]], bool],
) -> dict[str, FoldedPath]:
    """The module paths `homes` with the folds in them.

    Blocks are alike if they have the same nodes at the same places, in equal precision.

    Args:
        homes: node to the path of its module.
        order: the nodes, as they are drawn.
        like: node to a sign that is equal for equal nodes of two blocks.
        loops: whether one box around the first nodes, among the second ones, would read
            its own results; such blocks are not folded.

    Example:
        >>> homes = {f"exp_{n}": ("h", str(n)) for n in range(4)}
        >>> found = folded(homes, list(homes), lambda name: 0, lambda *_: False)
        >>> found["exp_2"]
        ('h', Fold(first='0', last='3', count=4), '2')
    """
    members: dict[Path, list[str]] = defaultdict(list)
    for name in order:
        for depth in range(len(homes[name]) + 1):
            members[homes[name][:depth]].append(name)
    children: dict[Path, list[Path]] = defaultdict(list)
    for path in members:
        if path:
            children[path[:-1]].append(path)
    folds: dict[Path, Fold] = {}
    for parent, blocks in children.items():
        for run in _runs(blocks, homes, members, like):
            inside = [name for block in run for name in members[block]]
            if not loops(inside, members[parent]):
                fold = Fold(run[0][-1], run[-1][-1], len(run))
                folds |= dict.fromkeys(run, fold)
    return {
        name: tuple(
            segment
            for depth in range(len(path))
            for segment in (folds.get(path[: depth + 1]), path[depth])
            if segment is not None
        )
        for name, path in homes.items()
    }


def _runs(
    blocks: Sequence[Path],
    homes: Mapping[str, Path],
    members: Mapping[Path, Sequence[str]],
    like: Callable[[str], Hashable],
) -> list[list[Path]]:
    """The longest runs of blocks that are numbered one after the other and alike."""
    runs: list[list[Path]] = [[]]
    last: Hashable = None
    for block in blocks:
        if not block[-1].isdecimal():
            last = None
            continue
        number = int(block[-1])
        inside = tuple(
            (homes[name][len(block) :], like(name)) for name in members[block]
        )
        if (number - 1, inside) != last:
            runs.append([])
        runs[-1].append(block)
        last = number, inside
    return [run for run in runs if len(run) >= LEAST]
