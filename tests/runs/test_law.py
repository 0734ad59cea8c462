"""The law of rounding, and comparisons of rings that are made by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from autoamp.runs.compare import compare
from autoamp.runs.law import Law, apart, multiple, together, unit_of
from tests.runs.recorded import made


def test_units_are_those_of_the_formats() -> None:
    assert [unit_of(p) for p in ("bf16", "fp16", "fp32")] == [2**-8, 2**-11, 2**-24]
    assert together("bf16", "bf16") == pytest.approx(math.sqrt(2) * 2**-8)


def test_the_multiple_keeps_its_chance_for_all_comparisons() -> None:
    for number in (1, 30, 30_000):
        wrong = number * 2 * math.exp(-(multiple(number) ** 2) / 2)
        assert wrong == pytest.approx(0.01)


def test_the_bound_is_that_of_the_theorem() -> None:
    law = Law(2**-8, 4, 30)
    assert law.allowed(5) == pytest.approx(multiple(30) * 3 * 2**-8)
    assert law.allowed(96) / law.allowed(21) == pytest.approx(2)


def test_the_noise_is_the_median_of_the_steps_before() -> None:
    law = Law(2**-24, 1, 30)
    for step in range(1, 10):
        law.seen((1e-3 if step % 4 else 1.0) * math.sqrt(1 + step), step)
    assert law.allowed(8) == pytest.approx(multiple(30) * 3 * 1.4826e-3)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.0, 0),
        (0.0, 0.0, 0),
        (math.nan, math.nan, 0),
        (math.inf, math.inf, 0),
        (1.0, math.nan, math.inf),
        (math.inf, -math.inf, math.inf),
        (2.0, 1.0, 0.5),
        (-1.0, 1.0, 2),
        (1e308, -1e308, 2),
        (0.0, 1e-300, 1),
    ],
)
def test_relative_differences(one: float, other: float, expected: float) -> None:
    assert apart(one, other) == apart(other, one) == expected


def test_a_gradient_passes_twice_the_roundings(tmp_path: Path) -> None:
    names = {f"w{n}": [[2], "float32"] for n in range(9)}
    step = {"loss": 1.0, "gradient": 1.0, "result": 1.0}
    one = made(tmp_path / "a", [{**step, "step": 7}], parameters=names)
    (row,) = compare(one, one).around
    allowed = {pair.name: pair.allowed for pair in row.pairs}
    assert allowed["loss"] == allowed["result"]
    assert (allowed["gradient"] / allowed["loss"]) ** 2 == pytest.approx(25 / 16)


def test_a_jump_beyond_both_yardsticks_parts(tmp_path: Path) -> None:
    noise = [1 + 1e-3 * (-1) ** n for n in range(20)]
    one = made(tmp_path / "a", [1.0] * 20)
    calm = compare(one, made(tmp_path / "b", noise))
    assert (calm.parted, calm.unequal) == (None, 1)
    found = compare(one, made(tmp_path / "c", [*noise[:12], 1.5, *noise[13:]]))
    assert (found.parted, found.beyond[0].b) == (13, 1.5)
    assert [row.step for row in found.around] == [10, 11, 12, 13, 14, 15]


def test_noise_that_grows_slowly_is_the_runs_own(tmp_path: Path) -> None:
    """Beyond what fp32 rounds, and yet no jump: both yardsticks have to be passed."""
    fp32 = {"options": {"keep": "('*',)"}}
    one = made(tmp_path / "a", [1.0] * 20, **fp32)
    slow = [1 + 2e-7 * n for n in range(1, 21)]
    found = compare(one, made(tmp_path / "b", slow, **fp32))
    assert found.parted is None
    last = found.around[-1].pairs[0]
    assert last.apart > Law(together("fp32", "fp32"), 1, 20).allowed(20)
    jump = [*slow[:12], 1 + 1e-3]
    assert compare(one, made(tmp_path / "c", jump, **fp32)).parted == 13


def test_the_walk_begins_anew_where_runs_are_equal(tmp_path: Path) -> None:
    """Ten thousand steps allow much, but not after a step that is equal to the bit."""
    steps = [{"step": 9_000 + n, "loss": 1.0} for n in range(20)]
    off = [{**each, "loss": 1.2 if n == 15 else 1.0} for n, each in enumerate(steps)]
    found = compare(made(tmp_path / "a", steps), made(tmp_path / "b", off))
    assert found.parted == 9_015
    near = [{**each, "loss": each["loss"] + 1e-3} for each in off]
    found = compare(made(tmp_path / "c", steps), made(tmp_path / "d", near))
    assert found.parted is None
    assert any("from step 9000 on" in note for note in found.notes)


def test_a_law_that_allows_all_says_so(tmp_path: Path) -> None:
    one = made(tmp_path / "a", [{"step": 10**6, "loss": 1.0}])
    other = made(tmp_path / "b", [{"step": 10**6, "loss": 1.9}])
    assert (compare(one, other).parted, compare(one, other).blind) == (None, 10**6)
    strict = compare(one, other, tolerance=0.1)
    assert (strict.parted, strict.blind) == (10**6, None)


def test_a_loss_that_is_not_finite_parts(tmp_path: Path) -> None:
    one = made(tmp_path / "a", [1.0, math.inf, 1.0])
    assert compare(one, one).parted is None
    found = compare(one, made(tmp_path / "b", [1.0, 1.0, 1.0]))
    assert found.parted == 2
    json.dumps(found.as_dict(), allow_nan=False)


def test_the_rank_that_parts_first(tmp_path: Path) -> None:
    for rank, losses in ((0, [1, 1, 1, 2]), (1, [1, 2, 1, 1]), (2, [1, 1, 1, 1])):
        made(tmp_path / "a", [1.0] * 4, rank=rank)
        made(tmp_path / "b", losses, rank=rank)
    made(tmp_path / "b", [1.0], rank=3)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert (found.rank, found.parted, found.ranks) == (1, 2, (0, 1, 2))
    assert "Only one of the runs has rank 3." in found.notes
    assert compare(tmp_path / "a", tmp_path / "b", rank=0).parted == 4
    assert compare(tmp_path / "a", tmp_path / "b", rank=2).parted is None


@pytest.mark.parametrize(("torch", "status"), [("2", 1), ("3", 0)])
def test_hashes_of_another_torch_are_no_proof(
    torch: str, status: int, tmp_path: Path
) -> None:
    one = made(tmp_path / "a", [1.0])
    other = made(tmp_path / "b", [{"loss": 1.0, "batch": "c"}], torch=torch)
    found = compare(one, other)
    assert (found.status, found.firsts) == (status, {"batch": 1})
    assert ("torch" in found.changed) == (not status)
