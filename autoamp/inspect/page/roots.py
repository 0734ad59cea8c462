"""For each op in fp32: its root, and the option that would lower it.

The keys are `root` and `remedy`.  `root` is null, or has

- `node`: the index of the node at the root of the chain;
- `said`: a sentence on that node;
- `chain`: indices of the nodes from the root to the op.

`remedy` is null where no option was tried, or has

- `words`: the options, "" where no option makes the op low;
- `tried`: where no option makes the op low, the options that were tried;
- `extra`: the predicted cost above the cost of the present placement, in the unit of
  the section;
- `along`: the number of other nodes that would change;
- `risk`: the risk of the options, or "".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoamp.analyse.ceiling import promotes_to_low, root_of
from autoamp.analyse.verdict import CEILING
from autoamp.inspect.costs import in_fp32
from autoamp.inspect.remedy import Remedy, candidates, remedy_for
from autoamp.inspect.rows import OpRow, Section
from autoamp.inspect.why import risk_of, root_text

MOST_TRIES = 3_000
"""The limit on runs of the pass for one page, times the nodes of the graphs.

One run takes about a millisecond for each node, so the limit is about 3 seconds.
"""


def roots_of(
    section: Section, index: Mapping[str, int]
) -> dict[str, dict[str, Any] | None]:
    """Each op that type promotion leaves fp32 to its root.

    Args:
        index: the place of each node on the page.
    """
    classified = section.rewritten.classified
    low = promotes_to_low(classified)
    found: dict[str, dict[str, Any] | None] = {}
    for row in section.ops:
        if row.is_low or classified.verdicts[row.name].origin != CEILING:
            continue
        root = root_of(row.name, classified, low)
        # A weight has no precision to be chosen, so the op that reads it is the root.
        is_value = root.source in classified.facts.constants
        first = root.reader if is_value else root.source
        chain = [first, *root.path, row.name]
        found[row.name] = {
            "node": index[first],
            "said": root_text(section, root),
            "chain": [index[name] for name in dict.fromkeys(chain)],
        }
    return found


def remedies_of(section: Section, most: int) -> dict[str, dict[str, Any]]:
    """Each op in fp32 to the option that would lower it, by at most `most` pass runs.

    The op of each kind that takes most time is tried first.  An option that also lowers
    other ops of the same kind is their remedy too.
    """
    rewritten = section.rewritten
    if rewritten.options is None:
        return {}
    found: dict[str, dict[str, Any]] = {}
    high = [row for row in section.ops if not row.is_low]
    high.sort(key=lambda row: -in_fp32(rewritten, row.name))
    firsts = {_kind(row): row for row in reversed(high)}
    for row in sorted(high, key=lambda row: firsts[_kind(row)] is not row):
        if row.name in found:
            continue
        tries = [*candidates(rewritten, rewritten.options, row.name)]
        if len(tries) > most:
            continue
        most -= len(tries)
        remedy = remedy_for(rewritten, row.name)
        if remedy is None:
            tried = [" and ".join(words) for _, words in tries]
            found[row.name] = {"words": "", "tried": tried}
            continue
        for name in (row.name, *_alike(row, high, remedy)):
            found.setdefault(name, _entry(section, name, remedy))
    return found


def _alike(row: OpRow, rows: Sequence[OpRow], remedy: Remedy) -> Iterator[str]:
    """The ops of the same kind that change along with `row`."""
    along = set(remedy.along)
    for other in rows:
        if other.name in along and _kind(other) == _kind(row):
            yield other.name


def _kind(row: OpRow) -> tuple[str, str, str]:
    return row.op, row.category, row.origin


def _entry(section: Section, name: str, remedy: Remedy) -> dict[str, Any]:
    return {
        "words": remedy.words,
        "extra": remedy.extra,
        "along": len(remedy.along),
        "risk": risk_of(section.rewritten.classified.verdicts[name]),
    }
