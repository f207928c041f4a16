"""What a watch saw, summed up in a RunRecord."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from floatline.optim.mesh import local_part
from floatline.plans.plan import name_all_modules
from floatline.probe.runs.failures import Failure
from floatline.probe.watch.events import (
    BackwardEvent,
    LoopEvent,
    ScalerStepEvent,
    StepEvent,
    UnscaleEvent,
)
from floatline.probe.watch.loop import MadeOptimizer, Watch
from floatline.probe.watch.own_updates import Updates
from floatline.probe.watch.patches import unwrap
from floatline.probe.watch.weights import match_masters

_Kind = TypeVar("_Kind", bound=LoopEvent)


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """An optimizer of the run.

    Args:
        number: As in the events.
        name: Such as 'torch.optim.SGD'.
        file: Where it was made.
        line: Line there.
        names: Its parameters' names in the model; '' for one that no model holds.
        num_steps: How often it stepped, skipped steps left out.
        num_idle: How often it was stepped, or was to be, without a single gradient.
        dead: Whether none of its parameters that no model holds ever got a gradient, and there are some.
        by_hand: Whether it stands for lines of the loop that update weights without an optimizer.
        rate: The largest learning rate that it was made with; None where one is no number.
    """

    number: int
    name: str
    file: str
    line: int
    names: tuple[str, ...]
    num_steps: int
    num_idle: int
    dead: bool
    by_hand: bool = False
    rate: float | None = None

    @property
    def call(self) -> str:
        """What updates the weights."""
        return "an update by hand" if self.by_hand else f"{self.name}.step"


@dataclass(frozen=True, slots=True)
class Untrained:
    """A tensor that the loss gives gradients to and that no optimizer holds; or the other way round.

    Args:
        name: Its name in the model.
        registered: Whether the model knows it as a parameter; False for a tensor or layer in a plain attribute.
        held: Whether an optimizer holds it: then it is its gradient that is missing.
        moved: Whether the attribute is what an operation made of it, such as `nn.Parameter(...).to(device)`.
    """

    name: str
    registered: bool
    held: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A batch tensor that is not finite, named as in 'batches[2].inputs[0]'."""

    name: str
    batch: int
    num_nan: int
    num_inf: int
    numel: int


