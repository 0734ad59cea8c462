"""Measured times on disk: lost lines, hostile lines, files that are none."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from autoamp.passes.speeds import store as stores
from autoamp.passes.speeds.store import FOLDER


def is_time(key: str, value: object) -> bool:
    return len(key) < 200 and isinstance(value, float) and 0 < value < 1e6


def Store(description: str) -> stores.Store:
    return stores.Store(description, is_time)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_another_description_is_another_file() -> None:
    one = Store("a CPU, torch 1")
    one.add({"key": 5.0})
    assert Store("a CPU, torch 1").known == {"key": 5.0}
    assert Store("a CPU, torch 2").known == {}


def write_many(number: int) -> None:
    store = Store("shared")
    for i in range(200):
        store.add({f"{number}-{i}-{j}": 1.0 + i for j in range(3)})


def test_writers_at_once_lose_nothing() -> None:
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(write_many, range(4)))
    assert len(Store("shared").known) == 4 * 600


@pytest.mark.parametrize("cut", [1, 5, 12, 13, 14])
def test_a_file_that_was_cut_off_loses_one_time_at_most(cut: int) -> None:
    store = Store("cut")
    store.add({"first": 1.5, "second": 2.5})
    store.path.write_bytes(store.path.read_bytes()[:-cut])
    again = Store("cut")
    assert again.known["first"] == 1.5
    again.add({"third": 3.5})
    assert {"first", "third"} <= Store("cut").known.keys()


HOSTILE = [
    b"\x00\xff\xfe garbage",
    b'["key", NaN]',
    b'["key", Infinity]',
    b'["key", -1.0]',
    b'["key", 0]',
    b'["key", true]',
    b'["key", "5"]',
    b'["key", 1e300]',
    b'["key", 1' + b"0" * 10_000 + b"]",
    b'["' + b"k" * 5000 + b'", 5.0]',
    b"[" * 100_000,
    b'{"key": 5}',
    b'["key", 5.0, "more"]',
    b'[["key"], 5.0]',
    b"null",
]


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_line_is_passed_over(line: bytes) -> None:
    store = Store("hostile")
    store.add({"before": 1.0})
    with store.path.open("ab") as file:
        file.write(line)
    store.add({"after": 2.0})
    assert Store("hostile").known == {"before": 1.0, "after": 2.0}


@pytest.fixture(params=["a folder", "a pipe", "a loop of links", "in a file"])
def blocked(request: pytest.FixtureRequest, folder: Path) -> Iterator[Path]:
    path = Store("blocked").path
    if request.param == "in a file":
        folder.write_text("no folder")
    else:
        folder.mkdir()
    if request.param == "a folder":
        path.mkdir()
    elif request.param == "a pipe":
        os.mkfifo(path)
    elif request.param == "a loop of links":
        path.symlink_to(path)
    return path


def test_a_file_that_is_none_is_said_and_done_without(
    blocked: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store("blocked")
    store.add({"key": 1.0})
    assert store.known == {"key": 1.0}
    assert "cannot be stored on disk" in caplog.text
    assert Store("blocked").known == {}


def test_a_huge_file_is_read_in_part(folder: Path) -> None:
    folder.mkdir()
    path = Store("huge").path
    line = json.dumps(["k" * 150, 5.0]) + "\n"
    path.write_text(json.dumps(["first", 5.0]) + "\n" + line * 10)
    with path.open("r+b") as file:
        file.truncate(2**31)  # sparse: zeros without a line's end
    assert Store("huge").known["first"] == 5.0
