"""Architectures of timm, at the smallest size their code takes."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from torch import nn

from tests.models.case import Case, distance, normal
from tests.models.tiny import without_zeros

from . import site

LABELS = 5
SIDE = 32

_ONES = (1, 1, 1, 1)
_STAGES = {"depths": _ONES, "dims": (8, 16, 24, 32)}
_VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
_WIDE = (16, 32, 48, 64)
_NFNET = {"group_size": 8, "num_features": 64}
_SWIN = {"img_size": SIDE, "window_size": 4, "embed_dim": 24, "depths": (2, 2)}
_SWIN |= {"num_heads": (2, 4)}

BY_NAME: tuple[tuple[str, dict[str, Any]], ...] = (
    ("resnet18", {"channels": (8, 16, 16, 32), "layers": (1, 1, 1, 1)}),
    ("densenet121", {"growth_rate": 8, "block_config": (2, 2)}),
    ("mobilenetv3_small_050", {}),
    ("convnext_atto", _STAGES),
    ("nfnet_f0", {"depths": _ONES, "channels": _WIDE, "stem_chs": 16, **_NFNET}),
    ("vit_tiny_patch16_224", _VIT),
    ("deit3_small_patch16_224", _VIT),
    ("eva02_tiny_patch14_224", _VIT),
    ("beit_base_patch16_224", _VIT),
    ("cait_xxs24_224", _VIT),
    ("xcit_nano_12_p16_224", _VIT),
    ("swin_tiny_patch4_window7_224", _SWIN),
    ("coat_lite_tiny", {"img_size": SIDE, "serial_depths": _ONES, "embed_dims": _WIDE}),
    ("edgenext_xx_small", _STAGES),
    (
        "pvt_v2_b0",
        {"depths": _ONES, "embed_dims": (8, 16, 24, 32), "num_heads": (1, 2, 2, 4)},
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


def _named(name: str, **settings: Any) -> nn.Module:
    site.activate()
    import timm

    return without_zeros(timm.create_model(name, num_classes=LABELS, **settings))


def _classed(module: str, name: str, **settings: Any) -> nn.Module:
    site.activate()
    found = importlib.import_module(f"timm.models.{module}")
    if "token_mixers" in settings:
        settings["token_mixers"] = getattr(found, settings["token_mixers"])
    return without_zeros(getattr(found, name)(num_classes=LABELS, **settings))


INPUTS = normal(4, 3, SIDE, SIDE)

MADE = {
    f"timm_{name.partition('_')[0]}": partial(_named, name, **settings)
    for name, settings in BY_NAME
} | {
    f"timm_{name}": partial(_classed, module, cls, **settings)
    for name, module, cls, settings in BY_CLASS
}
CASES = tuple(Case(name, make, INPUTS, distance) for name, make in MADE.items())
