"""Architectures of torchvision, made of its classes at a few thousand weights each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.models.case import Case, distance, normal
from tests.models.tiny import without_zeros

from . import site

LABELS = 5


def _mobilenet_v2(models: Any) -> nn.Module:
    setting = [[1, 8, 1, 1], [4, 16, 2, 2], [4, 24, 1, 2]]
    return models.MobileNetV2(
        LABELS, 0.25, inverted_residual_setting=setting, dropout=0.0
    )


def _mobilenet_v3(models: Any) -> nn.Module:
    block = partial(models.mobilenetv3.InvertedResidualConfig, dilation=1, width_mult=1)
    blocks = [
        block(16, 3, 16, 16, True, "RE", 2),
        block(16, 5, 48, 24, True, "HS", 2),
        block(24, 5, 48, 24, False, "HS", 1),
    ]
    return models.MobileNetV3(blocks, 48, num_classes=LABELS, dropout=0.0)


def _efficientnet(models: Any) -> nn.Module:
    mb = partial(models.efficientnet.MBConvConfig, width_mult=1, depth_mult=1)
    fused = models.efficientnet.FusedMBConvConfig(1, 3, 1, 16, 16, 1)
    blocks = [fused, mb(4, 3, 2, 16, 24, 1), mb(4, 5, 2, 24, 32, 2)]
    return models.EfficientNet(
        blocks, 0.0, stochastic_depth_prob=0.0, num_classes=LABELS, last_channel=64
    )


def _regnet(models: Any) -> nn.Module:
    params = models.regnet.BlockParams.from_init_params(
        depth=4, w_0=16, w_a=16.0, w_m=2.0, group_width=8, se_ratio=0.25
    )
    return models.RegNet(params, num_classes=LABELS, stem_width=16)


def _resnet(models: Any) -> nn.Module:
    model = models.ResNet(
        models.resnet.Bottleneck, [1, 1, 1, 1], num_classes=LABELS, width_per_group=8
    )
    model.layer3 = model.layer4 = nn.Identity()
    model.fc = nn.Linear(512, LABELS)
    return model


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    return models.ConvNeXt([block(16, 32, 1), block(32, None, 2)], num_classes=LABELS)


def _swin(models: Any, version: int) -> nn.Module:
    module, kinds = models.swin_transformer, {}
    if version == 2:
        kinds["block"] = module.SwinTransformerBlockV2
        kinds["downsample_layer"] = module.PatchMergingV2
    sizes = ([4, 4], 24, [1, 1], [2, 4], [4, 4])
    return models.SwinTransformer(
        *sizes, stochastic_depth_prob=0.0, num_classes=LABELS, **kinds
    )


def _swin3d(models: Any) -> nn.Module:
    sizes = ([2, 4, 4], 24, [1, 1], [2, 4], [2, 4, 4])
    return models.video.SwinTransformer3d(
        *sizes, stochastic_depth_prob=0.0, num_classes=LABELS
    )


class _Exits(nn.Module):
    """A small backbone with two exits, as the segmentation models take it."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"low": _reduced(3, 16), "high": _reduced(16, 32)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low = self.parts["low"](x)
        high = self.parts["high"](low)
        return {"low": low, "high": high, "out": high}


def _reduced(inner: int, outer: int) -> nn.Module:
    convolution = nn.Conv2d(inner, outer, 3, 2, 1)
    return nn.Sequential(convolution, nn.BatchNorm2d(outer), nn.ReLU())


def _segmenting(models: Any, kind: str) -> nn.Module:
    module = models.segmentation
    if kind == "lraspp":
        return module.LRASPP(_Exits(), 16, 32, LABELS, inter_channels=16)
    if kind == "fcn":
        return module.FCN(_Exits(), module.fcn.FCNHead(32, LABELS))
    head = module.deeplabv3.DeepLabHead(32, LABELS, (2, 3))
    return module.DeepLabV3(_Exits(), head)


def _by_class(name: str, *sizes: Any, **more: Any) -> Callable[[Any], nn.Module]:
    """A class of torchvision's that takes its sizes as they are."""
    return lambda models: getattr(models, name)(*sizes, num_classes=LABELS, **more)


IMAGE = normal(4, 3, 32, 32)
LARGE = normal(2, 3, 64, 64)
VIDEO = normal(2, 3, 4, 32, 32)

MODELS: tuple[tuple[str, Callable[[Any], nn.Module], Any], ...] = (
    ("densenet", _by_class("DenseNet", 8, (2, 2), 16), IMAGE),
    ("mnasnet", _by_class("MNASNet", 0.25, dropout=0.0), LARGE),
    ("mobilenet_v2", _mobilenet_v2, IMAGE),
    ("mobilenet_v3", _mobilenet_v3, IMAGE),
    ("shufflenet_v2", _by_class("ShuffleNetV2", [2, 2, 2], [8, 16, 32, 48, 64]), IMAGE),
    ("squeezenet", _by_class("SqueezeNet", "1_1", dropout=0.0), IMAGE),
    ("efficientnet", _efficientnet, IMAGE),
    ("regnet", _regnet, LARGE),
    ("resnet", _resnet, IMAGE),
    ("convnext", _convnext, IMAGE),
    ("vit", _by_class("VisionTransformer", 32, 8, 2, 4, 48, 96), IMAGE),
    ("swin", partial(_swin, version=1), IMAGE),
    ("swin_v2", partial(_swin, version=2), IMAGE),
    ("swin3d", _swin3d, VIDEO),
    ("maxvit", _by_class("MaxVit", (64, 64), 16, 4, [16, 32], [1, 1], 8, 0.0), LARGE),
    *(
        (kind, partial(_segmenting, kind=kind), IMAGE)
        for kind in ("lraspp", "fcn", "deeplabv3")
    ),
)


def _build(make: Callable[[Any], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        site.activate()
        import torchvision

        return without_zeros(make(torchvision.models))

    return build


CASES = tuple(
    Case(f"tv_{name}", _build(make), inputs, distance) for name, make, inputs in MODELS
)
