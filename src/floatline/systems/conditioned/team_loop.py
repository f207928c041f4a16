"""The team's training loop, as their document has it: it leaves a batch out by hand, and asks the scaler to update."""

from __future__ import annotations

import logging

import torch

from floatline.systems.conditioned import Config, build

_log = logging.getLogger(__name__)


def train(steps: int = 24) -> int:
    """Their loop; it raises at the first overflow of a gradient.

    Theirs waits 2,000 steps before the scale doubles, and this one 2, so that the scale soon is too large: that is how
    a dynamic scale finds its place, and no fault. The AssertionError is.

    Args:
        steps: How many batches are looked at.

    Returns:
        Batches that overflowed.
    """
    return _train(steps, leaves_out=True)


def train_fixed(steps: int = 24) -> int:
    """The same without their check of the gradients: `scaler.step` makes it anyway, and leaves the step out itself."""
    return _train(steps, leaves_out=False)


def _train(steps: int, *, leaves_out: bool) -> int:
    workload = build(Config(layers=1, num_batches=steps))
    model, device = workload.model, "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = workload.make_optimizer(model)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2)
    overflow_count = 0
    for inputs, targets in workload.batches[:steps]:
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.float16):
            logits = model(*(tensor.to(device) for tensor in inputs))
            total_loss = workload.loss_fn(logits, *(tensor.to(device) for tensor in targets))
        scaler.scale(total_loss).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        if leaves_out and any(bool(torch.isnan(g).any() or torch.isinf(g).any()) for g in grads):
            _log.warning("Gradient overflow detected, skipping batch")
            overflow_count += 1
            scaler.update()
            continue
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < before:
            overflow_count += 1
            _log.warning("Loss scale reduced from %g to %g due to overflow", before, scaler.get_scale())
    return overflow_count
