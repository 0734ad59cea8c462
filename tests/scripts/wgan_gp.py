"""A Wasserstein GAN with a gradient penalty: the critic is differentiated twice."""

import torch
from torch import nn

LATENT, BATCH, STEPS, CRITIC_STEPS = 4, 64, 20, 3

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(LATENT, 32), nn.ReLU(), nn.Linear(32, 2))
critic = nn.Sequential(
    nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
)
generator_optimizer = torch.optim.Adam(
    generator.parameters(), lr=1e-2, betas=(0.5, 0.9)
)
critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
mean = torch.tensor([2.0, -1.0])


def real_batch():
    return mean + 0.5 * torch.randn(BATCH, 2)


def gradient_penalty(real, fake):
    share = torch.rand(BATCH, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    return ((gradient.norm(dim=1) - 1) ** 2).mean()


distances, penalties = [], []
for _ in range(STEPS):
    for _ in range(CRITIC_STEPS):
        real = real_batch()
        with torch.no_grad():
            fake = generator(torch.randn(BATCH, LATENT))
        critic_optimizer.zero_grad()
        penalty = gradient_penalty(real, fake)
        (critic(fake).mean() - critic(real).mean() + 10 * penalty).backward()
        critic_optimizer.step()
        penalties.append(penalty.item())

    generator_optimizer.zero_grad()
    fake = generator(torch.randn(BATCH, LATENT))
    (-critic(fake).mean()).backward()
    generator_optimizer.step()
    distances.append((fake.detach().mean(0) - mean).norm().item())

RESULT = {
    "losses": distances,
    "penalties": penalties,
    "params": [*generator.parameters(), *critic.parameters()],
}
