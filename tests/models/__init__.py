"""The one table of models that tests and benchmarks share.

>>> from tests.models import BY_NAME, CASES
>>> BY_NAME["mlp"].model()
"""

from __future__ import annotations

from . import hf, odd, sequence, vision
from .case import Args, Case, distance, generator, labelled, normal, tokens

__all__ = [
    "BY_NAME",
    "CASES",
    "Args",
    "Case",
    "distance",
    "generator",
    "labelled",
    "normal",
    "tokens",
]

CASES: tuple[Case, ...] = hf.CASES + vision.CASES + sequence.CASES + odd.CASES
BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
