"""The columns of the table: sets of options of `autoamp.convert`."""

from __future__ import annotations

from typing import Any

USUAL = "bf16"
"""The column in which every row is tried; the others are tried in turn."""

COLUMNS: dict[str, dict[str, Any]] = {
    USUAL: {},
    "fp16": {"precision": "fp16"},
    "memory": {"objective": "memory"},
    "unfused": {"fuse": False},
    "every call": {"weight_copies": "every call"},
    "tensorflow": {"placement": "tensorflow"},
    "promote": {"placement": "promote"},
    "forced": {"placement": "forced"},
    "scaled": {"loss_scale": 2.0**10},
    "no harm": {"do_no_harm": True},
    "kept": {"keep": "*"},
    "exported": {},
}

DEFAULTS: dict[str, Any] = {
    "precision": "bf16",
    "do_no_harm": False,
    "strict": True,
    "loss_scale": "off",
}

EXPORTED = "exported"

BY_OTHER_LISTS = ("tensorflow", "promote", "forced")
"""Columns that promise nothing about precisions, kernels or errors."""

EXACT = ("kept",)
"""Columns in which each result is, to the bit, that of fp32."""

AS_SAID = (USUAL, "fp16", "memory", "unfused", "every call", "scaled")
"""Columns in which ops run as their rows say."""


def options(column: str) -> dict[str, Any]:
    return {**DEFAULTS, **COLUMNS[column]}
