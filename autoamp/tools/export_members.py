"""The parts of an exported file: sizes and hashes, noted as the file is written.

The plan is inside one of the parts, and therefore cannot have the hash of that part.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from autoamp.errors import ExportError, OptionError
from autoamp.messages import error_line, printable_line

MEMBERS = "autoamp.members"
"""The key of the note, and the end of its name in an archive."""

_CHUNK = 1 << 20

Members = Mapping[str, tuple[int, str]]
"""For each part its size in bytes and its SHA-256."""


def digest_of(chunks: Iterable[bytes]) -> tuple[int, str]:
    """The size and the SHA-256 of bytes."""
    size, digest = 0, hashlib.sha256()
    for chunk in chunks:
        size += len(chunk)
        digest.update(chunk)
    return size, digest.hexdigest()


def digest_of_file(file: BinaryIO) -> tuple[int, str]:
    """The size and the SHA-256 of an open file."""
    return digest_of(iter(lambda: file.read(_CHUNK), b""))


def note_of_members(members: Members) -> str:
    """The note that `check_members` reads."""
    return json.dumps({"sha256": members}, separators=(",", ":"))


def check_members(where: str, note: str | bytes, members: Members) -> None:
    """Checks the parts of a file against the note in the file.

    Raises:
        ExportError: a part was changed, removed or added.
    """
    try:
        noted: Any = json.loads(note)["sha256"]
        planned = {name: (size, sha) for name, (size, sha) in noted.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        planned = {MEMBERS: (0, "")}  # which no file has
    changed = [
        name
        for name in sorted({*planned, *members})
        if planned.get(name) != members.get(name)
    ]
    if changed:
        shown = ", ".join(printable_line(name, 80) for name in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise ExportError(
            f"{where}: it was changed or damaged after autoamp.export() wrote it: "
            f"{shown}{more} has another size or hash than was noted. Copy the file "
            "again, or export the model again"
        )


def seal_archive(path: Path) -> None:
    """Adds a note on all parts to a .pt2 file."""
    members = _members_of(path)
    root = next(iter(members)).partition("/")[0]  # torch takes one folder alone
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"{root}/extra/{MEMBERS}", note_of_members(members))


def check_archive(where: str, path: Path) -> list[str]:
    """The names of the parts of a .pt2 file, which are all read and checked.

    A file that another program wrote has no note; of such a file the checksums of the
    archive are checked.

    Raises:
        OptionError: the file is no archive, or a damaged one.
        ExportError: it is another archive than was written.
        OSError: the file cannot be read.
    """
    if not zipfile.is_zipfile(path):
        raise OptionError(
            f"{where}: it is no .pt2 or .onnx file, or its end is cut off. Copy the "
            "file again, or export the model again"
        )
    try:
        members = _members_of(path)
        noted = [name for name in members if name.endswith(f"/extra/{MEMBERS}")]
        with zipfile.ZipFile(path) as archive:
            note = archive.read(noted[0]) if noted else None
    except OSError:
        raise
    except Exception as error:  # `zipfile` raises errors of many kinds
        text = error_line(error)
        raise OptionError(
            f"{where}: the file is damaged: {text}. Copy the file again, or export the "
            "model again"
        ) from error
    if note is not None:
        check_members(where, note, {k: v for k, v in members.items() if k != noted[0]})
    return [*members]


def _members_of(path: Path) -> dict[str, tuple[int, str]]:
    members: dict[str, tuple[int, str]] = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                members[name] = digest_of_file(cast(BinaryIO, member))
    return members
