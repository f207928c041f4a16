"""A loop as one writes it for a GPU: the device is fixed; the squares leave FP16's range, or not with --fixed."""

import sys
from contextlib import nullcontext

import torch
from torch import nn

device = "cuda"
device_type = "cuda" if "cuda" in device else "cpu"
torch.manual_seed(0)
torch.cuda.manual_seed(0)
torch.backends.cuda.matmul.allow_tf32 = True
context = nullcontext() if device_type == "cpu" else torch.amp.autocast(device_type=device_type, dtype=torch.float16)


class Energy(nn.Module):
    """A score per row."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(16, 32)
        self.head = nn.Linear(32, 1)
        self.gain = 1.0 if "--fixed" in sys.argv else 300.0

    def forward(self, x):
        """The head's score of the squared features."""
        h = self.body(x) * self.gain
        return self.head(h * h)


model = Energy().to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=device_type == "cuda")
scaler = torch.cuda.amp.GradScaler(enabled=True)
for _ in range(40):
    x = torch.randn(32, 16).pin_memory().to(device, non_blocking=True)
    y = torch.zeros(32, 1, device="cuda:0")
    with context:
        loss = nn.functional.mse_loss(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
torch.cuda.synchronize()
sys.stdout.write(f"memory {torch.cuda.max_memory_allocated()}\n")
