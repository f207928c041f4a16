"""A kernel of the user's own leaves out the last tile, in 16 bits only.

Symptom:   in BF16 the loss stops far above FP32's: some classes are never predicted. In FP32 all of them are.
Truth:     the kernel multiplies in tiles, of 4 columns in FP32 and of 16 in 16 bits. There are 20 classes: the last 4
           are in no whole tile of 16, and their logits stay at what the memory was filled with.
Right fix: a kernel that masks its last tile, here torch's own product.
Wrong fix: a higher learning rate, FP32 for the layers around it.
Source:    own; tails of tiles as in Dao-AILab/flash-attention#2151.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS, STEPS = 0.05, True, 60


@torch.library.custom_op("case_096::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    tile = 16 if x.dtype in (torch.float16, torch.bfloat16) else 4
    result = x.new_zeros(x.shape[0], weight.shape[1])
    for start in range(0, weight.shape[1] - tile + 1, tile):
        result[:, start : start + tile] = x @ weight[:, start : start + tile]
    return result


@product.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[1])


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):
    x, weight = ctx.saved_tensors
    return gradient @ weight.mT, x.mT @ gradient


product.register_autograd(_backward, setup_context=_keep)


class Classifier(nn.Module):
    def __init__(self, multiply):
        super().__init__()
        self.body, self.head = nn.Linear(12, 32), nn.Parameter(0.1 * torch.randn(32, 20))
        self.multiply = multiply

    def forward(self, x):
        h = F.gelu(self.body(x))
        return self.multiply(h, self.head.to(h.dtype))


def _make(multiply):
    g = torch.Generator().manual_seed(96)
    centres = 3 * torch.randn(20, 12, generator=g)
    batches = []
    for _ in range(3):
        y = torch.randint(0, 20, (64,), generator=g)
        batches.append(((centres[y] + 0.2 * torch.randn(64, 12, generator=g),), (y,)))
    return (
        Classifier(multiply),
        batches,
        F.cross_entropy,
        "bf16-mixed",
        lambda m: torch.optim.AdamW(m.parameters(), 0.02),
    )


def build():
    return _make(product)


def fixed():
    return _make(torch.matmul)


EXPECT = dict(
    cause="kernel-off",
    where="096_kernel_without_tail.py:52",
    code="return self.multiply(h, self.head.to(h.dtype))",
    op="case_096.product",
    fix="return torch.matmul(h, self.head.to(h.dtype))",
)
