"""Convolutional networks written here: ResNet, U-Net, ConvNeXt-style blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Case, distance, normal


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, `relu_` in place and the residual added in place."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(inner, outer, 1, stride), nn.BatchNorm2d(outer))
            if stride != 1 or inner != outer
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.down(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, `depth` residual blocks over two stages, and a classifier."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.stages = nn.Sequential(
            BasicBlock(width, width, 1), BasicBlock(width, 2 * width, 2)
        )
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(self.stem(x))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def _conv_norm(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1), nn.GroupNorm(4, outer), nn.SiLU()
    )


class UNet(nn.Module):
    """Two levels, skip connections by `cat`, transposed convolutions, GroupNorm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = _conv_norm(3, width)
        self.down1 = _conv_norm(width, 2 * width)
        self.down2 = _conv_norm(2 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, 2 * width, 2, 2)
        self.mix1 = _conv_norm(4 * width, width)
        self.up2 = nn.ConvTranspose2d(width, width, 2, 2)
        self.mix2 = _conv_norm(2 * width, width)
        self.exit = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        b = self.down1(functional.max_pool2d(a, 2))
        c = self.down2(functional.max_pool2d(b, 2))
        c = self.mix1(torch.cat([self.up1(c), b], 1))
        return self.exit(self.mix2(torch.cat([self.up2(c), a], 1)))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm over a permuted view, MLP, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.contract(functional.gelu(self.expand(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """A patch stem, two blocks and a classifier over the pooled features."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(ConvNeXtBlock(width), ConvNeXtBlock(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean((2, 3))))


class GradCam(nn.Module):
    """Returns its features beside the logits computed from them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return self.head(features.mean((2, 3))), features


def _logits_only(output: tuple[Tensor, Tensor]) -> Tensor:
    return distance(output[0])


CASES = (
    Case("resnet", ResNet, normal(4, 3, 16, 16), distance, frozenset({"stateful"})),
    Case("unet", UNet, normal(2, 3, 16, 16), distance),
    Case("convnext", ConvNeXt, normal(2, 3, 32, 32), distance),
    Case(
        "grad_cam",
        GradCam,
        normal(2, 3, 16, 16),
        _logits_only,
        frozenset({"returns_features"}),
    ),
)
