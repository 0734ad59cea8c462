"""The way a script of this folder trains: the first argument of its command line.

`autocast` is what the trainer has for it, `everywhere` is autocast around the script,
and `explicit` converts the model.  A script under `autoamp run` is given `fp32`.
"""

import importlib.util
import json
import os
import random
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

WAY = sys.argv[1] if len(sys.argv) > 1 else "fp32"
AUTOCAST = WAY == "autocast"
OPTIONS = {"precision": "bf16", "do_no_harm": False}

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(0)
if WAY == "everywhere":
    torch.autocast("cpu", torch.bfloat16, cache_enabled=False).__enter__()
_converted, _kept, _reports = [], [], []


def _declare_operators():
    """Declares torchvision's operators where its wheel is for another torch.

    No model here calls one, but the import of torchvision needs them.
    """
    found = importlib.util.find_spec("torchvision")
    try:
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor boxes, Tensor scores, float most) -> Tensor")
        _kept.append(library)


_declare_operators()


def autocast():
    """The region in which the script computes a loss."""
    return torch.autocast("cpu", torch.bfloat16) if AUTOCAST else nullcontext()


def arguments(kind, batch, lr, **more):
    """Arguments of transformers' `Trainer`, or of one made from it."""
    return kind(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=batch,
        num_train_epochs=3,
        learning_rate=lr,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=AUTOCAST,
        **more,
    )


def callbacks():
    """What that trainer is given in order to be converted, if that is the way."""
    if WAY != "explicit":
        return []
    from autoamp.trainers import transformers_callback

    return [transformers_callback(**OPTIONS)]


def trained(trainer):
    """Has that trainer train, and prints what `finish` prints."""
    trainer.train()
    note(trainer.model)
    finish(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def tokenizer(numbers):
    """A tokenizer of texts that are numbers, separated by spaces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[EOS]", *map(str, range(numbers))]
    table = {word: place for place, word in enumerate(words)}
    made = Tokenizer(models.WordLevel(table, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "[EOS]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def bert():
    """The configuration of a small BERT, without dropout."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=101,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def prepared(model, optimizer=None):
    """Converts a model, and its optimizer where there is one, if that is the way."""
    if WAY == "explicit":
        import autoamp

        autoamp.convert(model, optimizer, **OPTIONS)
        _converted.append(model)


def note(model):
    """Has `finish` print the report of a model, which a trainer converted, of now."""
    if WAY == "explicit":
        import autoamp

        _reports.append(json.loads(autoamp.report(model).to_json()))


def finish(losses):
    """Prints the losses, and the reports of models that the script had converted."""
    for model in _converted:
        note(model)
    losses = [float(loss) for loss in losses]
    print(json.dumps({"losses": losses, "reports": _reports}))
