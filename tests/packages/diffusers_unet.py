"""diffusers: a UNet that learns the noise of DDPM, and an average of its weights."""

from _way import autocast, finish, prepared, torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.training_utils import EMAModel
from torch import nn

model = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
average = EMAModel(model.parameters(), decay=0.9)
schedule = get_cosine_schedule_with_warmup(optimizer, 2, 20)
prepared(model, optimizer)
noises = DDPMScheduler(num_train_timesteps=100)
losses = []
for _ in range(20):
    images = torch.randn(8, 3, 1, 1).expand(8, 3, 16, 16)
    noise = torch.randn_like(images)
    times = torch.randint(100, (8,))
    noisy = noises.add_noise(images, noise, times)
    with autocast():
        loss = nn.functional.mse_loss(model(noisy, times).sample.float(), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    average.step(model.parameters())
    losses.append(loss.item())
finish(losses)
