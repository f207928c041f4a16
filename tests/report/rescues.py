"""A rescue made of plain texts."""

from pathlib import Path

from tests.report.validation.validations import make_validation

from floatline.causes import find_cause
from floatline.diagnosis.headroom.step_rows import Row, Span
from floatline.diagnosis.islands.island import Island, Member
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding
from floatline.fixes.code_fix import CodeFix
from floatline.formats import find_format
from floatline.plans import KeptModule
from floatline.plans.presets import resolve_plan
from floatline.rescuing.result import Rescue, Stage, Tried


def make_rescue(name="energy", target="net.py", *, cause="product-overflow"):
    """A rescue in which every text holds the name."""
    span = Span(1e-9, 3e4, 4e6, 0.25, "overflows")
    chart = (Row(name, find_format("fp16"), span, span, True), Row("head", find_format("fp16"), span, None))
    seen = f"{name} makes 4.894e+06 of operands up to 2212 in FP32; float16 ends at 65504, so 9,905 are not finite"
    fix = CodeFix(Path("net.py"), "net.py", 1, "float-operands", name, True, f"x = '{name}'\n", "x = 1\n")
    tried = f"With this change it is healthy: {name}."
    place = (name, f"/somewhere/{name}.py", 22, "aten.mul")
    findings = (
        Finding(find_cause(cause), seen, f"x.float() # {name}", *place, patch=fix.patch, tried=tried),
        Finding(find_cause("gradient-underflow"), seen, name, name, op="backward"),
    )
    diagnosis = Diagnosis(
        target,
        "fp16-mixed",
        findings,
        4.0,
        (f"with `{name}` in FP32 it is finite",),
        (name,),
        None,
        chart,
        fixes=(fix,),
    )
    kept = (KeptModule(pattern="energy", reason=name),)
    plan = resolve_plan("fp16-mixed").model_copy(update={"name": "fp16-mixed-rescued", "fp32_modules": kept})
    return Rescue(
        target, diagnosis, 60, plan, f"{name} in FP32",
        Island((Member(name, seen, "the step fails"),), None, "", True, True, None, None, None, 1, 1, 0.5),
        (Tried("nothing changed", "for comparison", "loss ends at 4", 1.0), Tried(f"{name} in FP32", seen, "", 1.0)),
        make_validation({"fp16-mixed-rescued": 0.0002}, target=target, bare=True), "5 %", False,
        (Stage("diagnose", 4.0, f"found in {name}"), Stage("validate", 30.0, f"PASS: {name}")), (f"note {name}",),
        curves={"FP32": (3.0, 2.0, 1.0), name: (3.0, float("nan")), "rescued": (3.0, 2.1, 1.1)},
    )  # fmt: skip
