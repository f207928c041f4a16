"""FabricHooks: the precision plugin for Fabric, for either name of Lightning."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from floatline import optim
from floatline.errors import GuardError
from floatline.guard.outcome import Outcome
from floatline.guard.policy import Policy
from floatline.integrations.half_arithmetic import convert
from floatline.integrations.lightning.optimizers import follow
from floatline.integrations.lightning.steps import GuardedSteps, Watching
from floatline.plans import Plan
from floatline.precision.islands import cast_weights

if TYPE_CHECKING:
    from lightning.fabric.plugins.precision import Precision as Base
else:
    Base = object


class FabricHooks(Base):
    """Trains a Fabric loop in the precision of a plan, makes each step wholly or not at all, and knows which it was.

    The loop keeps its shape: `fabric.backward(loss)`, `fabric.clip_gradients(...)`, `optimizer.step()`. Guards are made
    in the first backward pass. Give schedulers to `scheduler`, and put the plugin into the checkpoint:
    `fabric.save(path, {"model": model, "optimizer": optimizer, "precision": precision})`.

    Args:
        plan: Precision: a name, a YAML file or a Plan. 16-bit weights need an optimizer of `floatline.optim`.
        policy: When to skip and stop: a Policy, a preset's name, or None, which skips what is not finite alone.
        folder: Run folder of the ledger; None keeps the account in memory only.
        resume: Go on with the ledger that the folder holds.
        layers_every: Record the gradient norm of each parameter every N steps; 0 never.
    """

    def __init__(
        self,
        plan: Plan | str | Path = "fp16-mixed",
        *,
        policy: Policy | str | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        layers_every: int = 0,
    ) -> None:
        self.steps = GuardedSteps(plan, cache_casts=True)
        self.steps.watching = Watching(policy, None if folder is None else Path(folder), resume, layers_every)
        self.precision = self.steps.name  # pyright: ignore[reportIncompatibleVariableOverride]
        self.outcome: Outcome | None = None
        self._modules: list[nn.Module] = []
        self._begun = False

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Give the weights the plan's format."""
        if self.steps.arithmetic.dtype is not None:
            cast_weights(module, self.steps.plan)
        self._modules.append(module)
        return module

    def convert_input(self, data: Any) -> Any:
        """Bring what the model gets into the format of the weights."""
        return convert(data, self.steps.arithmetic.dtype)

    def convert_output(self, data: Any) -> Any:
        """Give FP32 to the code behind the model."""
        return convert(data, torch.get_default_dtype())

    def forward_context(self) -> contextlib.AbstractContextManager[None]:
        """Around the model's forward."""
        self._begin(next((param.device for module in self._modules for param in module.parameters()), None))
        return self.steps.arithmetic.forward(self.steps.plan_now)

    def _begin(self, device: torch.device | None) -> None:
        if not self._begun and device is not None:
            self._begun = True
            self.steps.begin(device)

    def backward(self, tensor: Tensor, model: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        """Send the loss backward, scaled."""
        self._begin(tensor.device)
        with self.steps.arithmetic.products():
            super().backward(self.steps.scale_loss(tensor), model, *args, **kwargs)

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale gradients before Fabric clips them, or before user code looks at them."""
        self._guard(optimizer)
        self.steps.unscale(optimizer)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Make the step wholly or not at all; `outcome` says which, and reading it waits for the device."""
        closure = kwargs.pop("closure", None)
        if kwargs:
            raise GuardError(f"The step was given {next(iter(kwargs))!r}, which no guard passes on. Leave it out.")
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._guard(optimizer)
        with self.steps.arithmetic.products():
            self.outcome = self.steps.step(optimizer)
        return result

    def scheduler(self, scheduler: Any, *, every: int | None = None) -> Any:
        """Leave out calls of this scheduler's `step` for steps that were skipped; gives it back.

        Args:
            scheduler: Of an optimizer that was set up.
            every: Steps that one call stands for; None: one, where one was made since the last call.
        """
        own = getattr(scheduler.optimizer, "optimizer", scheduler.optimizer)
        self._guard(own)
        if scheduler.optimizer is not own:
            follow(scheduler, old=scheduler.optimizer, new=own)
        self.steps.schedules_of(own).guard(scheduler, every=every)
        return scheduler

    def _guard(self, optimizer: Any) -> None:
        own = getattr(optimizer, "optimizer", optimizer)
        if any(guard.optimizer is own for guard in self.steps.guards):
            return
        params = [param for group in own.param_groups for param in group["params"]]
        if self.steps.arithmetic.dtype is not None and not isinstance(own, optim.Optimizer):
            raise GuardError(
                f"{type(own).__name__} rounds small updates of 16-bit weights to nothing. "
                "Use one of floatline.optim, such as floatline.optim.AdamW."
            )
        for module in self._modules:
            held = {id(param) for param in module.parameters()}
            if all(id(param) in held for param in params):
                self._begin(params[0].device)
                self.steps.add(module, own)
                return
        raise GuardError(
            f"No model that was set up has all parameters of this {type(own).__name__}. "
            "Make it from model.parameters(), and call fabric.setup(model, optimizer)."
        )

    def summary(self) -> str:
        """What happened, in five lines for each optimizer; waits for the device."""
        return "\n".join(guard.summary() for guard in self.steps.guards) or "no step yet"

    def metrics(self) -> dict[str, float]:
        """For `fabric.log_dict`: scale, skips, norm; only what the host knows already."""
        return self.steps.metrics.of_run(self.steps.guards)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: scale, windows, counters, and what schedulers are owed."""
        return self.steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint of this plugin, or of a torch.amp.GradScaler; also before the first step."""
        self._begin(next((param.device for module in self._modules for param in module.parameters()), None))
        self.steps.load_state_dict(state_dict)

    def close(self) -> None:
        """Read what is outstanding, and close the ledger."""
        self.steps.end()
        self._begun = False

    def teardown(self) -> None:
        """Let go of everything."""
        self.close()
        super().teardown()
