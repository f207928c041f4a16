"""What `floatline doctor --model … --world 1` says on paper, against a decoder of that size that trains on one GPU.

    python benchmarks/scale.py [--models 0.1b 1b 3b] [--sequence 4096] [--steps 5]

Prints a Markdown table. "held" is what stays between steps: weights, master and states. "activations" is what lies
beside it after the forward pass. "peak" is the most within a step, of which the paper knows an upper bound: gradients
and activations are never whole at the same time. The paper has no autocast: under a mixed plan one process keeps its
16-bit copies of the matrices as long as the activations, where FSDP2 has what it gathered.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.checkup.reference_decoder import Decoder, loss_of

import floatline as fl
from floatline.checkup.scale import Scale, scale_up
from floatline.checkup.shapes import Transformer, find_transformer
from floatline.hardware.rates import find_rates
from floatline.plans.presets import PLANS

NAMES = ["fp32", "bf16-mixed", "bf16-true", "fp16-true"]
UNIT = 2**30


def on_paper(name: str, plan: str, sequence: int) -> Scale:
    """One process with the whole model."""
    size = 4 if PLANS[plan].compute == "fp32" else 2
    model = find_transformer(name).size(name, batch=1, sequence=sequence, size=size)
    return scale_up(model, PLANS[plan], world=1, rates=find_rates("H200"))


class Training:
    """Guarded steps of a decoder, and the bytes it takes."""

    def __init__(self, shape: Transformer, plan: str, sequence: int, device: str) -> None:
        self.device = device
        torch.manual_seed(0)
        weights = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[PLANS[plan].weights]
        with torch.device(device):
            model = Decoder(shape).to(weights)
            self.tokens, self.targets = torch.randint(0, shape.vocabulary, (2, 1, sequence)).unbind()
        self.model = model
        self.guard = fl.Guard(model, fl.optim.AdamW(model.parameters(), lr=1e-5), plan=plan)
        self.activations = 0

    def compute_loss(self, _: object) -> Tensor:
        """Of the one batch; counts what the forward pass leaves."""
        before = allocated(self.device)
        loss = loss_of(self.model(self.tokens), self.targets)
        self.activations = allocated(self.device) - before
        return loss

    def step(self) -> float:
        """Its seconds."""
        wait(self.device)
        began = time.perf_counter()
        self.guard.step(self.compute_loss, None)
        wait(self.device)
        return time.perf_counter() - began


def allocated(device: str) -> int:
    """Bytes of live tensors."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def measure(name: str, plan: str, *, sequence: int, steps: int, device: str) -> str:
    """A row of the table."""
    paper, shape = on_paper(name, plan, sequence), find_transformer(name)
    run = Training(shape, plan, sequence, device)
    for _ in range(2):
        run.step()
    run.model.zero_grad(set_to_none=True)
    held = allocated(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(run.step() for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    kept = sum(paper.parts[part] for part in ("weights", "master", "states"))
    copies = 0
    if PLANS[plan].weights == "fp32" and PLANS[plan].compute != "fp32":
        copies = 2 * sum(s.rows * s.columns for block in paper.model.blocks for s in block if s.columns > 1)
        copies += 2 * shape.vocabulary * shape.width  # the head; the embedding is looked up in FP32
    least = paper.least_seconds
    assert least is not None
    return " | ".join(
        [
            f"| {name}", f"`{plan}`", compare(kept, held),
            compare(paper.parts["activations"] + copies, run.activations),
            compare(paper.total + copies, peak), f"{1e3 * least:.1f} ms", f"{1e3 * seconds:.1f} ms",
            f"{seconds / least:.2f} |",
        ]
    )  # fmt: skip


def compare(paper: int, measured: int) -> str:
    """Both in GiB, and what was measured as a share of the paper."""
    return f"{paper / UNIT:.2f} | {measured / UNIT:.2f} | {measured / paper:.3f}"


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.1b", "1b", "3b"])
    parser.add_argument("--plans", nargs="+", default=NAMES)
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of the one sequence")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    print(f"{date.today()}, {machine}, torch {torch.__version__}, one sequence of {given.sequence} tokens, GiB.\n")
    print("| model | plan | held: paper | measured | share | activations: paper | measured | share "
          "| peak: paper, at most | measured | share | a step, at least | measured | times |")  # fmt: skip
    print("|---|---|" + "---:|" * 12)
    for name in given.models:
        for plan in given.plans:
            print(measure(name, plan, sequence=given.sequence, steps=given.steps, device=device), flush=True)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
