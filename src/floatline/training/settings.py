"""Plan, policy and settings of a run, kept in its folder, so that it is resumed as it was begun."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from os import PathLike
from pathlib import Path
from typing import Any

from floatline.base.files import read_bounded, write_whole
from floatline.base.plain_values import decode_state, encode_state
from floatline.errors import GuardError
from floatline.guard.policy import DEFAULT, Policy, resolve_policy
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.plans.yaml_files import read_yaml, write_yaml
from floatline.workload import Workload
from floatline.workload.target import split_settings


def name_folder(target: str) -> str:
    """A folder name for a target: 'examples/small_gpt.py' is 'small_gpt', 'a.b:tiny' is 'b-tiny'."""
    word, settings = split_settings(target)
    place, _, function = word.rpartition(":")
    stem = Path(place or function).name
    stem = stem.removesuffix(".py") if stem.endswith(".py") else stem.rpartition(".")[2]
    parts = [stem] if not place or function == "build" else [stem, function]
    parts += settings
    return re.sub(r"[^\w-]", "-", "-".join(parts))


_PLAN, _POLICY, CONFIG = "plan.yaml", "policy.json", "config.yaml"
AnyPlan = Plan | str | PathLike[str]


def shared_policy(workload: Workload) -> Policy:
    """The policy for runs that are compared: what the workload sets, whatever the plan, or the default.

    A preset's own policy would be a second difference between two plans, and FP32 as a reference trains on every batch.
    """
    return replace(DEFAULT, **workload.policy)


def save_settings(folder: Path, plan: Plan, policy: Policy, config: Mapping[str, Any]) -> None:
    """Write them into the run folder; a workload without settings has no config file."""
    linked = next((folder / name for name in (_PLAN, _POLICY, CONFIG) if (folder / name).is_symlink()), None)
    if linked is not None:  # what it leads to would be written over
        raise GuardError(f"{linked} is a link. Delete it, or choose another folder.")
    plan.save(folder / _PLAN)
    if config:
        write_yaml(folder / CONFIG, dict(config))
    try:
        write_whole(folder / _POLICY, json.dumps(encode_state(asdict(policy)), indent=2, allow_nan=False) + "\n")
    except OSError as error:
        raise GuardError(f"{folder} cannot be written: {error.strerror}. Choose another folder.") from None


def check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse to go on with a run whose workload had other settings."""
    own = read_yaml(folder / CONFIG, what="Config") if (folder / CONFIG).is_file() else {}
    key = next((name for name in {**own, **config} if own.get(name) != config.get(name)), None)
    if key is not None:
        raise GuardError(
            f"The run in {folder} has {key} {own.get(key)!r}, which is not the {config.get(key)!r} given now. "
            "Resume it without settings, or start another run."
        )


def load_settings(folder: Path, plan: AnyPlan | None, policy: Policy | str | None) -> tuple[Plan, Policy]:
    """What a run goes on with: its own plan, and its own policy unless another is given.

    Args:
        folder: The run folder.
        plan: The plan that is asked for; it must be the run's.
        policy: The policy that is asked for; None keeps the run's.
    """
    own = Plan.load(folder / _PLAN)
    asked = own if plan is None else resolve_plan(plan)
    if asked != own:
        raise GuardError(
            f"The run in {folder} has plan '{own.name}', which is not the '{asked.name}' given now. "
            "Resume it without a plan, or start another run."
        )
    if policy is not None:
        return own, resolve_policy(policy, plan_name=own.name)
    try:
        return own, Policy(**decode_state(json.loads(read_bounded(folder / _POLICY))))
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise GuardError(f"{folder / _POLICY} cannot be read. Resume the run with a policy by name.") from None
