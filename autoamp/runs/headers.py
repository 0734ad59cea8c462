"""What two rings say of their runs: the same model or not, and what else differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoamp.errors import OptionError
from autoamp.printable import printable_line
from autoamp.runs.read import Recording

_NAMED = ("autoamp", "torch", "python", "host", "world", "automatic", "argv")
"""Fields of a header that may explain a difference, beside the options."""


def same_model(one: Recording, other: Recording) -> None:
    """Holds two recordings to the same model.

    A model whose script was renamed has another module, so the name of the class and
    the names and shapes of the parameters count.

    Raises:
        OptionError: they are of different models.
    """
    if one.label != other.label:
        raise OptionError(
            f"the runs are of different models: {one.label} and {other.label}"
        )
    ours, theirs = one.header["parameters"], other.header["parameters"]
    if _listed(ours) and _listed(theirs):
        for name in [*ours, *(name for name in theirs if name not in ours)]:
            shapes = [_shape(each.get(name)) for each in (ours, theirs)]
            if shapes[0] != shapes[1]:
                text = [printable_line(str(each), 80) for each in (name, *shapes)]
                raise OptionError(
                    f"the runs are of different models: parameter {text[0]} of "
                    f"{one.label} is {text[1]} in A and {text[2]} in B"
                )
    elif parameters(one) != parameters(other):
        raise OptionError(
            f"the runs are of different models: {one.label} has {parameters(one)} "
            f"parameters in A and {parameters(other)} in B"
        )


def parameters(recording: Recording) -> int:
    """How many parameters the model has, as tensors."""
    listed = recording.header["parameters"]
    if _listed(listed):
        return len(listed)
    count = listed["count"]
    return count if isinstance(count, int) and 0 <= count < 1 << 32 else 0


def changed(one: Recording, other: Recording) -> dict[str, list[str]]:
    """The fields and options that differ: `{NAME: [IN A, IN B]}`, as text."""
    pairs: dict[str, list[Any]] = {
        name: [each.header.get(name) for each in (one, other)] for name in _NAMED
    }
    options = [_options(each) for each in (one, other)]
    for name in sorted({*options[0], *options[1]}):
        pairs[name] = [each.get(name, "default") for each in options]
    pairs["parameters"] = [_dtypes(each.header["parameters"]) for each in (one, other)]
    return {
        printable_line(name, 50): [printable_line(str(each), 200) for each in pair]
        for name, pair in pairs.items()
        if pair[0] != pair[1]
    }


def _options(recording: Recording) -> Mapping[str, Any]:
    found = recording.header.get("options")
    return found if isinstance(found, Mapping) else {}


def _listed(found: Mapping[str, Any]) -> bool:
    """Whether each parameter is named; `count` and `hash` stand for a long list."""
    return not {"count", "hash"} <= set(found) or isinstance(found["count"], list)


def _shape(entry: Any) -> Any:
    return entry[0] if isinstance(entry, list) and entry else "missing"


def _dtypes(found: Mapping[str, Any]) -> str:
    if not _listed(found):
        return str(found["hash"])
    pairs = [each for each in found.values() if isinstance(each, list)]
    return ", ".join(sorted({str(each[1]) for each in pairs if len(each) == 2}))
