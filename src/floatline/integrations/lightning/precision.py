"""PrecisionHooks: the Trainer's precision plugin, for either name that Lightning is imported by."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import GuardError, ScalerError
from floatline.findings import GuardStop
from floatline.guard.outcome import Outcome
from floatline.integrations.half_arithmetic import convert
from floatline.integrations.lightning.optimizers import count_calls, exchange, follow
from floatline.integrations.lightning.steps import GuardedSteps
from floatline.plans import Plan
from floatline.precision.islands import cast_weights
from floatline.precision.wrappers import unwrap

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as Base
else:
    Base = object

OWN_KEY = "FloatlinePrecision"
# Where Lightning's plugins and its older versions keep the state of a torch.amp.GradScaler.
SCALER_KEYS = ("MixedPrecision", "FSDPPrecision", "native_amp_scaling_state")
_HOOKS = ("on_before_optimizer_step", "configure_gradient_clipping")


class PrecisionHooks(Base):
    """Trains in the precision of a plan, makes each step wholly or not at all, and knows which it was.

    Numerics:
        Gradients are unscaled, checked and clipped in FP32, agreed on by all processes, and weights and states keep
        every bit in a skipped step. `trainer.global_step` counts applied steps, and schedulers advance with them.
        On a CPU 16-bit products are computed as a GPU does, with CUDA's autocast lists. Weights, states and schedule
        are those of Lightning's own `16-mixed` with the same scale, bit for bit, where torch's optimizer makes the
        same step. Checked by tests/integrations/test_lightning.py.

    Args:
        plan: Precision: 'fp16-mixed', 'bf16-mixed', 'fp16-true', 'bf16-true', 'fp32', a preset, a YAML file or a Plan.
            With 16-bit weights, torch's AdamW, Adam and SGD are exchanged for those of `floatline.optim`.
    """

    def __init__(self, plan: Plan | str | Path = "fp16-mixed") -> None:
        # Lightning's autocast keeps no casts either: weights may be changed between two uses in one training_step.
        self.steps = GuardedSteps(plan, cache_casts=False)
        self.precision = self.steps.name  # pyright: ignore[reportIncompatibleVariableOverride]
        self.before_guards: Callable[[], None] | None = None  # the callback's
        self._hooks_look = False
        self._warned = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the weights the plan's format."""
        if self.steps.arithmetic.dtype is not None:
            cast_weights(module, self.steps.plan)
        return module

    def convert_input(self, data: Any) -> Any:
        """Bring a batch into the format of the weights."""
        return convert(data, self.steps.arithmetic.dtype)

    def tensor_init_context(self) -> contextlib.AbstractContextManager[None]:
        """Make tensors in the format of the weights."""
        return self.steps.arithmetic.defaults()

    def module_init_context(self) -> contextlib.AbstractContextManager[None]:
        """Make modules in FP32: they are rounded once they are whole."""
        return contextlib.nullcontext()

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        """Around training_step, validation_step and so on."""
        return self.steps.arithmetic.forward(self.steps.plan_now)

    def connect(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], list[Any]]:
        """Put the optimizers under guard, and their schedulers with them; Lightning calls it before a run."""
        module = cast(Any, unwrap(model))
        self.steps.begin(next((param.device for param in model.parameters()), torch.device("cpu")))
        self.steps.on_outcome = self._uncount_if_skipped
        self._trainer = module.trainer
        if not optimizers or type(optimizers[0]).__name__ == "_MockOptimizer":  # where configure_optimizers gave none
            return model, optimizers, lr_schedulers
        if self._trainer.state.fn != "fit":  # validate and test after fit: the optimizers are still there
            return model, optimizers, lr_schedulers
        _check_accumulation(self.steps.plan, self._trainer)
        if self.before_guards is not None:
            self.before_guards()
            self.before_guards = None
        ours = [exchange(optimizer, self.steps.plan) for optimizer in optimizers]
        for old, new in zip(optimizers, ours, strict=True):
            if new is not old:
                count_calls(new)
                for config in lr_schedulers:
                    follow(config.scheduler, old=old, new=new)
            self.steps.add(model, new, alone=len(ours) == 1)
        for config in lr_schedulers:
            self._guard_scheduler(config, automatic=module.automatic_optimization)
        self._hooks_look = _hooks_see_gradients(module, self._trainer.callbacks)
        return model, ours, lr_schedulers

    def _guard_scheduler(self, config: Any, *, automatic: bool) -> None:
        if config.reduce_on_plateau or isinstance(config.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            return
        if automatic and config.interval != "step":
            return
        # In manual optimization the user calls it, after a step or after an epoch: nobody knows in advance.
        every = config.frequency if automatic else None
        self.steps.schedules_of(config.scheduler.optimizer).guard(config.scheduler, every=every)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss; hooks see it unscaled."""
        tensor = super().pre_backward(tensor, module)
        if not self.steps.guards:
            return tensor
        parts = self._trainer.accumulate_grad_batches if module.automatic_optimization else 1
        return self.steps.scale_loss(tensor, parts=parts)

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Send the loss backward."""
        with self.steps.arithmetic.products():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Run the closure, and make the step wholly or not at all."""
        if not self.steps.guards:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if kwargs:
            raise GuardError(f"The step was given {next(iter(kwargs))!r}, which no guard passes on. Leave it out.")
        with self.steps.arithmetic.products():
            result = closure()
            if model.automatic_optimization and not self.steps.waiting:
                self._after_closure(model, optimizer)  # training_step gave no loss: there is no step to make
                return result
            if self._hooks_look:
                self._unscale(optimizer)
            self._after_closure(model, optimizer)
            loop = self._trainer.fit_loop.epoch_loop
            self.steps.step(optimizer, epoch=self._trainer.current_epoch, batch=max(0, loop.batch_idx))
            if 0 < self._trainer.max_steps <= self._trainer.global_step + 1:
                self.steps.drain()  # the last step may have been skipped, and then it is not the last
        return result

    def _unscale(self, optimizer: Any) -> None:
        try:
            self.steps.unscale(optimizer)
        except ScalerError:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    "Hooks see scaled gradients: this torch cannot hold FP32 gradients of FP16 weights.", stacklevel=2
                )

    def clip_gradients(
        self, optimizer: Any, clip_val: float | None = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip in the step that comes: unscaled, in FP32, over all shards; fused optimizers too."""
        if not clip_val or clip_val <= 0:
            return
        by_value = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value"
        if by_value:
            self.steps.clip(optimizer, value=float(clip_val))
        else:
            self.steps.clip(optimizer, norm=float(clip_val))

    def _uncount_if_skipped(self, outcome: Outcome) -> None:
        """Lightning counts a step before anyone knows whether it was made."""
        if outcome.applied:
            return
        loop = self._trainer.fit_loop.epoch_loop
        automatic = self._trainer.lightning_module.automatic_optimization
        progress = (
            loop.automatic_optimization.optim_progress.optimizer.step
            if automatic
            else loop.manual_optimization.optim_step_progress
        )
        for counts in (progress.total, progress.current):
            counts.ready -= 1
            counts.completed -= 1

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: scale, windows, counters, and what schedulers are owed."""
        return self.steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint of this plugin."""
        self.steps.load_state_dict(state_dict)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Leave the scale where Lightning's own plugin looks for it, too; and count what is known only now."""
        if self.steps.guards:
            checkpoint["global_step"] = self._trainer.global_step
            checkpoint["loops"]["fit_loop"] = self._trainer.fit_loop.state_dict()
        state = self.steps.scaler_state()
        if state is not None:
            checkpoint[SCALER_KEYS[0]] = state

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the state of another plugin, where the checkpoint has none of this class's."""
        if type(self).__qualname__ in checkpoint or not self.steps.guards:
            return
        for key in (OWN_KEY, *SCALER_KEYS):
            if checkpoint.get(key):
                self.steps.load_state_dict(checkpoint[key])
                return
        scaling = self.steps.plan.scaling
        if scaling is not None:
            warnings.warn(
                f"The checkpoint has no loss scale: it starts at {scaling.init_scale:g} and has to be found again.",
                stacklevel=2,
            )

    def teardown(self) -> None:
        """Let go of everything at the end of a run."""
        with contextlib.suppress(GuardStop):  # the run is over, one way or the other
            self.steps.end()
        super().teardown()


def _check_accumulation(plan: Plan, trainer: Any) -> None:
    if plan.accumulate not in (1, trainer.accumulate_grad_batches):
        raise GuardError(
            f"Plan '{plan.name}' sums up {plan.accumulate} batches, and the Trainer "
            f"{trainer.accumulate_grad_batches}. Give Trainer(accumulate_grad_batches={plan.accumulate})."
        )


def _hooks_see_gradients(module: Any, callbacks: list[Any]) -> bool:
    """Whether a hook of the user's sees gradients before the step: they are unscaled for it, and not otherwise."""
    kinds: list[type[object]] = [type(owner) for owner in (module, *callbacks)]
    return any(
        getattr(kind, hook, None) is not getattr(_lightnings(kind), hook, None) for kind in kinds for hook in _HOOKS
    )


def _lightnings(own: type[object]) -> type[object]:
    """Lightning's own base class of a module or a callback."""
    return next(kind for kind in own.__mro__ if kind.__name__ in ("LightningModule", "Callback", "object"))
