"""A transformer that says the next token, conditioned on accuracies and a category."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from floatline.errors import TargetError

ConditioningName = Literal["bounded", "relu", "gelu-clamp"]
MaskName = Literal["lowest", "constant"]

_LARGEST = 65000  # of the clamp that was believed to keep values in FP16's range


class AccuracyConditioning(nn.Module):
    """Turns accuracies and a category into a vector that is added to every token.

    Numerics:
        "bounded" clamps accuracies to [0, 1], and tanh keeps every element in [-1, 1]. "relu" is what the team began
        with, "gelu-clamp" what they made of it; LayerNorm bounds both already, by sqrt(width - 1) times its weight. A
        NaN stays a NaN in all of them: the guard skips such a step. Checked by tests/systems/test_conditioned.py.

    Args:
        num_accuracies: Accuracies of a sequence.
        num_categories: Categories there are.
        width: Of the vector.
        kind: "bounded", "relu" or "gelu-clamp".
    """

    def __init__(self, num_accuracies: int, num_categories: int, width: int, *, kind: ConditioningName) -> None:
        super().__init__()
        self.kind: ConditioningName = kind
        self.num_categories = num_categories
        self.accuracy_projection = nn.Sequential(
            nn.Linear(num_accuracies, width // 2),
            nn.ReLU() if kind == "relu" else nn.GELU(),
            nn.Linear(width // 2, width),
            nn.LayerNorm(width),
        )
        self.category_embedding = nn.Embedding(num_categories, width)

    def forward(self, accuracies: Tensor, categories: Tensor) -> Tensor:
        """(n, width) from (n, num_accuracies) and (n,)."""
        # On a GPU the look would wait for the device in every step, and there torch's own assertion ends the run.
        if categories.device.type == "cpu":
            check_categories(categories, self.num_categories)
        if self.kind != "relu":
            accuracies = accuracies.clamp(0.0, 1.0)
        encoding = self.accuracy_projection(accuracies)
        category = self.category_embedding(categories)
        if self.kind == "relu":
            return encoding + category
        if self.kind == "gelu-clamp":
            encoding = torch.clamp(encoding, -_LARGEST, _LARGEST)
            return torch.clamp(encoding + category, -_LARGEST, _LARGEST)
        return torch.tanh(encoding + category)


def check_categories(categories: Tensor, num_categories: int) -> None:
    """TargetError where a category does not exist."""
    wrong = (categories < 0) | (categories >= num_categories)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        found = int(categories[row])
        raise TargetError(
            f"Category {found} of row {row} does not exist. Give a number from 0 to {num_categories - 1}."
        )


class Attention(nn.Module):
    """Each position sees those before it that are not padding."""

    def __init__(self, width: int, heads: int, *, mask: MaskName) -> None:
        super().__init__()
        self.heads = heads
        self.mask: MaskName = mask
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """(n, length, width); `hidden` (n, 1, length, length) is True where a position must not look."""
        num, length, width = x.shape
        q, k, v = self.qkv(x).view(num, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5
        if self.mask == "constant":
            scores = scores.masked_fill(hidden, -1e9)
        else:
            # A row that sees nothing gives equal weights, not NaN, because this number is finite.
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(num, length, width))


class FeedForward(nn.Module):
    """Two layers with a ReLU between; the hidden values are `scale` times as large as they need to be.

    Numerics:
        The scale is taken out again, so that in FP32 a power of two changes no bit of the result. In FP16 hidden values
        above 65504 / scale become inf. "clamp" turns them into 64992, and their gradient into 0.
    """

    def __init__(self, width: int, *, scale: float, clamp: bool) -> None:
        super().__init__()
        self.scale, self.clamp = scale, clamp
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width)."""
        inner = torch.relu(self.up(x))
        if self.scale == 1:
            return self.down(inner)
        inner = inner * self.scale
        if self.clamp:
            inner = torch.clamp(inner, -_LARGEST, _LARGEST)
        return self.down(inner) / self.scale


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a LayerNorm, on a residual stream."""

    def __init__(self, width: int, heads: int, *, mask: MaskName, scale: float, clamp: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, mask=mask)
        self.feed_forward = FeedForward(width, scale=scale, clamp=clamp)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        """(n, length, width)."""
        x = x + self.attention(self.norm1(x), hidden)
        return x + self.feed_forward(self.norm2(x))


class ConditionedTransformer(nn.Module):
    """Logits of the next token; token `vocabulary` is padding.

    Args:
        vocabulary: Tokens that can be said.
        length: The longest sequence.
        num_accuracies: Accuracies of a sequence.
        num_categories: Categories there are.
        width: Of the residual stream.
        heads: Of the attention; divides width.
        layers: Blocks.
        conditioning: See AccuracyConditioning.
        mask: What hides positions: the "lowest" number of the dtype, or the "constant" -1e9.
        feed_forward_scale: See FeedForward.
        feed_forward_clamp: See FeedForward.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        length: int,
        num_accuracies: int,
        num_categories: int,
        width: int,
        heads: int,
        layers: int,
        conditioning: ConditioningName = "bounded",
        mask: MaskName = "lowest",
        feed_forward_scale: float = 1.0,
        feed_forward_clamp: bool = False,
    ) -> None:
        super().__init__()
        self.vocabulary, self.length = vocabulary, length
        self.token, self.position = nn.Embedding(vocabulary + 1, width), nn.Embedding(length, width)
        self.conditioning = AccuracyConditioning(num_accuracies, num_categories, width, kind=conditioning)
        self.blocks = nn.ModuleList(
            Block(width, heads, mask=mask, scale=feed_forward_scale, clamp=feed_forward_clamp) for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, accuracies: Tensor, categories: Tensor) -> Tensor:
        """(n, length, vocabulary) from (n, length), (n, num_accuracies) and (n,)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        condition = self.conditioning(accuracies, categories)
        x = self.token(tokens) + self.position(places) + condition[:, None]
        hidden = (places[None, :] > places[:, None]) | (tokens == self.vocabulary)[:, None, :]
        for block in self.blocks:
            x = block(x, hidden[:, None])
        return self.head(self.norm(x))
