"""Everything a guarded run is made of, as named tensors and JSON; and how a run is brought back to it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from floatline.base.plain_values import DAMAGE
from floatline.errors import FloatlineError, GuardError
from floatline.guard.run import Run
from floatline.guard.step.buffer_blocks import is_plain
from floatline.ledger.account import Accounts
from floatline.optim import mesh
from floatline.optim.optimizer import Optimizer
from floatline.plans import Plan
from floatline.precision.random_state import load_random, save_random
from floatline.precision.wrappers import reshard, unwrap

SCHEMA = 1


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return mesh.local_part(tensor.detach())


def live_tensors(run: Run) -> dict[str, Tensor]:
    """The tensors that a step changes, by name, each once: weights, buffers, optimizer states, scale, average."""
    if isinstance(run.optimizer, Optimizer):
        run.optimizer.accept_writes()  # a weight that other code has written keeps no remainder
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    model = unwrap(run.model)
    reshard(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found |= _memory_of(f"model.{name}", tensor)
    for index, state in _optimizer_states(run).items():
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"optimizer.{index}.{key}"] = local(value)
    found |= {f"judge.{name}": tensor for name, tensor in run.judge.state().items()}
    if run.average is not None:
        found |= {f"average.{name}": tensor for name, tensor in run.average.tensors.items()}
    return found


_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _memory_of(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Tensors that can be copied from and into, and hold what a tensor holds: of a sparse one its parts.

    Nothing of one on the meta device, which holds nothing; and an expanded one has each of its elements once.
    """
    own = local(tensor)
    if own.is_meta:
        return {}
    if own.layout in _SPARSE_PARTS:
        return {f"{name}.{part.lstrip('_')}": getattr(own, part)() for part in _SPARSE_PARTS[own.layout]}
    if type(own) is Tensor and own.layout == torch.strided and not own.is_nested and 0 in own.stride():
        sizes = [size if stride else min(size, 1) for size, stride in zip(own.shape, own.stride(), strict=True)]
        own = own.as_strided(sizes, own.stride())
    return {name: own}


def may_be_nonfinite(run: Run) -> list[str]:
    """Names of live tensors that may hold inf or NaN in a sound run: buffers such as masks, and unfilled windows."""
    return ["judge.window", *buffer_names(run)]


def buffer_names(run: Run) -> list[str]:
    """Names of the model's buffers among the live tensors."""
    return [part for name, buffer in unwrap(run.model).named_buffers() for part in _memory_of(f"model.{name}", buffer)]


@torch.no_grad()
def reshape_buffers(run: Run, shapes: dict[str, torch.Size]) -> None:
    """Give buffers that have grown or shrunk, such as a memory of batches, the shape that a snapshot has of them.

    What they hold is not set: the snapshot is copied into them next.
    """
    for name, buffer in unwrap(run.model).named_buffers():
        shape = shapes.get(f"model.{name}", buffer.shape)
        if shape != buffer.shape and is_plain(buffer):
            buffer.data = buffer.new_empty(shape)


def collect(run: Run) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and JSON of a guarded run, random number generators included."""
    tensors = live_tensors(run)
    if run.samples is not None:
        tensors |= run.samples.state()
    random_tensors, random_fields = save_random(run.device)
    tensors |= random_tensors
    numbers = {
        f"{index}.{key}": value
        for index, state in _optimizer_states(run).items()
        for key, value in state.items()
        if isinstance(value, bool | int | float)
    }
    groups = [{k: v for k, v in g.items() if k != "params"} for g in run.optimizer.param_groups]
    state = {
        "schema": SCHEMA,
        "attempts": run.attempts,
        "epoch": run.epoch,
        "batch": run.batch,
        "plan": run.plan.model_dump(mode="json"),
        "islands": dict(run.islands.outputs),
        "optimizer": {
            "class": type(run.optimizer).__name__,
            "groups": [_plain_group(group) for group in groups],
            "numbers": numbers,
        },
        "schedules": run.schedules.state_dict(),
        "recovery": run.recovery.state_dict(),
        "snapshots": run.ring.state_dict(),
        "accounts": run.diary.accounts.as_json(),
        "average": None if run.average is None else run.average.decay,
        **random_fields,
    }
    return tensors, state


def restore(run: Run, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Bring a run to where `collect` was called. Nothing is changed where tensors or plan do not fit.

    Raises:
        GuardError: It does not fit, or is not what `collect` gave: a checkpoint may be anyone's.
    """
    try:
        _restore(run, tensors, state)
    except FloatlineError:
        raise
    except DAMAGE as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise GuardError(f"The state cannot be taken over ({reason}). Give a checkpoint that save() wrote.") from error


