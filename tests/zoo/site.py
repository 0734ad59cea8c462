"""Where timm and torchvision are: in a folder beside the environment, not in it.

transformers, torchmetrics and inductor import torchvision as soon as they find it, and
the operators of its wheel for CUDA do not load beside a torch for CPUs.  So a process
finds it only after `activate`, which declares the operators.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path

import torch
import transformers

SITE = Path(os.environ.get("AUTOAMP_ZOO_SITE", Path(sys.prefix) / "zoo"))
"""Where `make zoo` puts them."""


@functools.cache
def activate() -> None:
    """Makes timm and torchvision importable in this process, from now on."""
    if not (SITE / "torchvision").is_dir():
        raise ModuleNotFoundError(f"no timm and torchvision in {SITE}; run `make zoo`")
    # transformers keeps its answer, and shall not use what is found from here on.
    assert not transformers.utils.is_torchvision_available()
    sys.path.append(str(SITE))
    try:
        torch.ops.load_library(SITE / "torchvision" / "_C.so")
    except OSError:
        _declare_operators()
    importlib.import_module("timm")


def _declare_operators() -> None:
    """Declares what the import of torchvision needs; no model here calls it."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(
            f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        )
    _KEPT.append(library)


_KEPT: list[torch.library.Library] = []
"""What a library registers goes when the object does."""
