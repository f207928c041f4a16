"""MeasuredStep: told of the steps of a watched loop, measures one of them, and makes the manifest."""
# torch shows its dispatcher to Python under private names only.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.manifests.decays import SeenDecays, find_stuck_states
from floatline.manifests.judge import NOT_MEASURED
from floatline.manifests.manifest import Manifest
from floatline.manifests.rows import StateRow, SumRow, TiedRow, UpdateRow
from floatline.manifests.samples import GradientSums, StepSamples
from floatline.manifests.surroundings import (
    digest_named,
    find_bad_loss,
    find_devices,
    find_exchanges,
    find_last_loss,
    find_tied,
    read_switches,
)
from floatline.manifests.work import WorkWatch
from floatline.precision.declared_masters import read_masters
from floatline.precision.holding import Holding
from floatline.precision.live_holdings import NamedWeight, find_holdings, format_name, list_stepped, name_weights
from floatline.probe.scripts.weight_copies import all_weights
from floatline.probe.watch.events import AutocastEvent, BackwardEvent, ForwardEvent, ScalerStepEvent, StepEvent
from floatline.probe.watch.health import LateHealth, ScaledLoss
from floatline.probe.watch.loop import Watch
from floatline.probe.watch.own_updates import LooseWeights, Updates
from floatline.probe.watch.patches import Aside, Eagerly, is_inside_compiled
from floatline.probe.watch.weights import match_masters


