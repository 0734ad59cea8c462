"""Models of transformers that look or listen: images, speech, image and text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.case import Args, Case, distance, generator, labelled, tokens
from tests.models.hf import SEQUENCES, spectra, whisper
from tests.models.tiny import TINY, VOCAB, rows, tiny

SIDE = 32
LABELS = 5

IMAGES = rows(
    """
vit ViTForImageClassification **patches
deit DeiTForImageClassification **patches
beit BeitForImageClassification **patches, use_relative_position_bias=True
dinov2 Dinov2ForImageClassification **patches, mlp_ratio=2
swin SwinForImageClassification patch_size=4, embed_dim=24, depths=[1, 1],
    num_heads=[2, 4], window_size=4, **sized
swinv2 Swinv2ForImageClassification patch_size=4, embed_dim=24, depths=[1, 1],
    num_heads=[2, 4], window_size=4, **sized
hiera HieraForImageClassification image_size=[32, 32], embed_dim=16, depths=[1, 1, 1],
    num_heads=[1, 2, 4], num_query_pool=2, patch_stride=[4, 4], masked_unit_size=[4, 4],
    num_labels=5
convnextv2 ConvNextV2ForImageClassification hidden_sizes=[16, 32], depths=[1, 1],
    num_stages=2, **sized
focalnet FocalNetForImageClassification embed_dim=16, depths=[1, 1],
    hidden_sizes=[16, 32], focal_levels=[2, 2], focal_windows=[3, 3], **sized
segformer SegformerForSemanticSegmentation hidden_sizes=[8, 16, 24, 32], num_labels=5,
    depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32
mobilevit MobileViTForImageClassification hidden_sizes=[16, 20, 24],
    neck_hidden_sizes=[8, 8, 12, 16, 20, 24, 32], num_attention_heads=2, **sized
dpt DPTForDepthEstimation **patches, num_hidden_layers=4,
    backbone_out_indices=[0, 1, 2, 3], neck_hidden_sizes=[8, 8, 16, 16],
    fusion_hidden_size=8, is_hybrid=False
yolos YolosForObjectDetection image_size=[32, 32], patch_size=8, num_labels=5,
    num_detection_tokens=5
""",
    patches={"image_size": SIDE, "patch_size": 8, "num_labels": LABELS},
    sized={"image_size": SIDE, "num_labels": LABELS},
)

_SPEECH = """
wav2vec2 Wav2Vec2ForCTC mask_time_prob=0.0, layerdrop=0.0, apply_spec_augment=False,
    conv_dim=[16, 16, 16], conv_stride=[5, 2, 2], conv_kernel=[10, 3, 3],
    num_feat_extract_layers=3, num_conv_pos_embeddings=8,
    num_conv_pos_embedding_groups=2, ctc_loss_reduction="mean"
"""
SPEECH = rows(_SPEECH + _SPEECH.strip().replace("wav2vec2 Wav2Vec2", "wavlm WavLM"))


def _pictures(seed: int) -> Args:
    images = torch.randn(2, 3, SIDE, SIDE, generator=generator(seed))
    return (), {"pixel_values": images}


def _sound(seed: int) -> Args:
    sound = torch.randn(2, 800, generator=generator(seed))
    return (), {
        "input_values": sound,
        "labels": 3 + tokens(seed, 2, 6, vocab=VOCAB - 3),
    }


def _two_towers(model: str) -> Callable[[], nn.Module]:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads")
    both = {name: TINY[name] for name in (*sizes, "intermediate_size")}
    words = ("vocab_size", "max_position_embeddings", "pad_token_id", "bos_token_id")
    text = {name: TINY[name] for name in (*words, "eos_token_id")}
    text |= both | {"projection_size": 48}
    vision = {"image_size": SIDE, "patch_size": 8, **both}
    return lambda: tiny(model, text_config=text, vision_config=vision)


def _pairs(seed: int) -> Args:
    images = torch.randn(2, 3, SIDE, SIDE, generator=generator(seed))
    ids = tokens(seed, 2, 12, vocab=VOCAB - 3) + 3
    ids[:, -1] = 2
    return (), {
        "input_ids": ids,
        "pixel_values": images,
        "attention_mask": torch.ones_like(ids),
    }


def _scores(output: Any) -> Tensor:
    return distance(
        [output["logits_per_image"], output["text_embeds"], output["image_embeds"]]
    )


def _logits(output: Any) -> Tensor:
    for name in ("logits", "predicted_depth"):
        if name in output:
            return distance(output[name])
    raise KeyError(name)


def _detections(output: Any) -> Tensor:
    return distance([output["logits"], output["pred_boxes"]])


def _detr() -> nn.Module:
    import transformers

    backbone = transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        out_features=["stage2"],
    )
    return tiny(
        "DetrForObjectDetection",
        backbone_config=backbone,
        use_timm_backbone=False,
        num_queries=5,
        d_model=48,
        **SEQUENCES | {"encoder_layers": 1, "decoder_layers": 1},
    )


def _outputs_of(name: str) -> Callable[[Any], Tensor]:
    return _detections if name == "yolos" else _logits


CASES = (
    *(
        Case(name, partial(tiny, model, **settings), _pictures, _outputs_of(name))
        for name, model, settings in IMAGES
    ),
    *(
        Case(name, partial(tiny, model, **settings), _sound, labelled)
        for name, model, settings in SPEECH
    ),
    Case("whisper", whisper, spectra, labelled),
    Case("detr", _detr, _pictures, _detections),
    Case("clip", _two_towers("CLIPModel"), _pairs, _scores),
    Case("siglip", _two_towers("SiglipModel"), _pairs, _scores),
)
