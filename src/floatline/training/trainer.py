"""Trainer: the guard as a ready trainer for a workload, with ledger, checkpoints and resume."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import GuardError
from floatline.findings import GuardStop
from floatline.guard.checkpoints.run_files import newest_checkpoint, prune_checkpoints
from floatline.guard.guard import Guard
from floatline.guard.outcome import Outcome
from floatline.guard.policy import Policy, resolve_policy
from floatline.ledger.parts import list_parts
from floatline.numerics.cuda_autocast import gpu_arithmetic
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import cast_weights
from floatline.precision.random_state import restore_numpy, seed_all
from floatline.training.placement import measure_metric, place, take_optimizer
from floatline.training.result import Best, RunResult, is_better
from floatline.training.settings import AnyPlan, check_config, load_settings, save_settings
from floatline.workload import Workload

RECORD_LAYERS_EVERY = 50
"""Steps between two records of the gradient norms by layer, where there is a ledger."""


class Trainer:
    """Trains a workload under a guard, and can go on where it was ended.

    The batches are cycled in their order, `plan.accumulate` of them a step. Model and batches are on CUDA where there
    is a GPU. On a CPU, 16-bit products are computed as a GPU does, with CUDA's autocast lists.

    Numerics:
        A run that is resumed gives the bits of one that was never ended, on a CPU, and on a GPU whose kernels are
        deterministic: weights, states, scale, windows, random numbers and the place in the data are saved. What a
        policy with snapshots could go back to is not. Checked by tests/training/test_trainer.py.

    Args:
        workload: What is trained.
        plan: Precision: a name, a YAML file or a Plan. None takes that of the run that is resumed, else the workload's.
        policy: When to skip, go back and stop: a Policy, a preset's name, or None for that of the run or the plan.
        folder: Run folder: ledger, plan, policy and checkpoints; made where it is missing. None keeps nothing on the
            disk: for a run whose end is all that counts.
        steps: Steps of the whole run. None is what a resumed run had, else one pass over the batches or 200, whichever
            is longer.
        save_every: Steps between two checkpoints; the first step and the end have one in any case.
        keep: Checkpoints kept.
        evaluate_every: Steps between two evaluations on the way; the ledger tells each, and the folder's `best` holds
            the checkpoint of the best. None evaluates at the end only.
        seed: Of the random numbers while training; `resume` wants the same.
        resume: Go on from the newest checkpoint in the folder.
        on_step: Called with the outcome of every step. Reading its numbers waits for the device; after
            `policy.read_after` steps they are there.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        plan: AnyPlan | None = None,
        policy: Policy | str | None = None,
        folder: str | Path | None,
        steps: int | None = None,
        save_every: int = 500,
        keep: int = 2,
        evaluate_every: int | None = None,
        seed: int = 0,
        resume: bool = False,
        on_step: Callable[[Outcome], None] | None = None,
    ) -> None:
        self.folder = None if folder is None else Path(folder).absolute()  # the run may change its working directory
        self._check_folder(resume)
        if resume and self.folder is not None:
            self.plan, policy = load_settings(self.folder, plan, policy)
            check_config(self.folder, workload.settings)
        else:
            self.plan = resolve_plan(workload.precision if plan is None else plan)
            own = dict(workload.policy) if policy is None else dict[str, Any]()
            policy = replace(resolve_policy(policy, plan_name=self.plan.name), **own)
        self.steps: int = default_steps(len(workload.batches), self.plan) if steps is None else steps
        counts = {"steps": self.steps, "save_every": save_every, "keep": keep}
        if evaluate_every is not None:
            counts["evaluate_every"] = evaluate_every
        for name, value in counts.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise GuardError(f"{name} is {value!r}. Give a whole number from 1 up.")
        self.workload = workload
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.steps_done = 0
        self.best: Best | None = None
        self._saved: int | None = None  # steps of the newest checkpoint
        self._evaluate_every = evaluate_every
        self._save_every, self._keep, self._seed, self.on_step = save_every, keep, seed, on_step
        workload.model.to(self.device)
        if isinstance(workload.loss_fn, nn.Module):  # such as one with weights of the classes
            workload.loss_fn.to(self.device)
        cast_weights(workload.model, self.plan)
        optimizer = take_optimizer(workload.make_optimizer(workload.model), self.plan)
        self.guard = Guard(
            workload.model,
            optimizer,
            plan=self.plan,
            policy=policy,
            folder=self.folder,
            resume=resume,
            # Always the same batch, also after a resume; only a run that can go back asks for it.
            canary=(lambda: self._compute_loss(self.micro_batch(0))) if policy.snapshot_gib > 0 else None,
            loss_fn=workload.loss_fn,
            record_layers_every=0 if self.folder is None else RECORD_LAYERS_EVERY,
            steps=self.steps,
        )
        if self.guard.loss_fn is not None:
            self.workload = replace(workload, loss_fn=self.guard.loss_fn)  # as the plan computes it
        try:
            seed_all(self._seed)
            if resume:
                self._go_on(keep_steps=steps is None)
            else:
                if self.folder is not None:
                    save_settings(self.folder, self.plan, policy, workload.settings)
                self._save()  # so that there is something to resume from, whenever the run ends
        except BaseException:
            self.guard.close()
            raise

    def run(self, *, evaluate: bool = True) -> RunResult:
        """Train to the end, to Ctrl-C or SIGTERM, or until the guard ends the run; the state is saved in each case.

        Args:
            evaluate: False leaves the metric at the end to `measure`.
        """
        began = time.monotonic()
        metric, stop, caught = None, None, Interrupt()
        try:
            with caught, self.arithmetic():
                while self.steps_done < self.steps and caught.asked_by is None:
                    self.step()
                    self._evaluate()
                    if self.steps_done % self._save_every == 0 and self.steps_done < self.steps:
                        self._save()
                self._save()  # waits for the last steps, and hears of a stop there too
            if self.steps_done >= self.steps and evaluate:
                metric = self.measure()
        except GuardStop as error:
            stop = error
        finally:
            # Steps that are still under way after an error or a stop would only say the same again.
            with contextlib.suppress(GuardStop):
                self.guard.close()
        account = self.guard.accounts.run
        kept, stopped_at = None, None
        if self.folder is not None:
            kept = newest_checkpoint(self.folder)
            stopped_at = newest_checkpoint(self.folder / "stopped") if stop is not None else None
        return RunResult(
            attempted=account.attempted,
            applied=account.applied,
            skipped=dict(account.skipped),
            first_loss=account.first_loss,
            last_loss=account.last_loss,
            metric=metric,
            seconds=time.monotonic() - began,
            folder=self.folder,
            checkpoint=stopped_at or kept,
            ended_by=caught.asked_by if stop is None and self.steps_done < self.steps else None,
            stopped=None if stop is None else str(stop),
            finding=None if stop is None else stop.finding,
            best=self.best,
            epochs=tuple(self.guard.accounts.epochs.items()),
        )

    def _evaluate(self) -> None:
        """Evaluate where it is time to, and keep the checkpoint of the best."""
        if self._evaluate_every is None or self.steps_done % self._evaluate_every:
            return
        metric, name = self.measure(), self.workload.metric_name
        self.guard.drain()  # the ledger tells it after the steps that led to it
        self.guard.note_evaluation(f"{name} {metric:.6g} after {self.steps_done:,} steps", metric=metric)
        if not is_better(metric, self.best, higher_is_better=bool(self.workload.higher_is_better)):
            return
        self.best = Best(self.steps_done, metric)
        if self.folder is not None:
            self.guard.save(self.folder / "best", extra=self._extra())
            prune_checkpoints(self.folder / "best", 1)

    def _check_folder(self, resume: bool) -> None:
        if self.folder is None:
            if resume:
                raise GuardError("A run without a folder cannot be resumed. Give its folder.")
            return
        holds = self.folder.is_dir() and bool(list_parts(self.folder))
        if holds and newest_checkpoint(self.folder) is None:
            raise GuardError(
                f"The run in {self.folder} has no checkpoint to go on from. Delete the folder, or choose another."
            )
        if resume and not holds:
            raise GuardError(
                f"There is no run to resume in {self.folder}. Start one without resume, or give its folder."
            )
        if holds and not resume:
            raise GuardError(f"{self.folder} already holds a run. Resume it (--resume), or choose another folder.")

    def _go_on(self, *, keep_steps: bool) -> None:
        extra = self.guard.load(cast("Path", self.folder))
        for name, value in self._settings().items():
            if extra.get(name) != value:
                raise GuardError(
                    f"The run in {self.folder} has {name} {extra.get(name)!r}, which is not the {value!r} given now. "
                    f"Resume it with the same {name}, or start another run."
                )
        self.steps_done = self._saved = extra["steps_done"]
        self.steps = extra["steps"] if keep_steps else self.steps
        self.best = Best.of(extra.get("best"))
        restore_numpy(extra.get("numpy_random"))  # an earlier version kept it here; now the guard restores it

    def _settings(self) -> dict[str, Any]:
        """What a resumed run must have in common with the one that was ended."""
        return {"seed": self._seed, "batches": len(self.workload.batches)}

    def _save(self) -> None:
        self.guard.drain()
        note = "" if self.workload.note is None else self.workload.note(self.workload.model)
        if note:
            self.guard.note(f"{note}; {self.guard.accounts.success()}")
        if self.folder is None or self._saved == self.steps_done:
            return
        self.guard.flush()  # first: the ledger lacks no step that a checkpoint holds
        self.guard.save(self.folder, extra=self._extra())
        self._saved = self.steps_done
        prune_checkpoints(self.folder, self._keep)

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint holds besides the guard's state."""
        best = None if self.best is None else self.best.as_json()
        counts = {"steps": self.steps, "steps_done": self.steps_done, "best": best}
        return {**self._settings(), **counts}

    @contextlib.contextmanager
    def arithmetic(self) -> Generator[None]:
        """On a CPU: 16-bit products as a GPU computes them. torch's own kernels are some hundred times slower."""
        if self.device.type != "cpu" or self.plan.compute == "fp32":
            yield
            return
        with gpu_arithmetic():
            yield

    def step(self) -> Outcome:
        """One step, inside `arithmetic`; `run` makes all of them."""
        first = self.steps_done * self.plan.accumulate
        epoch = first // len(self.workload.batches)
        if epoch != self.guard.epoch:
            self.guard.begin_epoch(epoch)
        micro_batches = [self.micro_batch(i) for i in range(first, first + self.plan.accumulate)]
        outcome = self.guard.step(self._compute_loss, *micro_batches)
        self.steps_done += 1
        if self.on_step is not None:
            self.on_step(outcome)
        return outcome

    def measure(self, *, master: bool = True) -> float:
        """The metric of the model as it is now, in FP32; `run` does it at the end. See `measure_metric`."""
        return measure_metric(self.workload, self.guard.run, master=master)

    def micro_batch(self, number: int) -> tuple[Any, Any]:
        """A batch of the endless row, on the device and in the plan's format."""
        inputs, targets = self.workload.batches[number % len(self.workload.batches)]
        # Without autocast nothing else brings a batch into the weights' format, and torch refuses some losses of two.
        dtype = None if self.plan.weights == "fp32" else DTYPES[self.plan.weights]
        return place(inputs, self.device, dtype), place(targets, self.device, dtype)

    def _compute_loss(self, batch: tuple[Any, Any]) -> Tensor:
        return self.workload.compute_loss(*batch)


def default_steps(num_batches: int, plan: Plan) -> int:
    """One pass over the batches or 200 steps, whichever is longer."""
    return max(200, -(-num_batches // plan.accumulate))


class Interrupt:
    """Takes Ctrl-C and SIGTERM down as a wish while a run works; a second one raises KeyboardInterrupt.

    Attributes:
        asked_by: The signal that asked; None while none has.
    """

    def __init__(self) -> None:
        self.asked_by: int | None = None
        self._before: dict[int, Any] = {}
        # Python lets only the main thread have handlers; and whoever started a run that ignores a signal meant it.
        main = threading.current_thread() is threading.main_thread()
        known = (signal.SIGINT, signal.SIGTERM) if main else ()
        self._mine = [number for number in known if signal.getsignal(number) is not signal.SIG_IGN]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked_by is not None:
            signal.default_int_handler(number, frame)
        self.asked_by = number

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._ask) for number in self._mine}

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
