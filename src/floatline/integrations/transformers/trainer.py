"""prepare_trainer: a transformers Trainer whose steps are taken by a guard."""
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import contextlib
from collections.abc import Generator
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import convert_to_fp32
from torch import Tensor, nn
from transformers import Trainer

from floatline import optim
from floatline.diagnosis.diagnoser import Diagnoser
from floatline.errors import GuardError
from floatline.guard.failures import OnFailure
from floatline.guard.policy import Policy
from floatline.integrations.accelerate.accelerator import attach, put_before
from floatline.integrations.accelerate.guarding import Guarding, choose_policy
from floatline.integrations.half_arithmetic import autocast_lists
from floatline.integrations.transformers.callback import FloatlineCallback
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.dtypes import DTYPES
from floatline.precision.islands import cast_weights
from floatline.precision.micro_batches import Loss


def prepare_trainer(
    trainer: Trainer,
    plan: Plan | str | PathLike[str] | None = None,
    *,
    policy: Policy | str | None = None,
    folder: str | Path | None = None,
    diagnose: Diagnoser | bool = True,
    on_failure: OnFailure | None = None,
    layers_every: int = 50,
) -> FloatlineCallback:
    """Let a guard take the steps of a Trainer; call it after the Trainer was made and before `train`.

    It works for `transformers.Trainer` and everything that inherits from it, TRL's trainers among them. The class of
    the Trainer stays, with a few methods around it; nothing else in the process is changed.

    - FP16 on a CPU is FP16. Trained FP16 and BF16 weights get the exact updates of `floatline.optim`.
    - The learning-rate schedule does not advance on skipped steps, with fused optimizers as well.
    - `logging_nan_inf_filter` is switched off: a NaN is logged where it happened, and nowhere else.
    - Gradient checkpointing is the non-reentrant kind unless the arguments say otherwise, in transformers 4 as in 5:
      the other one finds no gradient where what goes into the first layer is frozen, as under LoRA.
    - The ledger is written to the output folder; checkpoints carry the guard's state in `scaler.pt`.

    Args:
        trainer: Changed in place.
        plan: Precision: a name, a YAML file or a Plan; trained weights are cast to what it says. None takes what the
            TrainingArguments and the model's dtypes say.
        policy: When to skip, go back and stop: a Policy or a preset's name. None skips what is not finite, and stops
            after 200 skips in a row.
        folder: Run folder of the ledger; None is the Trainer's `output_dir`.
        diagnose: Explain failed steps, for which the model is run again on copies; a `Diagnoser` says how.
        on_failure: Called with each failed step, instead.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.

    Returns:
        The callback that was added: `summary()`, `metrics()` and the `guard` itself.
    """
    model = cast(nn.Module, trainer.model)
    if isinstance(trainer, GuardedTrainer):
        raise GuardError("The Trainer is guarded already. Call prepare_trainer once.")
    if plan is None:
        plan = choose_plan(trainer.args, model)
    else:
        plan = resolve_plan(plan)
        _cast_parameters(model, plan)
    if on_failure is None and diagnose:
        on_failure = Diagnoser() if diagnose is True else diagnose
    guarding = attach(
        trainer.accelerator,
        plan,
        choose_policy(policy, plan),
        folder=folder or trainer.args.output_dir,
        layers_every=layers_every,
        on_failure=on_failure,
        bare=False,
    )
    trainer.accelerator.native_amp = False  # autocast is the guard's, so that it can raise precision
    trainer.args.logging_nan_inf_filter = False
    if trainer.args.gradient_checkpointing_kwargs is None:
        trainer.args.gradient_checkpointing_kwargs = {"use_reentrant": False}
    callback = FloatlineCallback(guarding)
    trainer.remove_callback(FloatlineCallback)
    trainer.add_callback(callback)
    own: Any = trainer
    own.__class__ = put_before(type(trainer), GuardedTrainer)
    own.floatline = callback
    return callback


def _cast_parameters(model: nn.Module, plan: Plan) -> None:
    """Cast weights as the plan says. Buffers stay, as transformers keeps them: rotary frequencies need FP32."""
    buffers = [(buffer, buffer.data) for buffer in model.buffers()]
    cast_weights(model, plan)
    for buffer, data in buffers:
        buffer.data = data


