"""A loop under accelerate, with accumulated and clipped gradients, on a BERT."""

from _way import AUTOCAST, bert, finish, prepared, torch
from accelerate import Accelerator
from transformers import BertForSequenceClassification

model = BertForSequenceClassification(bert())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
tokens = torch.randint(100, (240, 24))
labels = (tokens[:, 0] > 49).long()
data = torch.utils.data.TensorDataset(tokens, labels)
loader = torch.utils.data.DataLoader(data, batch_size=8)
accelerator = Accelerator(
    cpu=True,
    mixed_precision="bf16" if AUTOCAST else "no",
    gradient_accumulation_steps=2,
)
prepared(model, optimizer)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for tokens, labels in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=tokens, labels=labels).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(loss.item())
finish(losses)
