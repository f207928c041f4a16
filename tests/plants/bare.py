"""Runs a script as it is, without any diagnosis, and says what came out: numbers, skipped steps, exceptions."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf|nan)(?![\w.]*[A-Za-z])", re.IGNORECASE)
LOUD_SKIPS = 0.2
NUDGE = 1e-6


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Args:
        lines: What it printed last.
        error: Its exception, or nothing.
        num_losses: How often backward ran.
        num_bad_losses: How often it began at a value that is not finite.
        num_steps: Calls of a scaler's step.
        num_skipped: How many of them were skipped.
        seconds: How long it took.
    """

    lines: list[str] = field(default_factory=list)
    error: str = ""
    num_losses: int = 0
    num_bad_losses: int = 0
    num_steps: int = 0
    num_skipped: int = 0
    seconds: float = 0.0

    @property
    def loud(self) -> bool:
        """An exception, a loss that is not finite, or many steps skipped."""
        return bool(self.error or self.num_bad_losses) or self.num_skipped >= LOUD_SKIPS * max(self.num_steps, 1)

    def numbers(self, num_lines: int) -> list[float]:
        """All numbers of the last lines."""
        return [float(word) for line in self.lines[-num_lines:] for word in NUMBER.findall(line)]


def run_bare(path: Path, arguments: tuple[str, ...] = (), *, nudge: int = 0, limit: float = 300.0) -> Outcome:
    """Run a script in a process of its own, as on a GPU.

    Args:
        path: The script.
        arguments: For its command line.
        nudge: Seed of a relative change of 1e-6 of its weights; 0 changes nothing.
        limit: Seconds after which it is ended.
    """
    if "transformers" in path.read_text(encoding="utf-8"):
        import_transformers()
    warm_up()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        seen, log = Path(folder) / "seen.json", Path(folder) / "log"
        given = ([str(path), *arguments], nudge, str(seen), str(log))
        process = multiprocessing.get_context("fork").Process(target=_run, args=given)
        process.start()
        process.join(limit)
        if process.is_alive():
            process.kill()
            process.join()
        found = json.loads(seen.read_text(encoding="utf-8")) if seen.exists() else {"error": "ended without a word"}
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return Outcome(lines=lines[-3:], seconds=time.perf_counter() - began, **found)


@cache
def warm_up() -> None:
    """Load once what every script would load again: torch imports half of itself at the first step of an optimizer."""
    from floatline.probe.runs.cuda_on_cpu import as_cuda

    torch.set_num_threads(1)
    with as_cuda():
        model = torch.nn.Linear(2, 2)
        scaler = torch.amp.GradScaler("cuda")
        for kind in (torch.optim.SGD, torch.optim.AdamW):
            optimizer = kind(model.parameters(), lr=1e-3)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.ones(2, 2)).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


def import_transformers() -> None:
    """Load what the hosts need before processes are forked."""
    from transformers import (  # noqa: F401
        BertForSequenceClassification,
        GPT2LMHeadModel,
        LlamaForCausalLM,
        T5ForConditionalGeneration,
        ViTForImageClassification,
    )


def _run(words: list[str], nudge: int, seen: str, log: str) -> None:
    from floatline.probe.runs.cuda_on_cpu import as_cuda
    from floatline.probe.scripts.run import prepare_script

    torch.set_num_threads(1)
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    counts = dict.fromkeys(("num_losses", "num_bad_losses", "num_steps", "num_skipped"), 0)
    _listen(counts)
    if nudge:
        _nudge_weights(nudge)
    half = words[-1] != "fp32"  # FP32 is the same on every device
    error = ""
    try:
        with as_cuda() if half else contextlib.nullcontext():
            prepare_script(words)()
    except SystemExit as stop:
        error = f"exit {stop.code}" if stop.code else ""
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"[:300]
    sys.stdout.flush()
    Path(seen).write_text(json.dumps({"error": error, **counts}), encoding="utf-8")
    os._exit(0)


def _listen(counts: dict[str, int]) -> None:
    """Count losses that are not finite, and steps that are skipped."""
    backward, step = torch.Tensor.backward, torch.amp.GradScaler._maybe_opt_step

    def counted_backward(loss, *args, **kwargs):
        counts["num_losses"] += 1
        counts["num_bad_losses"] += not bool(torch.isfinite(loss.detach()).all())
        return backward(loss, *args, **kwargs)

    def counted_step(scaler, optimizer, state, *args, **kwargs):
        counts["num_steps"] += 1
        counts["num_skipped"] += any(value.item() for value in state["found_inf_per_device"].values())
        return step(scaler, optimizer, state, *args, **kwargs)

    torch.Tensor.backward, torch.amp.GradScaler._maybe_opt_step = counted_backward, counted_step


def _nudge_weights(seed: int) -> None:
    """Change weights by 1e-6 of themselves when they are moved to the device or begin to need gradients."""
    source = torch.Generator().manual_seed(seed)
    to, needs = torch.nn.Module.to, torch.Tensor.requires_grad_

    def nudged(tensor):
        noise = torch.randn(tensor.shape, generator=source)
        tensor.data.mul_(1 + NUDGE * noise.to(tensor.dtype))

    def nudged_to(module, *args, **kwargs):
        for parameter in module.parameters():
            nudged(parameter)
        return to(module, *args, **kwargs)

    def nudged_needs(tensor, *args, **kwargs):
        if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
            nudged(tensor)
        return needs(tensor, *args, **kwargs)

    torch.nn.Module.to, torch.Tensor.requires_grad_ = nudged_to, nudged_needs
