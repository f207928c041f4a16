"""Normalising flow: log|det W| of a matrix that autocast turned into half.

Symptom:   RuntimeError: linalg.slogdet: Low precision dtypes not supported. Got Half - only under autocast.
Truth:     L @ U is a matmul, so autocast returns half; slogdet has no half kernel and is not in the autocast FP32 list
           of this backend.
Right fix: leave autocast for the determinant: with autocast(enabled=False): slogdet((L @ U).float()).
Wrong fix: .half() on everything; try/except that drops the term; moving to another device.
Source:    own repro (class of facebookresearch/maskrcnn-benchmark#1048: op not implemented for 'Half')
CUDA:      same error class (linalg has no half kernels), some ops are promoted there.
"""

import torch
import torch.nn as nn

TARGET, FP32_TRAINS, STEPS = 2.3, True, 60


class Flow(nn.Module):
    def __init__(self, alt, d=2):
        super().__init__()
        self.alt = alt
        self.low, self.up, self.shift = (
            nn.Parameter(torch.eye(d)),
            nn.Parameter(torch.eye(d)),
            nn.Parameter(torch.zeros(d)),
        )

    def forward(self, x):
        W = self.low @ self.up
        if self.alt:
            with torch.autocast("cpu", enabled=False):
                logdet = torch.linalg.slogdet((self.low @ self.up).float())[1]
        else:
            logdet = torch.linalg.slogdet(W)[1]
        return x @ W + self.shift, logdet


def loss_fn(out):
    z, logdet = out
    return 0.5 * z.float().pow(2).sum(1).mean() - logdet.float() + 1.84


def _make(alt):
    g = torch.Generator().manual_seed(63)
    mix = torch.tensor([[0.6, 0.3], [-0.2, 0.4]])
    batches = [((torch.randn(48, 2, generator=g) @ mix + 2,), ()) for _ in range(3)]
    return Flow(alt), batches, loss_fn, "fp16-mixed", lambda m: torch.optim.Adam(m.parameters(), 5e-2)


def build():
    return _make(False)


def fixed():
    return _make(True)


EXPECT = dict(
    cause="unsupported-half-op",
    where="|063_flow_log_determinant.py:34",
    code="logdet = torch.linalg.slogdet(W)[1]",
    op="torch.linalg.slogdet",
    fix="compute the determinant in FP32 outside autocast",
)
