"""The ring: kills, torn slots, a full turn, and files that are no ring."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import pytest

from autoamp.errors import OptionError
from autoamp.flight import ring
from autoamp.flight.ring import HEADER, SLOT, SLOTS, Ring, read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring"


def written(path: Path, count: int = 5) -> Path:
    made = Ring(path, {"label": "Net"})
    for step in range(count):
        made.write({"step": step, "loss": 1.0 / (step + 1)})
    made.close()
    return path


def test_what_is_written_is_read(path: Path) -> None:
    found = read(written(path))
    assert found.header == {"label": "Net"}
    assert [r["step"] for r in found.records] == [0, 1, 2, 3, 4]
    assert found.records[1] == {"step": 1, "loss": 0.5, "number": 1}
    assert found.torn == 0


def test_numbers_that_are_not_finite_are_words(path: Path) -> None:
    made = Ring(path, {})
    made.write({"loss": float("nan"), "scale": float("-inf"), "big": 1 << 80})
    (record,) = read(path).records
    assert (record["loss"], record["scale"]) == ("nan", "-inf")
    assert record["big"] == str(1 << 80)


@pytest.mark.thorough
def test_a_kill_leaves_what_was_written(path: Path) -> None:
    """A process that writes as fast as it can is killed; no record before is lost."""
    code = f"""
        from pathlib import Path
        from autoamp.flight.ring import Ring
        made = Ring(Path({str(path)!r}), {{}})
        step = 0
        while True:
            made.write({{"step": step, "text": "x" * (step % 1500)}})
            print(step, flush=True)
            step += 1
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 700:
            break
    process.send_signal(signal.SIGKILL)
    with process:  # waits, and closes the pipe
        rest = [line for line in process.stdout.read().split("\n") if line]
    assert process.returncode == -signal.SIGKILL
    last = int(rest[-1]) if rest else 700
    found = read(path)
    steps = [record["step"] for record in found.records]
    assert steps == [*range(len(steps))]
    assert last <= steps[-1] <= last + 1
    assert found.torn <= 1


@pytest.mark.parametrize("at", [0, 4, 8, 16, 20, 40])
def test_a_torn_slot_is_said_and_the_others_are_read(path: Path, at: int) -> None:
    data = bytearray(written(path).read_bytes())
    data[HEADER + 2 * SLOT + at] ^= 0xFF
    path.write_bytes(data)
    found = read(path)
    assert [record["step"] for record in found.records] == [0, 1, 3, 4]
    assert found.torn == 1


@pytest.mark.parametrize("left", [1, 15, 16, 17, 30])
def test_a_file_cut_within_its_last_slot(path: Path, left: int) -> None:
    data = written(path).read_bytes()
    path.write_bytes(data[: HEADER + 4 * SLOT + left])
    found = read(path)
    assert [record["step"] for record in found.records] == [0, 1, 2, 3]
    assert found.torn == 1


def test_the_ring_turns_and_stays_small(path: Path, monkeypatch) -> None:
    count = SLOTS + 100
    found = read(written(path, count))
    assert [r["step"] for r in found.records] == [*range(100, count)]
    assert path.stat().st_size <= ring.MOST_BYTES
    assert HEADER + SLOTS * SLOT <= 20_000_000


def test_a_record_that_is_too_long_is_cut(path: Path) -> None:
    made = Ring(path, {})
    made.write({"step": 1, "why": "x" * 10_000, "ops": ["y" * 9_000]})
    made.write({"step": 2})
    assert read(path).records[0] == {"step": 1, "cut": True, "number": 0}
    assert read(path).records[1]["step"] == 2


