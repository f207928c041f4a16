"""FL303: BF16 on a device that does not compute in it."""

from __future__ import annotations

import ast

from floatline.lint.configs import ConfigRule, RunConfig
from floatline.lint.rule import Bad


class Bf16WithoutHardware(ConfigRule):
    """Flags BF16 settings where the device that was named (`--on sm_75`) does not compute in BF16.

    ## Why is this bad?
    A T4 or V100 has no BF16 arithmetic. torch widens every operand to FP32 and rounds back, so BF16 saves memory and
    costs time, and `torch.cuda.is_bf16_supported()` still says True. Their tensor cores take FP16.
    """

    code = "FL303"
    name = "bf16-without-hardware"
    title = "The device has no BF16 arithmetic"
    message = "BF16 is asked for, and the device does not compute in it"
    advice = "FP16 with a loss scaler, or FP32"
    words = ("bf16", "bfloat16")
    good = (
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nbf16: true\n", file="run.yaml", on="a100"),
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nbf16: true\n", file="run.yaml"),
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nbf16: false\n", file="run.yaml", on="t4"),
        Bad("import torch\nwith torch.autocast('cpu', dtype=torch.bfloat16):\n    y = model(x)", on="sm_75"),
    )
    bad = (
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nbf16: true\n", file="run.yaml", on="sm_75"),
        Bad("trainer:\n  max_epochs: 3\n  precision: bf16-mixed\n  log_every_n_steps: 1\n", file="run.yaml", on="v100"),
        Bad('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}', file="ds.json", on="sm_60"),
        Bad("import torch as t\nwith t.autocast('cuda', dtype=t.bfloat16):\n    y = model(x)", on="t4"),
        Bad("import pytorch_lightning as L\nL.Trainer(precision='bf16-mixed')", on="t4"),
    )

    def visit_Module(self, node: ast.Module) -> None:  # noqa: N802
        """Calls in Python, where there is something to compare them with."""
        if self.on is not None:
            super().visit_Module(node)

    def visit_config(self, config: RunConfig) -> None:
        """A mode in BF16, and what the device does with it."""
        mode, said = config.precision
        if self.on is None or not mode.startswith("bf16") or said is None or self.on.bf16.level == "native":
            return
        device = config.get("device_type") if config.kind == "autocast" else None
        if device is not None and device.value != self.on.kind and (device.value, self.on.kind) != ("cuda", "rocm"):
            return
        fp16 = self.on.fp16
        other = (
            "FP16 with a loss scaler" if fp16.level == "native" else "FP32: this device computes in no 16-bit format"
        )
        self.report_setting(
            said,
            seen=f"{said} on {self.on.id} ({self.on.title}): BF16 is {self.on.bf16}; FP16 is {fp16}",
            advice=other,
        )
