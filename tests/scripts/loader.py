"""A small convolutional classifier, fed by a DataLoader with two worker processes."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Stripes(Dataset):
    """Noisy 8 by 8 pictures of stripes; the direction is the label."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = index % 4
        rows = torch.arange(8).view(8, 1).expand(8, 8)
        phase = [rows, rows.T, rows + rows.T, rows - rows.T][label]
        offset = torch.rand((), generator=generator) * 6
        noise = torch.randn(8, 8, generator=generator)
        picture = torch.sin(phase * 1.5 + offset) + 0.3 * noise
        return picture.unsqueeze(0), label


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    loader = DataLoader(Stripes(), batch_size=32, shuffle=True, num_workers=2)
    losses = []
    for _ in range(3):
        for pictures, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(pictures), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"losses": losses, "params": list(model.parameters()), "model": model}


if __name__ == "__main__":
    RESULT = main()
