"""watch_rollouts: how far a GRPO trainer's log-probs are from those of its rollouts, every so many steps in its log."""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false
# pyright: reportIncompatibleMethodOverride=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer

from floatline.agreement.logprobs.comparing import BAND
from floatline.agreement.logprobs.files import Scored
from floatline.agreement.logprobs.ratios import Ratios, measure_ratios
from floatline.errors import ParityError
from floatline.integrations.accelerate.accelerator import put_before

_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


class RolloutDrift:
    """What is known of a trainer's rollouts. `watch_rollouts` makes it.

    Attributes:
        every: Steps from one measurement to the next.
        band: Ratios inside of it are fine.
        last: What was measured last; None before the first.
        recorded: Whether the engine's own log-probs were at hand; else they were computed again as `generate` does.
        problem: Why nothing could be measured; '' where it could.
    """

    def __init__(self, every: int, band: tuple[float, float]) -> None:
        self.every, self.band = every, band
        self.last: Ratios | None = None
        self.recorded = False
        self.problem = ""
        self._step = -1
        self._fresh = False

    def is_due(self, step: int) -> bool:
        """Whether to measure in a step, once."""
        return step != self._step and step % self.every == 0

    def measure(self, trainer: Trainer, model: nn.Module, inputs: dict[str, Any], step: int) -> None:
        """Compare the trainer's log-probs of a batch with the engine's."""
        self._step = step
        missing = [key for key in _KEYS if not isinstance(inputs.get(key), Tensor)]
        if missing:
            self.problem = f"the batch has no '{missing[0]}'"
            return
        training = model.training
        try:
            with torch.no_grad():
                ours = _score(trainer, model, inputs)
                given = inputs.get("sampling_per_token_logps")
                self.recorded = isinstance(given, Tensor)
                theirs = given if isinstance(given, Tensor) else _score_as_generate(trainer, model, inputs)
        except Exception as error:  # a log entry is not worth a run
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            return
        finally:
            model.train(training)
        known = inputs["completion_mask"].bool()
        rows = [
            Scored(tokens=ids[mask].cpu(), logprobs=engine[mask].double().cpu())
            for ids, mask, engine in zip(inputs["completion_ids"], known, theirs, strict=True)
        ]
        mine = torch.cat([row[mask].double().cpu() for row, mask in zip(ours, known, strict=True)])
        self.last = measure_ratios(mine, torch.cat([row.logprobs for row in rows]), rows, self.band)
        self.problem, self._fresh = "", True

    def take_metrics(self) -> dict[str, float]:
        """What was measured since the last call, for a log."""
        if self.last is None or not self._fresh:
            return {}
        self._fresh = False
        return {"floatline/ratios_outside": self.last.outside, "floatline/rollout_kl": self.last.kl}


class _WatchedRollouts(Trainer):
    """The methods of a trainer that its rollouts pass through."""

    rollout_drift: RolloutDrift

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's; before it, now and then, the rollout's log-probs are compared."""
        if model.training and isinstance(inputs, dict) and self.rollout_drift.is_due(self.state.global_step):
            self.rollout_drift.measure(self, model, cast("dict[str, Any]", inputs), self.state.global_step)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add what was measured."""
        logs.update(self.rollout_drift.take_metrics())
        super().log(logs, *args, **kwargs)


def watch_rollouts(trainer: Trainer, *, every: int = 20, band: tuple[float, float] = BAND) -> RolloutDrift:
    """Log how far a GRPO trainer's log-probs are from those of its rollouts::

        drift = watch_rollouts(trainer, every=20)  # trainer = trl.GRPOTrainer(...)
        trainer.train()

    The log gets `floatline/ratios_outside`, the share of ratios outside of the band, and `floatline/rollout_kl`, the
    divergence of a sequence. The engine's log-probs are its own where it hands them over, as vLLM does; else they are
    computed again as `generate` does it: token by token, with a cache. The run's numbers stay what they are.

    Numerics:
        Log-probs are taken of logits in float32, over the temperature. See `measure_ratios`.
        Checked by tests/integrations/test_rollouts.py.

    Args:
        trainer: Changed in place; TRL's GRPOTrainer, or one whose batches have its names.
        every: Steps from one measurement to the next; one costs a forward pass, or as many as a completion has tokens.
        band: Ratios inside of it are fine.

    Raises:
        ParityError: `every` or the band is out of range, or the trainer is watched already.
    """
    if every < 1:
        raise ParityError(f"every is {every}. Give a number of steps of at least 1.")
    if not 0 < band[0] < 1 < band[1]:
        raise ParityError(f"Band {band} does not hold the ratio 1. Give one such as 0.9 1.1.")
    if isinstance(trainer, _WatchedRollouts):
        raise ParityError("The rollouts of this trainer are watched already. Call watch_rollouts once.")
    drift = RolloutDrift(every, band)
    own: Any = trainer
    own.__class__ = put_before(type(trainer), _WatchedRollouts)
    own.rollout_drift = drift
    return drift


def _temperature(trainer: Trainer) -> float:
    return float(getattr(trainer.args, "temperature", 1.0) or 1.0)


def _pick(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    return (logits.float() / temperature).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def _score(trainer: Trainer, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The trainer's log-probs of the completions, as its loss computes them."""
    prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
    ids = torch.cat([prompt, completion], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with trainer.compute_loss_context_manager():
        logits = model(input_ids=ids, attention_mask=mask).logits
    return _pick(logits[:, prompt.shape[1] - 1 : -1], completion, _temperature(trainer))


def _score_as_generate(trainer: Trainer, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The same as `generate` computes them: without gradients, one token after the other, with a cache."""
    plain: Any = trainer.accelerator.unwrap_model(model)
    plain.eval()
    prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
    mask, ids, cache = inputs["prompt_mask"], prompt, None
    found: list[Tensor] = []
    places = (mask.long().cumsum(1) - 1).clamp(min=0)
    for number in range(completion.shape[1]):
        made = plain(input_ids=ids, attention_mask=mask, position_ids=places, past_key_values=cache, use_cache=True)
        cache, ids = made.past_key_values, completion[:, number : number + 1]
        found.append(_pick(made.logits[:, -1], ids[:, 0], _temperature(trainer)))
        mask = torch.cat([mask, inputs["completion_mask"][:, number : number + 1]], 1)
        places = places[:, -1:] + 1
    return torch.stack(found, 1)
