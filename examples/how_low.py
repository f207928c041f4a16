"""How low can this training float? Measures a small GPT's gradients against FP16, then checks the forecast in FP16.

Trains in FP32 for a while, looks at the gradients one step sends back through every layer, says what FP16 would
make of them with and without loss scaling, and then runs that same step in real FP16 to see whether it was right.
Writes a chart for each scale: demo/how_low_*.svg.
"""

import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

import floatline as fl
from floatline.checkup import choose_plan
from floatline.numerics import Ranges, measure_ranges
from floatline.report import draw_ranges

sys.path.insert(0, str(Path(__file__).parent))
import small_gpt

STEPS = 150
FOLDER = Path(__file__).parent.parent / "demo"


def gradients(model, batch, loss_fn, *, fp16: bool, scale: float) -> list[torch.Tensor]:
    """What one backward pass sends into every layer's output, as it is held in memory."""
    held: list[torch.Tensor] = []

    def keep(_module, _inputs, output):
        output.register_hook(held.append)

    leaves = [module for module in model.modules() if not list(module.children())]
    inputs, targets = batch
    with ExitStack() as stack:
        for leaf in leaves:
            stack.callback(leaf.register_forward_hook(keep).remove)
        if fp16:
            stack.enter_context(fl.HalfOnCPU())
            stack.enter_context(torch.autocast("cpu", dtype=torch.float16))
        loss = loss_fn(model(*inputs), *targets)
        (loss * scale).backward()
    model.zero_grad()
    return held


def lost_share(exact: list[torch.Tensor], held: list[torch.Tensor]) -> float:
    """Share of the gradients that are zero although FP32's are not."""
    lost = sum(int(((h == 0) & (e != 0)).sum()) for e, h in zip(exact, held, strict=True))
    return lost / sum(int((e != 0).sum()) for e in exact)


def total(tensors: list[torch.Tensor]) -> Ranges:
    """One set of figures for many tensors."""
    first, *rest = (measure_ranges(tensor, "fp16") for tensor in tensors)
    for ranges in rest:
        first = first + ranges
    return first


def main() -> None:
    """Train, measure, forecast, check, report."""
    console = Console()
    start = time.perf_counter()
    model, batches, loss_fn, _, make_optimizer = small_gpt.build()
    optimizer = make_optimizer(model)
    losses: list[float] = []
    for step in track(range(STEPS), "training in FP32", console=console, disable=not console.is_terminal):
        inputs, targets = batches[step % len(batches)]
        optimizer.zero_grad()
        loss = loss_fn(model(*inputs), *targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    console.print(f"A small GPT, {STEPS} steps in FP32: loss {losses[0]:.2f} to {losses[-1]:.2f}.\n")

    batch = batches[0]
    exact = gradients(model, batch, loss_fn, fp16=False, scale=1.0)
    rows = [("loss scale", "forecast: lost in FP16", "seen: lost in FP16")]
    FOLDER.mkdir(exist_ok=True)
    for scale in (1.0, 2.0**16):
        measured = total([gradient * scale for gradient in exact])
        chart = draw_ranges(measured, "fp16", title=f"gradients of the activations, loss scale {scale:,.0f}")
        (FOLDER / f"how_low_{scale:.0f}.svg").write_text(chart.svg(), encoding="utf-8")
        console.print(chart, "\n")
        held = gradients(model, batch, loss_fn, fp16=True, scale=scale)
        rows.append((f"{scale:,.0f}", f"{chart.shares['zero']:.2%}", f"{lost_share(exact, held):.2%}"))
    for row in rows:
        console.print("{:>12}  {:>24}  {:>20}".format(*row))

    choice = choose_plan()
    console.print(f"\nOn this machine: {choice.value.name}. {choice.reason}")
    console.print(f"\nThe charts are in {FOLDER} ({time.perf_counter() - start:.0f} s).")


if __name__ == "__main__":
    main()
