"""prepare_accelerator: an Accelerator whose optimizers are stepped by guards."""
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownParameterType=false
# pyright: reportUnknownArgumentType=false, reportMissingParameterType=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from floatline.errors import GuardError
from floatline.guard.failures import OnFailure
from floatline.guard.policy import Policy
from floatline.integrations.accelerate.guarding import Guarding, choose_policy
from floatline.integrations.accelerate.scaler import GuardScaler
from floatline.integrations.half_arithmetic import ForwardHooks, products
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.precision.islands import cast_weights
from floatline.precision.wrappers import unwrap


class GuardedOptimizer(AcceleratedOptimizer):
    """Accelerate's optimizer, whose step is the guard's, and which knows what became of it."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Let the guard take the step, unless gradients are still being accumulated."""
        if self.gradient_state.sync_gradients:
            self._own_scaler.step(self.optimizer, closure)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the newest step whose fate is known was skipped; also with fused optimizers."""
        return self._own_scaler.was_skipped(self.optimizer)

    @property
    def _own_scaler(self) -> GuardScaler:
        return cast(GuardScaler, self.scaler)


class GuardedAccelerator(Accelerator):
    """Accelerator's methods that touch precision, gradients and steps; `prepare_accelerator` makes one in place."""

    floatline: Guarding

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does, and guard every optimizer that has its model."""
        for model in (arg for arg in args if isinstance(arg, nn.Module)):
            self._prepare_weights(unwrap(model))
        self.floatline.begin(self.device)
        result = super().prepare(*args, device_placement=device_placement)
        guarded = [guard.optimizer for guard in self.floatline.guards]
        for optimizer in (wrapped.optimizer for wrapped in self._optimizers):
            if not any(optimizer is own for own in guarded):
                self._guard(optimizer)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare as Accelerate does, with weights and inputs as the plan says."""
        self._prepare_weights(unwrap(model))
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

    def _prepare_weights(self, model: nn.Module) -> None:
        if model in self.floatline.hooks:
            return
        if self.floatline.bare:
            cast_weights(model, self.floatline.plan)
        self.floatline.hooks[model] = ForwardHooks(model, self.device, self.floatline.plan)

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        wanted = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for model in self._models:
            if wanted <= {id(param) for param in model.parameters()}:
                self.floatline.make_guard(model, optimizer)
                return

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None) -> Any:
        """Wrap the optimizer as Accelerate does, with steps that the guard takes."""
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        prepared.__class__ = GuardedOptimizer
        return prepared

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Send the loss backward, scaled; on a CPU with 16-bit products as on a GPU."""
        with products(self.device, self.floatline.plan):
            super().backward(loss, **kwargs)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide the gradients by the scale, of all optimizers or of those that are given."""
        own: list[Any] = list(self._optimizers) if optimizer is None else _as_list(optimizer)
        for one in own:
            while isinstance(one, AcceleratedOptimizer):
                one = one.optimizer
            self.floatline.scaler.unscale_(one)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Any:
        """Clip in the step itself where the parameters are those of one optimizer; else unscale and clip now.

        Returns:
            The norm before clipping: where it is clipped in the step, a tensor that is filled there.
        """
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        optimizer = self._owner(params)
        if optimizer is None or norm_type != 2:
            return super().clip_grad_norm_(params, max_norm, norm_type=int(norm_type))
        return self.floatline.scaler.clip_by(optimizer, float(max_norm))

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Bound each element in the step itself, behind the check for inf."""
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        optimizer = self._owner(params)
        if optimizer is None:
            super().clip_grad_value_(params, clip_value)
            return
        self.floatline.scaler.bound_by(optimizer, clip_value)

    def _owner(self, params: list[Tensor]) -> torch.optim.Optimizer | None:
        """The one optimizer that trains parameters among these, if it trains no others."""
        given = {id(param) for param in params}
        found: torch.optim.Optimizer | None = None
        for guard in self.floatline.guards:
            own = {id(param) for group in guard.optimizer.param_groups for param in group["params"]}
            if own <= given and found is None:
                found = guard.optimizer
            elif own & given:
                return None
        return found

    def free_memory(self, *objects: Any) -> Any:
        """Let go of the guards as well."""
        self.floatline.close()
        self.floatline.scaler.forget()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Close the ledgers first."""
        self.floatline.close()
        super().end_training()


def prepare_accelerator(
    accelerator: Accelerator,
    plan: Plan | str | PathLike[str] = "fp16-mixed",
    *,
    policy: Policy | str | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    layers_every: int = 50,
) -> Guarding:
    """Let guards take the steps of an Accelerator; call it before `accelerator.prepare`.

    The Accelerator keeps its methods and the loop its lines. `optimizer.step_was_skipped` is true for fused optimizers,
    too, so that prepared schedulers stand still on skipped steps. FP16 is FP16 on a CPU.

    Args:
        accelerator: Changed in place; its own `mixed_precision` gives way to the plan.
        plan: Precision: a name, a YAML file or a Plan. Weights are cast to what it says.
        policy: When to skip, go back and stop: a Policy or a preset's name. None skips what is not finite, and stops
            after 200 skips in a row.
        folder: Run folder of the ledger; None keeps the account in memory only.
        resume: Go on with the ledger that the folder holds.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.

    Returns:
        What holds the guards: `summary()`, and `close()`, which `accelerator.end_training()` calls, too.
    """
    plan = resolve_plan(plan)
    chosen = choose_policy(policy, plan)
    # A loop that asks whether the step was skipped means the step it has just made. Autocast is Accelerate's: precision
    # cannot be raised on the way.
    chosen = replace(chosen, read_after=0, escalate_at=chosen.most_rollbacks + 1)
    guarding = attach(accelerator, plan, chosen, folder=folder, resume=resume, layers_every=layers_every)
    accelerator.native_amp = plan.mixed
    accelerator.state._mixed_precision = plan.compute if plan.mixed else "no"
    return guarding


def attach(
    accelerator: Accelerator,
    plan: Plan,
    policy: Policy,
    *,
    folder: str | Path | None,
    resume: bool = False,
    layers_every: int = 50,
    on_failure: OnFailure | None = None,
    bare: bool = True,
) -> Guarding:
    """Make the Accelerator a guarded one; what `prepare_accelerator` and `prepare_trainer` share."""
    kind = accelerator.distributed_type.value
    if kind in ("DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise GuardError(f"{kind} scales and steps by itself, out of a guard's sight. Use DDP or FSDP2.")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise GuardError("FSDP1 hides the shapes of its shards. Use fsdp_version=2.")
    if accelerator._optimizers:
        raise GuardError("The Accelerator has prepared an optimizer already. Call this before accelerator.prepare.")
    scaler = GuardScaler(accelerator.device.type, plan)
    run_folder = None if folder is None else Path(folder)
    guarding = Guarding(plan, policy, run_folder, resume, layers_every, scaler, on_failure, bare)
    own: Any = accelerator
    own.__class__ = put_before(type(accelerator), GuardedAccelerator)
    own.floatline = guarding
    own.scaler = scaler
    return guarding


def put_before(kind: type, first: type) -> type:
    """A class of the same name whose methods are looked for in `first`, then in the class itself."""
    body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (first, kind), body)


def _as_list(one_or_more: Any) -> list[Any]:
    return list(cast("list[Any]", one_or_more)) if isinstance(one_or_more, list | tuple) else [one_or_more]
