"""`floatline train`: a target trained under the guard, with ledger, checkpoints and resume."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from floatline.cli.endings import saying_how_to_go_on
from floatline.cli.output import FormatOption, OutputFormat, SeedOption, print_json, show_waiting, text_console

if TYPE_CHECKING:
    from rich.progress import Progress

    from floatline.guard.outcome import Outcome
    from floatline.ledger.account import Account
    from floatline.plans import Plan
    from floatline.training.result import RunResult
    from floatline.training.trainer import Trainer

_MOST_EPOCHS = 12  # of the last ones in the summary; the ledger has all


def train(
    target: Annotated[
        str,
        typer.Argument(
            help="What is trained: FILE.py, package.module[:name], or a reference workload: NAME[:VARIANT]."
        ),
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Settings of a reference workload; they override --preset and --config."
        ),
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="PLAN",
            help="The plan: a name or a YAML file. The default is the approved plan, else the target's own.",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="VARIANT", help="A variant of a reference workload, such as a size."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="YAML file with the settings of a reference workload."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="Policy of the guard: safe, balanced or ultra-conservative. The default is the plan's.",
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="How many steps the whole run takes. The default is one pass or 200, whichever is longer.",
        ),
    ] = None,
    seed: SeedOption = 0,
    folder: Annotated[
        str | None,
        typer.Option("--folder", metavar="FOLDER", help="Folder of the run. The default is runs/TARGET-PRESET."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint in the folder.")
    ] = False,
    save_every: Annotated[int, typer.Option("--save-every", min=1, help="Steps between two checkpoints.")] = 500,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            "--evaluate-every",
            min=1,
            help="Steps between two evaluations; the best is kept. The default is only at the end.",
        ),
    ] = None,
    approved_only: Annotated[
        bool, typer.Option("--approved-only", help="Train with the plan that is signed off, or not at all.")
    ] = False,
    output: FormatOption = OutputFormat.text,
) -> None:
    """Train a target under the guard: no damaged weights, a ledger of every step, checkpoints.

    Ctrl-C finishes the step, saves, and exits with 130, SIGTERM with 143; --resume goes on bit for bit. Exit code 1
    means that the guard ended the run, and says why.
    """
    import sys
    from pathlib import Path

    from floatline.plans.presets import resolve_plan
    from floatline.training.settings import CONFIG, name_folder

    asked = resolve_plan(plan) if plan is not None else None
    if approved_only:
        asked = _approved(target, plan)
    elif asked is None and not resume and not (preset or config or settings):
        asked = _current(target)
    place = folder if folder is not None else f"runs/{name_folder(f'{target}:{preset}' if preset else target)}"
    again = f"floatline train {target} --folder {place} --resume" + (f" --seed {seed}" if seed else "")
    # What the target prints is not the report.
    with (
        saying_how_to_go_on(f"From the last checkpoint, if there is one, goes on: {again}"),
        contextlib.redirect_stdout(sys.stderr),
    ):
        # A run goes on with the settings it was begun with, unless others are given; they are compared then.
        kept = f"{place}/{CONFIG}"
        own = kept if resume and not (preset or config or settings) and Path(kept).is_file() else config
        with show_waiting("loading the target"):
            from floatline.training.trainer import Trainer  # with torch, which takes seconds
            from floatline.workload import load_target

            workload = load_target(target, preset=preset, config=own, pairs=settings or ()).build(seed)

        with _blaming(target):
            trainer = Trainer(
                workload,
                plan=asked,
                policy=policy,
                folder=place,
                steps=steps,
                save_every=save_every,
                evaluate_every=evaluate_every,
                seed=seed,
                resume=resume,
            )
        trainer.guard.run.diary.diagnosed_by = f"floatline diagnose {target}"
        with _blaming(target, trainer), _Bar(trainer) as bar:
            trainer.on_step = bar.show
            result = trainer.run()
    if output is OutputFormat.json:
        print_json({"target": target, "plan": trainer.plan.name, "steps": trainer.steps, **result.as_json()})
    else:
        _write(result, trainer, place=place, again=again)
    if result.stopped is not None:
        raise typer.Exit(1)
    if result.ended_by is not None:
        raise typer.Exit(128 + result.ended_by)


def _approved(target: str, plan: str | None) -> Plan:
    """The plan that is signed off for the target."""
    from floatline.validation.signoff.status import approved_plan

    if plan is not None:
        raise typer.BadParameter("--plan and --approved-only say two things. Leave one out.")
    return approved_plan(target)


def _current(target: str) -> Plan | None:
    """The plan that the sign-off file has for the target, said in a line on stderr; None where it has none."""
    from floatline.validation.signoff.status import current_plan

    current = current_plan(target)
    if current is None:
        return None
    typer.echo(f"floatline: {current.text}. --plan overrides it.", err=True)
    return current.plan


@contextlib.contextmanager
def _blaming(target: str, trainer: Trainer | None = None) -> Generator[None]:
    """Show where the target's own code failed, and end with one line that says it was the target's."""
    import traceback

    from floatline.base.private_names import explain_missing
    from floatline.errors import FloatlineError, TargetError

    try:
        yield
    except FloatlineError:
        raise
    except Exception as error:
        if explain_missing(error) is not None:
            raise  # torch's doing, not the target's
        traceback.print_exc()
        what = "make_optimizer failed"
        if trainer is not None:
            done, total = trainer.steps_done, trainer.steps
            what = f"step {done + 1:,} failed" if done < total else "its evaluation failed"
        first_line = next(iter(str(error).splitlines()), "")
        raise TargetError(
            f"Target '{target}': {what}: {type(error).__name__}: {first_line}. "
            "Fix it there" + ("." if trainer is None else "; --resume goes on from the last checkpoint.")
        ) from error


_LOGGED = 20  # steps of a run that says in a log how far it is


class _Bar:
    """A progress bar on stderr with loss, scale and skips; where stderr is no terminal, a line for each tenth.

    A run of fewer than 20 steps has no such lines.
    """

    def __init__(self, trainer: Trainer) -> None:
        from collections import deque

        self._trainer = trainer
        self._skips = self._tenth = 0
        self._epoch: int | None = None
        # Shown once the guard has read them: the bar waits for the device no more than the guard does.
        self._outcomes: deque[Outcome] = deque()
        self._progress, self._task = self._make(trainer)
        self._began: tuple[float, int] | None = None  # when the first step was done, and how many were

    @staticmethod
    def _make(trainer: Trainer) -> tuple[Progress, Any]:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        fields = "loss {task.fields[loss]}  scale {task.fields[scale]}  skipped {task.fields[skips]}"
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn(fields), TimeRemainingColumn())
        progress = Progress(*columns, console=console, disable=not console.is_terminal)
        done, total = trainer.steps_done, trainer.steps
        return progress, progress.add_task("train", total=total, completed=done, loss="-", scale="-", skips="0")

    def show(self, outcome: Outcome) -> None:
        """Move on by one step."""
        self._progress.update(self._task, completed=self._trainer.steps_done)
        self._began = self._began or (time.monotonic(), self._trainer.steps_done)
        self._outcomes.append(outcome)
        if len(self._outcomes) <= self._trainer.guard.policy.read_after:
            return
        old = self._outcomes.popleft()
        self._skips += not old.applied
        if old.epoch != self._epoch:
            self._end_epoch()
            self._epoch = old.epoch
        self._progress.update(
            self._task,
            loss=f"{old.loss:.4g}",
            scale=f"{old.scale:g}",
            skips=f"{self._skips:,}",
        )
        if self._progress.disable:
            self._log(old)

    def _log(self, old: Outcome) -> None:
        done, total = self._trainer.steps_done, self._trainer.steps
        if total < _LOGGED or done * 10 // total == self._tenth:
            return
        self._tenth = done * 10 // total
        scale = f", scale {old.scale:g}" if self._trainer.plan.scaling is not None else ""
        text = f"floatline: step {done:,} of {total:,}, loss {old.loss:.4g}{scale}, {self._skips:,} skipped"
        typer.echo(f"{text}{self._say_left()}", err=True)

    def _say_left(self) -> str:
        """The time to go, by the steps since the first one, which sets things up."""
        from floatline.report.run.texts import show_seconds

        began, first = self._began or (0.0, 0)
        done, total = self._trainer.steps_done, self._trainer.steps
        if done <= first or done >= total:
            return ""
        return f", about {show_seconds((time.monotonic() - began) / (done - first) * (total - done))} to go"

    def _end_epoch(self) -> None:
        """A line for the epoch that is over, above the bar."""
        account = self._trainer.guard.accounts.epochs.get(-1 if self._epoch is None else self._epoch)
        if account is not None and not self._progress.disable:
            self._progress.console.print(describe_epoch(cast("int", self._epoch), account), highlight=False)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def describe_epoch(number: int, account: Account) -> str:
    """One line: losses, what was skipped and why, the scale and how often it was reduced."""
    loss = "no finite loss" if account.mean_loss is None else f"loss {account.mean_loss:.6g}"
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in account.skipped.items() if count)
    scale = "" if account.scale is None else f", scale {account.scale:g}"
    return (
        f"epoch {number}: {loss}, {account.applied:,} of {account.attempted:,} applied"
        + (f" (skipped: {reasons})" if reasons else "")
        + f"{scale}, {account.num_scale_reductions:,} reductions"
    )


def _write(result: RunResult, trainer: Trainer, *, place: str, again: str) -> None:
    """What happened, for people."""
    from rich.text import Text

    console = text_console()
    lines = trainer.guard.accounts.summary().splitlines()
    lines += [describe_epoch(number, account) for number, account in result.epochs[-_MOST_EPOCHS:]]
    name = trainer.workload.metric_name
    if result.metric is not None:
        lines.append(f"{name} {result.metric:.6g} in FP32 after {trainer.steps_done:,} steps")
    if result.best is not None:
        lines.append(f"best {name} {result.best.metric:.6g} after {result.best.step:,} steps, kept in {place}/best")
    lines.append(f"plan {trainer.plan.name}, {result.seconds:.1f} s, ledger and checkpoints in {place}")
    if result.stopped is not None:
        lines.append(result.stopped)
        if result.finding is not None:
            lines.append(str(result.finding))
    if result.interrupted:
        how = "Interrupted" if result.ended_by == signal.SIGINT else "Ended by SIGTERM"
        lines.append(f"{how} after step {trainer.steps_done:,} of {trainer.steps:,}; the state is saved.")
        lines.append(f"Go on with: {again}")
    console.print(Text("\n".join(lines)), soft_wrap=True)
