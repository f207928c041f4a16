"""What brings a model's log-probs nearer to those of another engine: each remedy tried, and measured."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from floatline.agreement.logprobs.files import Scored
from floatline.agreement.logprobs.ratios import Ratios, measure_ratios
from floatline.agreement.logprobs.scoring import logits_of, score
from floatline.plans import Plan
from floatline.plans.plan import KeptModule, name_modules
from floatline.plans.presets import resolve_plan
from floatline.precision.islands import Islands

_KERNELS = {
    "attention from its definition": SDPBackend.MATH,
    "flash attention": SDPBackend.FLASH_ATTENTION,
    "memory-efficient attention": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class TriedRemedy:
    """One remedy, measured.

    Args:
        name: What was done.
        ratios: Against the file; None where it could not be done.
        gap_to_fp32: Mean of |ours - FP32| over tokens.
        problem: Why it could not be done; '' where it could.
        plan: The plan that trains like that, for `floatline validate`; None where none does.
    """

    name: str
    ratios: Ratios | None
    gap_to_fp32: float = 0.0
    problem: str = ""
    plan: Plan | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        ratios = None if self.ratios is None else self.ratios.as_json()
        return {"name": self.name, "ratios": ratios, "gap_to_fp32": self.gap_to_fp32, "problem": self.problem}


@dataclass(frozen=True)
class _Arm:
    name: str
    change: Callable[[nn.Module], nn.Module]
    context: Callable[[], Any] = nullcontext
    batch_size: int | None = None
    plan: Plan | None = None


def try_remedies(
    model: nn.Module,
    sequences: Sequence[Scored],
    theirs: Tensor,
    exact: Tensor,
    *,
    batch_size: int,
    band: tuple[float, float],
) -> tuple[TriedRemedy, ...]:
    """Score again with each remedy on a copy of the model, and compare with the file.

    Args:
        model: The model; not changed.
        sequences: What the file holds.
        theirs: Its log-probs.
        exact: The model's log-probs in FP32.
        batch_size: Of the scoring that is to be changed.
        band: See `measure_ratios`.
    """
    found: list[TriedRemedy] = []
    known = theirs.isfinite()
    for arm in _list_arms(model, sequences, batch_size):
        try:
            with arm.context():
                ours = score(arm.change(model), sequences, batch_size=arm.batch_size or batch_size)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
            found.append(TriedRemedy(arm.name, None, problem=reason))
            continue
        gap = float((ours - exact)[known].abs().mean())
        found.append(TriedRemedy(arm.name, measure_ratios(ours, theirs, sequences, band), gap, plan=arm.plan))
    return tuple(found)


def _list_arms(model: nn.Module, sequences: Sequence[Scored], batch_size: int) -> list[_Arm]:
    head = _find_head(model, sequences)
    norms = [n for n, m in name_modules(model).items() if _is_one(m, "norm")]
    rotary = [n for n, m in name_modules(model).items() if _is_one(m, "rotary", "rope")]
    arms = [_Arm("FP16 scoring", _in_format(torch.float16), _without_autocast, plan=resolve_plan("fp16-mixed"))]
    own = _find_compute(model)
    if head:
        plan = _keep(own, "fp32-head", [head])
        arms.append(_Arm("FP32 head", _with_islands([head], outputs="fp32"), plan=plan))
    if norms or rotary:
        name = "FP32 norms and rotary" if rotary else "FP32 norms"
        plan = _keep(own, "fp32-norms", [*norms, *rotary])
        arms.append(_Arm(name, _with_islands([*norms, *rotary]), plan=plan))
    if len(sequences) > 1:
        other = len(sequences) if batch_size == 1 else 1
        arms.append(_Arm(f"{other} {'sequence' if other == 1 else 'sequences'} at a time", _same, batch_size=other))
    arms += [_Arm(name, _same, _kernel(kind)) for name, kind in _KERNELS.items()]
    bf16, fp32 = resolve_plan("bf16-mixed"), resolve_plan("fp32")
    arms.append(_Arm("BF16 scoring", _in_format(torch.bfloat16), _without_autocast, plan=bf16))
    arms.append(_Arm("FP32 scoring", _in_format(torch.float32), _without_autocast, plan=fp32))
    return arms


def _find_compute(model: nn.Module) -> str:
    """The plan that a model computes in now: by its weights, or by the autocast around it."""
    weight = next(model.parameters())
    kind = weight.device.type
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    return {torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}.get(compute, "fp32")


def _keep(name: str, called: str, modules: Sequence[str]) -> Plan | None:
    """A plan that keeps modules in FP32 besides; None where all of it is."""
    plan = resolve_plan(name)
    if plan.compute == "fp32":
        return None
    kept = tuple(KeptModule(pattern=module, reason="log-probs nearer to the rollout's") for module in modules)
    return plan.model_copy(update={"name": f"{name}-{called}", "fp32_modules": (*plan.fp32_modules, *kept)})


def _same(model: nn.Module) -> nn.Module:
    return model


def _in_format(dtype: torch.dtype) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        return copy.deepcopy(model).to(dtype)

    return change


def _with_islands(names: Sequence[str], *, outputs: Any = None) -> Callable[[nn.Module], nn.Module]:
    def change(model: nn.Module) -> nn.Module:
        changed = copy.deepcopy(model)
        islands = Islands(changed)
        for name in names:
            islands.add(name, outputs=outputs)
        return changed

    return change


@contextmanager
def _without_autocast() -> Generator[None]:
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


def _kernel(kind: SDPBackend) -> Callable[[], Any]:
    def enter() -> Any:
        return sdpa_kernel(kind)  # pyright: ignore[reportUnknownVariableType]

    return enter


def _is_one(module: nn.Module, *words: str) -> bool:
    return any(word in type(module).__name__.lower() for word in words)


def _find_head(model: nn.Module, sequences: Sequence[Scored]) -> str:
    """The last linear layer that gives one number for each token of the vocabulary; '' where there is none."""
    ids = sequences[0].tokens[None].to(next(model.parameters()).device)
    with torch.no_grad():
        size = logits_of(model(ids), ids).shape[-1]
    heads = [n for n, m in name_modules(model).items() if isinstance(m, nn.Linear) and m.out_features == size]
    return heads[-1] if heads else ""
