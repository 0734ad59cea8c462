"""Models of transformers made small: what every config is told."""

from __future__ import annotations

import re
from typing import Any

import transformers
from torch import nn

VOCAB = 96
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "use_cache": False,
}


def tiny(model: str, dropout: float = 0.0, **settings: Any) -> nn.Module:
    """The named class with small random weights."""
    cls = getattr(transformers, model)
    return without_zeros(cls(config_of(cls, dropout, settings)))


def rows(text: str, **known: Any) -> list[tuple[str, str, dict[str, Any]]]:
    """Lines `name Class key=value, ...`, of which an indented one goes on with another.

    They are a name, a class of transformers, and what its config needs besides.

    Args:
        known: what the values may name.
    """
    found = []
    for line in re.sub(r"\n +", " ", text.strip()).splitlines():
        name, cls, settings = [*line.split(" ", 2), ""][:3]
        found.append((name, cls, eval(f"dict({settings})", dict(known))))
    return found


def without_zeros(model: nn.Module) -> nn.Module:
    """`model`, with the tables that start as zeros drawn as well.

    Behind a head of zeros nothing gets a gradient, and the slope of a LayerNorm at a
    token of zeros is 1e6, which no trained model has.
    """
    for p in model.parameters():
        if p.dim() > 1 and not p.any():
            nn.init.normal_(p, std=0.02)
    return model


def config_of(cls: Any, dropout: float, settings: dict[str, Any]) -> Any:
    """`TINY`, as far as the config knows it, and `settings` laid over it."""
    config = cls.config_class
    spelling = config.attribute_map
    known = {
        f: TINY[name] for name in TINY if _knows(config, f := spelling.get(name, name))
    }
    made = config(**known | settings)
    for name, value in vars(made).items():
        if "drop" in name and isinstance(value, float):
            setattr(made, name, dropout)
    return made


def _knows(config: Any, name: str) -> bool:
    return any(name in getattr(base, "__annotations__", {}) for base in config.__mro__)
