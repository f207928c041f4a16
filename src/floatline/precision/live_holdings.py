"""find_holdings: the formats of parameters, gradients, states, master copies and buffers, read from live objects."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from floatline.optim.mesh import local_part
from floatline.plans import Plan
from floatline.precision.declared_masters import is_kept_elsewhere, local_size, read_fragment, read_masters
from floatline.precision.holding import HeldKind, Holding, LayerGroup, describe_holdings
from floatline.precision.wrappers import unwrap

_SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_HEADS = re.compile(r"(^|\.)(lm_head|head|classifier|score|fc_out|output_projection|v_head|qa_outputs)(\.|$)")
_ADAPTERS = re.compile(r"(^|\.)(lora_\w+|adapters?|prompt_encoder|ia3_\w+|modules_to_save)(\.|$)")
_POSITIONS = re.compile(r"(inv_freq|freqs|sinusoid|rotary|position|cos_cached|sin_cached|pos_emb)")
_AVERAGES = re.compile(r"(running_mean|running_var|ema|shadow|average)")
# Elements of a tensor that are compared to find a copy of it.
_COMPARED = 4096
# What floatline's optimizers, and others with Kahan summation, keep of a weight besides its 16 bits.
EXTRAS = ("remainder", "compensation", "kahan_comp", "shift")
# What they are together with the weight.
_WITH_WEIGHT = {"remainder": "fp32"} | dict.fromkeys(EXTRAS[1:], "kahan")


@dataclass(frozen=True)
class NamedWeight:
    """A parameter of a model.

    Args:
        name: Its qualified name.
        group: The layers that it belongs to.
        tensor: The parameter.
    """

    name: str
    group: LayerGroup
    tensor: Tensor


def format_name(dtype: torch.dtype) -> str:
    """The short name of a format: 'bf16'; for one that has none, torch's."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def name_weights(models: Iterable[nn.Module]) -> dict[int, NamedWeight]:
    """The parameters of models by id, each under its first name."""
    found: dict[int, NamedWeight] = {}
    own = [unwrap(model) for model in models]
    for model in own:
        prefix = f"{type(model).__name__}." if len(own) > 1 else ""
        modules = dict(cast("Iterator[tuple[str, nn.Module]]", model.named_modules()))
        last = next((name for name in reversed(modules) if isinstance(modules[name], nn.Linear)), None)
        for name, module in modules.items():
            for short, parameter in module.named_parameters(recurse=False):
                full = f"{name}.{short}" if name else short
                group = _find_group(full, module, is_last=name == last)
                found.setdefault(id(parameter), NamedWeight(prefix + full, group, parameter))
    return found


def _find_group(name: str, module: nn.Module, *, is_last: bool) -> LayerGroup:
    if _ADAPTERS.search(name):
        return "adapters"
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if "norm" in type(module).__name__.lower():
        return "norms"
    return "head" if is_last or _HEADS.search(name) else "body"


def find_holdings(
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer] = (),
    *,
    masters: Mapping[int, list[Tensor]] | None = None,
    averages: Collection[int] = (),
    stepped: Mapping[int, list[Tensor]] | None = None,
) -> tuple[Holding, ...]:
    """What models and optimizers hold now; parts of sharded tensors are looked at in place.

    Args:
        models: The models.
        optimizers: Their optimizers.
        masters: The weights that a tensor of an optimizer is the master copy of, by its id, where they are known.
        averages: Ids of buffers that were seen to be added to, where a step was.
        stepped: What an optimizer stepped, by its id, where a step was: ZeRO's third stage takes it away again.
    """
    models, optimizers = list(models), list(optimizers)
    weights, rows = name_weights(models), _Rows()
    for weight in weights.values():
        rows.add("weights" if weight.tensor.requires_grad else "frozen", weight, "", weight.tensor)
        if weight.tensor.grad is not None:
            rows.add("gradients", weight, "", weight.tensor.grad)
        if isinstance(buffer := getattr(weight.tensor, "main_grad", None), Tensor):  # Megatron
            rows.add("accumulation", weight, "", buffer)
    held = {id(optimizer): (stepped or {}).get(id(optimizer)) or list_stepped(optimizer) for optimizer in optimizers}
    flat = [parameter for own in held.values() for parameter in own]
    masters = {**(masters or {}), **read_masters([weight.tensor for weight in weights.values()], flat)}
    for weight in weights.values():
        if flat and is_kept_elsewhere(weight.tensor):
            rows.add("master", weight, "", flat[0], num=0)
    for optimizer in optimizers:
        for parameter in held[id(optimizer)]:
            owners = _find_owners(parameter, weights, masters)
            states = list(find_states(optimizer, parameter))
            for owner in owners:
                # A flat tensor holds many weights, or parts of them.
                num = None if len(owners) == 1 else _count(owner.tensor)
                if owner.tensor is not parameter:
                    rows.add("master", owner, "", parameter, num=num)
                for name, state, kind in states:
                    form = _WITH_WEIGHT.get(name, "")
                    rows.add(kind, owner, name if kind == "states" else "", state, form, num=num)
    for model in map(unwrap, models):
        for name, buffer in model.named_buffers():
            if buffer.is_floating_point():
                group: LayerGroup = "norms" if "running_" in name else "body"
                role = "averages" if id(buffer) in averages else _find_role(name)
                rows.add("buffers", NamedWeight(name, group, buffer), role, buffer)
    return rows.made


