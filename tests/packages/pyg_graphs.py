"""PyTorch Geometric: batches of graphs of many sizes, through GIN and attention."""

from _way import autocast, finish, prepared, torch
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GATConv, GINConv, global_add_pool


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GINConv(nn.Sequential(nn.Linear(8, 64), nn.ReLU()))
        self.second = GATConv(64, 16, heads=4)
        self.head = nn.Linear(64, 3)

    def forward(self, x, edges, batch):
        x = self.first(x, edges).relu()
        x = self.second(x, edges).relu()
        return self.head(global_add_pool(x, batch, size=int(batch[-1]) + 1))


def graph(nodes):
    label = torch.randint(3, (1,))
    edges = torch.randint(nodes, (2, 3 * nodes))
    return Data(x=torch.randn(nodes, 8) + label, edge_index=edges, y=label)


data = [graph(nodes) for nodes in torch.randint(5, 30, (96,)).tolist()]
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
prepared(model, optimizer)
losses = []
for _ in range(3):
    for batch in DataLoader(data, batch_size=12):
        with autocast():
            out = model(batch.x, batch.edge_index, batch.batch)
            loss = nn.functional.cross_entropy(out, batch.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
finish(losses)
