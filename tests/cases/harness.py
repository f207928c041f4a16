"""Runs the failure cases of this folder: as given, in FP32, and fixed. `python tests/cases/harness.py 053` shows one.

A case is a file NNN_slug.py that needs torch and nothing else, so that it is a target as users write them. It holds

- a docstring: the symptom as the user sees it, the truth, the right fix, a common wrong fix, a public source;
- `build()`, or `train(steps, fp32, probe)` where the fault is in the loop, and `fixed`, the same fixed;
- TARGET, which the final metric (the loss, or `metric(model)`) stays below when it trains; FP32_TRAINS; STEPS;
  FP32_AS_GIVEN where nothing in it is 16-bit;
- EXPECT: cause, where (`A|B`: either is right: a module, a parameter, or file:line), code (what stands on that line),
  op, fix.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import sys
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from floatline.numerics.cuda_autocast import cuda_autocast_lists

FOLDER = Path(__file__).parent
Variant = Literal["as given", "same in fp32", "fixed"]
VARIANTS: tuple[Variant, ...] = ("as given", "same in fp32", "fixed")


@dataclass(frozen=True)
class Outcome:
    """Whether it trained, and what the user would see."""

    trains: bool
    text: str


@dataclass(frozen=True)
class Case:
    """One file of this folder."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def module(self) -> ModuleType:
        # By its own name and with the folder on the path: processes that the case starts must find it again.
        with on_path():
            return importlib.import_module(self.name)

    @property
    def expect(self) -> dict[str, str]:
        return self.module.EXPECT

    @property
    def kind(self) -> Literal["build", "train"]:
        return "train" if hasattr(self.module, "train") else "build"

    @property
    def healthy(self) -> bool:
        return self.expect["cause"] == "healthy"

    @property
    def places(self) -> list[str]:
        """Every place that is right, one each."""
        return self.expect["where"].split("|") if self.expect["where"] else []

    @property
    def line(self) -> int:
        """The line that is right; 0 where the case names only modules."""
        lines = [int(place.rpartition(":")[2]) for place in self.places if place.startswith(self.path.name)]
        return lines[0] if lines else 0

    @property
    def variants(self) -> tuple[Variant, ...]:
        """How it can be run: a case that is in FP32 as given has no replay in FP32."""
        in_fp32 = getattr(self.module, "FP32_AS_GIVEN", False)
        return tuple(variant for variant in VARIANTS if not (in_fp32 and variant == "same in fp32"))

    def expects_training(self, variant: Variant) -> bool:
        """Whether the case says that it trains."""
        return {"as given": self.healthy, "same in fp32": self.module.FP32_TRAINS, "fixed": True}[variant]

    def run(self, variant: Variant) -> Outcome:
        """Train as on a GPU, and judge: no error, finite weights and buffers, the final metric under TARGET."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with on_path(), cuda_autocast_lists(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return _judge(self.module, lambda: self._train(variant))
        finally:
            torch.set_num_threads(threads)

    def _train(self, variant: Variant) -> dict[str, Any]:
        module, fp32 = self.module, variant == "same in fp32"
        if self.kind == "train":
            return module.fixed() if variant == "fixed" else module.train(fp32=fp32)
        build = module.fixed if variant == "fixed" else module.build
        return fit(build, steps=getattr(module, "STEPS", 40), precision="fp32" if fp32 else None)


def all_cases() -> list[Case]:
    """Every case of the folder, in order."""
    return [Case(path) for path in sorted(FOLDER.glob("[0-9][0-9][0-9]_*.py"))]


@contextlib.contextmanager
def on_path() -> Generator[None]:
    """Put the folder on sys.path."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))


def fit(build: Callable[[], tuple], *, steps: int, precision: str | None = None) -> dict[str, Any]:
    """An ordinary training loop over what `build` returns; a precision replaces the case's own."""
    torch.manual_seed(0)
    model, batches, loss_fn, own, make_optimizer = build()
    precision = precision or own
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    pure = precision.endswith("-true")
    if pure:
        model = model.to(dtype)
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16-mixed")
    losses, skipped = [], 0
    model.train()
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        if pure:
            inputs, targets = _cast(inputs, dtype), _cast(targets, dtype)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=dtype, enabled=precision.endswith("-mixed")):
            loss = loss_fn(model(*inputs), *targets)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped += scaler.get_scale() < before
        losses.append(float(loss.detach()))
    last = losses[-len(batches) :]
    return dict(
        losses=losses, model=model, skipped=skipped, scale=scaler.get_scale(), metric=math.fsum(last) / len(last)
    )


def _cast(values: tuple, dtype: torch.dtype) -> list:
    return [v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for v in values]


def _judge(module: ModuleType, train: Callable[[], dict[str, Any]]) -> Outcome:
    try:
        run = train()
    except Exception as error:  # the user would see this traceback
        return Outcome(False, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:110]}")
    model, losses = run["model"], run["losses"]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    bad = [name for name, value in tensors if value.is_floating_point() and not value.isfinite().all()]
    measure = getattr(module, "metric", None)
    metric = measure(model.float()) if measure else run.get("metric", losses[-1])
    text = f"loss {losses[0]:.4g} -> {losses[-1]:.4g}, metric {metric:.4g} (needs < {module.TARGET})"
    if run.get("skipped"):
        text += f", {run['skipped']}/{len(losses)} steps skipped, scale {run['scale']:.3g}"
    if bad:
        text += f", non-finite: {bad[:3]}"
    return Outcome(not bad and math.isfinite(metric) and metric < module.TARGET, text)


def _show(case: Case) -> None:
    print(f"{case.name}\n  cause {case.expect['cause']}, where {case.expect['where']}, fix: {case.expect['fix']}")
    for variant in case.variants:
        outcome = case.run(variant)
        said = "" if outcome.trains == case.expects_training(variant) else "   NOT AS DOCUMENTED"
        print(f"  {variant:>12}: {'trains' if outcome.trains else 'FAILS '}  {outcome.text}{said}")


if __name__ == "__main__":
    asked = tuple(sys.argv[1:]) or ("",)
    for each in all_cases():
        if each.name.startswith(asked):
            _show(each)
