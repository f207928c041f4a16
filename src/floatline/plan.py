"""Plan: dtypes, scaling, clipping, accumulation, modules kept in FP32, each with its reason. No torch."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from floatline.errors import FormatError, PlanError, suggest
from floatline.formats import find_format

if TYPE_CHECKING:
    from torch import nn

DtypeName = Literal["fp32", "fp16", "bf16"]
_DTYPES = ("fp32", "fp16", "bf16")


class _WrongTypeError(ValueError):
    """The value is not of the kind that the field's description names."""


def _read_dtype(value: object) -> str:
    if isinstance(value, (list, dict)):  # may be nested without end: never spell it out
        raise _WrongTypeError
    try:
        name = find_format(value).name
    except FormatError as error:
        if "ambiguous" in str(error):  # several formats have that name, and none is one to train in
            raise PlanError(f"'{value}' is not a training dtype. Use fp32, fp16 or bf16.") from None
        raise PlanError(f"'{value}' is not a known format. {suggest(str(value), _DTYPES)}") from None
    if name not in _DTYPES:
        raise PlanError(f"'{value}' is not a training dtype. Use fp32, fp16 or bf16.")
    return name


def _read_number(value: object) -> object:
    # YAML reads 1e-3 as text (it wants 1.0e-3), and Python takes True for 1: neither is what was meant.
    if isinstance(value, bool):
        raise _WrongTypeError
    return float(value) if isinstance(value, str) else value


Dtype = Annotated[DtypeName, BeforeValidator(_read_dtype)]
Number = Annotated[float, BeforeValidator(_read_number)]


class _Frozen(BaseModel):
    # The descriptions of fields end the sentence "It must be …" in error messages.
    model_config = ConfigDict(frozen=True, extra="forbid")


class Scaling(_Frozen):
    """How the loss is scaled, so that small FP16 gradients do not become zero.

    Args:
        init_scale: Scale of the first step.
        growth_factor: What the scale is multiplied by after `growth_interval` good steps.
        backoff_factor: What it is multiplied by after an overflow.
        growth_interval: Good steps in a row before it grows.
        floor: It never falls below; a scale under 1 shrinks gradients.
        cap: It never grows above.
        hysteresis: It falls from the N-th overflow in a row on; the steps are skipped all the same.
    """

    init_scale: Number = Field(default=2.0**16, gt=0, allow_inf_nan=False, description="a number above 0")
    growth_factor: Number = Field(default=2.0, gt=1, allow_inf_nan=False, description="a number above 1")
    backoff_factor: Number = Field(default=0.5, gt=0, lt=1, description="a number between 0 and 1")
    growth_interval: int = Field(default=1000, strict=True, ge=1, description="a whole number, 1 or more")
    floor: Number = Field(default=1.0, gt=0, allow_inf_nan=False, description="a number above 0")
    cap: Number = Field(default=2.0**24, gt=0, allow_inf_nan=False, description="a number above 0")
    hysteresis: int = Field(default=1, strict=True, ge=1, description="a whole number, 1 or more")

    @model_validator(mode="after")
    def _ordered(self) -> Scaling:
        if not self.floor <= self.init_scale <= self.cap:
            raise PlanError(
                f"init_scale {self.init_scale:g} lies outside floor {self.floor:g} to cap {self.cap:g}. "
                "Choose floor <= init_scale <= cap."
            )
        return self


class Clip(_Frozen):
    """How gradients are bounded after unscaling: by their global norm, or each element by value.

    Args:
        max_norm: Largest global norm; None where `max_value` is given.
        norm_type: Which norm; 2 is Euclidean, inf the largest element.
        max_value: Largest magnitude of an element; None where `max_norm` is given.
    """

    max_norm: Number | None = Field(default=None, gt=0, allow_inf_nan=False, description="a number above 0")
    norm_type: Number = Field(default=2.0, gt=0, description="a number above 0, or .inf")
    max_value: Number | None = Field(default=None, gt=0, allow_inf_nan=False, description="a number above 0")

    @model_validator(mode="after")
    def _one_of_two(self) -> Clip:
        if (self.max_norm is None) == (self.max_value is None):
            given = "neither max_norm nor" if self.max_norm is None else "both max_norm and"
            raise PlanError(f"{given} max_value is given. Give exactly one.")
        return self


