"""Expectation: what an owner believes that a run computes in, and what is not so. No torch."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from floatline.errors import ManifestError, PlanError, suggest
from floatline.formats import FORMATS, find_format
from floatline.manifests.facts import ManifestFacts
from floatline.plans.plan import Frozen, Plan
from floatline.plans.presets import PLANS, resolve_plan
from floatline.plans.yaml_files import read_yaml
from floatline.precision.holding import HeldKind, formats_of

_KINDS: tuple[HeldKind, ...] = ("weights", "master", "gradients", "states", "buffers")


def _read_format(value: object) -> object:
    return find_format(value).name if isinstance(value, str) else value


_Format = Annotated[str | None, BeforeValidator(_read_format)]


class Expectation(Frozen):
    """What a run is believed to compute in. What is None is not looked at.

    Args:
        weights: Format of all trained weights.
        master: Format of the copies that 16-bit weights are rounded from.
        gradients: Format of all gradients.
        states: Format of all optimizer states.
        buffers: Format of all floating-point buffers.
        compute: Format that FLOPs run in.
        compute_share: The smallest share of FLOPs that run in it.
        loss: Format that the loss is summed up in.
        reduce: Format that processes exchange gradients in.
        tf32: Whether FP32 products may be TF32 on a GPU.
        lost_updates: The largest share of updates that may round away.
    """

    weights: _Format = Field(default=None, description="a format such as fp32 or bf16")
    master: _Format = Field(default=None, description="a format such as fp32")
    gradients: _Format = Field(default=None, description="a format such as fp32 or bf16")
    states: _Format = Field(default=None, description="a format such as fp32")
    buffers: _Format = Field(default=None, description="a format such as fp32")
    compute: _Format = Field(default=None, description="a format such as bf16")
    compute_share: float = Field(default=0.75, ge=0, le=1, description="a number from 0 to 1")
    loss: _Format = Field(default=None, description="a format such as fp32")
    reduce: _Format = Field(default=None, description="a format such as fp32")
    tf32: bool | None = Field(default=None, description="true or false")
    lost_updates: float | None = Field(default=None, ge=0, le=1, description="a number from 0 to 1")

    def differences(self, facts: ManifestFacts) -> tuple[str, ...]:
        """What is not as expected, one sentence each."""
        found = [text for kind in _KINDS if (text := self._compare(facts, kind))]
        found += self._compare_work(facts)
        found += self._compare_rest(facts)
        return tuple(found)

    def _compare(self, facts: ManifestFacts, kind: HeldKind) -> str:
        wanted: str | None = getattr(self, kind)
        held = formats_of(facts.holdings, kind)
        if wanted is None or (kind != "master" and not held):
            return ""
        if not held:
            return f"{kind}: expected {wanted}, found none"
        others = [row for row in facts.holdings if row.kind == kind and row.format != wanted]
        if not others:
            return ""
        worst = max(others, key=lambda row: row.num_elements)
        share = sum(row.num_elements for row in others) / max(sum(held.values()), 1)
        label = f" {worst.name}" if worst.name else ""
        return f"{kind}: expected {wanted}, found {worst.format}{label} in {100 * share:.3g} % ({worst.example})"

    def _compare_work(self, facts: ManifestFacts) -> list[str]:
        flops = facts.flops()
        total = sum(flops.values())
        if self.compute is None:
            return []
        if not total:
            return [f"compute: expected {self.compute}, and no step was measured"]
        share = flops[self.compute] / total
        if share >= self.compute_share:
            return []
        listed = ", ".join(f"{name} {100 * num / total:.3g} %" for name, num in flops.most_common())
        return [f"compute: expected {self.compute} in {100 * self.compute_share:.3g} % of FLOPs, found {listed}"]

    def _compare_rest(self, facts: ManifestFacts) -> list[str]:
        found: list[str] = []
        losses = {row.format for row in facts.ran if row.kind == "loss"}
        if self.loss is not None and losses - {self.loss}:
            found.append(f"loss: expected {self.loss}, found {' and '.join(sorted(losses - {self.loss}))}")
        reduced = {row.reduce for row in facts.exchanges if row.reduce}
        if self.reduce is not None and reduced - {self.reduce}:
            found.append(f"reduce: expected {self.reduce}, found {' and '.join(sorted(reduced - {self.reduce}))}")
        is_on = facts.switches.matmul not in (None, "highest")
        if self.tf32 is not None and facts.switches.matmul is not None and is_on != self.tf32:
            found.append(f"tf32: expected {'on' if self.tf32 else 'off'}, found matmul '{facts.switches.matmul}'")
        total = sum(row.num_updates for row in facts.updates)
        lost = sum(row.num_lost for row in facts.updates) / total if total else 0.0
        if self.lost_updates is not None and lost > self.lost_updates:
            most = f"{100 * self.lost_updates:.3g}"
            found.append(f"lost_updates: expected at most {most} %, found {100 * lost:.3g} %")
        return found


def resolve_expectation(expected: str | PathLike[str]) -> Expectation:
    """The expectation that a plan's name stands for, or that a YAML file holds.

    Raises:
        ManifestError: It is neither.
    """
    text = str(expected)
    path = Path(text)
    if path.suffix in (".yaml", ".yml"):
        return _read(path)
    try:
        return expect_plan(resolve_plan(text))
    except PlanError:
        raise ManifestError(f"'{text}' is not known. {suggest(text, PLANS)} A YAML file works too.") from None


def expect_plan(plan: Plan) -> Expectation:
    """What a plan promises: 16-bit weights need a master copy, mixed ones are their own."""
    mixed = plan.weights == "fp32"
    return Expectation(
        weights=plan.weights,
        master=None if mixed else "fp32",
        gradients=plan.weights,
        states="fp32",
        compute=plan.compute,
        loss="fp32" if mixed else None,
        tf32=False if plan.compute == "fp32" else None,
        lost_updates=0.1,
    )


def _read(path: Path) -> Expectation:
    try:
        data: dict[str, Any] = read_yaml(path, what="Expectation")
        return Expectation(**data)
    except PlanError as error:
        raise ManifestError(str(error)) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            text = f"key '{key}' is not known. {suggest(key, Expectation.model_fields)}"
        else:
            must = Expectation.model_fields[key].description
            known = f" Formats: {', '.join(FORMATS)}." if "format" in str(must) else ""
            text = f"{key} is {first['input']!r:.40}. It must be {must}.{known}"
        raise ManifestError(f"Expectation '{path}': {text}") from None
