"""The models of the zoo, by name; nothing is imported or built before it is asked for.

>>> from tests.zoo import BY_NAME
>>> BY_NAME["mamba"].model()
"""

from __future__ import annotations

from tests.models.case import Case

from . import media, text, timm_models, torchvision_models

__all__ = ["BY_NAME"]

BY_NAME: dict[str, Case] = {
    case.name: case
    for module in (text, media, timm_models, torchvision_models)
    for case in module.CASES
}
