"""CallbackHooks: ledger, metrics, diagnosis and recovery of a Trainer's run, for either name of Lightning."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Generator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from floatline.diagnosis.diagnoser import Diagnoser
from floatline.errors import GuardError, LedgerError
from floatline.findings import GuardStop
from floatline.guard.diary import say
from floatline.guard.failures import OnFailure
from floatline.guard.policy import Policy
from floatline.integrations.lightning.precision import PrecisionHooks
from floatline.integrations.lightning.steps import GuardedSteps, Watching
from floatline.ledger.account import Accounts
from floatline.ledger.parts import list_parts

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as Base
else:
    Base = object


class CallbackHooks(Base):
    """Writes the ledger of a run, logs what the guard knows, explains failed steps, and goes back where it must.

    Needs the plugin: `Trainer(plugins=[FloatlinePrecision(...)], callbacks=[FloatlineCallback()])`. The Trainer's
    loggers get `floatline/scale`, `floatline/skipped`, `floatline/grad_norm` and so on every `log_every_n_steps`, and
    `trainer.callback_metrics` has them.

    Args:
        folder: Run folder of the ledger. None: 'floatline' in the Trainer's `log_dir`.
        policy: When to skip, go back and stop: a Policy, a preset's name, or None for the plan's. Going back needs
            snapshots: 'safe', or `Policy(snapshot_gib=4)`.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.
        diagnose: Explain failed steps, for which training_step is run again; a `Diagnoser` says how. Only in
            automatic optimization and in one process.

    Attributes:
        folder: The run folder, once a run has begun.
        accounts: What the run came to: of each optimizer.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        policy: Policy | str | None = None,
        layers_every: int = 50,
        diagnose: bool | OnFailure = True,
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.accounts: list[Accounts] = []
        self._given = self.folder
        self._policy = policy
        self._layers_every = layers_every
        self._on_failure = Diagnoser() if diagnose is True else diagnose or None
        self._steps: GuardedSteps | None = None
        self._batches: list[Any] = []
        self._replay: Callable[[tuple[Any, int]], Tensor] | None = None

    @property
    def diagnoser(self) -> OnFailure | None:
        """What explains failed steps."""
        return self._on_failure

    def summary(self) -> str:
        """What happened, in five lines for each optimizer."""
        return "\n".join(accounts.summary() for accounts in self.accounts) or "no step yet"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Tell the plugin what to watch; Lightning calls it before the optimizers are made."""
        if stage != "fit":
            return
        plugin = trainer.precision_plugin
        if not isinstance(plugin, PrecisionHooks):
            raise GuardError(
                f"FloatlineCallback is used with {type(plugin).__name__}, which cannot say whether a step was made. "
                'Give Trainer(plugins=[FloatlinePrecision("fp16-mixed")]); "fp32" is a plan, too.'
            )
        again = self._steps is not None
        self._steps = plugin.steps
        plugin.before_guards = partial(self._watch, trainer, pl_module, again=again)

    def _watch(self, trainer: Any, module: Any, *, again: bool) -> None:
        """Say what to watch with. The checkpoint that the run goes on from is known by now."""
        self.folder, resume = self._choose_folder(trainer, again=again)
        cast(GuardedSteps, self._steps).watching = Watching(
            policy=self._policy,
            folder=self.folder,
            resume=resume,
            layers_every=self._layers_every,
            on_failure=self._on_failure if module.automatic_optimization else None,
            steps=_planned_steps(trainer),
        )

    def _choose_folder(self, trainer: Any, *, again: bool) -> tuple[Path, bool]:
        """The run folder, and whether its ledger goes on; the first process chooses."""
        usual = Path(cast(str, trainer.log_dir or trainer.default_root_dir)) / "floatline"
        folder = self.folder if again and self.folder is not None else self._given or usual
        choice = None
        if trainer.is_global_zero:
            holds = folder.is_dir() and bool(list_parts(folder))
            # Some strategies load their checkpoint later, and nobody knows of it yet.
            goes_on = again or trainer.ckpt_path is not None or trainer.strategy.restore_checkpoint_after_setup
            number = 1
            while holds and not goes_on and self._given is None:
                number += 1
                folder = usual.with_name(f"floatline-{number}")
                holds = folder.is_dir() and bool(list_parts(folder))
            choice = str(folder), holds and goes_on, holds and not goes_on
        path, resume, refused = trainer.strategy.broadcast(choice)
        if refused:
            raise LedgerError(
                f"{path} already holds a ledger. Go on with fit(ckpt_path=...), or choose another folder."
            )
        return Path(path), resume

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Take the accounts of the guards, which exist by now."""
        if self._steps is not None:
            self.accounts = [guard.accounts for guard in self._steps.guards]
            self._replay = _replay(pl_module)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Keep the batch, so that the step can be run again if it fails."""
        steps = self._steps
        if steps is None or not steps.guards or not pl_module.automatic_optimization:
            return
        guard = steps.guards[0]
        if self._replay is None or (self._on_failure is None and guard.policy.snapshot_gib == 0):
            return
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._batches = []
        self._batches.append((batch, batch_idx))
        if len(self._batches) == 1:
            guard.remember(self._replay, self._batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Log what is known, when the Trainer logs."""
        steps = self._steps
        if steps is None:
            return
        if trainer.is_last_batch:
            steps.drain()  # once an epoch
        elif not _logs_now(trainer):
            return
        # Tensors on the host: reading them later waits for no device.
        values = {name: torch.tensor(value, device="cpu") for name, value in steps.metrics.of_run(steps.guards).items()}
        pl_module.log_dict(values, on_step=True, on_epoch=False, batch_size=1)
        layers = steps.metrics.of_layers(steps.guards)
        if layers and trainer.is_global_zero:
            for logger in trainer.loggers:  # hundreds of them: too many for log_dict
                logger.log_metrics(layers, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Hear of a stop while the run still is one; and say in one line what became of it."""
        if self._steps is not None:
            self._steps.drain()
            self.accounts = [guard.accounts for guard in self._steps.guards]
            if trainer.is_global_zero:
                for accounts in self.accounts:
                    say(f"{accounts.in_short()}; floatline watch {self.folder}")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Write down what ended the run; a stop is there already."""
        if self._steps is None:
            return
        for guard in self._steps.guards:
            if not isinstance(exception, GuardStop):
                with contextlib.suppress(Exception):
                    guard.drain()
                first = next(iter(str(exception).splitlines()), "")
                guard.note(f"the run ended with {type(exception).__name__}: {first}"[:500])
            guard.flush()
        self.accounts = [guard.accounts for guard in self._steps.guards]


def _planned_steps(trainer: Any) -> int | None:
    """Steps that the whole run will have; None where it has no end."""
    planned = trainer.estimated_stepping_batches
    return None if math.isinf(planned) else int(planned)


def _logs_now(trainer: Any) -> bool:
    """Whether the Trainer logs after this batch."""
    every, loop = trainer.log_every_n_steps, trainer.fit_loop
    return every > 0 and not loop._should_accumulate() and (loop.epoch_loop._batches_that_stepped + 1) % every == 0


def _replay(module: Any) -> Callable[[tuple[Any, int]], Tensor] | None:
    """Gives the loss of a batch as training_step does, without its log; None where it takes no batch."""
    names = list(inspect.signature(module.training_step).parameters)
    if not names or names[0] == "dataloader_iter":
        return None

    def compute_loss(given: tuple[Any, int]) -> Tensor:
        with _muted(module):
            output = module.training_step(*given[: len(names)])
        return cast(Tensor, output["loss"] if isinstance(output, Mapping) else output)

    return compute_loss


@contextlib.contextmanager
def _muted(module: Any) -> Generator[None]:
    """What training_step logs when it is run again is no news."""
    for name in ("log", "log_dict"):
        object.__setattr__(module, name, _say_nothing)
    try:
        yield
    finally:
        for name in ("log", "log_dict"):
            object.__delattr__(module, name)


def _say_nothing(*_: Any, **__: Any) -> None:
    pass
