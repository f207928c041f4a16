"""Plan: dtypes, scaling, clipping, accumulation, what stays in FP32 and what is rewritten, with reasons. No torch."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from pydantic import Field, ValidationError, model_validator

from floatline.errors import PlanError, suggest
from floatline.plans.fields import Clip, Dtype, Frozen, KeptFunction, KeptModule, Rewrite, Scaling, UpdateName
from floatline.plans.matching import is_match, match_modules, name_modules
from floatline.plans.yaml_files import read_yaml, write_yaml

if TYPE_CHECKING:
    from torch import nn


class Plan(Frozen):
    """What precision to train in. Plain data: compare it, print it, save it.

    Args:
        name: Short name, printed in reports.
        weights: Format of the trainable weights.
        compute: Format of matrix products and convolutions.
        scaling: Loss scaling; None is no scaling.
        clip: Gradient clipping; None is no clipping.
        accumulate: Batches summed up before each update.
        update: How the optimizer updates 16-bit weights, see `floatline.optim`; None leaves the optimizer as it is.
        fp32_modules: Modules that stay in FP32.
        fp32_functions: Functions and lines of code that compute in FP32.
        tf32: Whether the products of what stays in FP32 use TF32 where the GPU has it: FP32's range at half of FP16's
            speed. For what FP16's range harms, not for what its rounding does.
        rewrites: Operations that are computed in another form of the same function.
        reasons: Field name to why it was chosen.
    """

    name: str = Field(default="plan", min_length=1, description="a text")
    weights: Dtype = Field(description="fp32, fp16 or bf16")
    compute: Dtype = Field(description="fp32, fp16 or bf16")
    scaling: Scaling | None = Field(
        default=None, description="null or a mapping with init_scale, growth_interval and so on"
    )
    clip: Clip | None = Field(default=None, description="null or a mapping with max_norm or max_value")
    accumulate: int = Field(default=1, strict=True, ge=1, description="a whole number, 1 or more")
    update: UpdateName | None = Field(default=None, description=f"null, {', '.join(get_args(UpdateName))}")
    fp32_modules: tuple[KeptModule, ...] = Field(default=(), description="a list of mappings with pattern and reason")
    fp32_functions: tuple[KeptFunction, ...] = Field(
        default=(), description="a list of mappings with function and reason"
    )
    tf32: bool = Field(default=False, strict=True, description="true or false")
    rewrites: tuple[Rewrite, ...] = Field(
        default=(), description="a list of mappings with kind, module or function, and reason"
    )
    reasons: dict[str, str] = Field(default_factory=dict, description="a mapping from key to text")

    if not TYPE_CHECKING:  # type checkers keep the signature made from the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise PlanError(_explain(error)) from None

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if self.weights not in ("fp32", self.compute):
            raise PlanError(
                f"weights {self.weights} with compute {self.compute} is not a plan. "
                f"Use weights fp32 (mixed) or compute {self.weights} (true)."
            )
        if self.tf32 and self.compute == "fp32":
            raise PlanError("tf32 with compute fp32 would not be FP32 any more. Leave tf32 out, or compute in 16 bits.")
        for key in self.reasons:
            if key not in type(self).model_fields:
                raise PlanError(f"reasons: key '{key}' is not known. {suggest(key, type(self).model_fields)}")
        return self

    @property
    def mixed(self) -> bool:
        """Whether FP32 weights are computed with in 16 bits."""
        return self.weights != self.compute

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from YAML; the name is the file's where none is given."""
        path = Path(path)
        fields: dict[str, Any] = {"name": path.stem, **read_yaml(path)}
        try:
            return cls(**fields)
        except PlanError as error:
            raise PlanError(f"Plan '{path}': {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as YAML: whole or not at all, also when the machine stops half way."""
        write_yaml(Path(path), self.model_dump(mode="json"))

    def check_modules(self, model: nn.Module) -> list[str]:
        """The names of the model's modules that stay in FP32; refuses a pattern that matches none."""
        names = name_modules(model)
        patterns = [kept.pattern for kept in self.fp32_modules]
        for pattern in patterns:
            match_modules(names, pattern, said=f"Plan '{self.name}' keeps '{pattern}' in FP32")
        return [name for name in names if any(is_match(name, names[name], pattern) for pattern in patterns)]


def _explain(error: ValidationError) -> str:
    """The first problem as one sentence with the value, and one with what to do."""
    problems = error.errors(include_url=False)
    # A misspelt key is also a missing one: the misspelling is the better news.
    first = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    place = list(first["loc"])
    owner, field = _find_field(place)
    where = ".".join(str(part) for part in place)
    if first["type"] == "extra_forbidden":
        return f"key '{where}' is not known. {suggest(str(place[-1]), owner.model_fields)}"
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, PlanError):
        return f"{where}: {inner}" if where else str(inner)
    must = owner.model_fields[field].description if field in owner.model_fields else "a mapping"
    if first["type"] == "missing":
        return f"key '{where}' is missing. It must be {must}."
    return f"{where} is {reprlib.repr(first['input'])}. It must be {must}."


def _find_field(place: list[str | int]) -> tuple[type[Frozen], str]:
    """The model and the field that a place such as ('scaling', 'floor') lies in."""
    nested: dict[str, type[Frozen]] = {
        "scaling": Scaling,
        "clip": Clip,
        "fp32_modules": KeptModule,
        "fp32_functions": KeptFunction,
        "rewrites": Rewrite,
    }
    owner, field = Plan, str(place[0]) if place else ""
    names = [part for part in place if isinstance(part, str)]
    if len(names) > 1 and names[0] in nested:
        return nested[names[0]], names[1]
    return owner, field
