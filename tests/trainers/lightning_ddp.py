"""Lightning on two processes, which its Trainer starts or torchrun has started."""

import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = {
    "mixed": "32-true",
    "bad": "-1",
    **dict(a.split("=", 1) for a in sys.argv[1:]),
}


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 16))
        self.losses, self.weights = [], []

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.losses.append(loss.item())
        self.note_weights()
        # One rank alone sees the bad batch, where one is asked for.
        bad = index == int(OPTIONS["bad"]) and self.global_rank == 1
        return loss * 1e36 if bad else loss

    def validation_step(self, batch, index):
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("val_loss", loss, sync_dist=True)

    def note_weights(self):
        total = sum(p.detach().double().sum().item() for p in self.parameters())
        self.weights.append(total)

    def on_train_end(self):
        self.note_weights()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(80, 4) @ torch.randn(4, 16)
loader = DataLoader(TensorDataset(x), batch_size=4)
model = Net()
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    precision=OPTIONS["mixed"],
    max_epochs=1,
    gradient_clip_val=1.0,
    default_root_dir=OPTIONS["folder"],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(model, loader, loader)
RESULT = {
    "losses": model.losses,
    "weights": model.weights,
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
}
torch.save(RESULT, f"{OPTIONS['folder']}/{trainer.global_rank}.pt")
