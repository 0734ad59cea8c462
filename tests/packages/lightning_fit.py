"""Lightning's Trainer, with a validation after each epoch, on a small ConvNet."""

from _way import AUTOCAST, OPTIONS, WAY, finish, note, torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.body.append(nn.Conv2d(16, 32, 3, stride=2))
        self.head = nn.Linear(32, 4)
        self.losses = []

    def loss(self, batch):
        image, label = batch
        features = self.body(image).relu().mean((2, 3))
        return nn.functional.cross_entropy(self.head(features), label)

    def training_step(self, batch, _):
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, _):
        self.log("validation", self.loss(batch))

    def on_train_end(self):
        note(self.body)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


labels = torch.randint(4, (128,))
images = torch.randn(128, 3, 16, 16) + labels[:, None, None, None]
loader = torch.utils.data.DataLoader(
    torch.utils.data.TensorDataset(images, labels), batch_size=16
)
precision = {"precision": "bf16-mixed" if AUTOCAST else "32-true"}
if WAY == "explicit":
    from autoamp.trainers import lightning_precision

    precision = {"plugins": [lightning_precision(hot=False, **OPTIONS)]}
trainer = Trainer(
    accelerator="cpu",
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    **precision,
)
model = Net()
trainer.fit(model, loader, loader)
finish(model.losses)
