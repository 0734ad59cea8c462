"""Lightning: a module that is called, or calls its parts, on one device or two."""

import sys

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OPTIONS = {
    "mixed": "32-true",
    "bad": "-1",
    "kind": "whole",
    "resume": "",
    "epochs": "1",
    "ranks": "1",
    **dict(a.split("=", 1) for a in sys.argv[1:]),
}
RANKS = int(OPTIONS["ranks"])


class Whole(pl.LightningModule):
    """Calls itself in `training_step`."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 16))
        self.losses, self.weights, self.rates = [], [], []

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.reconstructed(batch[0]), batch[0])
        self.losses.append(loss.item())
        self.note_weights()
        # Of two ranks one alone sees the bad batch, where one is asked for.
        bad = index == int(OPTIONS["bad"]) and self.global_rank == RANKS - 1
        return loss * torch.inf if bad else loss

    def validation_step(self, batch, index):
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("val_loss", loss, sync_dist=RANKS > 1)

    def reconstructed(self, x):
        return self(x)

    def note_weights(self):
        total = sum(p.detach().double().sum().item() for p in self.parameters())
        self.weights.append(total)
        self.rates.append(self.lr_schedulers().get_last_lr()[0])

    def on_train_end(self):
        self.note_weights()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
        every = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": every}


class Parts(Whole):
    """An autoencoder as in Lightning's own examples: its parts are called."""

    def reconstructed(self, x):
        z = self.encoder(x)
        return self.decoder(z)


torch.manual_seed(0)
x = torch.randn(40 * RANKS, 4) @ torch.randn(4, 16)
loader = DataLoader(TensorDataset(x), batch_size=4)
model = Parts() if OPTIONS["kind"] == "parts" else Whole()
trainer = pl.Trainer(
    accelerator="cpu",
    devices=RANKS,
    strategy="ddp" if RANKS > 1 else "auto",
    precision=OPTIONS["mixed"],
    max_epochs=int(OPTIONS["epochs"]),
    gradient_clip_val=1.0,
    default_root_dir=OPTIONS["folder"],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    enable_checkpointing=False,
)
trainer.fit(model, loader, loader, ckpt_path=OPTIONS["resume"] or None)
if RANKS == 1:
    trainer.save_checkpoint(f"{OPTIONS['folder']}/last.ckpt")
RESULT = {
    "losses": model.losses,
    "params": dict(model.named_parameters()),
    "weights": model.weights,
    "rates": model.rates,
    "model": model,
    "optimizer": trainer.optimizers[0],
    "wrapper": trainer.strategy._lightning_optimizers[0],
}
if RANKS > 1:
    told = {name: RESULT[name] for name in ("losses", "weights")}
    told["dtypes"] = sorted({str(p.dtype) for p in model.parameters()})
    torch.save(told, f"{OPTIONS['folder']}/{trainer.global_rank}.pt")