@torch.no_grad()
def _restore(run: Run, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    if state.get("schema") != SCHEMA:
        raise GuardError(f"The state has schema {state.get('schema')!r}, and this version reads {SCHEMA}.")
    name = type(run.optimizer).__name__
    if state["optimizer"]["class"] != name:
        raise GuardError(f"The state is that of a {state['optimizer']['class']}, and this run has a {name}.")
    live = {name: tensor for name, tensor in live_tensors(run).items() if not name.startswith("optimizer.")}
    for name, tensor in live.items():
        if name not in tensors:
            raise GuardError(f"The checkpoint has no {name!r}. Load it with the model that it was saved from.")
        if tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
            raise GuardError(
                f"{name!r} is {tensors[name].dtype} {tuple(tensors[name].shape)} in the checkpoint and {tensor.dtype} "
                f"{tuple(tensor.shape)} in the model. Load it with the model that it was saved from."
            )
    plan = Plan(**state["plan"])
    for key in ("fp32_functions", "rewrites"):
        if getattr(plan, key) != getattr(run.plan, key):
            raise GuardError(
                f"The state's plan '{plan.name}' has other {key} than the guard's. Make it with that plan."
            )
    run.take_plan(plan, state["islands"])
    for name, tensor in (live | ({} if run.samples is None else run.samples.state())).items():
        if name in tensors:
            tensor.copy_(tensors[name])
    _restore_optimizer(run, tensors, state["optimizer"])
    run.schedules.load_state_dict(state["schedules"])
    run.recovery.load_state_dict(state["recovery"])
    run.diary.accounts = Accounts.from_json(state["accounts"])
    run.attempts, run.epoch, run.batch = state["attempts"], state["epoch"], state["batch"]
    load_random(run.device, tensors, state)


def _optimizer_states(run: Run) -> dict[int, dict[str, Any]]:
    """States by the parameter's place in the optimizer."""
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    state = cast("dict[Tensor, dict[str, Any]]", run.optimizer.state)
    return {i: state[p] for i, p in enumerate(params) if p in state}


def _restore_optimizer(run: Run, tensors: dict[str, Tensor], saved: dict[str, Any]) -> None:
    params = [p for group in run.optimizer.param_groups for p in group["params"]]
    state = cast("dict[Tensor, dict[str, Any]]", run.optimizer.state)
    state.clear()
    for name, tensor in tensors.items():
        if not name.startswith("optimizer."):
            continue
        _, index, key = name.split(".", 2)
        param = params[int(index)]
        # torch keeps step counters on the host unless a kernel reads them.
        on_host = key == "step" and not _counts_on_device(run)
        value = tensor.to("cpu" if on_host else local(param).device, copy=True)
        state[param][key] = mesh.like_param(param, key, value)
    for place, value in saved["numbers"].items():
        index, key = place.split(".", 1)
        state[params[int(index)]][key] = value
    for group, own in zip(run.optimizer.param_groups, saved["groups"], strict=True):
        for key, value in own.items():
            if key in group and not isinstance(group[key], Tensor):
                group[key] = tuple(value) if isinstance(group[key], tuple) else value
    if hasattr(run.optimizer, "_roster"):
        cast(Any, run.optimizer)._roster = None


def _counts_on_device(run: Run) -> bool:
    groups = run.optimizer.param_groups
    own = type(run.optimizer).__module__.startswith("floatline.")
    return own or any(group.get("fused") or group.get("capturable") for group in groups)


def _plain_group(group: dict[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON can hold them."""
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, tuple):
            plain[key] = [float(v) if isinstance(v, Tensor) else v for v in cast("tuple[Any, ...]", value)]
        elif isinstance(value, Tensor):
            plain[key] = float(value)
        elif value is None or isinstance(value, bool | int | float | str):
            plain[key] = value
    return plain


# What belongs to the loss scale; a run without one has nothing to say about it.
_OF_THE_SCALE = ("scale", "good_steps", "overflows")


def collect_own(run: Run) -> dict[str, Any]:
    """Windows, scale, counters, accounts, and the precision that was raised on the way."""
    return {
        "judge": {name: tensor.detach().to("cpu", copy=True) for name, tensor in run.judge.state().items()},
        "recovery": run.recovery.state_dict(),
        "accounts": run.diary.accounts.as_json(),
        "plan": run.plan.model_dump(mode="json"),
        "islands": dict(run.islands.outputs),
        "attempts": run.attempts,
        "epoch": run.epoch,
        "batch": run.batch,
    }


def restore_own(run: Run, state: dict[str, Any]) -> None:
    """Bring a run to where `collect_own` was called. A run that goes on in another precision keeps its own scale."""
    plan = Plan(**state["plan"])
    if plan.name.startswith(f"{run.plan.name}+"):
        run.take_plan(plan, state["islands"])  # precision that was raised on the way stays raised
    judge = dict(state["judge"])
    if (plan.scaling is None) != (run.plan.scaling is None):
        judge |= {name: run.judge.state()[name] for name in _OF_THE_SCALE}
    run.judge.load_state(judge)
    run.recovery.load_state_dict(state["recovery"])
    run.diary.accounts = Accounts.from_json(state["accounts"])
    run.attempts, run.epoch, run.batch = int(state["attempts"]), state["epoch"], state["batch"]


def check_number(saved: int, here: int) -> None:
    """Refuse the state of another number of guards."""
    if saved != here:
        raise GuardError(
            f"The checkpoint has the state of {saved} optimizers, and this run has {here}. "
            "Resume with the same optimizers."
        )
