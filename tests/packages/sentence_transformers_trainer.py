"""sentence-transformers' trainer, with in-batch negatives."""

import tempfile

from _way import arguments, bert, callbacks, tokenizer, torch, trained
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    models,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from transformers import BertModel

folder = tempfile.mkdtemp()
tokenizer(98).save_pretrained(folder)
BertModel(bert()).save_pretrained(folder)
body = models.Transformer(folder)
model = SentenceTransformer(modules=[body, models.Pooling(64)], device="cpu")
rows = torch.randint(98, (128, 8)).tolist()
texts = {
    "anchor": [" ".join(map(str, row)) for row in rows],
    "positive": [" ".join(map(str, row[::-1][:6])) for row in rows],
}
trained(
    SentenceTransformerTrainer(
        model=model,
        args=arguments(SentenceTransformerTrainingArguments, batch=16, lr=1e-4),
        train_dataset=Dataset.from_dict(texts),
        loss=MultipleNegativesRankingLoss(model),
        callbacks=callbacks(),
    )
)
