"""A Lightning fit with floatline's plugin and callback against Lightning's own 16-mixed. Ratios from one run.

GPU: a 369M-parameter GPT at batch 8 and 1, and a small one with 290 tensors, where the host's time counts. CPU: the
small one, both in real FP16. The arms take turns; each fit is timed behind its first steps.
"""

import argparse
import gc
import logging
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning
import torch
from guard import GPT, SIZES, loss_of  # benchmarks/guard.py
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

import floatline as fl
from floatline.integrations.lightning import FloatlineCallback, FloatlinePrecision
from floatline.numerics import cuda_autocast_lists

LR, DECAY, CLIP = 1e-4, 0.1, 1.0
OWN = "Lightning 16-mixed, fused AdamW, no clipping"
OWN_CLIPPED = "Lightning 16-mixed, AdamW, clipped"


class Module(lightning.LightningModule):
    """A GPT, and what trains it."""

    def __init__(self, size: str, optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(**SIZES[size][0])
        self.optimizer = optimizer

    def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
        """The loss."""
        return loss_of(self.model, tokens)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Torch's AdamW, fused or as it comes; or floatline's."""
        if self.optimizer == "floatline":
            return fl.optim.AdamW(self.parameters(), lr=LR, weight_decay=DECAY)
        return torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=DECAY, fused=self.optimizer == "fused")


class Clock(lightning.Callback):
    """Times the steps behind the first few, and counts host syncs of three of them where asked."""

    def __init__(self, *, warmup: int, count_syncs: bool) -> None:
        self.warmup, self.count_syncs = warmup, count_syncs
        self.seconds = self.syncs = 0.0
        self._open = ExitStack()

    def on_train_batch_start(self, *args: Any) -> None:
        """Start behind the warm-up."""
        _, module, _, number = args
        if number != self.warmup:
            return
        self._wait(module)
        self._start = time.perf_counter()
        if self.count_syncs:
            self._caught = self._open.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, *args: Any) -> None:
        """The last one is the end."""
        trainer, module, _, _, number = args
        if number + 1 < trainer.num_training_batches:
            return
        num = number + 1 - self.warmup
        if self.count_syncs:
            torch.cuda.set_sync_debug_mode("default")
            found = [str(w.message) for w in self._caught]
            self._open.close()
            self.syncs = sum("synchroniz" in text and "prototype" not in text for text in found) / num
        self._wait(module)
        self.seconds = (time.perf_counter() - self._start) / num

    def _wait(self, module: Module) -> None:
        if module.device.type == "cuda":
            torch.cuda.synchronize()


def own(device: str) -> Precision:
    """Lightning's plugin, in real FP16 on a CPU as well."""
    return MixedPrecision("16-mixed", device, scaler=torch.amp.GradScaler(device))


Arm = tuple[str, Callable[[str], Precision], bool, float | None]
ARMS: dict[str, Arm] = {  # optimizer, plugin, with the callback, clipping
    OWN: ("fused", own, False, None),
    "FloatlinePrecision, fused AdamW, no clipping": ("fused", lambda _: FloatlinePrecision(), False, None),
    "the same, and FloatlineCallback": ("fused", lambda _: FloatlinePrecision(), True, None),
    OWN_CLIPPED: ("plain", own, False, CLIP),
    "FloatlinePrecision, AdamW, clipped": ("plain", lambda _: FloatlinePrecision(), False, CLIP),
    "FloatlinePrecision, fused AdamW, clipped": ("fused", lambda _: FloatlinePrecision(), False, CLIP),
    "FloatlinePrecision, fused AdamW, clipped, and FloatlineCallback": (
        "fused",
        lambda _: FloatlinePrecision(),
        True,
        CLIP,
    ),
    "FloatlinePrecision, floatline AdamW, clipped, and FloatlineCallback": (
        "floatline",
        lambda _: FloatlinePrecision(),
        True,
        CLIP,
    ),
    "FloatlinePrecision('fp16-true'), AdamW, clipped, and FloatlineCallback": (
        "plain",
        lambda _: FloatlinePrecision("fp16-true"),
        True,
        CLIP,
    ),
}

ON_CPU = (
    OWN_CLIPPED,
    "FloatlinePrecision, AdamW, clipped",
    "FloatlinePrecision, fused AdamW, clipped, and FloatlineCallback",
)


def fit(size: str, arm: Arm, device: str, *, steps: int, warmup: int, count_syncs: bool = False) -> Clock:
    """One fit of an arm."""
    optimizer, make_plugin, with_callback, clip = arm
    tokens = torch.randint(0, SIZES[size][0].get("vocabulary", 65536), SIZES[size][1])
    data = torch.utils.data.DataLoader([tokens] * (warmup + steps), batch_size=None, pin_memory=device == "cuda")
    clock = Clock(warmup=warmup, count_syncs=count_syncs)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if device == "cpu":  # the same arithmetic for Lightning's own plugin
            stack.enter_context(cuda_autocast_lists())
            if make_plugin is own:
                stack.enter_context(fl.HalfOnCPU())
        watching = [FloatlineCallback(Path(folder) / "run")] if with_callback else []
        trainer = lightning.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            plugins=[make_plugin(device)],
            callbacks=[*watching, clock],  # the clock stops last
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            gradient_clip_val=clip,
        )
        trainer.fit(Module(size, optimizer), data)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return clock


def measure(size: str, device: str, *, rounds: int, steps: int, warmup: int) -> None:
    """Every arm of one size, the arms taking turns, as a table."""
    arms = {name: arm for name, arm in ARMS.items() if device == "cuda" or name in ON_CPU}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            times[name].append(fit(size, arm, device, steps=steps, warmup=warmup).seconds)
    print(f"\n{size}, {rounds} rounds of {steps} steps\n")
    print("| arm | ms a step | of Lightning's own | range over rounds | host syncs a step |")
    print("|---|---:|---:|---:|---:|")
    for name, arm in arms.items():
        base = times[OWN if arm[3] is None else OWN_CLIPPED]
        ratios = [one / other for one, other in zip(times[name], base, strict=True)]
        syncs = "-"
        if device == "cuda":
            syncs = f"{fit(size, arm, device, steps=3, warmup=warmup, count_syncs=True).syncs:.1f}"
        print(
            f"| {name} | {statistics.median(times[name]) * 1e3:.2f} | {statistics.median(ratios):.3f} "
            f"| {min(ratios):.3f} to {max(ratios):.3f} | {syncs} |",
            flush=True,
        )


def main() -> None:
    """Measure and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=list(SIZES), action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    place = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or platform.machine()
    print(f"{place}, torch {torch.__version__}, lightning {lightning.__version__}")
    sizes = options.size or (list(SIZES) if options.device == "cuda" else ["290 small tensors"])
    for size in sizes:
        measure(size, options.device, rounds=options.rounds, steps=options.steps, warmup=options.warmup)


if __name__ == "__main__":
    main()
