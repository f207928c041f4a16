"""DBNet: a residual backbone, a feature pyramid, and maps of probability, threshold and the step between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

StepName = Literal["sigmoid", "exponential"]
ArithmeticName = Literal["fp32", "as-it-comes"]
# The paper's amplification of the step.
STEEPNESS = 50.0


class Predicted(NamedTuple):
    """What DBNet says of each pixel; of shape (batch, height, width).

    Args:
        logits: Of the probability, before the sigmoid.
        probability: That it is text.
        threshold: Above which probabilities are text.
        binary: The step between the two, nearly 0 or 1.
    """

    logits: Tensor
    probability: Tensor
    threshold: Tensor
    binary: Tensor


class Residual(nn.Module):
    """Two convolutions beside a shortcut.

    Args:
        inputs: Channels that come in.
        outputs: Channels that go out.
        stride: Of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        inner = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inner)) + self.shortcut(x))


class Pyramid(nn.Module):
    """Features of all stages at the resolution of the finest.

    Args:
        widths: Channels of the stages, the finest first.
        outputs: Channels that go out; a share of it for each stage.
    """

    def __init__(self, widths: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, outputs, 1, bias=False) for width in widths)
        shares = [outputs // len(widths)] * len(widths)
        self.smooth = nn.ModuleList(nn.Conv2d(outputs, share, 3, 1, 1, bias=False) for share in shares)
        self.width = sum(shares)

    def forward(self, stages: list[Tensor]) -> Tensor:
        """The stages, each with the coarser ones added, side by side."""
        merged = [lateral(x) for lateral, x in zip(self.lateral, stages, strict=True)]
        for i in reversed(range(len(merged) - 1)):
            merged[i] = merged[i] + F.interpolate(merged[i + 1], size=merged[i].shape[-2:], mode="nearest")
        size = merged[0].shape[-2:]
        parts = [F.interpolate(s(x), size=size, mode="nearest") for s, x in zip(self.smooth, merged, strict=True)]
        return torch.cat(parts, 1)


class Head(nn.Module):
    """Logits of one map, at four times the resolution of the features.

    Args:
        inputs: Channels that come in.
        width: Channels inside.
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, width, 3, 1, 1, bias=False)
        self.conv_norm = nn.BatchNorm2d(width)
        # A 1x1 convolution and a shuffle of pixels are a transposed 2x2 convolution of stride 2, and faster.
        self.up = nn.Conv2d(width, 4 * width, 1)
        self.up_norm = nn.BatchNorm2d(width)
        self.out = nn.Conv2d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (batch, height, width)."""
        x = F.relu(self.conv_norm(self.conv(x)))
        x = F.relu(self.up_norm(F.pixel_shuffle(self.up(x), 2)))
        return F.pixel_shuffle(self.out(x), 2).squeeze(1)


class Binarization(nn.Module):
    """Both maps, and the step between them.

    Numerics:
        `sigmoid(k (P - T))` is the paper's `1 / (1 + exp(-k (P - T)))` without the number that overflows: in FP16
        `exp` is inf where P is 0.222 below T. The step is 0 there, as it should be; its gradient is 0 times inf.
        Autocast would take `exp` in FP32. Switched off, it takes numbers as they come, and they come in FP16.

    Args:
        step: `sigmoid`, or the paper's formula: `exponential`.
        arithmetic: `fp32` widens what comes in.
    """

    def __init__(self, step: StepName, arithmetic: ArithmeticName) -> None:
        super().__init__()
        self.step, self.arithmetic = step, arithmetic

    def forward(self, logits: Tensor, threshold_logits: Tensor) -> Predicted:
        """The maps."""
        with torch.autocast(logits.device.type, enabled=False):
            if self.arithmetic == "fp32":
                logits, threshold_logits = logits.float(), threshold_logits.float()
            probability, threshold = logits.sigmoid(), threshold_logits.sigmoid()
            if self.step == "sigmoid":
                binary = torch.sigmoid(STEEPNESS * (probability - threshold))
            else:
                binary = 1 / (1 + torch.exp(-STEEPNESS * (probability - threshold)))
            return Predicted(logits, probability, threshold, binary)


class SmallBackbone(nn.Module):
    """Features of some stages; the first has a quarter of the picture's resolution, each other half of the one before.

    Args:
        channels: Of a picture.
        widths: Channels of the stages.
        depth: Residual blocks of each stage.
    """

    def __init__(self, channels: int, widths: Sequence[int], depth: Sequence[int]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, 2, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(widths[0])
        self.stages = nn.ModuleList()
        inputs = widths[0]
        for width, blocks in zip(widths, depth, strict=True):
            rest = [Residual(width, width, 1) for _ in range(blocks - 1)]
            self.stages.append(nn.Sequential(Residual(inputs, width, 2), *rest))
            inputs = width

    def forward(self, images: Tensor) -> list[Tensor]:
        """The stages, the finest first."""
        x = F.relu(self.stem_norm(self.stem(images)))
        found: list[Tensor] = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


class DBNet(nn.Module):
    """Finds text: pictures in, maps out.

    Args:
        backbone: Gives the features of its stages, the finest first, at a quarter of the picture's resolution.
        widths: Channels of these stages.
        neck: Channels of the pyramid.
        head: Channels inside of the heads.
        binarization: The step between the maps; it has no weights.
    """

    def __init__(
        self, backbone: nn.Module, *, widths: Sequence[int], neck: int, head: int, binarization: Binarization
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.pyramid = Pyramid(widths, neck)
        self.probability = Head(self.pyramid.width, head)
        self.threshold = Head(self.pyramid.width, head)
        # One positive for three negatives, before anything is learnt: from 0 the probabilities can stay below one half
        # for a long time.
        nn.init.constant_(cast("Tensor", self.probability.out.bias), -math.log(3))
        self.binarization = binarization

    def forward(self, images: Tensor) -> Predicted:
        """The maps of pictures of shape (batch, channels, height, width)."""
        features = self.pyramid(self.backbone(images))
        return self.binarization(self.probability(features), self.threshold(features))
