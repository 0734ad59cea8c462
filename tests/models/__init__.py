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
    "LARGE",
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

LARGE = {"gpt2", "gpt2_dropout", "llama", "t5", "vit", "whisper", "unet"}
LARGE |= {"resnet", "convnext", "lstm", "nn_transformer"}
"""Models that take seconds: tests of all models run these with the slow tests."""