def test_a_ring_is_never_written_over(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        Ring(path, {})
    assert path.read_text() == "mine"


# -- files that are no ring ------------------------------------------------------------


def front(**changes: int) -> bytes:
    text = b'{"label":"Net"}'
    fields = {"version": 1, "size": SLOT, "count": SLOTS, "length": len(text)}
    fields |= {"check": zlib.crc32(text)} | changes
    return (struct.pack("<8sIIIIII", ring.MAGIC, *fields.values(), 0) + text).ljust(
        HEADER, b"\0"
    )


def header(text: bytes) -> bytes:
    data = struct.pack(
        "<8sIIIIII", ring.MAGIC, 1, SLOT, SLOTS, len(text), zlib.crc32(text), 0
    )
    return (data + text).ljust(HEADER, b"\0")


def slot(text: bytes, length: int | None = None, number: int = 0) -> bytes:
    check = zlib.crc32(struct.pack("<Q", number) + text)
    size = len(text) if length is None else length
    return struct.pack("<IIQ", size, check, number) + text


HOSTILE = {
    "empty": (b"", "does not begin as a ring"),
    "pickle": (b"\x80\x04cos\nsystem\n" * 9000, "does not begin as a ring"),
    "short": (front()[:-1], "does not begin as a ring"),
    "version": (front(version=9), "version 9"),
    "slots of nothing": (front(size=0), "no ring's"),
    "huge slots": (front(size=2**32 - 1), "no ring's"),
    "no slots": (front(count=0), "no ring's"),
    "many slots": (front(count=2**32 - 1), "no ring's"),
    "huge header": (front(length=2**32 - 1), "header of 4294967295"),
    "damaged header": (front(check=1), "header is damaged"),
    "NaN": (header(b'{"a":NaN}'), "NaN is no JSON"),
    "infinite": (header(b'{"a":-Infinity}'), "-Infinity is no JSON"),
    "deep": (header(b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}"), "too deeply"),
    "a list": (header(b"[1]"), "no object"),
    "not UTF-8": (header(b'{"a":"\xff"}'), "its header"),
    "huge number": (header(b'{"a":' + b"9" * 6000 + b"}"), "its header"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_is_no_ring_is_refused(kind: str, path: Path) -> None:
    data, message = HOSTILE[kind]
    path.write_bytes(data)
    with pytest.raises(OptionError, match=message) as caught:
        read(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        slot(b"{}", length=2**32 - 1),
        slot(b"{}", number=1),
        slot(b'{"a":NaN}'),
        slot(b"[" * 1000),
        slot(b'"text"'),
        b"\x01" * SLOT,
    ],
)
def test_a_hostile_slot_is_torn(data: bytes, path: Path) -> None:
    path.write_bytes(front() + data.ljust(SLOT, b"\0") + slot(b'{"step":1}', number=1))
    found = read(path)
    assert [record["step"] for record in found.records] == [1]
    assert found.torn == 1


def test_random_bytes_are_refused_or_read(path: Path) -> None:
    """Nothing but `OptionError` leaves the reader, whatever bytes are changed."""
    draw = random.Random(0)
    good = written(path).read_bytes()
    for _ in range(300):
        data = bytearray(good)
        for _ in range(draw.randint(1, 20)):
            place = draw.choice((draw.randrange(64), draw.randrange(len(data))))
            data[place] = draw.randrange(256)
        path.write_bytes(data[: draw.randint(0, len(data))])
        with contextlib.suppress(OptionError):
            read(path)
    path.write_bytes(draw.randbytes(100_000))
    with pytest.raises(OptionError):
        read(path)


def test_what_is_no_plain_file_is_refused(path: Path, tmp_path: Path) -> None:
    written(tmp_path / "real")
    path.symlink_to(tmp_path / "real")
    fifo, folder, sparse = tmp_path / "fifo", tmp_path / "folder", tmp_path / "sparse"
    os.mkfifo(fifo)
    folder.mkdir()
    with sparse.open("wb") as file:
        file.truncate(1 << 33)
    for each in (path, fifo, folder, sparse, tmp_path / "missing"):
        with pytest.raises(OptionError):
            read(each)
