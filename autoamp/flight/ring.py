"""The ring: a file of the last training steps, which a kill leaves readable.

The file has fixed places.  The first 64 KiB hold the header; after them come slots of
one size, and the newest record replaces the oldest.

* Bytes 0 to 31 are `<8sIIIIII`: the magic `AUTOAMPR`, the version, the size of a slot,
  the number of slots, the length and the CRC-32 of the header, and a 0.  The header is
  one JSON object, in UTF-8, at byte 32.
* A slot is `<IIQ`: the length of its text, the CRC-32 of its number and text, and its
  number; then one JSON object.  Record `n` stands in slot `n % slots`.

Each record is one write at a place of its own, so that a kill at any byte spoils no
record but the one that was being written, and that one's CRC shows it.  The file is
written and not mapped: a full disk is an error that can be caught, where a page of a
map that finds no room kills the process.  Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from autoamp.errors import OptionError
from autoamp.printable import printable_line

MAGIC = b"AUTOAMPR"
VERSION = 1
HEADER = 1 << 16
"""The bytes of the file before the first slot."""

SLOT = 2048
SLOTS = 8192
MOST_BYTES = 20 << 20
"""The most bytes of a ring."""

_FRONT = struct.Struct("<8sIIIIII")
_SLOT = struct.Struct("<IIQ")
_NUMBER = struct.Struct("<Q")


def encoded(value: object) -> bytes:
    """`value` as JSON; a number that is not finite becomes "inf", "-inf" or "nan"."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """`value` in what JSON has: its parts of other types become text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < 1 << 63 else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return printable_line(str(value), 200)


def decoded(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        ValueError: it is none, it holds NaN or an infinity, or it is nested deeply.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:  # a UnicodeDecodeError is a ValueError
        found = json.loads(data.decode(), parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


class Ring:
    """A ring that is being written.

    Attributes:
        path: the file.
        next: the number of the record that is written next.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Makes the file.

        Raises:
            OSError: it is there already, or cannot be written.
        """
        self.path, self.next = path, 0
        text = encoded(header)
        if len(text) > HEADER - _FRONT.size:
            raise ValueError("the header of a ring has at most 64 KiB")
        front = _FRONT.pack(MAGIC, VERSION, SLOT, SLOTS, len(text), zlib.crc32(text), 0)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        self._file = os.open(path, flags, 0o644)
        self._write(0, (front + text).ljust(HEADER, b"\0"))

    def write(self, record: dict[str, Any]) -> int:
        """Writes one record; returns its number.

        A record that is too long loses its longest field until it fits.

        Raises:
            OSError: the disk is full, say.
        """
        text = encoded(record)
        while len(text) > SLOT - _SLOT.size:
            longest = max(record, key=lambda key: len(encoded(record[key])))
            record = {k: v for k, v in record.items() if k != longest}
            record["cut"] = True
            text = encoded(record)
        number, self.next = self.next, self.next + 1
        check = zlib.crc32(_NUMBER.pack(number) + text)
        slot = _SLOT.pack(len(text), check, number) + text
        self._write(HEADER + number % SLOTS * SLOT, slot)
        return number

    def close(self) -> None:
        """Closes the file; a second call has no effect."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _write(self, at: int, data: bytes) -> None:
        while data:
            written = os.pwrite(self._file, data, at)
            if not written:
                raise OSError("nothing was written")
            data, at = data[written:], at + written


@dataclass(frozen=True)
class Records:
    """What a ring holds.

    Attributes:
        path: the file.
        header: who wrote it, as `flight/recorder.py` lists it.
        records: the records that are whole, in order; each has its number as "number".
        torn: how many slots hold no whole record: a kill met their writing.
    """

    path: Path
    header: dict[str, Any]
    records: list[dict[str, Any]] = field(default_factory=list)
    torn: int = 0


def read(path: str | os.PathLike[str]) -> Records:
    """The records of the ring at `path`.

    Raises:
        OptionError: the file cannot be read or is no ring; the message says where.
    """
    shown = printable_line(os.fsdecode(path), 300)
    try:
        data = _bytes_of(Path(path))
    except OSError as error:
        _refuse(shown, f"it cannot be read ({error.strerror})")
    except ValueError as error:
        _refuse(shown, str(error))
    if len(data) < HEADER or data[: len(MAGIC)] != MAGIC:
        _refuse(shown, "it does not begin as a ring does")
    _, version, size, count, length, check, _ = _FRONT.unpack_from(data)
    if version != VERSION:
        _refuse(shown, f"it is of version {version}; this autoamp reads {VERSION}")
    if not _SLOT.size < size <= HEADER or not 0 < count <= MOST_BYTES // size:
        _refuse(shown, f"{count} slots of {size} bytes are no ring's")
    if length > HEADER - _FRONT.size:
        _refuse(shown, f"a header of {length} bytes is no ring's")
    text = data[_FRONT.size : _FRONT.size + length]
    if zlib.crc32(text) != check:
        _refuse(shown, "its header is damaged")
    try:
        header = decoded(text)
    except ValueError as error:
        _refuse(shown, f"its header: {error}")
    found, torn = {}, 0
    for place in range(min(count, -(-(len(data) - HEADER) // size))):
        record = _record(data, HEADER + place * size, size, place, count)
        if record is None:
            torn += 1
        elif record:
            found[record["number"]] = record
    return Records(Path(path), header, [found[n] for n in sorted(found)], torn)


def _record(
    data: bytes, at: int, size: int, place: int, count: int
) -> dict[str, Any] | None:
    """The record in a slot; empty for a slot never written, None for a torn slot."""
    slot = data[at : at + size]
    if not slot.strip(b"\0"):
        return {}
    if len(slot) < _SLOT.size:
        return None
    length, check, number = _SLOT.unpack_from(slot)
    text = slot[_SLOT.size : _SLOT.size + length]
    whole = length <= size - _SLOT.size and len(text) == length
    if not whole or number % count != place:
        return None
    if zlib.crc32(_NUMBER.pack(number) + text) != check:
        return None
    try:
        return {**decoded(text), "number": number}
    except ValueError:
        return None


def _bytes_of(path: Path) -> bytes:
    """The bytes of a file of ours, which is a plain file of at most `MOST_BYTES`."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    file = os.open(path, flags)
    with os.fdopen(file, "rb") as opened:
        known = os.fstat(file)
        if not stat.S_ISREG(known.st_mode):
            raise ValueError("it is no file")
        if known.st_size > MOST_BYTES:
            raise ValueError(f"a ring has at most {MOST_BYTES} bytes")
        return opened.read(MOST_BYTES + 1)


def _refuse(shown: str, why: str) -> NoReturn:
    raise OptionError(
        f"{shown}: {why}; give a ring that the flight recorder has written"
    ) from None
