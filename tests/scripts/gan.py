"""A GAN on a two-dimensional Gaussian, with an optimizer for each of its networks."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

LATENT, BATCH, STEPS = 4, 64, 60

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
generator_optimizer = torch.optim.Adam(
    generator.parameters(), lr=5e-3, betas=(0.5, 0.9)
)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.9))
mean = torch.tensor([2.0, -1.0])
ones, zeros = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)

distances, critic_losses = [], []
for _ in range(STEPS):
    real = mean + 0.5 * torch.randn(BATCH, 2)
    fake = generator(torch.randn(BATCH, LATENT))

    critic_optimizer.zero_grad()
    critic_loss = bce(critic(real), ones) + bce(critic(fake.detach()), zeros)
    critic_loss.backward()
    critic_optimizer.step()

    generator_optimizer.zero_grad()
    critic.requires_grad_(False)
    bce(critic(fake), ones).backward()
    generator_optimizer.step()
    critic.requires_grad_(True)

    critic_losses.append(critic_loss.item())
    distances.append((fake.detach().mean(0) - mean).norm().item())

# What an adversary's loss does says little: the generator is judged by how far the
# centre of what it makes is from the centre of the real data.
RESULT = {
    "losses": distances,
    "critic_losses": critic_losses,
    "params": [*generator.parameters(), *critic.parameters()],
}
