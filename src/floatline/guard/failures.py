"""Failed steps of a guarded run, with what is needed to run them again and to explain them."""
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from floatline.guard.diary import is_first_process, say
from floatline.guard.outcome import Outcome
from floatline.guard.run import Run
from floatline.numerics import foreach
from floatline.precision.micro_batches import Loss
from floatline.precision.random_state import RandomState
from floatline.precision.wrappers import unwrap

_MOST_BUFFERS = 64 << 20  # bytes; larger ones are masks and tables, which steps do not change
_UNSEEN = "a step failed whose batch is not known: on_failure is called for steps made by guard.step"


@dataclass(frozen=True)
class FailedStep:
    """A step that was skipped, and that no smaller loss scale would have saved.

    Args:
        run: The run it belongs to; its weights are those of now.
        outcome: What it came to.
        compute_loss: Gives the loss of a batch.
        batches: Its micro-batches.
        random_state: Random numbers that it began with.
        buffers: Buffers of the model that it began with; none where they are too large to be kept.
        updates_since: Steps that were applied since: 0 where the weights are those of the failed step.
    """

    run: Run
    outcome: Outcome
    compute_loss: Callable[[Any], Loss]
    batches: tuple[Any, ...]
    random_state: RandomState
    buffers: dict[str, Tensor]
    updates_since: int


OnFailure: TypeAlias = Callable[[FailedStep], "str | None"]
"""Gets a failed step; gives what the ledger should say about it, or None."""


# How words begin that name no cause: they take the place of no advice.
NO_CAUSE = ("no cause found", "not diagnosed", "the failed step could not be diagnosed")


def name_cause(diagnoses: Sequence[str]) -> str:
    """The last line of a run's diagnoses that names a cause; '' where none does."""
    return next((line for line in reversed(diagnoses) if not line.partition(": ")[2].startswith(NO_CAUSE)), "")


@dataclass(frozen=True)
class _Kept:
    attempt: int
    compute_loss: Callable[[Any], Loss]
    batches: tuple[Any, ...]
    random_state: RandomState
    buffers: dict[str, Tensor]


class FailureWatch:
    """Keeps the last few steps until it is known what became of them, and hands on those that failed.

    Keeping one copies the buffers on their device and takes the random numbers; the host waits for nothing.

    Args:
        run: The run.
        on_failure: Called with each failed step. What it raises is noted, and the run goes on.
    """

    def __init__(self, run: Run, on_failure: OnFailure) -> None:
        self._run = run
        self._on_failure = on_failure
        self._kept: deque[_Kept] = deque()
        self._told = False
        self._said: dict[str, str] = {}  # the last line of each diagnosis, by its words
        # Walking through all modules in every step would take as long as the rest of keeping it.
        modules = cast("Iterable[tuple[str, nn.Module]]", unwrap(run.model).named_modules())
        self._holders = [(name, module) for name, module in modules if module._buffers]

    def keep(self, attempt: int, compute_loss: Callable[[Any], Loss], batches: tuple[Any, ...]) -> None:
        """Remember a step that is about to be made."""
        while self._kept and self._kept[-1].attempt >= attempt:  # it raised, or the run went back to a checkpoint
            self._kept.pop()
        self._kept.append(_Kept(attempt, compute_loss, batches, RandomState.now(), self._copy_buffers()))

    def look_at(self, outcome: Outcome, later: Iterable[Outcome]) -> None:
        """Hand the step on if it failed; waits for the device in that case only.

        Args:
            outcome: What a step came to.
            later: Steps that were made since.
        """
        kept = None
        while self._kept and self._kept[0].attempt <= outcome.attempt:
            kept = self._kept.popleft()
        if not self._is_failure(outcome):
            return
        if kept is None or kept.attempt != outcome.attempt:
            if not self._told:
                self._told = True
                self._run.diary.note("diagnosis", _UNSEEN)
            return
        since = sum(other.applied for other in later)
        failed = FailedStep(self._run, outcome, kept.compute_loss, kept.batches, kept.random_state, kept.buffers, since)
        try:
            words = self._on_failure(failed)
        except Exception as error:  # whatever it is, the run is worth more
            first = next(iter(str(error).splitlines()), "")
            words = f"the failed step could not be diagnosed: {type(error).__name__}: {first}"
        if not words:
            return
        self._run.diary.note("diagnosis", words)
        before, line = self._said.pop(words, None), f"diagnosis of step {outcome.attempt:,}: {words}"
        self._said[words] = line
        self._run.diagnoses[:] = [other for other in self._run.diagnoses if other != before] + [line]
        if before is None and is_first_process(self._run.judge.group):  # once is enough for people
            say(line)

    def _is_failure(self, outcome: Outcome) -> bool:
        """Whether a smaller scale would not have helped: NaN in the forward pass, or an overflow at the smallest."""
        if outcome.reason == "forward-nonfinite":
            return True
        scaling = self._run.plan.scaling
        return outcome.reason == "overflow" and (scaling is None or outcome.scale <= scaling.floor)

    @torch.no_grad()
    def _copy_buffers(self) -> dict[str, Tensor]:
        live: dict[str, Tensor] = {}
        seen: set[int] = set()
        for prefix, module in self._holders:
            for name, buffer in module._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    live[f"{prefix}.{name}" if prefix else name] = buffer.detach()
        if not live or sum(b.numel() * b.element_size() for b in live.values()) > _MOST_BUFFERS:
            return {}
        copies = [torch.empty_like(buffer) for buffer in live.values()]
        foreach.copy_(copies, list(live.values()))  # a few launches, however many there are
        return dict(zip(live, copies, strict=True))
