"""Models for the tests of the page, one of which is hostile to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoamp

EVIL = "</script><img src=x onerror=hacked=1>"
"""A module name that runs a script if it is ever read as markup."""


class Block(nn.Module):
    """Two products, with an op between them that the options below deny."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.exp(self.up(x)) * 2)


class Layers(nn.Module):
    """Blocks in a list, a module with a hostile name, and a checkpointed region."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.named = nn.ModuleDict({EVIL: nn.Linear(16, 16)})
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.named[EVIL](x)  # </script><script>hacked=2</script><!-- <script>
        return checkpoint(self.last, x, use_reentrant=False)


Layers.__name__ = "</title><script>hacked=3</script>&{{data}}"


class Embedded(nn.Module):
    """A layer norm that is fp32 because it reads, through an add, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(16, 64), nn.LayerNorm(64)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        found = self.embed(x)
        return self.out(self.norm(found + found))


class Bottleneck(nn.Module):
    """ResNet's block, whose three normalizations share one relu in place."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride > 1 or channels != 4 * width:
            self.downsample.append(nn.Conv2d(channels, 4 * width, 1, stride))
            self.downsample.append(nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """ResNet-50, for pictures of any size; fewer `blocks` make a smaller one."""

    def __init__(self, blocks: tuple[int, ...] = (3, 4, 6, 3)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(64), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential()
        channels = 64
        for stage, count in enumerate(blocks):
            layer = nn.Sequential()
            for place in range(count):
                stride = 2 if stage and not place else 1
                layer.append(Bottleneck(channels, 64 << stage, stride))
                channels = 256 << stage
            self.layers.append(layer)
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(x.mean((2, 3)))


def explained(model: nn.Module, *args: Tensor, **options: object) -> autoamp.Report:
    """The report of `explain` with everything converted that may be, but `exp`."""
    given = {"precision": "bf16", "do_no_harm": False, "deny": ["exp"], **options}
    return autoamp.explain(model, *args, **given)


def layers_report(blocks: int = 2) -> autoamp.Report:
    """The report of `Layers`."""
    return explained(Layers(blocks), torch.randn(4, 16))
