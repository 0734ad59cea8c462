"""Sentences of all lengths, padded to the longest of each batch."""

import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

WORDS, WIDTH = 40, 32


class Tagger(nn.Module):
    """Whether more than half the words of a sentence are from the second half."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, WIDTH, padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, sentences):
        there = (sentences != 0).unsqueeze(-1)
        mixed = self.mix(self.words(sentences)) * there
        return self.head(mixed.sum(1) / there.sum(1))


def batch(generator):
    lengths = [generator.randrange(3, 40) for _ in range(16)]
    lists = [[generator.randrange(1, WORDS + 1) for _ in range(n)] for n in lengths]
    labels = [int(sum(w > WORDS // 2 for w in each) * 2 > len(each)) for each in lists]
    sentences = pad_sequence(list(map(torch.tensor, lists)), batch_first=True)
    return sentences, torch.tensor(labels)


torch.manual_seed(0)
chance = random.Random(0)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
losses = []
for _ in range(40):
    sentences, labels = batch(chance)
    loss = nn.functional.cross_entropy(model(sentences), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

RESULT = {"losses": losses, "params": list(model.parameters())}
