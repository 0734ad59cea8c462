"""The models and batches that are timed on a GPU; small ones where `quick`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.models.case import Args, Case, generator, labelled, tokens

from . import full_models
from .full_models import LABELS, QUICK_VOCAB

Inputs = Callable[[int], Args]


def text(batch: int, length: int, vocab: int) -> Inputs:
    """Token ids, which are the labels too."""

    def inputs(seed: int) -> Args:
        ids = tokens(seed, batch, length, vocab=vocab)
        return (), {"input_ids": ids, "labels": ids}

    return inputs


def images(batch: int, side: int) -> Inputs:
    """Images and a label for each."""

    def inputs(seed: int) -> Args:
        pixels = torch.randn(batch, 3, side, side, generator=generator(seed))
        return (), {"pixel_values": pixels, "labels": torch.arange(batch) % LABELS}

    return inputs


def gpu_cases(quick: bool) -> tuple[Case, ...]:
    """The seven models, each with a batch that keeps a GPU busy."""

    def case(name: str, build: Callable[[bool], nn.Module], inputs: Inputs) -> Case:
        return Case(name, lambda: build(quick), inputs, labelled)

    def read(batch: int, length: int, vocab: int) -> Inputs:
        return text(2, 16, QUICK_VOCAB) if quick else text(batch, length, vocab)

    def seen(batch: int) -> Inputs:
        return images(2, 64) if quick else images(batch, 224)

    return (
        case("gpt2", full_models.gpt2, read(8, 1024, 50257)),
        case("bert", full_models.bert, read(32, 128, 30522)),
        case("llama", full_models.llama, read(8, 1024, 32000)),
        case("t5", full_models.t5, read(32, 256, 32128)),
        case("vit", full_models.vit, seen(64)),
        case("resnet50", full_models.resnet50, seen(128)),
        case("convnext_tiny", full_models.convnext_tiny, seen(64)),
    )


def gpu_case(name: str, quick: bool) -> Case:
    """The case named."""
    return {case.name: case for case in gpu_cases(quick)}[name]


BATCHES = """\
The batches are 8 x 1024 tokens of GPT-2 and Llama (219 M parameters), 32 x 128 of
BERT-base, 32 x 256 of T5-small, 64 images of ViT-B and ConvNeXt-T, 128 of ResNet-50."""

QUICK_BATCHES = """\
The models and batches are small, to try the command: their times say nothing."""


def batches(quick: bool) -> str:
    """What a table says about its batches."""
    return QUICK_BATCHES if quick else BATCHES
