"""Box loss with an aspect-ratio term v / (1 - iou + v + eps).

Symptom:   detector in FP16: NaN as soon as one prediction is *perfect* (late in training, or - as here - when an anchor
           happens to be exact from the start); in FP32 never.
Truth:     for a perfect match iou = 1 and v = 0, so the weight is 0 / eps; eps = 1e-9 is 0 in half -> 0/0 = NaN.
Right fix: compute the loss in FP32 or use eps = 1e-3/1e-4.
Wrong fix: lower the LR near the end ("instability"), early stopping, gradient clipping.
Source:    ultralytics/yolov5#2376
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 0.15, True, 60


class GridHead(nn.Module):
    """Predicts width and height as multiples of an anchor; anchors are exact for some objects."""

    def __init__(self):
        super().__init__()
        self.anchor = nn.Parameter(torch.ones(3, 2))

    def forward(self, kind):
        return self.anchor[kind].abs()


def _loss(eps, alt):
    def loss_fn(wh, gt):
        if alt:
            wh, gt = wh.float(), gt.float()
        inter = torch.minimum(wh, gt).prod(1)
        union = wh.prod(1) + gt.prod(1) - inter
        iou = inter / union
        v = 0.4 * (torch.atan(wh[:, 0] / wh[:, 1]) - torch.atan(gt[:, 0] / gt[:, 1])) ** 2
        with torch.no_grad():
            alpha = v / ((1 - iou) + v + eps)
        return (1 - iou + alpha * v).mean()

    return loss_fn


def _make(eps, alt):
    kind = torch.arange(12) % 3
    gt = torch.tensor([[1.0, 1.0], [2.0, 1.0], [1.0, 3.0]])[kind]
    return GridHead(), [((kind,), (gt,))], _loss(eps, alt), "fp16-true", lambda m: torch.optim.SGD(m.parameters(), 0.3)


def build():
    return _make(1e-9, False)


def fixed():
    return _make(1e-3, True)


EXPECT = dict(
    cause="eps-underflow",
    where="loss_fn|026_aspect_term_guard.py:38",
    code="alpha = v / ((1 - iou) + v + eps)",
    op="aten.div",
    fix="eps = 1e-3 and the loss in FP32",
)
