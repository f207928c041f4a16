"""What parity costs: whole calls of it as multiples of one forward and backward pass of the model, in one process.

    python benchmarks/parity_cost.py --device cuda --compiled --out parity.json

The 369M GPT of benchmarks/guard.py in BF16 beside a copy whose attention is written out (they agree), the same with a
planted scale in one block (it is found: layer, operation and line), and, with `--compiled`, what Inductor makes of it.
The first call of each pair loads kernels and is told apart.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from guard import GPT, SIZES, Block

import floatline as fl


class WrittenOut(Block):
    """The same block with attention written out, and its scores scaled by a factor that should be 1."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention, then the feed-forward part."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) * (self.factor / math.sqrt(q.shape[-1]))
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def write_out(model: nn.Module, *, factor: float = 1.0) -> nn.Module:
    """A copy with attention written out; in the block in the middle with another scale."""
    other = copy.deepcopy(model)
    for block in other.blocks:
        block.__class__ = WrittenOut
    other.blocks[len(other.blocks) // 2].factor = factor
    return other


def seconds(work: Callable[[], object], device: str) -> float:
    """How long it takes, with what it leaves to the device."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def passes(model: nn.Module, tokens: torch.Tensor) -> Callable[[], None]:
    """One forward and backward pass."""

    def run() -> None:
        model(tokens).float().square().mean().backward()
        model.zero_grad(set_to_none=True)

    return run


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description="What parity costs.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), default="369M, batch 1")
    parser.add_argument("--calls", type=int, default=2)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sizes, shape = SIZES[given.size]
    torch.manual_seed(0)
    model = GPT(**sizes).to(given.device, torch.bfloat16)
    tokens = torch.randint(0, model.embed.num_embeddings, shape, device=given.device)
    run = passes(model, tokens)
    for _ in range(3):
        run()
    plain = statistics.median(seconds(run, given.device) for _ in range(7))
    wide = copy.deepcopy(model).float()
    run_wide = passes(wide, tokens)
    run_wide()
    in_fp32 = statistics.median(seconds(run_wide, given.device) for _ in range(3))
    del wide, run_wide
    others: dict[str, Callable[[], nn.Module]] = {
        "attention written out": lambda: write_out(model),
        "a scale off by 3 % in one block": lambda: write_out(model, factor=1.03),
    }
    if given.compiled:
        others["compiled by Inductor"] = lambda: torch.compile(model)
    device = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
    document = {
        "device": device, "torch": torch.__version__, "size": given.size, "shape": list(shape),
        "forward_backward_s": plain, "forward_backward_fp32_s": in_fp32, "pairs": {},
    }  # fmt: skip
    for name, make in others.items():
        other = make()
        taken, found = [], None
        for _ in range(given.calls):
            began = time.perf_counter()
            found = fl.parity(model, other, tokens)
            taken.append(time.perf_counter() - began)
        assert found is not None
        document["pairs"][name] = {
            "seconds": taken,
            "times": [own / plain for own in taken],
            "times_of_fp32": [own / in_fp32 for own in taken],
            "verdict": found.verdict,
            "entry": str(found.entry)[:200],
        }
        if given.device == "cuda":
            document["pairs"][name]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
            torch.cuda.reset_peak_memory_stats()
        if given.out:
            given.out.write_text(json.dumps(document, indent=1) + "\n")
        del other, found
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
