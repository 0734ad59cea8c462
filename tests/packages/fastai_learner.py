"""fastai's Learner, under its one-cycle schedule, on images."""

from _way import autocast, finish, prepared, torch
from fastai.vision.all import Callback, DataLoaders, Learner, TensorImage, accuracy
from torch import nn

labels = torch.randint(4, (160,))
images = torch.randn(160, 3, 16, 16) + labels[:, None, None, None] / 2
data = [(TensorImage(images[i]), labels[i]) for i in range(160)]
loaders = DataLoaders.from_dsets(data[:128], data[128:], bs=16, num_workers=0)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 4),
)
prepared(model)
losses = []


class Note(Callback):
    def before_batch(self):
        self.region = autocast()
        self.region.__enter__()

    def after_loss(self):
        self.region.__exit__(None, None, None)
        if self.training:
            losses.append(self.loss.item())


learner = Learner(
    loaders, model, loss_func=nn.CrossEntropyLoss(), metrics=accuracy, cbs=[Note()]
)
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(3, 1e-2)
finish(losses)
