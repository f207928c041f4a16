"""MMGCN: a graph network for each modality over users and items, and the mean of what they say."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from floatline.systems.mmgcn.interactions import Interactions
from floatline.systems.mmgcn.messages import Neighbours, Summing


class MMGCN(nn.Module):
    """Scores of pairs of items for users, from ids and from the features of several modalities.

    Wei et al. 2019, MMGCN: Multi-modal Graph Convolution Network for Personalized Recommendation of Micro-video.

    Args:
        data: Training pairs, which are the graph, and features.
        num_layers: Graph layers of each modality.
        dim_id: Width of the id embeddings and of the result.
        dim_latent: Width that features are projected to; None takes them as they are.
        normalize: Whether features and preferences are brought to length 1.
        aggregation: How messages are summed.
        init: How embeddings begin.
        registered: Whether embeddings are parameters. False makes bare tensors, as the team had them.
    """

    id_embedding: Tensor

    def __init__(
        self,
        data: Interactions,
        *,
        num_layers: int,
        dim_id: int,
        dim_latent: int | None,
        normalize: bool,
        aggregation: Summing,
        init: Literal["xavier", "uniform"],
        registered: bool,
    ) -> None:
        super().__init__()
        self.num_users = data.num_users
        num_nodes = data.num_users + data.num_items
        self.neighbours = Neighbours(_both_ways(data), num_nodes, aggregation)
        self.id_embedding = make_embedding(num_nodes, dim_id, init=init, registered=registered)
        self.gcns = nn.ModuleDict(
            {
                name: ModalityGCN(
                    features,
                    data.num_users,
                    num_layers=num_layers,
                    dim_id=dim_id,
                    dim_latent=dim_latent,
                    normalize=normalize,
                    init=init,
                    registered=registered,
                )
                for name, features in data.features.items()
            }
        )

    def forward(self, users: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
        """Scores of the items that were taken and of the others, of shape (B, 2)."""
        nodes = self.represent()
        user = nodes[users]
        taken, other = nodes[self.num_users + positives], nodes[self.num_users + negatives]
        # Sums are FP32 under CUDA's autocast, and not under the CPU's: said here, they are the same on both.
        scores = [(user * item).sum(-1, dtype=torch.float32) for item in (taken, other)]
        return torch.stack(scores, dim=1)

    def represent(self) -> Tensor:
        """A row for each user and, after them, for each item."""
        rows = [gcn(self.id_embedding, self.neighbours) for gcn in self.gcns.values()]
        return torch.stack(rows).mean(0)


class ModalityGCN(nn.Module):
    """The graph network of one modality.

    Args:
        features: Of the items.
        num_users: Users have no features, but a preference that is learnt.
        num_layers: Graph layers.
        dim_id: Width of the id embeddings and of the result.
        dim_latent: Width that features are projected to; None takes them as they are.
        normalize: Whether features and preferences are brought to length 1.
        init: How the preference begins.
        registered: Whether the preference is a parameter.
    """

    features: Tensor
    preference: Tensor

    def __init__(
        self,
        features: Tensor,
        num_users: int,
        *,
        num_layers: int,
        dim_id: int,
        dim_latent: int | None,
        normalize: bool,
        init: Literal["xavier", "uniform"],
        registered: bool,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.register_buffer("features", features, persistent=False)
        width = features.shape[1] if dim_latent is None else dim_latent
        self.project = nn.Identity() if dim_latent is None else nn.Linear(features.shape[1], dim_latent)
        self.preference = make_embedding(num_users, width, init=init, registered=registered)
        widths = [width, *[dim_id] * (num_layers - 1)]
        self.layers = nn.ModuleList(GraphLayer(each, dim_id) for each in widths)

    def forward(self, id_embedding: Tensor, neighbours: Neighbours) -> Tensor:
        """Rows of users and items, after the last layer."""
        items = self.project(self.features)
        x = torch.cat([self.preference.to(items), items])
        if self.normalize:
            # In FP32: the eps of normalize is 0 in FP16, and a row of zeros would be 0/0.
            x = F.normalize(x.float(), dim=-1).to(items.dtype)
        for layer in self.layers:
            x = layer(x, id_embedding, neighbours)
        return x


class GraphLayer(nn.Module):
    """What the neighbours say, and what the node says itself, with its id."""

    def __init__(self, width: int, dim_id: int) -> None:
        super().__init__()
        self.message = nn.Linear(width, width, bias=False)
        self.own = nn.Linear(width, dim_id)
        self.combine = nn.Linear(width, dim_id)

    def forward(self, x: Tensor, id_embedding: Tensor, neighbours: Neighbours) -> Tensor:
        """The next rows, of width dim_id."""
        heard = F.leaky_relu(neighbours(self.message(x)))
        own = F.leaky_relu(self.own(x))
        return F.leaky_relu(self.combine(heard) + own + id_embedding.to(own))


def make_embedding(num_rows: int, width: int, *, init: Literal["xavier", "uniform"], registered: bool) -> Tensor:
    """A table of rows that is trained; or the team's, which is not: no module holds a bare tensor."""
    rows = torch.rand(num_rows, width)
    if init == "xavier":
        nn.init.xavier_normal_(rows)
    return nn.Parameter(rows) if registered else rows.requires_grad_()


def _both_ways(data: Interactions) -> Tensor:
    """Edges between users and items in both directions, sorted by where they go."""
    users, items = data.train[0], data.train[1] + data.num_users
    edges = torch.stack([torch.cat([users, items]), torch.cat([items, users])])
    return edges[:, edges[1].argsort(stable=True)]
