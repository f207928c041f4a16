"""watch: the events of a training loop, seen without changing it."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from floatline.probe.watch.calls import patch_calls
from floatline.probe.watch.compiled import CompilerWatch
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.own_updates import OwnUpdates
from floatline.probe.watch.patches import Aside
from floatline.probe.watch.scaler_calls import patch_scaler

__all__ = ["Watch", "watch"]


@contextlib.contextmanager
def watch(*, light: bool = False) -> Generator[Watch]:
    """Observe the training loop that runs inside; everything is put back at the end.

    Observed on this thread: forward passes, backward passes and torch.autograd.grad, torch.amp.GradScaler, optimizers,
    schedulers, clipping and norms of gradients, autocast regions, state dicts, casts of modules and collectives::

        with watch() as seen:
            train()
        print([type(event).__name__ for event in seen.events])

    The results of the loop are those without it. It costs a few microseconds a call, one reduction over the gradients
    and one copy of the weights (up to 16 million of them) for each optimizer step. From step 256 on, the copy is made,
    and calls that a step may have several of are seen, in two steps after each power of two only.

    Args:
        light: Whether the loop must not be slowed down: all of that is seen in the first 24 steps and in two after
            each power of two; from the others, what a step has once is kept. On a GPU nothing is waited for.
    """
    seen = Watch(light=light)
    patches, hooks = patch_calls(seen)
    scaler_patches = patch_scaler(seen)
    seen.updates = OwnUpdates(seen)
    compiler = CompilerWatch(seen, (patches, scaler_patches))
    try:
        yield seen
    finally:
        compiler.undo()
        scaler_patches.undo()
        patches.undo()
        for hook in hooks:
            hook.remove()
        with Aside():
            seen.settle()
