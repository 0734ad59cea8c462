"""A small agent, as in cleanrl's PPO: two networks of 64 units, called by a method."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(0)


def network(out):
    return nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, out)
    )


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic, self.actor = network(1), network(2)

    def get_action_and_value(self, x, action=None):
        chances = Categorical(logits=self.actor(x))
        action = chances.sample() if action is None else action
        return action, chances.log_prob(action), chances.entropy(), self.critic(x)


agent = Agent()
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4)
state = torch.randn(4, 4)
for _ in range(12):
    seen = []
    for _ in range(128):
        with torch.no_grad():
            action, chance, _, value = agent.get_action_and_value(state)
        state = torch.tanh(state + 0.1 * action[:, None] - 0.05)
        seen.append((state, action, chance, value[:, 0]))
    states, actions, chances, values = map(torch.cat, zip(*seen, strict=True))
    gains = states[:, 0] - values
    for _ in range(4):
        for batch in torch.randperm(512).split(128):
            _, new, entropy, value = agent.get_action_and_value(
                states[batch], actions[batch]
            )
            ratio = (new - chances[batch]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            policy = -torch.min(ratio * gains[batch], clipped * gains[batch]).mean()
            error = (value[:, 0] - states[batch, 0]).square().mean()
            loss = policy + 0.5 * error - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
print(loss.item())
