"""What a step shows of single layers: norms of their gradients, and how much of them FP16 lost to zero."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from floatline.guard.policy import Policy
from floatline.ledger.lines import LateValues
from floatline.numerics import foreach
from floatline.optim import mesh
from floatline.optim.mesh import num_processes
from floatline.optim.survey import Survey
from floatline.plans import Plan

SMALLEST_FP16 = 2.0**-24
# A float32 sum of so many ones is exact, in every order.
_CHUNK = 1 << 24
# Values that nearest rounding takes to 0 end at _ZERO, to one unit at _ONE, to two or three at _LOW.
_ZERO, _ONE, _LOW = 0.5, 1.5, 3.5
_BELOW = 0.75  # FP16 leaves nothing between 0 and one unit
# One element at one unit and two at two or three, as near a density without a peak at zero: what is believed
# before anything is seen, so that a single element proves nothing.
_PRIOR = (1.0, 2.0)
_EXPONENTS = (0.1, 16.0)
# With less than this share of the non-zero elements above _LOW, the shape can no longer be seen.
_LEAST_ABOVE = 0.1


@dataclass(frozen=True)
class Lost:
    """What a count came to.

    Args:
        share: Estimated share of all elements that were lost to zero.
        layers: Names with a share above the policy's underflow_warn, and the share; the worst first.
        silent: Names whose gradient is zero everywhere: unused, or lost as a whole; the counts cannot tell.
        silent_share: Their share of all elements.
        level: What the policy says to the share; at least "warn" where a gradient is silent.
    """

    share: float
    layers: tuple[tuple[str, float], ...]
    silent: tuple[str, ...]
    silent_share: float
    level: Literal["fine", "warn", "act"]


@torch.no_grad()
def count_near_zero(grads: Sequence[Tensor], *, smallest: float = SMALLEST_FP16) -> Tensor:
    """Count the elements at zero and just above it; nothing here waits for the device.

    Numerics:
        With u = smallest: zeros |g| == 0, ones 0 < |g| < 1.5 u, low 1.5 u <= |g| < 3.5 u; exact. inf and NaN are in
        none. FP16 makes multiples of u, and so are their sums. A gradient that holds an element between 0 and 0.75 u
        was made in FP32 (a norm's weight under autocast, an FP32 island) and has lost nothing: its ones and low are
        given as 0. At most 16 million elements are copied to float32 at a time, and counted in about 15 launches.
        Checked by tests/guard/step/test_underflow.py.

    Args:
        grads: Dense gradients, scaled, as the backward pass made them; float16, float32 or bfloat16. All on one device.
        smallest: Smallest magnitude that FP16 leaves. Where gradients were averaged over N processes it is
            SMALLEST_FP16 / N; with a larger one they look as if they were made in FP32.

    Returns:
        int64, one row of zeros, ones and low for each gradient, on their device.
    """
    pieces: list[list[Tensor]] = [[] for _ in grads]
    for part in _cut(grads):
        flat = torch.cat([piece for _, piece in part]).to(torch.float32).abs_()
        sizes = [piece.numel() for _, piece in part]
        zero, one = flat == 0, flat < _ONE * smallest
        kinds = (zero, one & ~zero, (flat < _LOW * smallest) & ~one, (flat < _BELOW * smallest) & ~zero)
        # A norm of a list is one launch for many tensors; a sum is one for each.
        sums = [torch.stack(foreach.norm(torch.split(kind.float(), sizes), 1)) for kind in kinds]
        for (index, _), row in zip(part, torch.stack(sums, dim=1).to(torch.int64), strict=True):
            pieces[index].append(row)
    none = torch.zeros(4, dtype=torch.int64, device=grads[0].device if grads else None)
    if not pieces:
        return none.new_zeros(0, 3)
    # Most gradients are one piece: only those of several take launches of their own.
    found = torch.stack([torch.stack(rows).sum(dim=0) if len(rows) > 1 else (rows or [none])[0] for rows in pieces])
    return keep_made_in_fp16(found)


def thresholds(smallest: float) -> tuple[float, float, float]:
    """Magnitudes at which 'below', 'ones' and 'low' end."""
    return _BELOW * smallest, _ONE * smallest, _LOW * smallest


def keep_made_in_fp16(found: Tensor) -> Tensor:
    """Zeros, ones and low of counts that have 'below' as fourth column; where it is not 0, nothing was lost."""
    return torch.cat([found[:, :1], found[:, 1:3] * (found[:, 3:] == 0)], dim=1)


def _cut(grads: Sequence[Tensor]) -> list[list[tuple[int, Tensor]]]:
    """Flat pieces with the index of their gradient, in lists of one dtype and at most _CHUNK elements."""
    parts: list[list[tuple[int, Tensor]]] = []
    room, dtype = 0, None
    for index, grad in enumerate(grads):
        for piece in cast("tuple[Tensor, ...]", grad.detach().reshape(-1).split(_CHUNK)):
            if not piece.numel():
                continue
            if piece.numel() > room or piece.dtype != dtype:
                parts.append([])
                room, dtype = _CHUNK, piece.dtype
            parts[-1].append((index, piece))
            room -= piece.numel()
    return parts


def lost_share(zeros: Sequence[int], ones: Sequence[int], low: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Estimate, for each tensor, the share of its elements that FP16 lost to zero.

    A zero may have another reason: an unused row of an embedding, a dead ReLU. Such zeros have no neighbours. So the
    magnitudes that were kept are taken for those of a Weibull distribution, P(|g| > x) = exp(-(x/s)^a), which near
    zero is the power law x^a, and the fit says how many lie below 0.5 u.

    Numerics:
        With n = size - zeros, A = -ln(1 - ones/n) and B = -ln(1 - low/(n - ones)), the exponent a solves
        A/B = (1.5^a - 0.5^a) / (3.5^a - 1.5^a), and lost = n (exp(h) - 1), h = (A + B) 0.5^a / (3.5^a - 0.5^a).
        One and two elements (a = 1) are added to the counts for a alone, and a is at least 0.1. Never more than
        `zeros`, so that without other zeros it never says too much. 0 where ones and low are 0. Where less than a
        tenth of n is above 3.5 u, all zeros count as lost: the shape cannot be seen any more.

        Estimate / truth for a million magnitudes of which 0.3 to 15 % are lost, beside ten million other zeros:
        normal 0.68 to 0.98, Laplace, Student (2 degrees) and products of 2 or 3 normals 0.90 to 1.14, lognormal of
        sigma 2, 3 and 5 1.2 to 1.9, of sigma 1 2.8 to 3.0. Worst case: magnitudes spread evenly over their logarithm
        that end at a sharp edge just below 0.5 u, up to 460; that a power law ends there cannot be seen from above.
        At 30 % the normal one counts as all zeros; the lognormal of sigma 1 is at 3.3.
        Gradients of an MLP, a transformer layer and a convolution with tensors of 1,000 elements and more: 0.5 to
        1.9 at 3 % and 10 %; below 100 lost elements the counts themselves scatter (0.5 to 4.2 seen). One MLP with a
        real FP16 backward pass at scales that lose 0.005 to 60 %: 0.80 to 1.00.
        What is lost on the way back, in the gradient of an activation, leaves no neighbours either: a tensor that it
        makes zero altogether has a share of 0. `report` names such tensors.
        Checked by tests/guard/step/test_underflow.py.

    Args:
        zeros: Elements that are 0, of each tensor.
        ones: Elements that are one smallest number u.
        low: Elements that are two or three.
        sizes: All elements.
    """
    return [
        _estimate(z, o, w, size) / size if size else 0.0 for z, o, w, size in zip(zeros, ones, low, sizes, strict=True)
    ]


def _estimate(zeros: int, ones: int, low: int, size: int) -> float:
    kept = size - zeros
    above = kept - ones - low
    if ones + low == 0 or zeros == 0:
        return 0.0
    if above < _LEAST_ABOVE * kept:
        return float(zeros)
    believed = kept + sum(_PRIOR)
    first = -math.log1p(-(ones + _PRIOR[0]) / believed)
    second = -math.log1p(-(low + _PRIOR[1]) / (believed - ones - _PRIOR[0]))
    a = _solve_exponent(first / second)
    hazard = math.log(kept / above) * _ZERO**a / (_LOW**a - _ZERO**a)
    return min(float(zeros), kept * math.expm1(hazard))


def _solve_exponent(ratio: float) -> float:
    """The a at which (1.5^a - 0.5^a) / (3.5^a - 1.5^a), which falls with a, is the ratio; within _EXPONENTS."""
    least, most = _EXPONENTS
    for _ in range(40):
        a = (least + most) / 2
        if _ONE**a - _ZERO**a > ratio * (_LOW**a - _ONE**a):
            least = a
        else:
            most = a
    return least


def report(names: Sequence[str], counts: Tensor, sizes: Sequence[int], *, policy: Policy) -> Lost:
    """Turn counts into a share, the layers to blame and what the policy says to it; waits for the device.

    Args:
        names: Name of each gradient's parameter.
        counts: From `count_near_zero`, in the order of the names; summed up over processes if they hold shards.
        sizes: Elements of each.
        policy: Its underflow_warn and underflow_act.
    """
    rows = cast("list[tuple[int, int, int]]", counts.tolist())
    zeros, ones, low = ([row[i] for row in rows] for i in range(3))
    shares = lost_share(zeros, ones, low, sizes)
    total = sum(share * size for share, size in zip(shares, sizes, strict=True)) / max(sum(sizes), 1)
    layers = sorted(zip(names, shares, strict=True), key=lambda layer: -layer[1])
    silent = tuple(name for name, z, size in zip(names, zeros, sizes, strict=True) if size and z == size)
    num_silent = sum(size for z, size in zip(zeros, sizes, strict=True) if z == size)
    level = "fine"
    if total > policy.underflow_warn or silent:
        level = "act" if total > policy.underflow_act else "warn"
    worst = tuple(layer for layer in layers if layer[1] > policy.underflow_warn)
    return Lost(total, worst, silent, num_silent / max(sum(sizes), 1), level)


class Layers:
    """Names of the trained parameters, and what was counted for each.

    Args:
        model: Gives the names.
        optimizer: Gives the order.
        every: Steps between two records of the norms; 0 never.
        policy: Says how often lost gradients are counted.
        plan: Lost gradients are counted where FP16 computes them.
        group: Processes that train together; None is the default group.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int,
        policy: Policy,
        plan: Plan,
        count: Callable[..., Tensor] = count_near_zero,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        names = {id(param): name for name, param in model.named_parameters()}
        self._params = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
        self._every = every
        self._policy = policy
        self._count_every = policy.underflow_every if plan.compute == "fp16" else 0
        self._group = group
        self._count = count
        self._counts: dict[int, tuple[list[str], list[int], LateValues]] = {}

    def due(self, attempt: int) -> bool:
        """Whether the norms of this step are recorded."""
        return self._every > 0 and attempt % self._every == 0

    def record(self, survey: Survey, unit: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """Names and unscaled norms of the parameters that have a gradient."""
        names = tuple(name for name, param in self._params if param.grad is not None)
        return names, survey.whole.norms / unit

    def count(self, attempt: int) -> None:
        """Count the smallest gradients of this step, if it is time; the numbers are read later."""
        if not self._count_every or attempt % self._count_every:
            return
        present = [(name, p) for name, p in self._params if p.grad is not None and not p.grad.is_sparse]
        if not present:
            return
        world = num_processes(self._group)
        grads = [mesh.local_part(cast(Tensor, p.grad)) for _, p in present]
        # Averaged over processes, the smallest gradient is a fraction of FP16's smallest number.
        counts = self._count(grads, smallest=SMALLEST_FP16 / world)
        sharded = world > 1 and any(mesh.is_distributed(p) for _, p in present)
        if sharded:
            # Processes that saw different parts must not come to different scales. Whole gradients are the same
            # everywhere.
            dist.all_reduce(counts, group=self._group)
        sizes = [p.numel() * world // mesh.num_parts(p) if sharded else p.numel() for _, p in present]
        late = LateValues({}, [([str(i) for i in range(counts.numel())], counts.reshape(-1).to(torch.float64))])
        self._counts[attempt] = ([name for name, _ in present], sizes, late)

    def lost(self, attempt: int) -> Lost | None:
        """What FP16 lost in this step; None where it was not counted."""
        found = self._counts.pop(attempt, None)
        if found is None:
            return None
        names, sizes, late = found
        counts = torch.tensor([int(value) for value in late.read().values()], device="cpu").reshape(-1, 3)
        return report(names, counts, sizes, policy=self._policy)
