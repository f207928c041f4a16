"""The optimizer for 16-bit weights: torch.optim's manners, with survey, decision and step in one call."""

# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import OptimizerError
from floatline.numerics.moving import send
from floatline.numerics.uncompiled import uncompiled
from floatline.optim import checkpoint, hyperparameters, mesh, resuming
from floatline.optim.kernels import applier_for, fused_step_for, survey_all
from floatline.optim.roster import Footprint, Roster, Writes, collect
from floatline.optim.rules import RuledOptimizer, StatesName, UpdateName, UpdateRule
from floatline.optim.storage import EXTRAS
from floatline.optim.survey import Decision, Entry, Survey, by_device, check_options, decide, fill

_SHARED = importlib.import_module("torch.optim.optimizer")  # torch.optim does not show it
_SOMEONE = (True,)  # where torch does not tell who listens


def share_hooks(old: torch.optim.Optimizer, new: torch.optim.Optimizer) -> None:
    """Who listens to the steps of one optimizer listens to those of another; handles remove a hook from both."""
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if hasattr(old, name):
            setattr(new, name, getattr(old, name))


def is_heard(optimizer: torch.optim.Optimizer) -> bool:
    """Whether anyone may listen to the steps of an optimizer: a hook of its own or of all, or the profiler."""
    return bool(
        getattr(optimizer, "_optimizer_step_pre_hooks", _SOMEONE)
        or getattr(optimizer, "_optimizer_step_post_hooks", _SOMEONE)
        or getattr(_SHARED, "_global_optimizer_pre_hooks", _SOMEONE)
        or getattr(_SHARED, "_global_optimizer_post_hooks", _SOMEONE)
        or getattr(torch.autograd, "_profiler_enabled", lambda: True)()
    )


