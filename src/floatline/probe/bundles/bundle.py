"""Replay bundles: a captured step in a folder, and the step again on another machine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from floatline.errors import FloatlineError, ReplayError, suggest
from floatline.findings import Finding
from floatline.plans import Plan
from floatline.plans.plan import name_all_modules
from floatline.precision.islands import Islands
from floatline.precision.nested import map_tensors
from floatline.precision.random_state import RandomState
from floatline.probe.runs.plain_loop import batches_of
from floatline.probe.runs.target_steps import PlannedLoss, capture_target, origin_of
from floatline.probe.steps.bundle_files import read_files, unpack, write_files
from floatline.probe.steps.capture import CapturedStep, capture_step
from floatline.probe.steps.origin import StepOrigin, describe_origin
from floatline.probe.steps.other_precision import AutocastState
from floatline.workload import Target, Workload, load_target


@dataclass(frozen=True)
class Bundle:
    """What a bundle holds, read and checked, but not yet a step.

    Args:
        folder: Where it lies.
        kind: 'build': weights, states and random numbers are in it. 'train': the target is run again from its seed.
        origin: Where the step comes from.
        plan: How it computes; None where only the user's loop knows.
        findings: What a diagnosis found, as JSON.
        versions: What it was written with.
        fields: The rest.
        tensors: By name.
    """

    folder: Path
    kind: str
    origin: StepOrigin
    plan: Plan | None
    findings: list[dict[str, Any]]
    versions: dict[str, str]
    fields: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def has_data(self) -> bool:
        """Whether the batches are in it."""
        return self.fields.get("batches") is not None


def write_bundle(
    target: Target,
    folder: str | Path,
    *,
    step: int,
    seed: int = 0,
    findings: Sequence[Finding] = (),
    with_data: bool = False,
) -> Path:
    """Run a target to a step, as it is, and write that step as a bundle.

    Of a train() function only its name, seed and step are kept: its loop is the only one who knows what a step is.

    Args:
        target: The loaded target.
        folder: Where; it must not exist, or be empty.
        step: Number of the step, from 0, as in a RunRecord.
        seed: Seed of the run.
        findings: What a diagnosis found.
        with_data: Put the batches in, too.

    Raises:
        ReplayError: It cannot be written.
        TargetError: The target ends before that step.
    """
    if target.builder is not None:
        return capture_target(target, step=step, seed=seed).save(folder, with_data=with_data, findings=findings)
    if with_data:
        raise ReplayError(f"Target '{target.text}' has only train(), whose batches are not known. Leave the data out.")
    origin = origin_of(target, seed=seed, step=step)
    return write_files(Path(folder), {**describe_origin("train", origin, findings), "plan": None}, {})


def read_bundle(folder: str | Path) -> Bundle:
    """Read a bundle and check it; nothing is run.

    Raises:
        ReplayError: There is none, or it is damaged.
    """
    folder = Path(folder)
    fields, tensors = read_files(folder)
    try:
        facts: dict[str, Any] = {**fields["origin"], "islands": tuple(fields["origin"]["islands"])}
        origin = StepOrigin(**facts)
        plan = fields.pop("plan")
        kind = fields["kind"]
        if kind not in ("build", "train") or (plan is None) != (kind == "train"):
            raise ValueError(f"its kind is {kind!r:.40}")
        _check_types(origin)
        plan = None if plan is None else Plan(**plan)
        findings: list[dict[str, Any]] = [dict(finding) for finding in fields["findings"]]
        versions: dict[str, str] = {str(name): str(text) for name, text in fields["versions"].items()}
    except (KeyError, TypeError, ValueError, AttributeError, FloatlineError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ReplayError(f"Bundle '{folder}' is damaged: {reason}. Write it again.") from None
    return Bundle(folder, kind, origin, plan, findings, versions, fields, tensors)


def open_target(bundle: Bundle, target: str | None = None) -> Target:
    """Load the target that a bundle names, or another one that is given.

    A file in the bundle's own folder is not run unless it is given.
    """
    text = target or bundle.origin.target
    if not text:
        raise ReplayError(f"Bundle '{bundle.folder}' names no target. Give one that builds its model, with --target.")
    if target is None and _lies_in(text, bundle.folder.resolve()):
        raise ReplayError(f"Target '{text}' lies in the bundle itself. Read it, and give it with --target to run it.")
    return load_target(text)


def _lies_in(text: str, folder: Path) -> bool:
    """Whether a target is a file of the folder, or a module that Python would find there."""
    places = {Path(part) for part in (text, text.rpartition(":")[0]) if part}
    roots = [Path.cwd(), *(Path(root or ".") for root in sys.path)]
    for name in {part.split(":")[0] for part in (text, text.rpartition(":")[0])}:
        # Importing a.b.c runs a and a.b before it.
        words = name.split(".")
        places |= {root.joinpath(*words[:num]) for root in roots for num in range(1, len(words) + 1)}
    return any(place.resolve().is_relative_to(folder) for place in places if "\0" not in str(place))


def code_differs(bundle: Bundle, target: Target) -> bool:
    """Whether the target's file is another one than the bundle was written with."""
    own = origin_of(target, seed=0, step=0)
    return bool(bundle.origin.sha256) and own.sha256 != bundle.origin.sha256


def restore_step(bundle: Bundle, target: Target) -> CapturedStep:
    """The step of a bundle, with model, loss and optimizer that a target builds.

    Raises:
        ReplayError: The target's model or batches are not those of the bundle.
    """
    workload = target.build(bundle.origin.seed)
    try:
        return _put_in(bundle, workload)
    except FloatlineError:
        raise
    except Exception as error:  # of what the bundle holds, nothing is trusted
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise ReplayError(f"'{bundle.folder}' does not fit target '{target.text}': {reason}. Write it again.") from None


