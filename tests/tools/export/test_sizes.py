"""Programs for any batch and length: what is proved of positions passes its check."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoamp

DIMS = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}


class Attends(nn.Module):
    """Attention whose mask is made of positions that an embedding reads as well."""

    def __init__(self, shown: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.shown = shown
        self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])[None]
        wave = (at[..., None] * 0.1).cos()
        at = at.expand(x.shape[0], -1)
        mask = self.shown(at[:, None, :, None], at[:, None, None, :])
        heads = self.into(x + wave).unflatten(2, (6, 32)).transpose(1, 2).chunk(3, 1)
        attended = nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        return self.out(attended.transpose(1, 2).flatten(2))


def exported(
    model: nn.Module, sizes: Any, *args: Any, **kwargs: Any
) -> tuple[list[tuple[bool, bool]], torch.export.ExportedProgram]:
    """Whether each attention has a mask and is told that it is causal; the program."""
    program = autoamp.export(
        model,
        args,
        kwargs,
        precision="bf16",
        do_no_harm=False,
        strict=True,
        dynamic_shapes=sizes,
    )
    calls = [n for n in program.graph.nodes if "scaled_dot" in str(n.target)]
    given = [(*n.args, *(None, 0.0, False)[len(n.args) - 3 :]) for n in calls]
    return [(each[3] is not None, bool(each[5])) for each in given], program


@pytest.mark.parametrize(
    ("shown", "kernel"),
    [
        (lambda query, key: query >= key, (False, True)),
        (lambda query, key: ~(key > query), (False, True)),
        (lambda query, key: query + key >= 0, (False, False)),
        (lambda query, key: (query >= key) & (query < key + 8), (True, False)),
        (lambda query, key: query <= key, (True, False)),
        (lambda query, key: query >= key * 2, (True, False)),
    ],
    ids=["causal", "not later", "all", "window", "later", "every second"],
)
def test_positions_that_others_read_too(
    shown: Callable[[Tensor, Tensor], Tensor], kernel: tuple[bool, bool]
) -> None:
    torch.manual_seed(0)
    model = Attends(shown).eval()
    found, program = exported(model, (DIMS,), torch.randn(2, 16, 64))
    assert found == [kernel]
    x = torch.randn(3, 21, 64)
    with torch.no_grad():
        exact = model(x)
        errors = [
            float((each(x) - exact).norm())
            for each in (
                autoamp.convert(model, precision="bf16", do_no_harm=False),
                program.module(),
            )
        ]
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        # In CI GPT-2 stands for both, whose attention is called alike.
        pytest.param("Llama", [(False, True)], marks=pytest.mark.slow),
        ("GPT2", [(False, True)]),
        pytest.param("Qwen2", [(False, True)], marks=pytest.mark.slow),
        ("Mistral", [(True, False)]),  # a window of the last 8 positions
        ("Bert", [(False, False)]),
        ("T5", [(True, False)]),
    ],
)
def test_language_models_of_any_batch_and_length(
    name: str, kernels: list[tuple[bool, bool]]
) -> None:
    hf: Any = pytest.importorskip("transformers")
    config = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "hidden_size": 64,
        "vocab_size": 500,
        "max_position_embeddings": 64,
        "use_cache": False,
        "pad_token_id": 0,
        "num_key_value_heads": 1,
        "sliding_window": 8,
    }
    kind = "T5EncoderModel" if name == "T5" else f"{name}Model"
    torch.manual_seed(0)
    model = getattr(hf, kind)(getattr(hf, f"{name}Config")(**config)).eval()
    ids = torch.randint(1, 500, (2, 16))
    found, program = exported(model, {"input_ids": DIMS}, input_ids=ids)
    assert found == kernels
    with torch.no_grad():
        given = program.module()(input_ids=ids[:1, :5])[0]
        exact = model(input_ids=ids[:1, :5])[0]
    assert given.shape == exact.shape
    assert bool(given.isfinite().all())
