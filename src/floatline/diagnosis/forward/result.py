"""ForwardDiagnosis: what a forward pass suffers from in 16 bits, its outputs beside FP32's, and the island."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from floatline.diagnosis.result import Diagnosis
from floatline.plans import Plan

if TYPE_CHECKING:  # torch is not needed to hold a result
    from floatline.diagnosis.islands.island import Island
    from floatline.probe.steps.outputs import OutputMatch


@dataclass(frozen=True)
class OutputRow:
    """One way to compute the outputs, held against FP32.

    Args:
        arm: 'fp16', 'bf16', or 'floor': FP32 with weights that are moved by half a unit in the last place of 16 bits.
        matches: Of each output.
        failure: What ended it; '' where it came to its end.
    """

    arm: str
    matches: tuple[OutputMatch, ...]
    failure: str = ""

    @property
    def worst(self) -> OutputMatch | None:
        """The output that is farthest from FP32's."""
        return max(self.matches, key=lambda match: match.distance, default=None)

    def as_json(self) -> dict[str, Any]:
        """Texts and numbers."""
        return {"arm": self.arm, "failure": self.failure, "matches": [asdict(match) for match in self.matches]}


@dataclass(frozen=True, kw_only=True)
class ForwardDiagnosis(Diagnosis):
    """What a forward pass suffers from.

    Args:
        outputs: How near to FP32 each way of computing it is, the one that was asked about first.
        island: What must compute in FP32; None where nothing must, or nobody looked.
        exit_code: The script's own; 0 of a target.
    """

    outputs: tuple[OutputRow, ...] = ()
    island: Island | None = None
    exit_code: int = 0

    @property
    def status(self) -> int:
        """The exit code of the command: 2 without a verdict; else a script's own, or 1 where something is wrong."""
        return 2 if self.verdict == "no-verdict" else self.exit_code or super().status

    @property
    def plan(self) -> Plan | None:
        """The plan with the island; None where there is none."""
        if self.island is None or not self.island.members:
            return None
        compute = "bf16" if self.precision.startswith("bf16") else "fp16"
        weights = compute if self.precision.endswith("-true") else "fp32"
        return Plan(name="forward", weights=weights, compute=compute, fp32_modules=self.island.kept)

    @property
    def layers(self) -> dict[str, Any]:
        """The modules of the island in the words of those that take such a list; {} where there is none."""
        plan = self.plan
        return {} if plan is None or self.island is None else name_layers(self.island.modules)

    def as_json(self) -> dict[str, Any]:
        """The fields of the command-line contract, and what only a forward pass has."""
        return super().as_json() | {
            "unexplained": self.unexplained,
            "notes": list(self.notes),
            "exit_code": self.exit_code,
            "outputs": [row.as_json() for row in self.outputs],
            "island": None if self.island is None else self.island.as_json(),
            "plan": None if self.plan is None else self.plan.as_given(),
            "layers": self.layers,
        }


def name_layers(modules: Sequence[str]) -> dict[str, Any]:
    """Names of modules as other tools take them. They are names only: nothing was exported or built here.

    Args:
        modules: Qualified names, as in `model.named_modules()`.
    """
    nodes = ["/" + "/".join(_scopes(name)) for name in modules]
    return {
        "modules": list(modules),
        "onnx_node_prefixes": nodes,
        "coreml_scopes": ["/".join(part.rpartition(".")[2] for part in _scopes(name)) for name in modules],
        "tensorrt": "--precisionConstraints=obey --layerPrecisions=" + ",".join(f"{node}/*:fp32" for node in nodes),
    }


def _scopes(name: str) -> list[str]:
    """'model.layers.3.mlp' is ['model', 'layers.3', 'mlp']: a list of modules is never called, and so has no scope."""
    found: list[str] = []
    for part in name.split("."):
        if part.isdigit() and found:
            found[-1] += f".{part}"
        else:
            found.append(part)
    return found


def say_percent(share: float) -> str:
    """'12 %', '0.034 %', or 'not finite'."""
    if not math.isfinite(share):
        return "not finite"
    return f"{100 * share:.0f} %" if share >= 0.095 else f"{100 * share:.2g} %"
