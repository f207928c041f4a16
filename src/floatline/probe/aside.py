"""Aside: work beside the step, out of sight of dispatch modes, autocast and autograd."""

# torch shows these switches to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch


class Aside:
    """A context for the recorder's own tensors. A class, since it is entered twice an operation."""

    def __enter__(self) -> None:
        self._guards = (torch._C._DisableTorchDispatch(), torch._C._DisableAutocast())
        for guard in self._guards:
            guard.__enter__()
        self._tracked = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._tracked)
        for guard in reversed(self._guards):
            guard.__exit__(None, None, None)
