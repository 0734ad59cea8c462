"""The helper that looks for what a message must name finds it, and can fail."""

from __future__ import annotations

import warnings

import pytest

from tests.says import says


def test_each_thing_that_is_needed_must_be_named() -> None:
    error = ValueError("layers.0: aten.mm at train.py:12 overflows; try keep= or 65504")
    says(error, 65504, module="layers.0", op=["aten.mm"], line=":12", option="keep=")
    for missing in ({"module": "layers.1"}, {"op": ["aten.mm", "aten.add"]}):
        with pytest.raises(AssertionError):
            says(error, **missing)


def test_one_message_of_a_list_must_name_everything() -> None:
    says(["one", "one two"], "one", "two")
    with pytest.raises(AssertionError):
        says(["one", "two"], "one", "two")
    with pytest.raises(AssertionError):
        says([], "one")


def test_errors_and_warnings_that_were_caught_are_read() -> None:
    with pytest.raises(ValueError) as raised:
        raise ValueError("of one")
    says(raised, "one")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn("of two", stacklevel=1)
    says(caught, "two")