class MeasuredStep:
    """A listener of a light watch. It measures the first step from a number on in which a learning rate is above zero.

    It is over when every optimizer that the loop has made has stepped, or one of them steps again; where nobody is
    called then, when the loop is.

    Attributes:
        manifest: What was found; None until the step is over.
        records: Whether the step is being measured.

    Args:
        seen: The watch.
        model: What is trained; None takes the modules that the loop calls.
        first: Number of the applied step, from 1.
        on_done: Called once the manifest is made; None measures until `end`.
    """

    def __init__(
        self,
        seen: Watch,
        model: nn.Module | None = None,
        *,
        first: int = 1,
        on_done: Callable[[Manifest], None] | None = None,
    ) -> None:
        self._seen, self._model, self._first, self._on_done = seen, model, first, on_done
        self.manifest: Manifest | None = None
        self.records = False
        self._applied: dict[int, int] = {}  # steps of each optimizer, by id
        self._stepped: dict[int, Optimizer] = {}  # in the step that is measured
        self._around = contextlib.ExitStack()
        self._notes: list[str] = []
        self._num_skipped = 0
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of a step."""
        self._work: WorkWatch | None = None
        self._sums: GradientSums | None = None
        self._samples: StepSamples | None = None
        self._decays = SeenDecays()
        self._gradients: list[Holding] = []
        self._masters: dict[int, list[Tensor]] = {}
        self._held: dict[int, list[Tensor]] = {}
        self._found_sums: list[SumRow] = []
        self._updates: list[UpdateRow] = []
        self._states: list[StateRow] = []
        self._tied: tuple[TiedRow, ...] = ()
        self._counted = WorkWatch(self._seen)
        self._scaled = False

    @property
    def num_applied(self) -> list[int]:
        """Steps that each optimizer has made."""
        return list(self._applied.values())

    @property
    def num_skipped(self) -> int:
        """Steps that a scaler left out."""
        return self._num_skipped

    @property
    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        return list(dict.fromkeys(self._notes))

    @property
    def models(self) -> list[nn.Module]:
        """What is trained: what was given, or the modules that the loop calls and that are no part of another."""
        if self._model is not None:
            return [self._model]
        roots = list(self._seen.modules.roots.values())
        if not roots:  # functions of tensors
            return [LooseWeights(all_weights(self._seen))]
        inner = {id(part) for root in roots for part in root.modules() if part is not root}
        return [root for root in roots if id(root) not in inner]

    @property
    def _measures(self) -> bool:
        """Whether a step is under way: several optimizers may step after one backward pass."""
        return self._work is not None or bool(self._stepped)

    # What the watch tells.

    def begin_forward(self, root: nn.Module, args: Any, kwargs: Any, event: ForwardEvent) -> None:
        """A root module is about to run, with gradients."""
        del root, args, kwargs, event
        self._begin_if_due()

    def _begin_if_due(self) -> None:
        due = max(self._applied.values(), default=0) >= self._first - 1
        if due and self.manifest is None and self._work is None and not is_inside_compiled():
            self._try(self._begin)

    def begin_backward(self) -> None:
        """A loop that calls no module is about to go backward: nothing can be told of its modules."""

    def see_gradients(self, optimizer: Optimizer, event: StepEvent, health: LateHealth | float) -> None:
        """An optimizer is about to step."""
        del health
        if self.manifest is None and id(optimizer) in self._stepped:
            self._finish()  # an optimizer that the loop has made never steps
        elif self.manifest is None and self._measures and not isinstance(optimizer, Updates):
            self._try(lambda: self._look(optimizer, event))

    def see_weights(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        self._applied[id(optimizer)] = self._applied.get(id(optimizer), 0) + 1
        if self._samples is not None:
            self._try(lambda: self._compare(optimizer))

    def see_attempt(self, event: ScalerStepEvent, losses: Sequence[ScaledLoss | float]) -> None:
        """A scaler has let a step through, or not."""
        del losses
        self._scaled = self._scaled or event.scale != 1.0
        if not event.applied:
            self._num_skipped += 1
            self._leave()
            self._forget()

    def end_step(self, *, late: bool = False) -> None:
        """A step is over."""
        del late
        if not self._stepped and self._model is None and not self._seen.modules.roots:
            self._begin_if_due()  # no module will tell when the next step begins
        if self.manifest is not None or not self._stepped or self._on_done is None:
            return
        known = [made.optimizer for made in self._seen.optimizers.values() if not isinstance(made.optimizer, Updates)]
        if all(id(optimizer) in self._stepped for optimizer in known):
            self._finish()

    def end_backward(self) -> None:
        """Gradients of a loop without an optimizer are there."""

    def see_functional_gradients(self, gradients: dict[str, Tensor]) -> None:
        """torch.func has taken gradients."""

    def see_compile(self) -> None:
        """The loop is about to compile something: the step that is measured runs eagerly."""
        self._notes.append("compiled code ran eagerly in this step")

    def leave_step(self) -> None:
        """What comes now is no part of the step, but an evaluation."""

    def leave_mode(self, mode: object) -> None:
        """The loop leaves a dispatch mode of its own; what was entered above it must be left first."""
        size = torch._C._len_torch_dispatch_stack()
        if self._work is None or mode is self._work or not size:
            return
        if torch._C._get_dispatch_stack_at(size - 1) is self._work:
            self._leave()

    # What is done about it.

    def _begin(self) -> None:
        weights = [weight.tensor for weight in self._weights().values()]
        self._counted.name_modules(self.models)
        self._work = self._counted
        self._sums = GradientSums(weights)
        self._around.enter_context(Eagerly())
        self._around.enter_context(self._work)
        self.records = True

    def _leave(self) -> None:
        """The forward and backward passes of a step are over."""
        self._work, self.records = None, False
        self._around.close()
        if self._sums is not None:
            self._found_sums += self._sums.end()
            self._found_sums += self._counted.own_sums.end()
            self._sums = None

    def _weights(self) -> dict[int, NamedWeight]:
        return name_weights(self.models)

    def _look(self, optimizer: Optimizer, event: StepEvent) -> None:
        self._leave()
        if not any(event.rates) and not self._stepped:
            self._forget()  # a warm-up begins at 0: nothing is to move
            return
        self._scaled = self._scaled or any(factor != 1.0 for factor in event.factors)
        weights, held = self._weights(), list_stepped(optimizer)
        self._held[id(optimizer)] = held
        strangers, own = [p for p in held if id(p) not in weights], [w.tensor for w in weights.values()]
        self._masters |= match_masters(strangers, own) | read_masters(own, strangers)
        owners = dict(weights)
        for key, parts in self._masters.items():
            owner = next((weights[id(part)] for part in parts if id(part) in weights), None)
            if owner is not None:
                owners[key] = owner
        with Aside():
            if not self._stepped:  # all weights are as the forward pass saw them
                self._tied = find_tied(weight for weight in weights.values() if weight.tensor.grad is not None)
            self._gradients += [row for row in find_holdings(self.models) if row.kind in ("gradients", "accumulation")]
        self._samples = StepSamples(optimizer, owners)
        if not type(optimizer).__module__.startswith(("torch.optim", "floatline.optim")):
            self._around.enter_context(self._decays)  # those of others are known by what they do

    def _compare(self, optimizer: Optimizer) -> None:
        self._around.close()
        samples, self._samples = self._samples, None
        if samples is None:
            return
        self._updates += samples.compare()
        self._states += find_stuck_states(optimizer, self._decays)
        self._stepped[id(optimizer)] = optimizer

    def _finish(self) -> None:
        self._leave()
        self.manifest = self._make()
        if self._on_done is not None:
            self._on_done(self.manifest)

    def _make(self) -> Manifest:
        optimizers = list(self._stepped.values())
        with Aside():
            averages = self._counted.averages
            held = find_holdings(self.models, optimizers, masters=self._masters, averages=averages, stepped=self._held)
            gradients = tuple(dict.fromkeys(self._gradients))
            holdings = (*(row for row in held if row.kind not in ("gradients", "accumulation")), *gradients)
            rank, num_ranks = read_rank()
            self._note_strangers(optimizers)
            return Manifest(
                holdings=holdings,
                optimizers=tuple(type(optimizer).__name__ for optimizer in optimizers),
                devices=find_devices(self.models),
                switches=read_switches(),
                exchanges=find_exchanges(self.models, self._counted.reductions),
                tied=self._tied,
                step=max(self._applied.values(), default=1),
                regions=self._find_regions(),
                refused=self._find_refused(),
                work=self._counted.work,
                ran=self._counted.ran,
                scaled=self._is_scaled(),
                updates=tuple(self._updates),
                states=tuple(self._states),
                sums=tuple(self._found_sums),
                peaks=self._counted.peaks,
                notes=tuple(self.notes),
                rank=rank,
                num_ranks=num_ranks,
                seed=torch.initial_seed(),
                digest=digest_named(self._weights().values()),
                bad_loss=find_bad_loss(self._seen),
                loss=find_last_loss(self._seen),
                num_collectives=self._counted.reductions.num_collectives,
            )

    def _is_scaled(self) -> bool:
        passes = (e for e in self._seen.events if isinstance(e, BackwardEvent))
        return self._scaled or any(e.factor != 1.0 or e.by_hand != 1.0 for e in passes)

    def _note_strangers(self, optimizers: Sequence[Optimizer]) -> None:
        """What was not looked at is said: tensors with gradients that somebody else updates."""
        known = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        known |= {*self._weights()}
        num = sum(id(leaf) not in known for leaf in self._seen.weights.leaves.values())
        if num:
            which = f"{num} tensor{'s' * (num > 1)} with gradients belong{'s' * (num == 1)}"
            self._notes.append(f"{which} to no module and no optimizer: what becomes of them was not measured")

    def _find_regions(self) -> tuple[str, ...]:
        entered = [e for e in self._seen.events if isinstance(e, AutocastEvent) and e.enabled]
        return tuple(dict.fromkeys(format_name(getattr(torch, e.dtype.removeprefix("torch."))) for e in entered))

    def _find_refused(self) -> tuple[str, ...]:
        made = [e.refused for e in self._seen.events if isinstance(e, AutocastEvent) and e.refused]
        return tuple(dict.fromkeys(made))

    def end(self) -> None:
        """The loop is over: what was measured of it is a manifest, where an optimizer stepped."""
        if self.manifest is None and self._stepped:
            self._finish()
        self._leave()

    def _try(self, work: Callable[[], None]) -> None:
        """Do something beside the loop; what goes wrong with it must not end it."""
        try:
            work()
        except Exception as error:
            self._notes.append(f"{NOT_MEASURED}{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            with contextlib.suppress(Exception):
                self._leave()


def read_rank() -> tuple[int, int]:
    """Number of this process, and how many there are."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()