class Optimizer(RuledOptimizer):
    """What AdamW, Adam, SGD, Lion and Muon share: everything but the arithmetic.

    Numerics:
        Every update is computed in float32 from the float32 numbers that weight and states stand for. `update` and
        `states` say how these are stored; see `floatline.optim.storage`.
        A 16-bit weight that was written from outside counts as written: the next step goes on from that value, bit for
        bit where torch counts the write (`p.zero_()`, `p.mul_(mask)`, `load_state_dict` of the model), and within half
        a spacing of it where torch does not (`p.data.zero_()`). A checkpoint of weights and optimizer is loaded in any
        order. Checked by tests/optim/test_written_weights.py.

    Args:
        params: As in torch.optim: tensors, named tensors or parameter groups.
        defaults: Settings of groups that do not have their own.
        rule: The arithmetic.
        update: How a 16-bit weight takes its update. "exact": with 16 more bits beside it, nothing is lost.
            "stochastic": rounded up or down at random, right on average, no extra memory. "kahan": what was lost is
            kept in the weight's own format. "nearest": small updates are lost; for comparison only.
            float32 weights need none of them.
        states: "fp32", "bf16" or "int8" (a scale for each 256 elements).
        seed: Key of every random choice. The choice depends on seed, step, parameter and element alone.

    Attributes:
        decision: What was decided in the last step that had to be decided; None before, and after a plain step.
    """

    # torch.amp.GradScaler hands scale and found_inf over instead of unscaling 16-bit gradients itself.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        rule: UpdateRule,
        update: UpdateName = "exact",
        states: StatesName = "fp32",
        seed: int = 0,
    ) -> None:
        hyperparameters.check_names(update=update, states=states, seed=seed)
        if update == "nearest":
            warnings.warn(
                'update="nearest" loses every update below half the spacing at a 16-bit weight. '
                'Use it for comparison only; update="exact" loses none.',
                stacklevel=3,
            )
        self.rule = rule
        self.update = update
        self.states = states
        self.seed = seed
        self.decision: Decision | None = None
        self._roster: Roster | None = None
        self._writes = Writes()
        super().__init__(params, defaults)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch.optim's wrapper around `step`, left out where nobody listens: it costs as much as two launches."""
        wrapped = torch.optim.Optimizer.profile_hook_step(func)

        @functools.wraps(func)
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return wrapped(self, *args, **kwargs) if is_heard(self) else func(self, *args, **kwargs)

        return step

    def __getstate__(self) -> dict[str, Any]:
        self.accept_writes()
        own = {name: getattr(self, name) for name in ("rule", "update", "states", "seed")}
        return {**super().__getstate__(), **own, "decision": None, "_roster": None, "_writes": Writes()}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch.optim does, and refuse what cannot be trained here.

        Args:
            param_group: "params", and settings that differ from the defaults.
        """
        params = param_group["params"]
        if isinstance(params, Tensor):
            param_group["params"] = [params]
        elif not isinstance(params, set):
            param_group["params"] = list(params)
        hyperparameters.check_params(param_group["params"])
        hyperparameters.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        self._roster = None

    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Callable[[], Any] | None = None,
        *,
        scale: float | Tensor | None = None,
        clip_norm: float | Tensor | None = None,
        skip: bool | Tensor | None = None,
        decide: Callable[[Survey], Decision] | None = None,
    ) -> Any:
        """Make one step; with any of the options, survey the gradients first and make it wholly or not at all.

        Numerics:
            Without options this is torch.optim's step: nothing is checked. With options the step is skipped where a
            gradient holds inf or NaN, where the norm overflows, or where `skip` says so; weights, states and step
            counters then keep every bit. Gradients themselves are never changed.
            On a GPU nothing is read on the host: scale, clip norm and skip may be tensors on the device.

        Args:
            closure: Computes the loss again and returns it.
            scale: What the loss was multiplied by; gradients are divided by it.
            clip_norm: Largest global norm of the unscaled gradients; larger ones are scaled down to it.
            skip: True: leave everything as it is.
            decide: Makes the decision from the survey, instead of the other options. It is called in every step,
                with an empty survey where no parameter has a gradient: it may talk to other processes. Of sharded
                gradients the survey holds what this process found; `survey.whole` what all have.

        Returns:
            What the closure returned.
        """
        check_options(scale=scale, clip_norm=clip_norm)
        if decide is not None and not (scale is None and clip_norm is None and skip is None):
            raise OptimizerError("decide is given with scale, clip_norm or skip. Let decide look at them itself.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if decide is None:
            self._step(scale, clip_norm, skip)
        else:
            self._step_decided(decide)
        return loss

    @uncompiled
    @torch.no_grad()
    def _step(self, scale: float | Tensor | None, clip_norm: float | Tensor | None, skip: bool | Tensor | None) -> None:
        params, entries = self._begin()
        try:
            self._step_entries(params, entries, scale, clip_norm, skip)
            self._writes.remember()
        finally:
            if self._roster is not None:
                self._roster.release()

    @uncompiled
    @torch.no_grad()
    def _step_decided(self, decide: Callable[[Survey], Decision]) -> None:
        params, entries = self._begin()
        try:
            survey = self._look(entries)
            if self._roster is None:  # a roster holds plain parameters only: there is no shard to ask for
                survey = mesh.own_share(survey, params)
            self.decision = decide(survey)
            self._apply(entries)
            self._writes.remember()
        finally:
            if self._roster is not None:
                self._roster.release()

    def _step_entries(
        self,
        params: list[Tensor],
        entries: list[Entry],
        scale: float | Tensor | None,
        clip_norm: float | Tensor | None,
        skip: bool | Tensor | None,
    ) -> None:
        self.decision = None
        if not entries:
            return
        device = entries[0].weight.device
        amp_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None:
            # torch.amp.GradScaler has looked at the gradients itself: survey only what it cannot know.
            own = scale is not None or clip_norm is not None or skip is not None
            survey = self._survey(params, entries) if own else None
            unscale = _product(scale, amp_scale, device)
            self.decision = decide(
                survey, scale=unscale, clip_norm=clip_norm, skip=_either(skip, found_inf, device), device=device
            )
        elif scale is not None or clip_norm is not None or skip is not None:
            fused = fused_step_for(entries) if self._roster is not None and not self.rule.others else None
            if fused is not None:
                self.decision = fused(
                    self.rule,
                    entries,
                    scale=scale,
                    clip_norm=clip_norm,
                    skip=skip,
                    update=self.update,
                    states=self.states,
                    seed=self.seed,
                )
                return
            survey = self._survey(params, entries)
            self.decision = decide(survey, scale=scale, clip_norm=clip_norm, skip=skip)
        self._apply(entries)

    def _apply(self, entries: list[Entry]) -> None:
        if not entries:
            return
        for place, own_entries in by_device(entries).items():
            decision = self.decision
            if decision is not None and place != decision.applied.device:
                decision = decision.to(place)
            for rule, part in self._by_rule(own_entries):
                applier_for(rule, place).apply(
                    rule, part, decision=decision, update=self.update, states=self.states, seed=self.seed
                )

    def _by_rule(self, entries: list[Entry]) -> list[tuple[UpdateRule, list[Entry]]]:
        """The entries that follow each rule; the list itself where there is only one rule."""
        if not self.rule.others:
            return [(self.rule, entries)]
        fill(entries)
        rules = (self.rule, *self.rule.others.values())
        parts = ((rule, [entry for entry in entries if self.rule.of(entry.group) is rule]) for rule in rules)
        return [(rule, part) for rule, part in parts if part]

    @torch.no_grad()
    def survey(self) -> Survey:
        """Norms and non-finite counts of the gradients as they are, for every parameter that has one, in order.

        Sharded gradients are summed over their mesh; every process must call it then.
        """
        found = self._survey(*self._collect())
        if self._roster is not None:
            self._roster.release()
        return found

    def _survey(self, params: list[Tensor], entries: list[Entry]) -> Survey:
        return mesh.agree(self._look(entries), params)

    def _look(self, entries: list[Entry]) -> Survey:
        if not entries:
            nothing = torch.zeros(0, device=next(self._params()).device)
            return Survey(nothing, nothing.to(torch.int32))
        return survey_all(entries)

    def _params(self) -> Iterator[Tensor]:
        for group in self.param_groups:
            yield from group["params"]

    def _begin(self) -> tuple[list[Tensor], list[Entry]]:
        """Who takes part in this step, with weights that others have written taken as they are."""
        params, entries = self._collect()
        self._writes.watch(params, entries, self.state, extra=EXTRAS.get(self.update))
        self._writes.settle()
        return params, entries

    def _collect(self) -> tuple[list[Tensor], list[Entry]]:
        """The parameters that have a gradient, and what a backend needs of them."""
        if self._roster is not None and self._roster.refresh(self.param_groups, self.state):
            return self._roster.params, self._roster.entries
        params, entries, self._roster = collect(
            self.param_groups, self.state, rule=self.rule, update=self.update, states=self.states
        )
        return params, entries

    def accept_writes(self) -> None:
        """Let weights that others have written since the last step count as written: zeros stand beside them then.

        `step`, `state_dict`, `master_state_dict` and copying do it by themselves. Call it before you read remainders or
        compensations from `state`.
        """
        self._writes.settle()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on as if nothing had happened, the weights themselves excepted; as in torch.optim.

        The remainder of a sharded weight comes as bfloat16 with the same bits: collectives carry no int16.
        """
        self.accept_writes()
        saved = super().state_dict()
        packed = cast("dict[Any, Any]", saved["state"])
        for key, state in packed.items():
            if isinstance(state, dict) and "remainder" in state:
                own = cast("dict[str, Tensor]", state)
                packed[key] = {**own, "remainder": mesh.portable(own["remainder"])}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` saved, here or in torch.optim, without casting a state to the weight's dtype.

        Moments from torch.optim, or saved in another form, are kept and brought into this optimizer's form.

        Args:
            state_dict: From an optimizer with the same parameters in the same groups.
        """
        resuming.load_state(self, state_dict, super().load_state_dict)
        self._roster, self._writes = None, Writes()

    def master_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state with every weight as the float32 number that is being trained.

        Args:
            model: The model whose parameters this optimizer trains, without a DDP wrapper.
        """
        self.accept_writes()
        return checkpoint.master_state_dict(self, model)

    def load_master(self, model: nn.Module, tensors: Mapping[str, Tensor] | str | Path) -> None:
        """Set the model's weights, and what stands beside them, from float32 weights; moments stay as they are.

        Args:
            model: The model whose parameters this optimizer trains.
            tensors: Weights by name, or a safetensors file.
        """
        checkpoint.load_master(self, model, tensors)
        self._roster, self._writes = None, Writes()

    def save_master(self, model: nn.Module, path: str | Path) -> None:
        """Write `master_state_dict` to a safetensors file that any tool reads.

        Args:
            model: The model whose parameters this optimizer trains.
            path: The file.
        """
        self.accept_writes()
        checkpoint.save_master(self, model, path)

    def memory(self) -> Footprint:
        """Bytes held now for weights, gradients and every part of the state, counted from the tensors themselves.

        States are made in the first step: before it there are none.
        """
        state = cast("Mapping[Tensor, dict[str, Any]]", self.state)
        return Footprint.of(list(self._params()), state, copies=self._writes.copies.values())


def _product(first: float | Tensor | None, second: Tensor | None, device: torch.device) -> float | Tensor | None:
    if second is None:
        return first
    return second if first is None else first * second.to(device)


def _either(skip: bool | Tensor | None, found_inf: Tensor, device: torch.device) -> Tensor:
    found = send(found_inf, device).reshape(()) != 0
    return found if skip is None else found | torch.as_tensor(skip, device=device).to(torch.bool).reshape(())
