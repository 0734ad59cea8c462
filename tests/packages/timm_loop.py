"""timm: its models, optimizer, mixup, soft loss and average of weights, in a loop."""

from _way import autocast, finish, prepared, torch
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3

model = create_model(
    "vit_tiny_patch16_224", img_size=64, num_classes=10, depth=3, pretrained=False
)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
average = ModelEmaV3(model, decay=0.9)
prepared(model, optimizer)
mixup = Mixup(mixup_alpha=0.2, num_classes=10, label_smoothing=0.1)
criterion = SoftTargetCrossEntropy()
losses = []
for step in range(20):
    labels = torch.randint(10, (8,))
    images = torch.randn(8, 3, 64, 64) + labels[:, None, None, None] / 5
    images, targets = mixup(images, labels)
    with autocast():
        loss = criterion(model(images), targets)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    average.update(model, step=step)
    losses.append(loss.item())
finish(losses)
