"""Backends: how survey and step are carried out on a device."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from floatline.optim.rules import UpdateRule
from floatline.optim.survey import Decision, Entry, Survey, by_device, merge


class Applier(Protocol):
    """Makes steps. All entries of a call are on one device."""

    def apply(
        self, rule: UpdateRule, entries: list[Entry], *, decision: Decision | None, update: str, states: str, seed: int
    ) -> None:
        """Make one step, or leave everything as it is where the decision says so.

        Args:
            rule: The arithmetic.
            entries: What to change, in place.
            decision: On the entries' device. None: make the step, with the gradients as they are.
            update: "exact", "stochastic", "kahan" or "nearest": how a 16-bit weight takes its update.
            states: "fp32", "bf16" or "int8": how states are stored.
            seed: Key of every random choice.
        """
        ...


class Backend(Applier, Protocol):
    """What a backend module offers: steps, and what it finds in gradients."""

    def survey(self, entries: list[Entry]) -> Survey:
        """Sum of squares and number of non-finite values of each gradient, in the entries' order."""
        ...


def applier_for(rule: UpdateRule, device: torch.device) -> Applier:
    """Who makes a step by a rule on a device: for a rule on whole matrices torch's products, on every device."""
    return _load("matrices") if rule.whole else backend_for(device)


def backend_for(device: torch.device) -> Backend:
    """The backend for a device: triton on NVIDIA and AMD GPUs where it is installed, torch everywhere else."""
    return _load("triton_backend" if device.type == "cuda" and _has_triton() else "torch_backend")


def survey_all(entries: list[Entry]) -> Survey:
    """What the backends find on their devices, as one survey in the entries' order; there must be an entry."""
    places = by_device(entries)
    if len(places) == 1:
        return backend_for(entries[0].weight.device).survey(entries)
    spots = {id(entry): i for i, entry in enumerate(e for own in places.values() for e in own)}
    surveys = [backend_for(place).survey(own) for place, own in places.items()]
    return merge(surveys, [spots[id(entry)] for entry in entries])


class FusedStep(Protocol):
    """Survey, decision and step in one call, for a backend that can."""

    def __call__(
        self,
        rule: UpdateRule,
        entries: list[Entry],
        *,
        scale: float | Tensor | None,
        clip_norm: float | Tensor | None,
        skip: bool | Tensor | None,
        update: str,
        states: str,
        seed: int,
    ) -> Decision:
        """Make the step wholly or not at all; the options are those of `survey.decide`."""
        ...


def fused_step_for(entries: list[Entry]) -> FusedStep | None:
    """The backend's call that does everything at once; None where it has none, or the entries need more care."""
    backend = backend_for(entries[0].weight.device)
    takes = getattr(backend, "takes", None)
    return cast("FusedStep", vars(backend)["survey_and_apply"]) if takes is not None and takes(entries) else None


@cache
def _load(name: str) -> Backend:
    return cast("Backend", importlib.import_module(f"floatline.optim.kernels.{name}"))


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