def _put_in(bundle: Bundle, workload: Workload) -> CapturedStep:
    fields, model = bundle.fields, workload.model
    plan = cast("Plan", bundle.plan)
    batches = _restore_batches(bundle, workload, plan)
    _cast_weights(model, bundle)
    optimizer = workload.make_optimizer(model)  # before the weights: it may change the model
    _load_weights(model, bundle)
    for name, module in name_all_modules(model):
        module.training = bool(fields["training"].get(name, True))
    _load_optimizer(optimizer, bundle)
    loss = PlannedLoss(workload, plan)
    planned = set(plan.check_modules(model))
    added = [name for name in bundle.origin.islands if name not in planned]  # by a guard, during its run
    if added:
        Islands(model, added)
    random_state = RandomState.from_parts(bundle.tensors, fields["random"])
    with random_state.replayed():
        pass  # a state that no generator takes is refused here
    step = capture_step(
        model,
        optimizer,
        loss,
        *batches,
        plan=plan,
        scale=float(fields["scale"]),
        random_state=random_state,
        half_on_cpu=bool(fields["half_on_cpu"]),
        origin=bundle.origin,
    )
    step.around = loss.in_force
    step.checked, step.autocast = bool(fields["checked"]), AutocastState.from_json(fields["autocast"])
    step.cuda_lists = bool(fields.get("cuda_lists"))  # bundles of version 0.1.0 have none
    for name in step.state.captured:
        if name.startswith("optimizer["):  # trained, and no part of the model
            step.state.captured[name] = bundle.tensors[f"model.{name}"].to(step.device)
    return step


def _restore_batches(bundle: Bundle, workload: Workload, plan: Plan) -> list[Any]:
    if not bundle.has_data:
        if bundle.origin.batch is None:
            raise ReplayError(f"Bundle '{bundle.folder}' has no data, and names no batch. Write it with its data.")
        return list(batches_of(workload, plan, bundle.origin.batch))
    device = next((p.device for p in workload.model.parameters()), torch.device("cpu"))
    batches = map_tensors(lambda t: t.to(device), unpack(bundle.fields["batches"], bundle.tensors))
    for batch in batches:
        if not isinstance(batch, list | tuple) or len(cast("list[Any]", batch)) != 2:
            raise ReplayError(f"The batch of '{bundle.folder}' is no (inputs, targets), which a target's loss takes.")
    return list(batches)


def _live(model: nn.Module) -> dict[str, Tensor]:
    weights = {f"model.{name}": p for name, p in model.named_parameters()}
    return weights | {f"buffer.{name}": b for name, b in model.named_buffers()}


def _cast_weights(model: nn.Module, bundle: Bundle) -> None:
    for name, tensor in _live(model).items():
        if name in bundle.tensors:
            tensor.data = tensor.data.to(bundle.tensors[name].dtype)


def _load_weights(model: nn.Module, bundle: Bundle) -> None:
    live = _live(model)
    saved = {n: t for n, t in bundle.tensors.items() if n.startswith(("model.", "buffer."))}
    for name in saved:
        if name not in live and not name.startswith("model.optimizer["):
            short = name.partition(".")[2]
            raise ReplayError(
                f"The bundle holds '{short}', and the target's model has none. "
                f"{suggest(short, [n.partition('.')[2] for n in live][:50])}"
            )
    for name, tensor in live.items():
        short = name.partition(".")[2]
        if name not in saved:
            raise ReplayError(f"The target's model has '{short}', and the bundle has none. Give the target it is of.")
        if saved[name].shape != tensor.shape:
            raise ReplayError(
                f"'{short}' is {tuple(saved[name].shape)} in the bundle and {tuple(tensor.shape)} in the target's "
                "model. Give the target it is of."
            )
        tensor.data = saved[name].to(tensor.device, copy=True)


def _load_optimizer(optimizer: torch.optim.Optimizer, bundle: Bundle) -> None:
    """Put the saved states in as they are: torch's load_state_dict would round them to the weights' format."""
    saved = bundle.fields["optimizer"]
    if saved is None:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if saved["class"] != type(optimizer).__name__ or len(saved["state"]) != len(params):
        raise ReplayError(
            f"The bundle's optimizer is a {saved['class']} of {len(saved['state'])} tensors, and the target's a "
            f"{type(optimizer).__name__} of {len(params)}. Give the target it is of."
        )
    tree = unpack(saved, bundle.tensors)
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    on_device = fused or type(optimizer).__module__.startswith("floatline.")
    state = cast("dict[Tensor, dict[str, Any]]", optimizer.state)
    for param, own in zip(params, tree["state"], strict=True):
        if own:
            state[param] = {
                key: value.to("cpu" if key == "step" and not on_device else param.device)
                if isinstance(value, Tensor)
                else value
                for key, value in own.items()
            }
    for group, own in zip(optimizer.param_groups, tree["groups"], strict=True):
        group.update({key: value for key, value in own.items() if key in group})


def _check_types(origin: StepOrigin) -> None:
    texts = (origin.target, origin.file, origin.sha256, *origin.islands)
    numbers = (origin.seed, origin.step, 0 if origin.batch is None else origin.batch)
    if not all(isinstance(t, str) for t in texts) or not all(isinstance(n, int) and 0 <= n < 1 << 63 for n in numbers):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("its origin cannot be read")
