"""Values that the commands' `--help` lists; the tests hold them to autoamp's own."""

from __future__ import annotations

PLACEMENTS = ("optimal", "tensorflow", "promote", "forced")
PRECISIONS = ("fp16", "bf16")
CATEGORIES = ("allow", "deny", "infer", "clear")