def choose_plan(args: Any, model: nn.Module) -> Plan:
    """The plan that TrainingArguments and the dtypes of the model's weights mean.

    Args:
        args: Their `fp16` and `bf16` say what is computed in.
        model: Weights that are trained in the compute dtype make it a `-true` plan; any other a `-mixed` one. Frozen
            16-bit weights, as under LoRA, are computed with in their dtype where the arguments say nothing.
    """
    every = {param.dtype for param in model.parameters()}
    trained = {param.dtype for param in model.parameters() if param.requires_grad}
    if args.fp16 or (torch.float16 in every and not args.bf16):
        compute = "fp16"
    elif args.bf16 or torch.bfloat16 in every:
        compute = "bf16"
    else:
        return resolve_plan("fp32")
    return resolve_plan(f"{compute}-true" if trained == {DTYPES[compute]} else f"{compute}-mixed")


class GuardedTrainer(Trainer):
    """The methods of a Trainer that a guard has a part in."""

    floatline: FloatlineCallback

    @property
    def _guarding(self) -> Guarding:
        return cast(Any, self.accelerator).floatline

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train under guard; on a CPU with CUDA's autocast lists. The ledger is closed at the end, whatever it is."""
        guarding = self._guarding
        guarding.resume = bool(resume_from_checkpoint)
        with autocast_lists(self.args.device, guarding.plan):
            try:
                result = super().train(resume_from_checkpoint, *args, **kwargs)
            except BaseException:
                with contextlib.suppress(Exception):  # it would only say the same again
                    guarding.close_ledgers()
                raise
            guarding.close_ledgers()
        return result

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the plan says."""
        with autocast_lists(self.args.device, self._guarding.plan):
            return super().evaluation_loop(*args, **kwargs)

    @contextlib.contextmanager
    def compute_loss_context_manager(self) -> Generator[None]:
        """Autocast of the guard's plan, which may change on the way, around what the Trainer has."""
        guards, plan = self._guarding.guards, self._guarding.plan
        if guards:
            autocast = guards[0].autocast()
        else:  # an evaluation before any training
            autocast = torch.autocast(self.args.device.type, dtype=DTYPES[plan.compute], enabled=plan.mixed)
        with super().compute_loss_context_manager(), autocast:
            yield

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Logits in FP32, as metrics expect them."""
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        return loss, convert_to_fp32(logits), labels

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's optimizer; one of floatline.optim with the same settings where 16-bit weights are trained."""
        self._guarding.steps = self.state.max_steps or None  # for the ledger, which begins with the next thing
        optimizer = super().create_optimizer(*args, **kwargs)
        if isinstance(optimizer, AcceleratedOptimizer | optim.Optimizer) or self.lr_scheduler is not None:
            return optimizer
        narrow = (torch.float16, torch.bfloat16)
        if any(param.dtype in narrow for group in optimizer.param_groups for param in group["params"]):
            plan = self._guarding.plan
            self.optimizer = optim.convert(optimizer, update=plan.update or "exact", states=plan.states)
        return self.optimizer

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        """The Trainer's, remembered by the guard until it knows what became of the step."""
        if not self._guarding.scaler.waiting:
            self._batches: list[Any] = [dict(inputs)]
            self._guarding.guards[0].remember(self._loss_of(model), self._batches)
        else:
            self._batches.append(dict(inputs))
        return super().training_step(model, inputs, *args, **kwargs)

    def _loss_of(self, model: nn.Module) -> Any:
        def compute_loss(batch: dict[str, Any]) -> Loss:
            return cast(Tensor, self.compute_loss(model, self._prepare_inputs(dict(batch))))

        return compute_loss

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        before = self._globalstep_last_logged
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)
        if self._globalstep_last_logged != before:
            # The Trainer subtracts the sum from itself, and NaN - NaN is NaN for ever.
            tr_loss.zero_()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the guard's numbers to what is logged while training."""
        if "loss" in logs and self._guarding.guards:
            logs.update(self.floatline.metrics())
        super().log(logs, *args, **kwargs)
