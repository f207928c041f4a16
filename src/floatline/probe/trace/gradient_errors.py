"""GradientRecorder: a recorder that also sums up how far all gradients of the step are from FP32's."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor

from floatline.probe.trace.recorder import Recorder
from floatline.probe.trace.twins import Shadow

# Elements of all gradients up to which they are compared on the host: no operation must be loaded onto a GPU for them.
_SMALL = 2**18
_LOWEST = -200  # exponents below are counted there: FP32 itself ends at -149


class GradientRecorder(Recorder):
    """A recorder whose trace has the gradients of all parameters compared with FP32's, of the same weights and batch.

    `trace.meta["gradients"]` holds: `error`, the norm of the difference over the norm of FP32's, both over all
    parameters (None where one of either is not finite); `lost`, the share of elements that are 0 and are not in
    FP32; `exponents`, how many elements of FP32's gradients lie in [2**k, 2**(k+1)), by k.

    Numerics:
        Sums in float64, over the scaled gradients as backward left them.
        Checked by tests/probe/runs/test_changes.py.
    """

    def _read_gradients(self) -> None:
        super()._read_gradients()
        difference = norm = 0.0
        lost = nonzero = 0
        exponents: dict[int, int] = {}
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        gradients = [gradient for gradient in gradients if gradient.layout is torch.strided and gradient.numel()]
        small = sum(gradient.numel() for gradient in gradients) <= _SMALL
        for gradient in gradients:
            shadow = self._twins.of(gradient) if self._twins else Shadow(exact=True)
            place = "cpu" if small else gradient.device
            own = gradient.detach().to(place).double()
            twin = own if shadow.twin is None else shadow.twin.detach().to(place).double()
            fine = twin.isfinite() & own.isfinite()
            if not bool(fine.all()):
                own, twin, difference = own[fine], twin[fine], math.inf
            difference += float((own - twin).square().sum())
            norm += float(twin.square().sum())
            lost += int(((own == 0) & (twin != 0)).sum())
            nonzero += int((twin != 0).sum())
            _count(twin, exponents)
        error = math.sqrt(difference / norm) if norm else (math.inf if difference else 0.0)
        self.trace.meta["gradients"] = {
            "error": error if math.isfinite(error) else None,
            "lost": lost / max(nonzero, 1),
            "exponents": {str(k): exponents[k] for k in sorted(exponents)},
        }


def _count(twin: Tensor, exponents: dict[int, int]) -> None:
    sizes = twin[twin != 0].abs()
    if not sizes.numel():
        return
    powers: Tensor = (torch.frexp(sizes).exponent - 1).clamp(min=_LOWEST)
    counts = cast("list[int]", torch.bincount((powers - _LOWEST).flatten().long()).tolist())
    for place, count in enumerate(counts):
        if count:
            exponents[place + _LOWEST] = exponents.get(place + _LOWEST, 0) + count
