"""manifest: what a model and its optimizer compute in, from the live objects, and from one real step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from floatline.errors import ManifestError
from floatline.manifests.manifest import Manifest
from floatline.manifests.measured_step import MeasuredStep, read_rank
from floatline.manifests.surroundings import find_devices, find_exchanges, find_tied, read_switches
from floatline.precision.live_holdings import find_holdings, name_weights
from floatline.probe.watch.patches import Aside
from floatline.probe.watch.watch import watch


def manifest(model: nn.Module, optimizer: Optimizer, *, step: Callable[[], Any] | None = None) -> Manifest:
    """Say what a run really computes in.

    Without a step it tells what the live objects hold: call it after a step, when gradients and states are there. With
    one it makes that step, and measures in it where FLOPs ran, what share of the updates rounded to nothing, and what
    else was lost::

        print(fl.manifest(model, optimizer, step=lambda: train_one(batch)))
        fl.manifest(model, optimizer, step=lambda: train_one(batch)).check("bf16-mixed")

    Numerics:
        The step is the one that would have been made without it: nothing is changed, rounded or cast. Weights are
        compared with samples from before the step, of up to 65,536 elements a tensor. Parts of sharded tensors are
        looked at where they are.

    Args:
        model: The model; plain, compiled, or wrapped by DDP or FSDP2.
        optimizer: Trains it.
        step: Makes one step, from the forward pass to `optimizer.step()`; None makes none.

    Raises:
        ManifestError: The optimizer did not step in `step`.
    """
    if step is None:
        with Aside():
            rank, num_ranks = read_rank()
            return Manifest(
                holdings=find_holdings([model], [optimizer]),
                optimizers=(type(optimizer).__name__,),
                devices=find_devices([model]),
                switches=read_switches(),
                exchanges=find_exchanges([model]),
                tied=find_tied(name_weights([model]).values()),
                rank=rank,
                num_ranks=num_ranks,
            )
    with watch(light=True) as seen:
        measured = MeasuredStep(seen, model)
        seen.listener = measured
        try:
            step()
        finally:
            measured.end()
    if measured.manifest is None:
        raise ManifestError(
            "The optimizer made no step in step(), or one with a learning rate of 0. Make one whole step in it: "
            "forward, backward and optimizer.step()."
        )
    return measured.manifest
