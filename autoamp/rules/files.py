"""Where the built-in rules files are, in a wheel and in a checkout."""

from __future__ import annotations

from pathlib import Path

from autoamp.dtypes import LOW_DTYPES
from autoamp.errors import RulesError

TENSORFLOW = {"fp16": "tensorflow", "bf16": "tensorflow-bf16"}
"""Precision to the rule set that holds TensorFlow's lists for it."""

COMPLETE = ("torch-cuda", "torch-cpu", *TENSORFLOW.values())
"""The complete rule sets, which are not laid over the built-in rules."""

BUILTIN = (*LOW_DTYPES, *COMPLETE)
"""The names of the rule sets that come with the package."""

_PACKAGE = Path(__file__).resolve().parents[1]
_CANDIDATES = (_PACKAGE / "_rules", _PACKAGE.parent / "rules")


def directory(candidates: tuple[Path, ...] = _CANDIDATES) -> Path:
    """The directory of the built-in files: in the wheel, or else in the checkout.

    A directory of another project that happens to be called `rules` lies beside the
    package in some layouts, so a candidate counts only if it has our files.
    """
    for candidate in candidates:
        if all((candidate / f"{name}.toml").is_file() for name in BUILTIN):
            return candidate
    tried = " and ".join(str(candidate) for candidate in candidates)
    raise RulesError(
        f"the built-in rules files are missing (looked in {tried}); "
        "reinstall autoamp, or give the path of a rules file"
    )


def builtin_path(name: str) -> Path:
    """The file of the built-in rule set `name`."""
    return directory() / f"{name}.toml"


def is_builtin(path: Path) -> bool:
    """Whether `path` is the file of a built-in rule set."""
    return path.resolve().parent == directory() and path.stem in BUILTIN
