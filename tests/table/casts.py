"""Programs in which a cast could be stale, lost, shared wrongly, or cast too much."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.table.rows import frozen, linear, numbers, parameter, row


@row((4, 8), fc=linear(8), w=lambda: torch.randn(8, 8))
def written_between(m: Any, x: Tensor) -> Tensor:
    hidden = x.detach().exp()
    first = F.linear(hidden, m.w)
    hidden.view(-1)[0:3].zero_()
    return first + 2 * F.linear(hidden, m.w) + m.fc(x)


@row((4, 8), w=parameter(8, 8))
def piece_of_a_view_of_a_weight(m: Any, x: Tensor) -> Tensor:
    piece = m.w.t().chunk(2, 1)[0]
    return sum(x @ piece for _ in range(12))


@row((4, 8), w=parameter(8, 8))
def view_of_a_weight_in_later_regions(m: Any, x: Tensor) -> Tensor:
    view = m.w.t()
    total = sum(x @ view for _ in range(3))
    with torch.no_grad():
        constant = x @ view
    return total + constant + sum(x @ view for _ in range(3))


@row((4, 8), fc=linear(8), w=lambda: torch.randn(8, 8))
def written_weight(m: Any, x: Tensor) -> Tensor:
    first = F.linear(x.detach(), m.w)
    m.w.neg_()
    return first + 2 * F.linear(x.detach(), m.w) + m.fc(x)


@row((4, 8), fc=linear(8), w=lambda: torch.randn(4, 4))
def written_copy(m: Any, x: Tensor) -> Any:
    left = x.detach()[:, :4]
    flat = left.reshape(-1).mul_(-1)
    return F.linear(left, m.w), F.linear(flat.view(4, 4), m.w), m.fc(x)


@row((4, 8), fc=linear(8), low=("linear",))
def features_returned(m: Any, x: Tensor) -> Any:
    features = m.fc(x)
    return m.fc(features.relu()).sum(), features, features


@row((4, 8), fc=linear(8))
def statistics_read(m: Any, x: Tensor) -> Any:
    found = torch.native_layer_norm(m.fc(x), [8], None, None, 1e-5)
    return m.fc(found[0]), *found[1:]


@row(frozen(4, 8), fc=linear(8), mean=lambda: torch.zeros(8))
def statistics_written_in_the_graph(m: Any, x: Tensor) -> Any:
    mean, var = m.mean.clone(), torch.ones(8)
    F.batch_norm(x, mean, var, training=True, momentum=1.0)
    return mean, m.fc(x)


SIZES = {"exported": "the number of pieces is data, which an export refuses"}


@row((4, 8), fc=linear(8), low=("tensor_split",), without=SIZES)
def pieces_whose_number_is_data(m: Any, x: Tensor) -> Any:
    first, second = torch.tensor_split(m.fc(x), torch.tensor(2))
    return m.fc(first), second


@row(frozen(1, 4, 8), lambda: torch.zeros(4, 4).fill_diagonal_(-3e38), fc=linear(8))
def masked_by_the_lowest(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    x = m.fc(x)
    return F.scaled_dot_product_attention(x, x, x, mask)


@row(numbers(8, 4), table=lambda: nn.Embedding(8, 8), fc=linear(8), high=("embedding",))
def rows_of_a_table(m: Any, ids: Tensor) -> Tensor:
    return m.fc(m.table(ids))


@row((4, 8), numbers(9, 4), fc=linear(8))
def floats_made_of_integers(m: Any, x: Tensor, i: Tensor) -> Tensor:
    i = i + 1
    factors = i / 3 + i.sqrt() + torch.log(i) + torch.true_divide(i, 7)
    factors = factors + i.float().mean() + torch.where(i > 2, 1.0, 0.5)
    return m.fc(m.fc(x)) * factors.unsqueeze(-1)


@row((4, 8), fc=linear(8))
def read_by_its_places(m: Any, x: Tensor) -> Any:
    every = m.fc(x)[:, 1::2]
    return every.exp(), every.as_strided((3, 3), (8, 2), 3).exp(), m.fc(x).t()[1:4]
