"""Folders that hold no run, or a damaged one, are refused or read up to the tear."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from autoamp.errors import OptionError
from autoamp.flight import ring
from autoamp.runs.compare import compare
from tests.runs.recorded import made


def file_of(root: Path) -> Path:
    return root / "run" / "rank-00000" / "ring"


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return made(tmp_path / "good", [1.0, 2.0, 3.0])


def refused(one: Path, other: Path, match: str, **options: Any) -> None:
    for pair in ((one, other), (other, one)):
        with pytest.raises(OptionError, match=match):
            compare(*pair, **options)


def test_what_is_no_recorders_folder(good: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("empty", "file", "missing"):
        refused(good, tmp_path / name, "holds no ring")
    for text in (b"", b"x" * 100_000, file_of(good).read_bytes()[:5000]):
        other = made(tmp_path / f"bad{len(text)}", [1.0])
        file_of(other).write_bytes(text)
        refused(good, other, "it does not begin as a ring does")


def test_links_are_not_followed(good: Path, tmp_path: Path) -> None:
    home = tmp_path / "link" / "run" / "rank-00000"
    home.mkdir(parents=True)
    os.symlink(file_of(good), home / "ring")
    refused(good, tmp_path / "link", "holds no ring")


@pytest.mark.parametrize(
    "header",
    [
        {"rank": "0"},
        {"rank": True},
        {"rank": -1},
        {"parameters": None},
        {"parameters": [1]},
    ],
)
def test_headers_of_other_types(
    header: dict[str, Any], good: Path, tmp_path: Path
) -> None:
    file_of(good)
    bad = tmp_path / "bad" / "run" / "rank-00000"
    bad.mkdir(parents=True)
    about = {"rank": 0, "label": "Net", "parameters": {}, **header}
    ring.Ring(bad / "ring", about).close()
    refused(good, tmp_path / "bad", "its header is no recorder's")


@pytest.mark.parametrize("step", [0, -1, "1", 1.5, True, None, [1]])
def test_steps_of_other_types(step: Any, good: Path, tmp_path: Path) -> None:
    refused(good, made(tmp_path / "b", [{"step": step}]), "no number of a step")


@pytest.mark.parametrize(
    "noted",
    [
        {"loss": "1"},
        {"loss": [1.0]},
        {"loss": True},
        {"loss": None, "batch": 3, "taken": "no"},
        {"ops": [1]},
        {"ops": {"a:b": 1, "c:d": [1], "e:f": ["x", 1], "g:h": None}},
        {"gradient": {}, "scale": {}},
    ],
)
def test_fields_of_other_types_are_left_out(
    noted: dict[str, Any], good: Path, tmp_path: Path
) -> None:
    found = compare(good, made(tmp_path / "b", [noted, 2.0, 3.0]))
    assert found.status == 0
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "parameters",
    [
        {"w": 3},
        {"w": []},
        {"w": [[3], "float32"]},
        {"count": 1, "hash": "0"},
        {"count": "x", "hash": []},
        {},
    ],
)
def test_other_parameters_are_another_model(
    parameters: dict[str, Any], good: Path, tmp_path: Path
) -> None:
    other = made(tmp_path / "b", [1.0], parameters=parameters)
    if parameters.get("count") == 1:  # a long list, of which the number is known
        assert "parameters" in compare(good, other).changed
    else:
        refused(good, other, "different models")


def test_options_of_other_types(good: Path, tmp_path: Path) -> None:
    for name, options in (("b", None), ("c", [1]), ("d", {"precision": [1]})):
        other = made(tmp_path / name, [1.0, 2.0, 3.0], options=options)
        assert compare(good, other).precisions == ("bf16", "bf16")


def test_a_torn_ring_is_read_up_to_the_tear(tmp_path: Path) -> None:
    one = made(tmp_path / "a", [1.0, 2.0, 3.0])
    other = made(tmp_path / "b", [1.0, 2.0, 9.0])
    file = file_of(other)
    data = bytearray(file.read_bytes())
    data[ring.HEADER + 2 * ring.SLOT + 30] ^= 1
    file.write_bytes(data)
    found = compare(one, other)
    assert (found.parted, found.steps) == (None, (1, 2))
    assert any("ring of B has 1 torn record" in note for note in found.notes)
    file.write_bytes(data[: ring.HEADER + ring.SLOT + 40])
    assert compare(one, other).steps == (1, 1)


def test_nothing_in_common(good: Path, tmp_path: Path) -> None:
    late = made(tmp_path / "late", [{"step": 9, "loss": 1.0}])
    refused(good, late, "no step in common: A has steps")
    refused(good, made(tmp_path / "none", []), "no step in common.*none")
    refused(good, made(tmp_path / "r", [1.0], rank=1), "no rank in common: A has ")
    refused(good, good, "no rank 5 in common", rank=5)
    refused(good, made(tmp_path / "m", [1.0], label="Gpt"), "models: (Net|Gpt) and")


def test_several_runs_are_named(good: Path, tmp_path: Path) -> None:
    made(good, [1.0, 2.0, 4.0], run="second")
    refused(good, good / "run", "holds 2 runs; give one of them: .*/run, .*/second")
    assert compare(good / "run", good / "second").beyond[0].b == 4
    assert compare(good / "run" / "rank-00000", good / "run").status == 0


def test_two_rings_of_one_rank(good: Path, tmp_path: Path) -> None:
    other = made(tmp_path / "b", [1.0])
    made(tmp_path / "c", [1.0], rank=1)
    (tmp_path / "c/run/rank-00001").rename(other / "run/rank-00001")
    data = file_of(other).read_bytes()
    (other / "run/rank-00001/ring").write_bytes(data)
    refused(good, other, "two rings of rank 0")


@pytest.mark.parametrize("tolerance", [-1.0, float("nan"), float("inf")])
def test_a_tolerance_that_is_none(tolerance: float, good: Path) -> None:
    refused(good, good, "give 0 or more", tolerance=tolerance)
