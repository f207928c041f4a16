"""Neighbours: the mean over the neighbours of every node, by torch_geometric's message passing or by one kernel."""

from __future__ import annotations

import importlib.util
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import Aggregation

Summing = Literal["grouped", "scatter", "fused"]
# Messages that are summed at once. Their number is filled up with zeros for each node.
GROUP = 16


class GroupedSum(Aggregation):
    """Sums groups of messages in FP32, and the groups of a node in FP32.

    A sum by `scatter` in FP16 rounds after every message on a GPU, and stands still at 2,048 messages of one size.

    Numerics:
        Messages stay in their format, so that they take half the memory in FP16. No sum is rounded before its end.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        index: Tensor,
        ptr: Tensor | None,  # noqa: ARG002
        dim_size: int,
        dim: int,  # noqa: ARG002
    ) -> Tensor:
        """Sums of the rows of x, by the node that the group of 16 belongs to; torch_geometric calls this."""
        groups = x.view(-1, GROUP, x.shape[-1]).sum(1, dtype=torch.float32)
        total = groups.new_zeros(dim_size, x.shape[-1]).index_add_(0, index[::GROUP], groups)
        return total.to(x.dtype)


class Neighbours(MessagePassing):
    """The mean of what the neighbours of each node send.

    The graph is undirected: every edge is there in both directions. So the backward pass is the same sum, of gradients.

    Args:
        edges: From the first row to the second, sorted by the second, of shape (2, E).
        num_nodes: Users and items.
        aggregation: `grouped`; torch_geometric's own sum by `scatter`; or `fused`, which keeps no message in memory.
    """

    edges: Tensor
    degree: Tensor
    starts: Tensor

    def __init__(self, edges: Tensor, num_nodes: int, aggregation: Summing) -> None:
        super().__init__(aggr=GroupedSum() if aggregation == "grouped" else "sum")
        self.aggregation = aggregation
        degree = torch.bincount(edges[1], minlength=num_nodes)
        if aggregation == "grouped":
            edges = _fill_groups(edges, degree)
        if aggregation == "fused":
            edges = edges[0].to(torch.int32)  # the nodes that they lead to follow from `starts`
            self.register_buffer("starts", nn.functional.pad(degree.cumsum(0), (1, 0)), persistent=False)
        self.register_buffer("edges", edges, persistent=False)
        # As integers: a cast of the model to FP16 must not round them.
        self.register_buffer("degree", degree.clamp(min=1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Means of the rows of x over the neighbours of each node, in the format of x."""
        own = self.aggregation != "scatter"
        total = cast("Tensor", _UndirectedSum.apply(x, self) if own else self.propagate(self.edges, x=x))
        return (total / self.degree[:, None].float()).to(x.dtype)

    def message(self, x_j: Tensor) -> Tensor:
        """What a neighbour sends: its row."""
        return x_j

    def add_up(self, x: Tensor) -> Tensor:
        """Sums over the neighbours; a last row of zeros is what fills up the groups."""
        if self.aggregation == "fused":
            return _add_up_fused(x, self.edges, self.starts)
        num_nodes = x.shape[0]
        return self.propagate(self.edges, x=nn.functional.pad(x, (0, 0, 0, 1)), size=None)[:num_nodes]


def _add_up_fused(x: Tensor, sources: Tensor, starts: Tensor) -> Tensor:
    """By one kernel on a GPU that Triton knows; elsewhere with messages in FP32."""
    if x.is_cuda and importlib.util.find_spec("triton") is not None:
        from floatline.systems.mmgcn.fused_sum import sum_rows

        return sum_rows(x, sources, starts)
    targets = torch.arange(len(starts) - 1, device=x.device).repeat_interleave(starts.diff())
    total = torch.zeros(len(starts) - 1, x.shape[1], device=x.device)
    return total.index_add_(0, targets, x[sources].float()).to(x.dtype)


class _UndirectedSum(torch.autograd.Function):
    """y = A x with A = A^T: the gradient of x is A times that of y, and nothing needs to be kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, neighbours: Neighbours) -> Tensor:
        ctx.neighbours = neighbours
        return neighbours.add_up(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.neighbours.add_up(gradients[0]), None


def _fill_groups(edges: Tensor, degree: Tensor) -> Tensor:
    """Edges with as many more, from the row of zeros, as make the number of each node's a multiple of GROUP."""
    filled = -(-degree // GROUP) * GROUP
    targets = torch.arange(len(degree)).repeat_interleave(filled)
    sources = torch.full_like(targets, len(degree))
    first = (filled.cumsum(0) - filled)[edges[1]]
    within = torch.arange(edges.shape[1]) - (degree.cumsum(0) - degree)[edges[1]]
    sources[first + within] = edges[0]
    return torch.stack([sources, targets])
