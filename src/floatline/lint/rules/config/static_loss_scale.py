"""FL307: a loss scale that never moves."""

from __future__ import annotations

from floatline.causes.overflow import GRADIENT_OVERFLOW
from floatline.lint.configs import ConfigRule, RunConfig, Setting
from floatline.lint.reading.reaching import ZERO_IN_FP16
from floatline.lint.rule import Bad

_LARGEST = 65504.0


class StaticLossScale(ConfigRule):
    """Flags a fixed loss scale in DeepSpeed (`loss_scale` other than 0) and apex (`amp.initialize(loss_scale=128.0)`).

    ## Why is this bad?
    Gradients change by orders of magnitude in the course of a training. A fixed scale S makes every gradient above
    65504 / S inf and every one below 2.98e-08 / S zero: at 128 these are 512 and 2.3e-10. Once gradients outgrow it,
    every step is skipped for good, because nothing lowers it.
    """

    code = "FL307"
    name = "static-loss-scale"
    title = "The loss scale cannot move"
    cause = GRADIENT_OVERFLOW
    message = "the loss scale is fixed: gradients that outgrow it are inf in every later step"
    advice = '"loss_scale": 0  (dynamic)'
    words = ("loss_scale",)
    good = (
        Bad('{"zero_optimization": {}, "fp16": {"enabled": true, "loss_scale": 0}}', file="ds.json"),
        Bad('{"zero_optimization": {}, "fp16": {"enabled": false, "loss_scale": 128}}', file="ds.json"),
        Bad('{"zero_optimization": {}, "fp16": {"enabled": true, "loss_scale_window": 1000}}', file="ds.json"),
        Bad("loss_scale: 128\nname: of the plot\n", file="plot.yaml"),
        "from apex import amp\nmodel, optimizer = amp.initialize(model, optimizer, loss_scale='dynamic')  # torch",
    )
    bad = (
        Bad('{"zero_optimization": {},\n "fp16": {"enabled": true, "loss_scale": 128}}', file="ds.json"),
        "from apex import amp as a  # torch\nmodel, optimizer = a.initialize(model, optimizer, loss_scale=128.0)",
        Bad("zero_optimization: {stage: 2}\nfp16:\n  enabled: auto\n  loss_scale: 1024\n", file="ds.yaml"),
        "import deepspeed\nsettings = {'zero_optimization': {}, 'fp16': {'enabled': True, 'loss_scale': 2.0**10}}",
    )

    def visit_config(self, config: RunConfig) -> None:
        """A scale that is a number other than DeepSpeed's 0."""
        if config.kind == "deepspeed" and fp16_may_be_on(config):
            self._check(config.get("fp16", "loss_scale"), self.advice)
        elif config.kind == "apex":
            enabled = config.get("enabled")
            if enabled is None or enabled.is_on:
                self._check(config.get("loss_scale"), 'loss_scale="dynamic", or torch.amp.GradScaler')

    def _check(self, scale: Setting | None, advice: str) -> None:
        number = scale.number if scale is not None else None
        if scale is None or number is None or number <= 0:
            return
        self.report_setting(
            scale,
            seen=f"{scale} is fixed: gradients above {_LARGEST / number:.2g} are inf and those below "
            f"{ZERO_IN_FP16 / number:.1e} zero, for the whole run",
            advice=advice,
        )


def fp16_may_be_on(config: RunConfig) -> bool:
    """Whether DeepSpeed's FP16 is on, or left to the caller ("auto")."""
    enabled = config.get("fp16", "enabled")
    return enabled is not None and (enabled.is_on or enabled.value == "auto")
