"""What a message must hold for the person who reads it, whatever its words are."""

from __future__ import annotations

from typing import Any

Needed = object | list[object] | None


def says(
    told: Any,
    *values: object,
    module: Needed = None,
    op: Needed = None,
    line: Needed = None,
    option: Needed = None,
) -> None:
    """Asserts that a message names each thing that its reader needs.

    Args:
        told: a text, an exception, what `pytest.raises` or `pytest.warns` gives, or a
            list of texts, one of which must name everything.
        *values: numbers, paths and names that the message is about.
        module: the path of the module that is meant, `layers.0`.
        op: the op, as reports name it.
        line: the place in the user's code, `train.py:12`.
        option: what the user can set or call to change it, `keep=`.

        Each may be a list, of which all are needed.

    Example:
        >>> says(ValueError("precision='fp8': one of bf16, fp16"), "fp8", option="bf16")
    """
    kinds = {"module": module, "op": op, "line": line, "option": option}
    needed = [("value", each) for each in values]
    for kind, given in kinds.items():
        each = given if isinstance(given, list) else [given]
        needed += [(kind, one) for one in each if one is not None]
    assert needed, "nothing was asked for"
    texts = [_text(one) for one in (told if isinstance(told, list) else [told])]
    assert texts, "nothing was said"
    missing = [[pair for pair in needed if str(pair[1]) not in t] for t in texts]
    least = min(missing, key=len)
    assert not least, f"no word of {least} in:\n" + "\n".join(texts)


def _text(told: Any) -> str:
    """The words of an exception, of what holds one, of a warning or a log record."""
    if hasattr(told, "getMessage"):
        return str(told.getMessage())
    for inside in ("value", "message"):
        if not isinstance(told, str | BaseException):
            told = getattr(told, inside, told)
    return str(told)
