"""Sequence models written here: recurrent, attention, ties, masks, lengths."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import Args, Case, distance, generator, itself, normal, tokens

VOCAB = 64


class LSTMClassifier(nn.Module):
    """`nn.LSTM` over a sequence, classified from its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])


def _transformer() -> nn.Module:
    return nn.Transformer(32, 4, 1, 1, 64, dropout=0.0, batch_first=True)


def _transformer_inputs(seed: int) -> Args:
    g = generator(seed)
    source = torch.randn(2, 9, 32, generator=g)
    target = torch.randn(2, 7, 32, generator=g)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    # Told, not detected: detection reads the mask's values, which breaks the graph in a
    # frame of torch.nn, and such frames Dynamo does not take up again.
    return (source, target), {"tgt_mask": mask, "tgt_is_causal": True}


class TiedLM(nn.Module):
    """A language model whose output layer is its embedding table."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.body = nn.Sequential(nn.Linear(width, 64), nn.Tanh(), nn.Linear(64, width))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, VOCAB, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        logits = self.out(self.norm(x + self.body(x)))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _tied_inputs(seed: int) -> Args:
    ids = tokens(seed, 4, 8, vocab=VOCAB)
    return (ids, ids.roll(-1, 1)), {}


class MaskedAttention(nn.Module):
    """Attention by hand, its mask built from `torch.finfo(x.dtype).min`."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, self.heads, width // self.heads)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4)
        mask = torch.zeros(batch, 1, 1, length, dtype=x.dtype, device=x.device)
        mask = mask.masked_fill(~keep[:, None, None], torch.finfo(x.dtype).min)
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        scores = torch.where(causal, scores, torch.finfo(scores.dtype).min)
        y = scores.softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


def _masked_inputs(seed: int) -> Args:
    keep = torch.ones(3, 8, dtype=torch.bool)
    keep[1, 5:] = False
    return (torch.randn(3, 8, 32, generator=generator(seed)), keep), {}


class VariableLength(nn.Module):
    """Embedding, causal attention and a head; batch and length vary by call."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.position = nn.Embedding(32, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.embed(ids) + self.position(torch.arange(length, device=ids.device))
        q, k, v = self.qkv(x).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + y.transpose(1, 2).reshape(batch, length, -1))


def _variable_inputs(seed: int) -> Args:
    batch, length = ((2, 5), (2, 7), (3, 9), (2, 11))[seed % 4]
    return (tokens(seed, batch, length, vocab=VOCAB),), {}


CASES = (
    Case("lstm", LSTMClassifier, normal(4, 10, 16), distance),
    Case("nn_transformer", _transformer, _transformer_inputs, distance),
    Case("tied_lm", TiedLM, _tied_inputs, itself),
    Case("finfo_mask", MaskedAttention, _masked_inputs, distance),
    Case(
        "variable_length",
        VariableLength,
        _variable_inputs,
        distance,
        frozenset({"dynamic"}),
    ),
)
