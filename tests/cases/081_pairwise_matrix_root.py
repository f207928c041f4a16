"""Pairwise distance matrix with sqrt, diagonal included.

Symptom:   finite loss, NaN gradients in the first step, AMP and FP32.
Truth:     the diagonal of the distance matrix is exactly 0; sqrt has an infinite derivative there and 0 * inf = NaN.
Right fix: mask the diagonal before the sqrt (double where), or sqrt(d2 + eps).
Wrong fix: FP32/BF16; gradient clipping; masking the diagonal after the sqrt (this case).
Source:    pytorch/pytorch#6394, pytorch/pytorch#2421
CUDA:      same.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 0.2, False, 60


class Layout(nn.Module):
    """Learns 2-d coordinates that reproduce given distances (MDS)."""

    def __init__(self, alt, n=6):
        super().__init__()
        self.alt, self.xy = alt, nn.Linear(n, 2, bias=False)

    def forward(self, eye):
        p = self.xy(eye).float()
        d2 = (p[:, None] - p[None]).pow(2).sum(-1)
        off = 1 - eye
        d = torch.where(off > 0, d2, torch.ones_like(d2)).sqrt() if self.alt else d2.sqrt()
        return d * off


def loss_fn(d, target):
    return (d - target).pow(2).mean()


def _make(alt):
    g = torch.Generator().manual_seed(81)
    p = torch.randn(6, 2, generator=g)
    t = (p[:, None] - p[None]).norm(dim=-1)
    return (
        Layout(alt),
        [((torch.eye(6),), (t,))],
        loss_fn,
        "fp16-mixed",
        lambda m: torch.optim.Adam(m.parameters(), 5e-2),
    )


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="singular-gradient",
    where="|081_pairwise_matrix_root.py:28",
    code="d = torch.where(off > 0, d2, torch.ones_like(d2)).sqrt() if self.alt else d2.sqrt()",
    op="SqrtBackward0",
    fix="replace the zero entries before the sqrt (double where)",
)