class KeptModule(_Frozen):
    """Modules that stay in FP32, and why.

    Args:
        pattern: Qualified module name; `*`, `?` and `[…]` match as in file names.
        reason: Why it stays in FP32.
    """

    pattern: str = Field(min_length=1, description="a module name or pattern, such as 'decoder.*.norm'")
    reason: str = Field(default="", description="a text")


class Plan(_Frozen):
    """What precision to train in. Plain data: compare it, print it, save it.

    Args:
        name: Short name, printed in reports.
        weights: Format of the trainable weights.
        compute: Format of matrix products and convolutions.
        scaling: Loss scaling; None is no scaling.
        clip: Gradient clipping; None is no clipping.
        accumulate: Batches summed up before each update.
        fp32_modules: Modules that stay in FP32.
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
    fp32_modules: tuple[KeptModule, ...] = Field(default=(), description="a list of mappings with pattern and reason")
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
        fields: dict[str, Any] = {"name": path.stem, **_read_yaml(path)}
        try:
            return cls(**fields)
        except PlanError as error:
            raise PlanError(f"Plan '{path}': {error}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as YAML: whole or not at all, also when the machine stops half way."""
        path = Path(path)
        text = yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise PlanError(f"Plan cannot be written to '{path}': {error.strerror}. Choose another path.") from None

    def check_modules(self, model: nn.Module) -> list[str]:
        """The names of the model's modules that stay in FP32; refuses a pattern that matches none."""
        names: list[str] = [name for name, _ in model.named_modules() if name]  # pyright: ignore[reportUnknownVariableType]
        for kept in self.fp32_modules:
            if any(fnmatchcase(name, kept.pattern) for name in names):
                continue
            near = difflib.get_close_matches(kept.pattern, names, n=3, cutoff=0.5)
            raise PlanError(
                f"Plan '{self.name}' keeps '{kept.pattern}' in FP32, but the model has no such module. "
                + suggest(kept.pattern, near or names[:8])
            )
        return [n for n in names if any(fnmatchcase(n, kept.pattern) for kept in self.fp32_modules)]


def _read_yaml(path: Path) -> dict[str, Any]:
    if path.is_dir():
        raise PlanError(f"Plan '{path}' is a folder. Give a YAML file.")
    if not path.is_file():
        raise PlanError(f"Plan '{path}' does not exist. Give a YAML file or the name of a plan.")
    try:
        data: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise PlanError(f"Plan '{path}' is not UTF-8 text (byte {error.start}). Save it as UTF-8.") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise PlanError(f"Plan '{path}' is not plain YAML: {_first_problem(error)}. Mend it there.") from None
    except OSError as error:
        raise PlanError(f"Plan '{path}' cannot be read: {error.strerror}. Check its permissions.") from None
    if data is None:
        raise PlanError(f"Plan '{path}' is empty. It needs at least weights and compute.")
    if not isinstance(data, Mapping):
        raise PlanError(f"Plan '{path}' holds a {type(data).__name__}. It must map keys to values.")
    return {str(key): value for key, value in data.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def _first_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem}, line {error.problem_mark.line + 1}"
    return "nested too deep" if isinstance(error, RecursionError) else str(error)


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


def _find_field(place: list[str | int]) -> tuple[type[_Frozen], str]:
    """The model and the field that a place such as ('scaling', 'floor') lies in."""
    nested: dict[str, type[_Frozen]] = {"scaling": Scaling, "clip": Clip, "fp32_modules": KeptModule}
    owner, field = Plan, str(place[0]) if place else ""
    names = [part for part in place if isinstance(part, str)]
    if len(names) > 1 and names[0] in nested:
        return nested[names[0]], names[1]
    return owner, field