@dataclass(slots=True)
class RunRecord:
    """What one run showed.

    Args:
        kind: 'build' where floatline ran the loop, 'train' where the loop is the user's.
        entry: Name of the user's function that was run.
        precision: Of the workload, or of the replay: 'fp32', 'bf16'. '' where only the user's loop knows.
        file: Source file of the target's function.
        losses: One for each backward pass, without the loss scale.
        loss_steps: The step of each loss.
        events: What the loop called.
        exception: What ended it; None where it came to its end.
        num_steps: Steps begun.
        num_batches: Batches in a workload; 0 where the loop is the user's.
        skipped: Steps whose optimizer step a scaler left out.
        bad_loss, bad_gradient, bad_weight: The first step with a loss, an applied gradient or a weight that is not
            finite; None where there is none.
        searches_in_loss: Whether losses that are not finite are a search for a scale: a penalty on scaled gradients
            overflows by the scale alone, and every such step was left out.
        weights_finite: Whether all weights and buffers are finite at the end.
        moved, still, no_gradient: Names of parameters that moved, that stood still, and that got no gradient.
        optimizers: Those that were made.
        untrained: What the loss uses and no optimizer trains.
        half_parameters: Names of the FP16 parameters that a scaler was to unscale.
        bad_tensors: Batch tensors that are not finite.
        model: The model after training.
        result: What the user's function returned.
        seconds: How long it took.
    """

    kind: Literal["build", "train"]
    entry: str
    precision: str
    file: str = ""
    losses: list[float] = field(default_factory=list[float])
    loss_steps: list[int] = field(default_factory=list[int])
    events: list[LoopEvent] = field(default_factory=list[LoopEvent])
    exception: Failure | None = None
    num_steps: int = 0
    num_batches: int = 0
    skipped: list[int] = field(default_factory=list[int])
    bad_loss: int | None = None
    bad_gradient: int | None = None
    bad_weight: int | None = None
    searches_in_loss: bool = False
    weights_finite: bool = True
    moved: list[str] = field(default_factory=list[str])
    still: list[str] = field(default_factory=list[str])
    no_gradient: list[str] = field(default_factory=list[str])
    optimizers: list[OptimizerRecord] = field(default_factory=list[OptimizerRecord])
    untrained: list[Untrained] = field(default_factory=list[Untrained])
    half_parameters: list[str] = field(default_factory=list[str])
    bad_tensors: list[BadTensor] = field(default_factory=list[BadTensor])
    model: nn.Module | None = None
    result: object = None
    seconds: float = 0.0

    def of(self, *kinds: type[_Kind]) -> list[_Kind]:
        """The events of some kinds, in order."""
        return [event for event in self.events if isinstance(event, kinds)]

    @property
    def first_bad_step(self) -> int | None:
        """The first step with a loss, an applied gradient or a weight that is not finite."""
        return min((s for s in (self.bad_loss, self.bad_gradient, self.bad_weight) if s is not None), default=None)

    @property
    def stuck_skips(self) -> list[int]:
        """Skipped steps that are not the search for a scale.

        A search goes down until a step is applied. A step that is skipped at a scale at which one was applied
        before, and skips that last to the end of the run, are something else.
        """
        worked = 0.0
        found: list[int] = []
        tail: list[int] = []
        for event in self.of(ScalerStepEvent):
            if event.applied:
                worked, tail = max(worked, event.scale), []
                continue
            tail.append(event.step)
            if event.scale <= worked:
                found.append(event.step)
        return found or (tail if len(tail) > 20 else [])

    @property
    def step_to_trace(self) -> int:
        """The step to look into: the first bad one that is no search for a scale, or else a late one."""
        if self.exception is not None:
            return self.exception.step
        stuck = self.stuck_skips
        # Where nothing but skips is left, the last has the smallest scale: no search can explain it.
        never_ends = len(stuck) > 20 and bool(self.skipped) and self.skipped[-1] >= self.num_steps - 1
        candidates = [self.first_bad_step, (stuck[-1] if never_ends else stuck[0]) if stuck else None]
        return min((step for step in candidates if step is not None), default=self.loss_steps[-1] if self.losses else 0)

    def progress(self, other: RunRecord) -> float:
        """How far the loss fell, as a share of how far the other run's fell; 1 where that one did not fall."""
        own, theirs = _fall(self.losses), _fall(other.losses)
        if theirs is None or theirs <= 0:
            return 1.0
        return -math.inf if own is None else own / theirs


