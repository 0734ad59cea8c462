"""The folder of recorders: `DIR/<run>/rank-00000/ring` and `.../deaths/step-...`.

Each model of each process has a folder of its own.  Ranks of one training find the same
name for their run, from what their launcher tells them, and differ by their rank.
Files are written under another name and renamed, and nothing outside of the folder is
read or written: what is read are plain files by fixed names, never links.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoamp.errors import OptionError
from autoamp.flight import ring
from autoamp.printable import printable_line

RING = "ring"
DEATHS = "deaths"
DEATH = "death.json"
TENSORS = ("state", "batch", "caller")
"""The names of the files of tensors of a death, `<name>.safetensors`."""

_MOST_JSON = 64 << 20
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_RANK = re.compile(r"rank-(\d{5})")
_STEP = re.compile(r"step-(\d{8,12})(-\d)?")
_MOST_RUNS = 100_000


def checked(value: str | os.PathLike[str]) -> Path:
    """The folder `value` of a recorder, made if it is missing.

    Raises:
        OptionError: it cannot be written to, or safetensors is not installed.
    """
    shown = printable_line(os.fsdecode(value), 300)
    if find_spec("safetensors") is None:
        raise OptionError(
            "the flight recorder writes tensors with safetensors, which is missing: "
            "pip install 'autoamp[record]'"
        )
    try:
        path = Path(value).expanduser()  # a RuntimeError where there is no such home
        path.mkdir(parents=True, exist_ok=True)
        # Permission bits let root write everywhere, even in /proc.
        with tempfile.TemporaryFile(dir=path):
            return path.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"the flight recorder in {shown!r}: {error}; give a folder that can be "
            "written"
        ) from None


def begin(root: Path, rank: int | None) -> Path:
    """A new folder for one model of this process, `root/<run>/rank-...`.

    Raises:
        OSError: it cannot be made.
    """
    name = _name_of_run(os.environ, several=rank is not None)
    for number in range(1, _MOST_RUNS):
        run = root / (name if number == 1 else f"{name}-{number}")
        run.mkdir(parents=True, exist_ok=True)
        try:  # `mkdir` tells who was first, as no look does
            (run / rank_name(rank)).mkdir()
        except FileExistsError:
            continue
        return run / rank_name(rank)
    raise OSError(f"{root} holds too many runs")


def rank_name(rank: int | None) -> str:
    """The name of a rank's folder."""
    return f"rank-{rank or 0:05d}"


def _name_of_run(environ: Mapping[str, str], *, several: bool) -> str:
    """A name that all ranks of one run find, and that few other runs do."""
    job = ""
    if several:
        given = [
            environ.get(each, "") for each in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
        ]
        known = [each for each in given if each not in ("", "none")]
        where = f"{environ.get('MASTER_ADDR', '')}-{environ.get('MASTER_PORT', '')}"
        again = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        job = "-".join(["job", *(known[:1] or [where]), again])
    else:
        job = time.strftime("run-%Y%m%d-%H%M%S-") + str(os.getpid())
    return re.sub(r"[^A-Za-z0-9_.-]", "_", job)[:80]


@contextmanager
def new_death(home: Path, step: int) -> Iterator[tuple[Path, Path]]:
    """A folder for a death's files, and the name it gets once all are written."""
    deaths = home / DEATHS
    deaths.mkdir(exist_ok=True)
    name = f"step-{step:08d}"
    taken = sum(each.name.startswith(name) for each in deaths.iterdir())
    target = deaths / (f"{name}-{taken + 1}" if taken else name)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=deaths))
    try:
        yield partial, target
        partial.chmod(0o755)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write(path: Path, data: bytes) -> None:
    """Writes a whole file and has the disk keep it."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def version() -> str:
    """The version of the autoamp that is installed; "" for a folder of source."""
    try:
        return metadata.version("autoamp")
    except metadata.PackageNotFoundError:
        return ""


def write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    """Writes tensors, by name, as safetensors."""
    import_module("safetensors.torch").save_file(tensors, path)


# -- reading ---------------------------------------------------------------------------


def rings(root: str | os.PathLike[str]) -> list[ring.Records]:
    """The rings in a folder of recorders, by run and rank.

    `root` may also be the folder of one run, or of one rank.

    Raises:
        OptionError: there is none, or one of them is no ring.
    """
    found = [ring.read(home / RING) for home in homes(root)]
    return sorted(found, key=lambda each: str(each.path))


def homes(root: str | os.PathLike[str]) -> list[Path]:
    """The folders of ranks in `root`, which is one of them, or is one level or two up.

    Raises:
        OptionError: there is none.
    """
    top = Path(root)
    try:
        levels = [[top], _folders(top, _RANK)]
        levels.append([r for run in _folders(top, _RUN) for r in _folders(run, _RANK)])
        for level in levels:
            found = [each for each in level if _is(each / RING, stat.S_ISREG)]
            if found:
                return found
    except (OSError, ValueError) as error:
        raise _refused(top, f"cannot be read ({error})") from None
    raise _refused(top, "holds no ring")


def deaths(home: Path) -> list[Path]:
    """The folders of the deaths of one rank, the first death first."""
    where = home / DEATHS
    return sorted(_folders(where, _STEP)) if _is(where, stat.S_ISDIR) else []


def read_death(death: str | os.PathLike[str]) -> dict[str, Any]:
    """The text of a death: the object in its `death.json`.

    Raises:
        OptionError: it cannot be read, or is no death.
    """
    path = Path(death) / DEATH
    try:
        _plain_file(path, _MOST_JSON)
        found = ring.decoded(path.read_bytes())
    except (OSError, ValueError) as error:
        raise _refused(path, f"cannot be read ({error})") from None
    if found.get("format") != ring.VERSION:
        raise _refused(
            path, f"is of format {found.get('format')!r}, not {ring.VERSION}"
        )
    return found


def read_tensors(death: str | os.PathLike[str], name: str) -> dict[str, Any]:
    """The tensors, by name, of one of the files `TENSORS` of a death.

    Raises:
        OptionError: the file cannot be read, or holds something else.
    """
    if name not in TENSORS:
        raise OptionError(f"{name!r} is none of {', '.join(TENSORS)}")
    path = Path(death) / f"{name}.safetensors"
    try:
        _plain_file(path)
        return dict(import_module("safetensors.torch").load_file(path))
    except Exception as error:  # noqa: BLE001 (safetensors has errors of its own)
        raise _refused(path, f"cannot be read ({error})") from None


def _plain_file(path: Path, most: int | None = None) -> None:
    if not _is(path, stat.S_ISREG) or _is(path.parent, stat.S_ISLNK):
        raise ValueError("it is missing, or no plain file")
    if most is not None and path.lstat().st_size > most:
        raise ValueError(f"it has more than {most} bytes")


def _folders(where: Path, names: re.Pattern[str]) -> list[Path]:
    """The folders, not links, in `where` whose names we could have given."""
    if not _is(where, stat.S_ISDIR):
        return []
    found = [each for each in where.iterdir() if names.fullmatch(each.name)]
    return sorted(each for each in found if _is(each, stat.S_ISDIR))


def _is(path: Path, kind: Any) -> bool:
    try:
        return bool(kind(path.lstat().st_mode))
    except (OSError, ValueError):
        return False


def _refused(path: Path, why: str) -> OptionError:
    shown = printable_line(os.fsdecode(path), 300)
    return OptionError(f"{shown} {why}; give a folder of the flight recorder")
