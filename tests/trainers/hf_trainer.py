"""Hugging Face's Trainer: evaluation, a checkpoint half way, and resuming from it."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

OPTIONS = {
    "mixed": "no",
    "bad": "-1",
    "resume": "",
    **dict(a.split("=", 1) for a in sys.argv[1:]),
}


class Counting(Dataset):
    """Sentences in which every token is the one before it plus one."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        ids = (torch.arange(12) + 7 * i) % 60
        return {"input_ids": ids, "labels": ids}


class Weights(TrainerCallback):
    """The sum of all weights before the first step and after each."""

    def __init__(self):
        self.sums = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.on_step_end(args, state, control, model)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.sums.append(
            sum(p.detach().double().sum().item() for p in model.parameters())
        )


class CausalTrainer(Trainer):
    """Its loss is infinite at one step, where that is asked for."""

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        bad = model.training and self.state.global_step == int(OPTIONS["bad"])
        return loss * torch.inf if bad else loss


def make_trainer():
    torch.manual_seed(0)
    shape = {"n_embd": 48, "n_layer": 1, "n_head": 4, "n_positions": 32}
    special = {"bos_token_id": 62, "eos_token_id": 63, "use_cache": False}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, **shape, **special))
    args = TrainingArguments(
        OPTIONS["folder"],
        max_steps=10,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        use_cpu=True,
        bf16=OPTIONS["mixed"] == "bf16",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = Counting()
    return CausalTrainer(
        model, args, train_dataset=data, eval_dataset=data, callbacks=[weights]
    )


def losses(trainer, key="loss"):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


weights = Weights()
trainer = make_trainer()
trainer.train(resume_from_checkpoint=OPTIONS["resume"] or None)
RESULT = {
    "losses": losses(trainer),
    "eval": losses(trainer, "eval_loss"),
    "params": dict(trainer.model.named_parameters()),
    "weights": weights.sums,
    "model": trainer.model,
    "optimizer": trainer.optimizer.optimizer,
    "wrapper": trainer.optimizer,
    "rates": losses(trainer, "learning_rate"),
}
