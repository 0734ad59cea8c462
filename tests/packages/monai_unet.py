"""MONAI's SupervisedTrainer, a U-Net and the Dice loss, on three-dimensional images."""

from _way import autocast, finish, prepared, torch
from monai.data import DataLoader, Dataset
from monai.engines import SupervisedTrainer
from monai.inferers import SimpleInferer
from monai.losses import DiceCELoss
from monai.networks.nets import UNet


class Inferer(SimpleInferer):
    """Stands for `amp=True`, which is CUDA's autocast alone."""

    def __call__(self, inputs, network, *args, **kwargs):
        with autocast():
            return super().__call__(inputs, network, *args, **kwargs).float()


images = torch.randn(32, 1, 16, 16, 16)
data = [{"image": image, "label": (image > 0.5).float()} for image in images]
model = UNet(3, 1, 1, channels=(8, 16, 32), strides=(2, 2), num_res_units=1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
prepared(model, optimizer)
losses = []
trainer = SupervisedTrainer(
    device=torch.device("cpu"),
    max_epochs=4,
    train_data_loader=DataLoader(Dataset(data), batch_size=4),
    network=model,
    optimizer=optimizer,
    loss_function=DiceCELoss(sigmoid=True),
    decollate=False,
    inferer=Inferer(),
)
trainer.logger.setLevel("ERROR")
trainer.add_event_handler(
    "ITERATION_COMPLETED", lambda engine: losses.append(engine.state.output["loss"])
)
trainer.run()
finish(losses)