def _fall(losses: Iterable[float]) -> float | None:
    """From the mean of the first tenth to that of the last; None where one is not finite."""
    values = list(losses)
    size = max(len(values) // 10, 1)
    ends = [sum(part) / size for part in (values[:size], values[-size:]) if part]
    if len(ends) < 2 or not all(map(math.isfinite, ends)):
        return None
    return ends[0] - ends[1]


def find_bad_tensors(batches: Sequence[tuple[Sequence[Any], Sequence[Any]]]) -> list[BadTensor]:
    """Batch tensors with NaN or inf. A tensor of 0 and -inf alone is a mask, and meant."""
    found: list[BadTensor] = []
    for number, (inputs, targets) in enumerate(batches):
        for part, values in (("inputs", inputs), ("targets", targets)):
            for path, tensor in tree_flatten_with_path(list(values))[0]:
                if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.isfinite().all():
                    continue
                if bool(((tensor == 0) | tensor.isneginf()).all()):
                    continue
                counts = int(tensor.isnan().sum()), int(tensor.isinf().sum())
                found.append(BadTensor(f"batches[{number}].{part}{keystr(path)}", number, *counts, tensor.numel()))
    return found


def fill_record(record: RunRecord, seen: Watch) -> None:
    """Fill a record from what was seen."""
    record.events = seen.events
    record.num_steps = seen.step + 1
    backward = record.of(BackwardEvent)
    scaled = bool(seen.weights.masters) or (seen.updates is not None and seen.updates.scales_itself)
    record.losses = [event.loss / (event.by_hand if scaled else 1.0) for event in backward]
    record.loss_steps = [event.step for event in backward]
    if not backward:
        # The training may have run in other processes; then what the function says about it is all there is.
        record.losses = _read_losses(record.result)
        record.loss_steps = list(range(len(record.losses)))
    record.skipped = [event.step for event in record.of(ScalerStepEvent) if not event.applied]
    lost = [event.step for event in backward if not math.isfinite(event.loss)]
    record.bad_loss = next(iter(lost), None)
    record.searches_in_loss = seen.scaling.penalties and set(lost) <= set(record.skipped)
    steps = record.of(StepEvent)
    tried = {event.step for event in record.of(StepEvent, ScalerStepEvent)}
    # An optimizer that takes the scaler's flag leaves such a step out by itself.
    used = [e for e in steps if not (e.through_scaler and e.scales_itself)]
    bad = [e.step for e in used if not all(map(math.isfinite, e.largest))]
    bad += [e.step for e in backward if e.step not in tried and not e.finite_after]
    record.bad_gradient = min(bad, default=None)
    record.bad_weight = next((event.step for event in steps if not event.finite_after), None)
    if record.kind == "train":
        record.model = _find_model(record, seen)
    names = _name_parameters(record, seen)
    _fill_motion(record, seen, names)
    record.optimizers = [_sum_up(record, made, seen, names) for made in seen.optimizers.values()]
    record.untrained = list(_find_untrained(record, seen, names))
    # A loop that clips meets the scaler's refusal in unscale_, before any step.
    halves: list[tuple[int, int]] = [
        (e.optimizer, i) for e in record.of(ScalerStepEvent, UnscaleEvent) for i in e.halves
    ]
    held: dict[int, list[Tensor]] = {made.number: made.parameters for made in seen.optimizers.values()}
    record.half_parameters = list(dict.fromkeys(names.get(id(held[number][i]), "") for number, i in halves))


def _read_losses(result: object) -> list[float]:
    losses: Any = result.get("losses") if isinstance(result, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if not isinstance(losses, (list, tuple)):
        return []
    return [float(loss) for loss in losses if isinstance(loss, (int, float))]  # pyright: ignore[reportUnknownVariableType]


def _find_model(record: RunRecord, seen: Watch) -> nn.Module | None:
    result = record.result
    returned: list[Any] = list(result.values()) if isinstance(result, dict) else [result]  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    modules = [value for value in returned if isinstance(value, nn.Module)]
    return next(iter(modules), None) or next(reversed(seen.modules.roots.values()), None)


def _name_parameters(record: RunRecord, seen: Watch) -> dict[int, str]:
    """Names by id; the model's own first, then those of modules that were called alone."""
    models = [unwrap(model) for model in (record.model, *seen.modules.roots.values()) if model is not None]
    names: dict[int, str] = {}
    for model in models:
        for name, tensor in model.named_parameters():
            names.setdefault(id(tensor), name)
    for key, parts in seen.weights.masters.items():
        whole = f"FP32 copy of {len(parts)} parameters"
        names.setdefault(key, names.get(id(parts[0]), "") if len(parts) == 1 else whole)
    return names


def _fill_motion(record: RunRecord, seen: Watch, names: dict[int, str]) -> None:
    tensors = {id(t): t for model in seen.modules.roots.values() for t in model.parameters() if t.requires_grad}
    for key, tensor in tensors.items():
        start = seen.weights.start.get(key)
        if start is None:
            continue
        tensor = local_part(tensor)
        same = (
            start.dtype == tensor.dtype
            and start.shape == tensor.shape
            and bool((start.to(tensor.device) == tensor.detach()).all())
        )
        (record.still if same else record.moved).append(names.get(key, ""))
        if key not in seen.weights.leaves:
            record.no_gradient.append(names.get(key, ""))
    if record.model is not None:
        floats = (t for t in (*record.model.parameters(), *record.model.buffers()) if t.is_floating_point())
        record.weights_finite = all(bool(local_part(tensor).detach().isfinite().all()) for tensor in floats)


def _sum_up(record: RunRecord, made: MadeOptimizer, seen: Watch, names: dict[int, str]) -> OptimizerRecord:
    steps = [event for event in record.of(StepEvent) if event.optimizer == made.number]
    idle = [event for event in steps if event.num_without_gradient == event.num_parameters]
    idle += [e for e in record.of(ScalerStepEvent) if e.optimizer == made.number and not e.num_gradients]
    strangers = [p for p in made.parameters if id(p) not in names]
    dead = bool(strangers) and not any(id(parameter) in seen.weights.leaves for parameter in strangers)
    by_hand = isinstance(made.optimizer, Updates)
    tried = bool(steps) or any(e.optimizer == made.number for e in record.of(ScalerStepEvent))
    dead = dead and tried and not by_hand  # one that never stepped proves nothing
    own = tuple(names.get(id(parameter), "") for parameter in made.parameters)
    return OptimizerRecord(
        made.number,
        made.name,
        made.spot.file,
        made.spot.line,
        own,
        len(steps),
        len(idle),
        dead and bool(seen.modules.roots),
        by_hand,
        made.made_with,
    )


def _find_untrained(record: RunRecord, seen: Watch, names: dict[int, str]) -> Iterator[Untrained]:
    """Tensors that get gradients and are in no optimizer; and tensors in one that never get any, though used."""
    if not seen.optimizers:
        return
    held = {id(parameter) for made in seen.optimizers.values() for parameter in made.parameters}
    held |= {id(part) for parts in (*seen.weights.masters.values(), *_find_copies(record, seen)) for part in parts}
    hidden = {id(t): name for model in seen.modules.roots.values() for name, t in _hidden_tensors(model)}
    for key, leaf in seen.weights.leaves.items():
        start, now = seen.weights.start.get(key), local_part(leaf).detach()
        moved = start is not None and not bool((start.to(now.device) == now).all())
        if key in held or (moved if seen.weights.moved is None else key in seen.weights.moved):
            continue
        if key in names:
            yield Untrained(names[key], registered=True)
        elif key in hidden:
            yield Untrained(hidden[key], registered=False)
    for model in seen.modules.roots.values():
        for name, leaf in _moved_tensors(model):
            if leaf.grad is not None and id(leaf) not in held and id(leaf) not in names:
                yield Untrained(name, registered=False, moved=True)
    if not seen.weights.leaves:
        return
    for model in seen.modules.roots.values():
        for path, module in name_all_modules(model):
            for name, parameter in module.named_parameters(recurse=False):
                missing = id(parameter) in held and parameter.requires_grad and id(parameter) not in seen.weights.leaves
                if missing and id(module) in seen.modules.called:
                    yield Untrained(f"{path}.{name}".lstrip("."), registered=True, held=True)


def _find_copies(record: RunRecord, seen: Watch) -> Iterator[list[Tensor]]:
    """Weights of which an optimizer that had gradients holds copies that are equal still, since all updates were 0."""
    own = [parameter for model in seen.modules.roots.values() for parameter in model.parameters()]
    fed = {e.optimizer for e in record.of(StepEvent) if e.num_without_gradient < e.num_parameters}
    for made in seen.optimizers.values():
        if made.number in fed:
            yield from match_masters(made.parameters, own).values()


def _hidden_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Trainable tensors in plain attributes of modules, also inside lists, dicts and unregistered modules."""
    for path, module in name_all_modules(model):
        for name, value in vars(module).items():
            if name.startswith("_"):
                continue
            for tensor in _trainable_in(value):
                yield f"{path}.{name}".lstrip("."), tensor


def _moved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Plain attributes that a chain of operations on one tensor made, `nn.Parameter(x).to("cuda")`; and that tensor."""
    for path, module in name_all_modules(model):
        for name, value in vars(module).items():
            node = value.grad_fn if isinstance(value, Tensor) and not name.startswith("_") else None
            while node is not None and len(node.next_functions) == 1:
                node = node.next_functions[0][0]
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, Tensor):
                yield f"{path}.{name}".lstrip("."), leaf


def _trainable_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.requires_grad and value.is_leaf:
            yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif depth and isinstance(value, (list, tuple, dict)):
        items: Any = value.values() if isinstance(value, dict) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        for item in items:
            yield from _trainable_in(item, depth - 1)
