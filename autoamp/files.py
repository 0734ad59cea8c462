"""Writes text to a file, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

from autoamp.errors import OptionError


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes `text` as UTF-8; an error leaves an older file unchanged.

    The text goes to a new file beside the target, which then takes the target's place,
    so that a reader never meets half of the text.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        target = Path(path).resolve()
        draft = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}")
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        raise OptionError(f"path={path!r} is not a file path: {error}") from error
    try:
        # `open` gives the file the permissions of the process (umask), unlike mkstemp.
        # The name of a class or an op may be no valid text.
        with draft.open(
            "x", encoding="utf-8", errors="backslashreplace", newline="\n"
        ) as file:
            file.write(text)
        os.replace(draft, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise OptionError(
            f"path={str(path)!r}: the file cannot be written there: "
            f"{error.strerror or error}. Pass a path in a folder that exists and is "
            "writable"
        ) from error
