"""Architectures of timm, at the smallest size their code takes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from tests.models.case import Case, distance, normal

from . import site
from .tiny import without_zeros

LABELS = 5
SIDE = 32

_STAGES = {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)}
_VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}

BY_NAME: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resnet18", {"channels": (8, 16, 16, 32), "layers": (1, 1, 1, 1)}),
    ("densenet121", {"growth_rate": 8, "block_config": (2, 2)}),
    ("mobilenetv3_small_050", {}),
    ("convnext_atto", _STAGES),
    (
        "nfnet_f0",
        {
            "depths": (1, 1, 1, 1),
            "channels": (16, 32, 48, 64),
            "stem_chs": 16,
            "group_size": 8,
            "num_features": 64,
        },
    ),
    ("vit_tiny_patch16_224", _VIT),
    ("deit3_small_patch16_224", _VIT),
    ("eva02_tiny_patch14_224", _VIT),
    ("beit_base_patch16_224", _VIT),
    ("cait_xxs24_224", _VIT),
    ("xcit_nano_12_p16_224", _VIT),
    (
        "swin_tiny_patch4_window7_224",
        {
            "img_size": SIDE,
            "window_size": 4,
            "embed_dim": 24,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
    ),
    (
        "coat_lite_tiny",
        {
            "embed_dims": (16, 32, 48, 64),
            "serial_depths": (1, 1, 1, 1),
            "img_size": SIDE,
        },
    ),
    ("edgenext_xx_small", _STAGES),
    (
        "pvt_v2_b0",
        {
            "depths": (1, 1, 1, 1),
            "embed_dims": (8, 16, 24, 32),
            "num_heads": (1, 2, 2, 4),
        },
    ),
)
"""Models made by name, and what of them is made smaller."""

BY_CLASS: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    (
        "mixer",
        "mlp_mixer",
        "MlpMixer",
        {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "num_blocks": 2},
    ),
    ("convmixer", "convmixer", "ConvMixer", {"dim": 24, "depth": 2, "patch_size": 4}),
    ("poolformer", "metaformer", "MetaFormer", {**_STAGES, "token_mixers": "Pooling"}),
)
"""Models whose named versions do not let their size be changed: class by module."""


def _named(name: str, settings: dict[str, Any]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        site.activate()
        import timm

        return without_zeros(timm.create_model(name, num_classes=LABELS, **settings))

    return build


def _classed(
    module: str, name: str, settings: dict[str, Any]
) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        site.activate()
        found = importlib.import_module(f"timm.models.{module}")
        given = settings
        if "token_mixers" in given:
            given = {**given, "token_mixers": getattr(found, given["token_mixers"])}
        return without_zeros(getattr(found, name)(num_classes=LABELS, **given))

    return build


INPUTS = normal(4, 3, SIDE, SIDE)

CASES = (
    *(
        Case(f"timm_{name.partition('_')[0]}", _named(name, settings), INPUTS, distance)
        for name, settings in BY_NAME
    ),
    *(
        Case(f"timm_{name}", _classed(module, cls, settings), INPUTS, distance)
        for name, module, cls, settings in BY_CLASS
    ),
)
