"""What a run is surrounded by: switches, devices, other processes and what tells them apart, and tied weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from floatline.manifests.reductions import Reductions
from floatline.manifests.rows import ExchangeRow, Switches, TiedRow
from floatline.optim.mesh import local_part
from floatline.precision.live_holdings import NamedWeight, format_name
from floatline.probe.scripts.weight_digest import digest_weights
from floatline.probe.watch.events import BackwardEvent
from floatline.probe.watch.loop import Watch

_T = TypeVar("_T")
# Numbers of two weights that are compared.
_COMPARED = 4096


def read_switches() -> Switches:
    """Switches of torch as they stand; what this torch does not tell is None."""
    matmul = torch.backends.cuda.matmul
    return Switches(
        matmul=_ask(torch.get_float32_matmul_precision),
        tf32_convolutions=_ask(lambda: bool(torch.backends.cudnn.allow_tf32)),
        fp16_reductions=_ask(lambda: bool(matmul.allow_fp16_reduced_precision_reduction)),
        bf16_reductions=_ask(lambda: bool(matmul.allow_bf16_reduced_precision_reduction)),
    )


def _ask(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except RuntimeError:  # newer versions refuse where older and newer switches were mixed
        return None


def find_devices(models: Iterable[nn.Module]) -> tuple[str, ...]:
    """Kinds of the devices that parameters are on."""
    return tuple(dict.fromkeys(p.device.type for model in models for p in model.parameters()))


def find_exchanges(models: Iterable[nn.Module], reduced: Reductions | None = None) -> tuple[ExchangeRow, ...]:
    """FSDP2's policies and what DDP or the loop sums gradients up in, where a model has any.

    Args:
        models: The models.
        reduced: What was seen in a step; None where there was none, and hooks are taken by their names.
    """
    reduced = reduced or Reductions()
    rows = [row for model in models for row in _find_exchanges(model, reduced.format_of("ddp"))]
    by_loop = reduced.format_of("loop")
    return (*rows, *([ExchangeRow("loop", "", reduce=by_loop)] if by_loop else []))


def _find_exchanges(model: nn.Module, by_ddp: str) -> Iterator[ExchangeRow]:
    rows: dict[tuple[str, str, str], ExchangeRow] = {}
    for name, module in cast("Iterator[tuple[str, Any]]", model.named_modules()):
        if hasattr(module, "_get_fsdp_state"):
            policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
            formats = [_name(getattr(policy, f"{key}_dtype", None)) for key in ("param", "reduce", "output")]
            # Gradients are reduced in the format that weights are gathered in, where nothing else is said.
            formats[1] = formats[1] or formats[0] or _format_of_weights(module)
            rows.setdefault((formats[0], formats[1], formats[2]), ExchangeRow("fsdp2", name, *formats))
        if type(module).__name__ == "DeepSpeedEngine" and hasattr(module, "communication_data_type"):
            reduce = _name(module.communication_data_type)
            rows.setdefault(("deepspeed", reduce, ""), ExchangeRow("deepspeed", name, reduce=reduce))
        config: Any = getattr(module, "ddp_config", None)
        if hasattr(config, "grad_reduce_in_fp32"):
            reduce = "fp32" if config.grad_reduce_in_fp32 else _format_of_weights(module)
            rows.setdefault(("megatron", reduce, ""), ExchangeRow("megatron", name, reduce=reduce))
        if hasattr(module, "_get_ddp_logging_data"):
            hook = str(module._get_ddp_logging_data().get("comm_hook", ""))
            reduce = by_ddp or next((short for short in ("bf16", "fp16") if short in hook.lower()), "")
            if hook or by_ddp:
                row = ExchangeRow("ddp-hook", hook, reduce=reduce) if hook else ExchangeRow("ddp", name, reduce=reduce)
                rows.setdefault((hook, reduce, ""), row)
    yield from rows.values()


def _format_of_weights(module: nn.Module) -> str:
    return next((_name(weight.dtype) for weight in module.parameters()), "")


def _name(dtype: Any) -> str:
    return format_name(dtype) if isinstance(dtype, torch.dtype) else ""


def find_tied(weights: Iterable[NamedWeight]) -> tuple[TiedRow, ...]:
    """Pairs of trained weights of one shape that hold the same numbers in different formats.

    A copy that is not trained, such as a teacher or a model to compare with, is as it should be.

    Numerics:
        The same numbers: the first 4096 of one, rounded to the other's format, are the other's, bit for bit, and not
        all of them are one number.
    """
    by_shape: dict[tuple[int, ...], list[NamedWeight]] = {}
    for weight in weights:
        if weight.tensor.dim() > 1 and weight.tensor.requires_grad:
            by_shape.setdefault(tuple(weight.tensor.shape), []).append(weight)
    pairs = (pair for own in by_shape.values() for pair in combinations(own, 2))
    return tuple(
        TiedRow((one.name, other.name), (format_name(one.tensor.dtype), format_name(other.tensor.dtype)))
        for one, other in pairs
        if one.tensor.dtype != other.tensor.dtype and _are_same(one.tensor, other.tensor)
    )


def _are_same(one: Tensor, other: Tensor) -> bool:
    narrow, wide = sorted((one, other), key=lambda tensor: tensor.element_size())
    first, second = (local_part(tensor).detach().reshape(-1)[:_COMPARED] for tensor in (narrow, wide))
    if first.device != second.device or not first.numel() or bool((first == first[0]).all()):
        return False
    return torch.equal(first, second.to(first.dtype))


def digest_named(weights: Iterable[NamedWeight]) -> str:
    """A digest of the weights of modules, behind one of their names: stages of a pipeline have other weights."""
    own = sorted(weights, key=lambda weight: weight.name)
    names = hashlib.sha256("\n".join(weight.name for weight in own).encode()).hexdigest()[:8]
    return f"{names}-{digest_weights((weight.name, weight.tensor) for weight in own)}"


def find_bad_loss(seen: Watch) -> int | None:
    """The first step whose loss was not finite in this process; reads what is still on a device."""
    return next((event.step for event in _passes(seen) if not math.isfinite(event.loss)), None)


def find_last_loss(seen: Watch) -> float | None:
    """The loss of the last backward pass; None where there is none, or it is not finite."""
    last = next((event.loss for event in reversed(_passes(seen))), math.nan)
    return last if math.isfinite(last) else None


def _passes(seen: Watch) -> list[BackwardEvent]:
    seen.settle()
    return [event for event in seen.events if isinstance(event, BackwardEvent)]
