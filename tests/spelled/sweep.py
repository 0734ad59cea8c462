"""Cases of spellings on data, run one after the other, and a table of the worst."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.spelled import attention, backwards, chains, layouts, rotary_embeddings
from tests.spelled.data import CHANGES, COTANGENTS, LENGTHS, Situation
from tests.spelled.layers import Spelling
from tests.spelled.measure import Subject, Verdict, judged

SPELLINGS: dict[str, Spelling] = {
    **attention.spellings(),
    **chains.spellings(),
    **backwards.spellings(),
    **rotary_embeddings.spellings(),
    **layouts.spellings(),
}


@dataclass(frozen=True)
class Case:
    name: str
    situation: Situation
    precision: str

    def __str__(self) -> str:
        return f"{self.name} [{self.situation}, {self.precision}]"

    def subject(self, **options: object) -> Subject:
        return Subject(SPELLINGS[self.name], self.situation, self.precision, options)


@dataclass
class Result:
    case: Case
    verdict: Verdict


ISSUE: tuple[tuple[str, Situation], ...] = (
    ("attention/sdpa/zeros", Situation()),
    ("attention/sdpa/all_ones", Situation()),
    ("attention/sdpa/first_key", Situation()),
    ("attention/nano_gpt/left_padded/1e9", Situation()),
    ("attention/nano_gpt/left_padded/min", Situation()),
    ("attention/bert/left_padded*-3e+38", Situation()),
    ("attention/bert/distances", Situation()),
    ("attention/timm", Situation("sink")),
    ("attention/timm", Situation("sink_of_opposites")),
    ("chain/softmax less 20", Situation()),
    ("chain/rms outside", Situation("rows_of_zeros")),
    ("chain/rms outside", Situation("rows_of_little")),
    ("custom/times itself", Situation()),
    ("custom/averaged over all", Situation()),
    ("custom/softmax", Situation()),
    ("layout/every other", Situation()),
    ("layout/transposed", Situation()),
    ("attention/timm", Situation("scale 3000")),
    ("attention/timm", Situation("scale 10000")),
    ("chain/layer_norm", Situation("plain", 64)),
    ("chain/layer_norm", Situation("plain", 100)),
    ("attention/timm", Situation("key_bias")),
    ("rotary/raw_view", Situation()),
)
"""What was found first (issue 37)."""


def issue_cases(precisions: Iterable[str] = ("bf16", "fp16")) -> list[Case]:
    return [Case(*case, p) for case in ISSUE for p in precisions]


def sampled(count: int, seed: int = 0) -> list[Case]:
    """Cases with every spelling as often as every other, every data likewise."""
    draw = random.Random(seed)
    by_kind: dict[str, list[str]] = {}
    for name in SPELLINGS:
        by_kind.setdefault(name.split("/")[0], []).append(name)
    kinds = sorted(by_kind)
    weights = [min(len(by_kind[kind]), 60) for kind in kinds]
    found: dict[Case, None] = {}
    for turn in itertools.count():
        if len(found) >= count:
            break
        (kind,) = draw.choices(kinds, weights)
        name = draw.choice(by_kind[kind])
        is_plain = draw.random() < 0.15
        situation = Situation(
            "plain" if is_plain else draw.choice(list(CHANGES)),
            draw.choice(LENGTHS),
            draw.choice(["random", *COTANGENTS]),
        )
        found[Case(name, situation, ("bf16", "fp16")[turn % 2])] = None
    return list(found)


def swept(cases: Iterable[Case], fuse: bool = True) -> Iterator[Result]:
    """The verdict on each case."""
    options = {} if fuse else {"fuse": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            yield Result(case, judged(case.subject(**options)))


def table(results: Iterable[Result]) -> str:
    """A line for each, the worst first."""
    return "\n".join(map(line, sorted(results, key=lambda r: -r.verdict.worst())))


def line(result: Result) -> str:
    verdict = result.verdict
    said = f"{verdict.worst():9.3g}  {result.case}"
    return said + f"; kernels {verdict.kernels}: {verdict}" if verdict.fails else said
