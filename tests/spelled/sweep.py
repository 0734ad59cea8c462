"""Cases of spellings on data, run one after the other, and a table of the worst."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.spelled import activations, attention, layouts, norms
from tests.spelled.data import CHANGES, COTANGENTS, LENGTHS, Situation
from tests.spelled.layers import Spelling
from tests.spelled.measure import FIRST, Subject, Verdict, judged

SPELLINGS: dict[str, Spelling] = {
    **attention.spellings(),
    **norms.spellings(),
    **activations.spellings(),
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
    vanishes: bool | None = None
    """Whether a failure is none without replacements; None where nothing fails."""


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
    ("softmax/less 20, 1e-6", Situation()),
    ("norm/rms_outside", Situation("rows_of_zeros")),
    ("norm/rms_outside", Situation("rows_of_little")),
    ("custom/times itself", Situation()),
    ("custom/averaged over all", Situation()),
    ("custom/softmax", Situation()),
    ("custom/cubed", Situation()),
    ("layout/every other", Situation()),
    ("layout/transposed", Situation()),
    ("attention/timm", Situation("scale 3000")),
    ("attention/timm", Situation("scale 10000")),
    ("norm/bert_norm", Situation("plain", 64)),
    ("norm/bert_norm", Situation("plain", 100)),
    ("attention/timm", Situation("key_bias")),
    ("rotary/raw_view", Situation()),
)
"""What was found first (issue 37)."""


def issue_cases(precisions: Iterable[str] = ("bf16", "fp16")) -> list[Case]:
    return [Case(*case, p) for case in ISSUE for p in precisions]


def sampled(
    count: int, seed: int = 0, only: str = "", precision: str = ""
) -> list[Case]:
    """Cases with every spelling as often as every other, every data likewise."""
    draw = random.Random(seed)
    names = [name for name in SPELLINGS if only in name]
    if not names:
        raise ValueError(f"no spelling has {only!r} in its name")
    by_kind: dict[str, list[str]] = {}
    for name in names:
        by_kind.setdefault(name.split("/")[0], []).append(name)
    found: dict[Case, None] = {}
    for turn in range(20 * count):
        if len(found) >= count:
            break
        kinds = sorted(by_kind)
        weights = [min(len(by_kind[kind]), 60) for kind in kinds]
        (kind,) = draw.choices(kinds, weights)
        name = draw.choice(by_kind[kind])
        is_plain = draw.random() < 0.15
        situation = Situation(
            "plain" if is_plain else draw.choice(list(CHANGES)),
            draw.choice(LENGTHS),
            draw.choice(["random", *COTANGENTS]),
        )
        asked = precision or ("bf16", "fp16")[turn % 2]
        found[Case(name, situation, asked)] = None
    return list(found)


def swept(
    cases: Iterable[Case], seeds: int = FIRST, fuse: bool = True
) -> Iterator[Result]:
    """The verdict on each case; for failures, whether `fuse=False` has none."""
    options = {} if fuse else {"fuse": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            verdict = judged(case.subject(**options), seeds)
            result = Result(case, verdict)
            if verdict.fails and fuse:
                result.vanishes = not judged(case.subject(fuse=False), seeds).fails
            yield result


def table(results: Iterable[Result]) -> str:
    """The worst ratio of each spelling, its data and precision, the worst first."""
    worst: dict[tuple[str, str], Result] = {}
    for result in results:
        key = (result.case.name, result.case.precision)
        if key not in worst or worst[key].verdict.worst() < result.verdict.worst():
            worst[key] = result
    rows = sorted(worst.values(), key=lambda r: (-r.verdict.fails, -r.verdict.worst()))
    return "\n".join(line(result) for result in rows)


def line(result: Result) -> str:
    verdict = result.verdict
    said = f"{verdict.worst():9.3g}  {result.case}"
    if verdict.fails:
        replaced = "fuse" if result.vanishes else "also with fuse=False"
        said += f"\n           {replaced}; kernels {verdict.kernels}: {verdict}"
    return said


def timed(results: Iterable[Result], seconds: float) -> Iterator[Result]:
    """Results until the time is over."""
    end = time.monotonic() + seconds
    for result in results:
        yield result
        if time.monotonic() > end:
            return
