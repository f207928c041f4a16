"""Weights: copies of tensors, to be put back where they came from; LateSteps keeps them until a GPU tells."""

# torch shows its copies of many tensors to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.numerics import foreach
from floatline.optim.mesh import local_part
from floatline.probe.watch.events import StepEvent
from floatline.probe.watch.gradient_scales import largest_of
from floatline.probe.watch.health import LateHealth, LateNumbers
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.patches import Aside, unwrap

# A copy for each step is made of no more than that; one for a failing step is.
_MOST = 2**24


@dataclass
class Weights:
    """Tensors and their copies, on the same device.

    Args:
        tensors: The weights; of those that several processes hold, the parts of this one.
        copies: What they held.
    """

    tensors: list[Tensor]
    copies: list[Tensor]

    @classmethod
    def copy(cls, tensors: Sequence[Tensor], *, most: bool = False) -> Weights | None:
        """Copy weights; None where there are too many.

        Args:
            tensors: The weights.
            most: Whether 16 million are the most.
        """
        own = [local_part(tensor) for tensor in tensors]
        if most and sum(tensor.numel() for tensor in own) > _MOST:
            return None
        with Aside():
            return cls(own, [tensor.detach().clone() for tensor in own])

    @classmethod
    def refresh(cls, old: Weights | None, tensors: Sequence[Tensor]) -> Weights | None:
        """Copy weights into the memory of an older copy; None where a GPU has not enough memory for one."""
        if old is None or len(old.tensors) != len(tensors):
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < 2 * size:
                return None
            return cls.copy(tensors)
        with Aside():
            foreach.copy_(old.copies, [local_part(tensor) for tensor in tensors])
        return old

    @classmethod
    def merge(cls, parts: Iterable[Weights]) -> Weights | None:
        """Several copies as one; None where there is none."""
        found = list(parts)
        tensors = [tensor for part in found for tensor in part.tensors]
        return cls(tensors, [copy for part in found for copy in part.copies]) if found else None

    @property
    def on_cpu(self) -> bool:
        """Whether they can be looked at without waiting."""
        return all(tensor.device.type == "cpu" for tensor in self.tensors[:1])

    def put_back(self) -> None:
        """Write the copies over the weights; autograd does not see it."""
        with Aside():
            for tensor, copy in zip(self.tensors, self.copies, strict=True):
                tensor.data.copy_(copy)


def all_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether no tensor holds inf or NaN."""
    largest = largest_of([tensor for tensor in tensors if tensor.is_floating_point()])
    with Aside():
        return largest is None or bool(largest.isfinite().all())


class LateSteps:
    """Asks of every step whether it was finite, and keeps the weights from before it until the answer is there.

    Attributes:
        kept_step: The step before which the weights were last copied; -1 where they never were.

    Args:
        late: Brings the numbers to the host.
        on_failure: Called with every step that was not finite, in their order.
    """

    def __init__(self, late: LateNumbers, on_failure: Callable[[StepEvent], None]) -> None:
        self.kept_step = -1
        self._late = late
        self._on_failure = on_failure
        self._weights: dict[int, Weights] = {}  # of optimizers, by id
        self._too_large: set[int] = set()  # optimizers whose weights a GPU had no memory for

    @property
    def weights(self) -> Weights | None:
        """The weights from before the step that is not known yet; None where no copy was made."""
        return Weights.merge(self._weights.values())

    def keep(self, optimizer: Optimizer, step: int, *, detailed: bool) -> None:
        """Copy the weights of an optimizer beside them; the answers about earlier steps have been read.

        Where memory did not suffice, it is tried again in detailed steps only.
        """
        if id(optimizer) in self._too_large and not detailed:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        fresh = Weights.refresh(self._weights.get(id(optimizer)), parameters)
        if fresh is None:
            self._too_large.add(id(optimizer))
        else:
            self._weights[id(optimizer)], self.kept_step = fresh, step

    def ask(self, event: StepEvent, health: LateHealth) -> None:
        """Send the numbers of a step on their way."""
        if not health.numbers:
            return

        def tell(found: list[float]) -> None:
            for loss, number in zip(health.losses, found[len(found) - len(health.losses) :], strict=True):
                loss.value = number
            if not health.is_fine(found):
                self._on_failure(event)

        self._late.ask(_pack(health.numbers), event.step, tell)


def _pack(numbers: list[Tensor]) -> Tensor:
    """Single numbers as one vector."""
    with Aside():
        try:
            return torch.stack(numbers)
        except RuntimeError:  # they lie on several devices
            return torch.stack([number.to(numbers[-1].device, torch.float32) for number in numbers])


def all_weights(seen: Watch) -> list[Tensor]:
    """Parameters and buffers of a loop; not those that count, such as the batches that a norm has seen."""
    owners = seen.modules.roots.values()
    tensors = [tensor for owner in owners for tensor in (*owner.parameters(), *owner.buffers())]
    tensors += [p for made in seen.optimizers.values() for p in made.parameters]
    tensors += [] if owners else seen.weights.leaves.values()
    return [*{id(tensor): tensor for tensor in tensors if tensor.is_floating_point()}.values()]


def find_model(seen: Watch, root: nn.Module) -> nn.Module:
    """The largest module that was called by itself and that the root is a part of."""
    owners = [m for m in seen.modules.roots.values() if any(part is root for part in m.modules())]
    return unwrap(max(owners, key=lambda m: sum(1 for _ in m.modules()), default=root))


def find_loose(seen: Watch, model: nn.Module) -> dict[str, Tensor]:
    """Weights of the optimizers that are none of the model's, by name: another model's, or those of no call."""
    named = {id(p) for p in model.parameters()}
    others = {id(p): name for root in seen.modules.roots.values() for name, p in root.named_parameters()}
    return {
        others.get(id(p), f"parameter {i} of {made.name}"): p
        for made in seen.optimizers.values()
        for i, p in enumerate(made.parameters)
        if id(p) not in named
    }
