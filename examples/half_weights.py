"""16-bit weights: what torch's AdamW does to them, and what fl.optim.AdamW does.

The same regression in FP32, and in FP16 and BF16 weights under both optimizers, from the same start and on the same
batches. Run it with: python examples/half_weights.py
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import floatline as fl

STEPS, LR = 80, 1e-3


def train(dtype: torch.dtype, make_optimizer: type) -> tuple[float, nn.Module, torch.optim.Optimizer]:
    """The last loss, in FP32, with the model and the optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1)).to(dtype)
    optimizer = make_optimizer(model.parameters(), lr=LR)
    x = torch.randn(256, 32)
    y = torch.tanh(x @ torch.randn(32, 1) / 4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(x.to(dtype)).float() - y).square().mean()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return (model(x.to(dtype)).float() - y).square().mean().item(), model, optimizer


def main() -> None:
    """All five, and the FP32 weights of one."""
    with fl.HalfOnCPU():
        exact, _, _ = train(torch.float32, torch.optim.AdamW)
        print(f"float32, torch.optim.AdamW: loss {exact:.5f}")
        for dtype in (torch.float16, torch.bfloat16):
            for library in (torch.optim, fl.optim):
                loss, model, optimizer = train(dtype, library.AdamW)
                print(f"{str(dtype)[6:]}, {library.__name__}.AdamW: loss {loss:.5f}")
    print(optimizer.memory())
    path = Path(tempfile.mkdtemp()) / "master.safetensors"
    optimizer.save_master(model, path)  # plain FP32 weights, which any tool reads
    master = load_file(path)["0.weight"]
    print("the model's weight", model[0].weight[0, 0].item(), "stands for", master[0, 0].item())


if __name__ == "__main__":
    main()
