"""The parts of a plan: scaling, clipping, what stays in FP32, what is rewritten, each with its reason. No torch."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from floatline.errors import FormatError, PlanError, suggest
from floatline.formats import find_format

DtypeName = Literal["fp32", "fp16", "bf16"]
UpdateName = Literal["exact", "stochastic", "kahan", "nearest"]
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
