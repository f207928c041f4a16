"""FL308: a loss scale that starts far from where it belongs."""

from __future__ import annotations

import math

from floatline.causes.underflow import GRADIENT_UNDERFLOW
from floatline.lint.configs import ConfigRule, RunConfig, Setting
from floatline.lint.rule import Bad
from floatline.lint.rules.config.static_loss_scale import fp16_may_be_on

_LARGEST_POWER, _SMALLEST_POWER = 24, 4
_USUAL_POWER = 16  # where torch.amp.GradScaler starts
_SLOW = 5_000  # steps until a small scale has grown to the usual one


class InitialScaleFarOff(ConfigRule):
    """Flags loss scales that start above 2^24, or below 2^4 with growth too slow to make up for it.

    ## Why is this bad?
    At 2^32, which old examples of DeepSpeed show, every gradient above 65504 / 2^32 = 1.5e-05 is inf. Each halving
    costs a skipped step: 16 until the scale is 2^16, where torch.amp.GradScaler starts. At 1, all gradients below
    2.98e-08 are zero, and doubling every 2000 steps takes 32,000 steps to 2^16.
    """

    code = "FL308"
    name = "initial-scale-far-off"
    only_if_selected = True
    title = "The loss scale starts far from where it belongs"
    cause = GRADIENT_UNDERFLOW
    message = "the loss scale starts far from where FP16 gradients fit"
    advice = "2^16 = 65536, the usual start"
    words = ("initial_scale_power", "init_scale", "GradScaler")
    good = (
        Bad('{"zero_optimization": {}, "fp16": {"enabled": true, "initial_scale_power": 16}}', file="ds.json"),
        Bad('{"zero_optimization": {}, "fp16": {"enabled": false, "initial_scale_power": 32}}', file="ds.json"),
        Bad(
            '{"zero_optimization": {}, "fp16": {"enabled": true, "initial_scale_power": 32, "loss_scale": 64}}',
            file="ds.json",
        ),
        "import torch\nscaler = torch.amp.GradScaler('cuda', init_scale=2.0**12)",
        "import torch\nscaler = torch.amp.GradScaler('cuda', init_scale=2.0, growth_interval=10)",
        "import torch\nscaler = torch.amp.GradScaler('cuda', init_scale=1.0, enabled=False)",
    )
    bad = (
        Bad('{"zero_optimization": {},\n "fp16": {"enabled": true, "initial_scale_power": 32}}', file="ds.json"),
        "import torch as t\nscaler = t.amp.GradScaler('cuda', init_scale=1.0)",
        "from torch.cuda.amp import GradScaler\nscaler = GradScaler(2.0**30)",
        (
            "from accelerate import Accelerator, GradScalerKwargs as K\n"
            "accelerator = Accelerator(mixed_precision='fp16', kwargs_handlers=[K(init_scale=1)])"
        ),
    )

    def visit_config(self, config: RunConfig) -> None:
        """DeepSpeed's power of two, or a scaler's factor."""
        if config.kind == "deepspeed" and fp16_may_be_on(config):
            fixed = config.get("fp16", "loss_scale")
            power = config.get("fp16", "initial_scale_power")
            if power is not None and power.number is not None and (fixed is None or fixed.number == 0):
                self._check(power, power.number, _number(config.get("fp16", "loss_scale_window"), 1000))
        elif config.kind == "scaler":
            scale, enabled = config.get("init_scale"), config.get("enabled")
            if (
                scale is None
                or not scale.number
                or scale.number < 0
                or (enabled is not None and enabled.value is False)
            ):
                return
            self._check(scale, math.log2(scale.number), _number(config.get("growth_interval"), 2000))

    def _check(self, scale: Setting, power: float, interval: float | None) -> None:
        if power > _LARGEST_POWER:
            largest = 65504 * 2.0**-power if power < 1000 else 0.0
            self.report_setting(
                scale,
                seen=f"{scale}: the scale starts at 2^{power:g}; gradients above {largest:.1e} are inf, and every "
                "halving costs a skipped step",
            )
        elif power < _SMALLEST_POWER and interval is not None and (_USUAL_POWER - power) * interval > _SLOW:
            num_steps = math.ceil((_USUAL_POWER - power) * interval)
            self.report_setting(
                scale,
                seen=f"{scale}: the scale starts at 2^{power:.3g}; gradients below {2.0 ** -(25 + power):.1e} are zero"
                f", and it takes {num_steps:,} steps to grow to 2^16",
            )


def _number(setting: Setting | None, default: float) -> float | None:
    return default if setting is None else setting.number
