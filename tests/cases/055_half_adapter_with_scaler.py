"""Adapter fine-tuning: everything (adapters too) loaded in half, trained with GradScaler.

Symptom:   ValueError: Attempting to unscale FP16 gradients.
Truth:     the trainable parameters themselves are FP16, so their gradients are FP16; GradScaler expects FP32
           parameters.
Right fix: keep the base in half, cast the trainable adapter parameters to FP32.
Wrong fix: disable the scaler (then gradients underflow / Adam in half gives NaN); edit grad_scaler.py to allow FP16.
Source:    pytorch/pytorch#74739, ShivamShrirao/diffusers#131, bitsandbytes-foundation/bitsandbytes#945
CUDA:      same.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

TARGET, FP32_TRAINS = 0.6, True


class LoRALinear(nn.Module):
    def __init__(self, d, r=3):
        super().__init__()
        self.base = nn.Linear(d, d)
        self.down, self.up = nn.Linear(d, r, bias=False), nn.Linear(r, d, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _loop(steps, fp32, probe, cast_adapters):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(55)
    model = nn.Sequential(LoRALinear(8), nn.ReLU(), LoRALinear(8))
    if not fp32:
        model = model.half()
    for n, p in model.named_parameters():
        p.requires_grad_("base" not in n)
        if cast_adapters and p.requires_grad:
            p.data = p.data.float()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 3e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=not fp32)
    if probe:
        probe(model=model, optimizer=opt, scaler=scaler)
    x = torch.randn(24, 8, generator=g)
    y = x.argmax(-1)
    losses = []
    for _ in range(steps):
        opt.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not fp32):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        losses.append(float(loss.detach()))
    return dict(losses=losses, model=model)


def train(steps=50, fp32=False, probe=None):
    return _loop(steps, fp32, probe, False)


def fixed(steps=50, fp32=False, probe=None):
    return _loop(steps, fp32, probe, True)


EXPECT = dict(
    cause="fp16-params-with-scaler",
    where="0.down.weight|055_half_adapter_with_scaler.py:36",
    code="model = model.half()",
    op="torch.amp.GradScaler.unscale_",
    fix="cast the trainable parameters to FP32",
)
