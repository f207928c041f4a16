"""FunctionalSteps: loops that take the gradients of their weights by torch.func, noted as passes of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from torch import Tensor, nn

from floatline.optim.mesh import local_part
from floatline.probe.watch.events import BackwardEvent, ForwardEvent
from floatline.probe.watch.functional_gradients import FunctionalGradient
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.own_updates import Updates
from floatline.probe.watch.steps import note_light_forward, read_loss


class FunctionalWeights(nn.Module):
    """Stands for the model of one call that hands its weights to torch.func.

    Args:
        weights: By name.
        call: The call.
    """

    def __init__(self, weights: dict[str, Tensor], call: FunctionalGradient) -> None:
        super().__init__()
        self.weights, self._call = weights, call

    @property
    def runs_again(self) -> bool:
        """Whether loss and gradients can be taken again."""
        return self._call.again is not None

    def forward(self, *_: Any) -> Any:
        """Loss and gradients once more."""
        return None if self._call.again is None else self._call.again()

    def named_parameters(self, *_: Any, **__: Any) -> Generator[tuple[str, Any]]:
        """The weights and their names."""
        yield from self.weights.items()


class FunctionalSteps:
    """Notes such a call as a forward pass, and as a backward pass where it is for an update of weights.

    Where optimizers of torch hold the weights, they are known by their memory, since loops hand over what `detach`
    gives. Where nobody holds them, they are what gradients are taken of, unless another computation made them, as
    inner loops do. Gradients with a graph of their own may be part of another loss: they are a pass only if an
    optimizer steps before anything else goes backward.

    Args:
        seen: The watch.
    """

    def __init__(self, seen: Watch) -> None:
        self._seen = seen
        self._kept: Callable[[], None] | None = None

    @contextlib.contextmanager
    def hear(self, call: FunctionalGradient) -> Generator[None]:
        """Note one call."""
        seen = self._seen
        weights = {} if seen.busy else self._find_trained(call)
        if not weights:
            yield
            return
        self._kept = None
        first = id(self) not in seen.modules.roots
        root = seen.modules.roots[id(self)] = FunctionalWeights(weights, call)
        if first:
            seen.weights.keep_start(list(weights.values()))
        seen.note_boundary(cleared=False)
        if seen.light:
            note_light_forward(seen, root, call.args, {})
        else:
            seen.note(ForwardEvent(bad_inputs=False, region=seen.regions.current))
        yield
        if call.loss is None:
            return
        if seen.listener is not None:
            seen.listener.see_functional_gradients({n: g for n, g in call.gradients.items() if n in weights})
        if not call.is_kept or not self._makers():
            self._note_backward(call, weights)
        elif not seen.accumulates:
            self._kept = lambda: self._note_backward(call, weights)

    def before_step(self) -> None:
        """An optimizer is about to step: what was kept is its pass."""
        kept, self._kept = self._kept, None
        if kept is not None and not self._seen.accumulates:
            kept()

    def _makers(self) -> list[Any]:
        return [made for made in self._seen.optimizers.values() if not isinstance(made.optimizer, Updates)]

    def _find_trained(self, call: FunctionalGradient) -> dict[str, Tensor]:
        """The weights that the loop trains, of those that gradients are taken of, by name."""
        makers = self._makers()
        if not makers:
            return call.weights if all(weight.grad_fn is None for weight in call.weights.values()) else {}
        if self._seen.accumulates and not call.is_kept:
            return {}  # the loop trains by backward(), which knows nothing of these
        held = {_address(p): p for made in makers for p in made.parameters}
        return {name: held[_address(w)] for name, w in call.weights.items() if _address(w) in held}

    def _note_backward(self, call: FunctionalGradient, weights: dict[str, Tensor]) -> None:
        seen = self._seen
        if call.loss is None or (seen.accumulates and self._makers()):
            return
        loss: Any = read_loss((call.loss.detach().double().mean(),), 1.0)
        seen.scaling.by_hand = call.factor
        seen.note_cheaply(BackwardEvent(loss, 1.0, create_graph=False, by_hand=call.factor))
        seen.step_losses.append(loss)
        seen.weights.add_leaves(weights.values())
        seen.note_backward({id(w): call.gradients[name] for name, w in weights.items() if name in call.gradients})


def _address(weight: Tensor) -> tuple[int, int]:
    own = local_part(weight)
    return own.data_ptr(), own.numel()
