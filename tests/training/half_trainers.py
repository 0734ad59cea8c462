"""Programs of transformers, peft, accelerate and Lightning that train half weights.

Each makes a model in the dtype that it is given, trains it, and gives it back.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.training.half_programs import (
    BF16,
    FP32,
    RATE,
    STEPS,
    Net,
    adam,
    batch,
)


def with_lightning(dtype: torch.dtype) -> Net:
    lightning = pytest.importorskip("pytorch_lightning")
    model = Net()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, given: Any, index: int) -> Tensor:
            out = self.net(given[0])
            return nn.functional.cross_entropy(out.float(), given[1])

        def configure_optimizers(self) -> optim.Optimizer:
            return adam(self.parameters())

    data = torch.utils.data.TensorDataset(*batch(FP32))
    lightning.Trainer(
        accelerator="cpu",
        precision={BF16: "bf16-true", FP32: "32-true"}[dtype],
        max_epochs=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Module(), torch.utils.data.DataLoader(data, batch_size=32))
    return model


def accumulated_by_accelerate(dtype: torch.dtype) -> Net:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, rows = Net().to(dtype), torch.utils.data.TensorDataset(*batch(dtype))
    ready, optimizer, loader = accelerator.prepare(
        model,
        adam(model.parameters()),
        torch.utils.data.DataLoader(rows, batch_size=16),
    )
    for _ in range(STEPS):
        for x, y in loader:
            with accelerator.accumulate(ready):
                loss = nn.functional.cross_entropy(ready(x).float(), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(ready.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    return model


# -- language models -------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}


def ids() -> Tensor:
    return (torch.arange(12) + 7 * torch.arange(8)[:, None]) % 60


def llama(dtype: torch.dtype) -> Any:
    """Loads a model as it was saved: its weights may lie in memory mapped to a file."""
    transformers = pytest.importorskip("transformers")
    folder = f"llama-{dtype}"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, use_cache=False)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def by_trainer(model: Any, kind: str = "", **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    rows = [{"input_ids": row, "labels": row} for row in ids()]
    return getattr(transformers, f"{kind}Trainer")(
        model,
        getattr(transformers, f"{kind}TrainingArguments")(
            output_dir="out",
            **{"max_steps": STEPS, "save_strategy": "no", **options},
            use_cpu=True,
            learning_rate=RATE,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows,
    )


def causal_by_trainer(dtype: torch.dtype) -> Any:
    model = llama(dtype)
    by_trainer(model, gradient_checkpointing=True).train()
    return model


def resumed_by_trainer(dtype: torch.dtype) -> Any:
    whole = llama(dtype)
    by_trainer(whole, save_strategy="steps", save_steps=STEPS // 2).train()
    model = llama(dtype)
    by_trainer(model).train(resume_from_checkpoint=f"out/checkpoint-{STEPS // 2}")
    for ours, theirs in zip(whole.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs), "it goes on bit for bit"
    return model


# -- adapters --------------------------------------------------------------------------


def adapted(dtype: torch.dtype) -> Any:
    """A frozen base, its LoRA adapters and a trained norm, all in `dtype`."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"]
    )
    torch.manual_seed(0)
    return peft.get_peft_model(llama(dtype), config, autocast_adapter_dtype=False)


def adapters_by_trainer(dtype: torch.dtype) -> Any:
    model = adapted(dtype)
    by_trainer(model).train()
    return model