def list_stepped(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _find_role(buffer: str) -> str:
    """What a buffer is for, by its name: 'positions', 'averages', or '' for others."""
    return "positions" if _POSITIONS.search(buffer) else "averages" if _AVERAGES.search(buffer) else ""


def describe_start(model: nn.Module, optimizer: Optimizer, plan: Plan) -> str:
    """One line on what a run starts with, before its first step: states are there in a run that goes on.

    Args:
        model: The model.
        optimizer: Its optimizer.
        plan: What it computes in.
    """
    held = describe_holdings(find_holdings([model], [optimizer]))
    update = getattr(optimizer, "update", "") if type(optimizer).__module__.startswith("floatline.optim") else ""
    if update and update != "nearest":
        held = held.replace("without a master copy", f"with {update} updates")
    where = " under autocast" if plan.mixed else ""
    return f"{held}; {type(optimizer).__name__}; computes in {plan.compute.upper()}{where}"


def _find_owners(
    parameter: Tensor, weights: Mapping[int, NamedWeight], masters: Mapping[int, list[Tensor]]
) -> list[NamedWeight]:
    """The weights that a tensor of an optimizer is, or is the master copy of."""
    if id(parameter) in weights:
        return [weights[id(parameter)]]
    return [weights[id(part)] for part in masters.get(id(parameter), []) if id(part) in weights]


def _count(weight: Tensor) -> int:
    """Elements that this process has of a weight in a flat tensor."""
    fragment = read_fragment(weight)
    return local_size(weight) if fragment is None else fragment.numel()


def find_states(optimizer: Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor, HeldKind]]:
    """The states of a parameter that are as large as it, by name; which of them are its master copy is told."""
    state: dict[str, Any] = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.numel() != parameter.numel() or value.dim() != parameter.dim():
            continue
        is_master = name in EXTRAS or _holds_more(value, parameter)
        yield name, value, "master" if is_master else "states"


def _holds_more(state: Tensor, weight: Tensor) -> bool:
    """Whether a state is the weight with more bits: by its values, so that it may have any name."""
    if state.dtype != torch.float32 or weight.dtype not in (torch.float16, torch.bfloat16):
        return False
    wide, narrow = (local_part(one).detach().reshape(-1)[:_COMPARED] for one in (state, weight))
    return bool(narrow.any()) and torch.equal(wide.to(narrow.dtype), narrow)


class _Rows:
    """Adds up holdings."""

    def __init__(self) -> None:
        self._found: dict[tuple[HeldKind, LayerGroup, str, str], Holding] = {}

    def add(
        self,
        kind: HeldKind,
        weight: NamedWeight,
        name: str,
        tensor: Tensor,
        form: str = "",
        *,
        num: int | None = None,
    ) -> None:
        if not (tensor.is_floating_point() or kind in ("master", "states")):
            return
        key = kind, weight.group, name, form if kind == "master" and form else format_name(tensor.dtype)
        held = self._found.get(key)
        count, size = (0, 0) if held is None else (held.num_tensors, held.num_elements)
        example = weight.name if held is None else held.example
        size += local_size(tensor) if num is None else num
        self._found[key] = Holding(*key, count + 1, size, example)

    @property
    def made(self) -> tuple[Holding, ...]:
        return tuple(self._found.values())
