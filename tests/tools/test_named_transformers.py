"""Names stand for models of transformers, which are made without weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import autoamp
from autoamp.errors import OptionError
from autoamp.tools.named_transformers import named_model
from tests.says import says

transformers = pytest.importorskip("transformers")

GPT2 = {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 200, "n_positions": 32}
GPT2 |= {"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def test_a_config_file_and_a_type_of_model(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    file = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **GPT2}
    path.write_text(json.dumps({**file, "dtype": "bfloat16"}))
    model, (_, kwargs) = named_model(str(path), batch=3)
    assert type(model) is transformers.GPT2LMHeadModel
    assert kwargs["input_ids"].shape == kwargs["labels"].shape == (3, 32)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(p.is_meta for p in model.parameters())
    small = "(hidden_size=32, num_attention_heads=2, num_hidden_layers=1)"
    for config, kind in (("BertConfig", "BertForMaskedLM"), ("ViTConfig", None)):
        name = f"transformers:{config}{small}"
        model, (_, kwargs) = named_model(name, batch=2, trains=False)
        assert "labels" not in kwargs
        assert kind in (None, type(model).__name__)
    assert kwargs["pixel_values"].shape == (2, 3, 224, 224)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("transformers:NoSuchConfig()", "no configuration NoSuchConfig"),
        ("transformers:no-such", "no type of model 'no-such'"),
        ("transformers:GPT2Config(n_layer=open('x'))", "no literal"),
        ("transformers:GPT2Config(__import__('os'))", "a name with keywords"),
        ("transformers:os.system('true')", "write a name"),
        ("transformers:GPT2Config(**{})", "a name with keywords"),
        ("transformers:GPT2Config(", "write a name"),
        ("transformers:GPT2Config(n_embd=7, n_head=2)", "cannot be made"),
        ("transformers:Wav2Vec2Config()", "MODULE:FACTORY"),
        ("transformers:LlamaConfig(num_hidden_layer=2)", "num_hidden_layers?"),
        ("transformers:gpt2(n_layers=2)", "GPT2Config has no n_layers"),
        ("transformers:LlavaConfig(text_config={'hiden_size': 64})", "hidden_size?"),
        ("absent/config.json", "cannot be read"),
    ],
)
def test_a_wrong_name_is_told(name: str, problem: str) -> None:
    with pytest.raises(OptionError) as raised:
        named_model(name)
    says(raised, problem)


def test_a_config_file_that_is_nested_deeply_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[" * 100_000)
    with pytest.raises(OptionError) as raised:
        named_model(str(path))
    says(raised, path, "deep")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(OptionError) as raised:
        autoamp.explain("transformers:gpt2")
    says(raised, "transformers", "installed")
