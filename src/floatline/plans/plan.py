"""Plan: dtypes, scaling, clipping, accumulation, what stays in FP32 and what is rewritten, with reasons. No torch."""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from floatline.errors import FormatError, PlanError, suggest
from floatline.formats import find_format
from floatline.plans.yaml_files import read_yaml, write_yaml

if TYPE_CHECKING:
    from torch import nn


DtypeName = Literal["fp32", "fp16", "bf16"]
UpdateName = Literal["exact", "stochastic", "kahan", "nearest"]
StatesName = Literal["fp32", "bf16", "int8"]
RewriteKind = Literal[
    "log-sigmoid", "log-softmax", "softplus", "exp-ratio", "bce-with-logits", "mask-constant", "small-eps"
]
REWRITE_KINDS: tuple[RewriteKind, ...] = get_args(RewriteKind)
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


class Frozen(BaseModel):
    """Data that cannot be changed, with known keys only."""

    # The descriptions of fields end the sentence "It must be …" in error messages.
    model_config = ConfigDict(frozen=True, extra="forbid")


class Scaling(Frozen):
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


class Clip(Frozen):
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


class KeptModule(Frozen):
    """Modules that stay in FP32, and why.

    Args:
        pattern: Qualified module name, or `type:` and the name of a class; `*`, `?` and `[…]` match as in file names.
        reason: Why it stays in FP32.
    """

    pattern: str = Field(min_length=1, description="a module name or pattern, such as 'decoder.*.norm' or 'type:GRU'")
    reason: str = Field(default="", description="a text")


class KeptFunction(Frozen):
    """A function, or one line of code, that computes in FP32, and why.

    Args:
        function: `package.module.function`, `package.module.Class.method`, `file.py:function`, a line as
            `file.py:31`, or `loss` for the workload's loss function.
        reason: Why it computes in FP32.
        code: What stands on that line: the plan is refused where it is something else by now. '' does not look.
    """

    function: str = Field(min_length=1, description="a function such as 'package.losses.dice', 'file.py:31' or 'loss'")
    reason: str = Field(default="", description="a text")
    code: str = Field(default="", description="the code on that line")


class Rewrite(Frozen):
    """Operations that are replaced by the same function in a form that 16 bits hold, inside a module or a function.

    Args:
        kind: Which operations: see `floatline.precision.rewrites`.
        module: Where: a module, as in `fp32_modules`; '' where a function is named.
        function: Where: a function, as in `fp32_functions`; '' where a module is named.
        reason: Why.
    """

    kind: RewriteKind = Field(description=f"one of {', '.join(REWRITE_KINDS)}")
    module: str = Field(default="", description="a module name or pattern, such as 'decoder.*.attention'")
    function: str = Field(default="", description="a function such as 'package.losses.focal' or 'loss'")
    reason: str = Field(default="", description="a text")

    @model_validator(mode="after")
    def _one_place(self) -> Rewrite:
        if bool(self.module) == bool(self.function):
            given = "both module and function are" if self.module else "neither module nor function is"
            raise PlanError(f"{given} given. Give exactly one.")
        return self


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
        states: How that optimizer stores its moments; None leaves it as it is.
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
    states: StatesName | None = Field(default=None, description=f"null, {', '.join(get_args(StatesName))}")
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
        if self.states is not None and self.weights == "fp32":
            raise PlanError(
                f"states {self.states} with weights fp32 is not a plan: only the optimizer of 16-bit weights is "
                f"exchanged. Use weights {'bf16' if self.compute == 'fp32' else self.compute}, or leave states out."
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

    @property
    def master_bytes(self) -> int:
        """Bytes beside each trained weight for what 16 bits drop of it: 2, or none where it is dropped or not there."""
        return 0 if self.weights == "fp32" or self.update in ("stochastic", "nearest") else 2

    @property
    def states_share(self) -> float:
        """Bytes of the optimizer's moments as a share of FP32's; in 8 bits 256 elements share a scale of 4 bytes."""
        return {"bf16": 1 / 2, "int8": (256 + 4) / (4 * 256)}.get(self.states or "fp32", 1.0)

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
        write_yaml(Path(path), self.as_given())

    def as_given(self) -> dict[str, Any]:
        """The plan as plain data, of the scaling only what was set: a script's own scaler decides the rest."""
        plain = self.model_dump(mode="json")
        if self.scaling is not None:
            plain["scaling"] = self.scaling.model_dump(mode="json", exclude_unset=True)
        return plain

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


_TYPE = "type:"


def name_all_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module once, with its qualified name; the model itself is ''."""
    return list(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]


def name_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules below a model, by their qualified names."""
    return {name: module for name, module in name_all_modules(model) if name}


def is_match(name: str, module: nn.Module, pattern: str) -> bool:
    """Whether a pattern means a module: 'decoder.*.norm' by its name, 'type:*Norm' by its class or a base of it."""
    if not pattern.startswith(_TYPE):
        return fnmatchcase(name, pattern)
    return any(fnmatchcase(kind, pattern.removeprefix(_TYPE)) for kind in _class_names(module))


def match_modules(names: Mapping[str, nn.Module], pattern: str, *, said: str) -> list[str]:
    """The names that a pattern means; PlanError with the nearest ones where it means none.

    Args:
        names: The model's modules, from `name_modules`.
        pattern: A name, a pattern, or 'type:' and a class.
        said: What the plan says of it, to begin the message with.
    """
    found = [name for name, module in names.items() if is_match(name, module, pattern)]
    if found:
        return found
    if pattern.startswith(_TYPE):
        kinds = list(dict.fromkeys(type(module).__name__ for module in names.values()))
        raise PlanError(f"{said}, but the model has no such type. {_nearest(pattern.removeprefix(_TYPE), kinds)}")
    raise PlanError(f"{said}, but the model has no such module. {_nearest(pattern, list(names))}")


def _nearest(pattern: str, known: list[str]) -> str:
    near = difflib.get_close_matches(pattern, known, n=3, cutoff=0.5)
    return suggest(pattern, near or known[:8])


def _class_names(module: nn.Module) -> list[str]:
    """Names of its class and of what that was made from; nn.Module itself is everybody's."""
    return [base.__name__ for base in type(module).__mro__ if base.__name__ not in ("Module", "object")]
