"""FL304: FP16 training whose gradients are not clipped."""

from __future__ import annotations

from floatline.causes.elsewhere import OPTIMIZATION_DIVERGENCE
from floatline.lint.configs import ConfigRule, RunConfig, Setting
from floatline.lint.rule import Bad

_DOES_IT_ITSELF = ("automatic_optimization", "agc")
_TRAINS = ("max_epochs", "max_steps", "min_epochs", "accumulate_grad_batches")


class Fp16WithoutClipping(ConfigRule):
    """Flags FP16 training whose configuration leaves gradient clipping off.

    Lightning clips nothing unless `gradient_clip_val` says so, and DeepSpeed nothing without `gradient_clipping`: under
    the Trainer of transformers, `max_grad_norm` reaches DeepSpeed only where that key is "auto". The Trainer alone
    clips at 1.0, unless `max_grad_norm: 0` turns it off.

    ## Why is this bad?
    The loss scaler skips a step whose gradients are inf. A spike below that is applied whole: at a scale of 1024,
    FP16 holds gradients up to 65504 / 1024 = 64, far above a norm of 1. Weights that one such step moves give larger
    activations, and those meet FP16's end at 65504.
    """

    code = "FL304"
    name = "fp16-without-clipping"
    only_if_selected = True
    title = "FP16 training without gradient clipping"
    cause = OPTIMIZATION_DIVERGENCE
    message = "FP16 training without gradient clipping: the scaler skips inf, a finite spike is applied whole"
    advice = "gradient_clip_val: 1.0"
    words = ("precision", "fp16")
    good = (
        Bad("trainer:\n  max_epochs: 3\n  precision: 16-mixed\n  gradient_clip_val: 1.0\n", file="run.yaml"),
        Bad("trainer:\n  max_epochs: 3\n  precision: bf16-mixed\n  log_every_n_steps: 1\n", file="run.yaml"),
        Bad("defaults: [base]\ntrainer:\n  max_epochs: 3\n  precision: 16-mixed\n", file="run.yaml"),
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\n", file="run.yaml"),
        Bad(
            '{"train_batch_size": 8, "zero_optimization": {}, "fp16": {"enabled": true}, "gradient_clipping": "auto"}',
            file="ds.json",
        ),
        Bad('{"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}', file="ds.json"),
        "import pytorch_lightning as L\ntrainer = L.Trainer(precision='16-mixed')\ntrainer.predict(model)",
        "import pytorch_lightning as L\nL.Trainer(precision='16-mixed', **options).fit(model)",
    )
    bad = (
        Bad("trainer:\n  max_epochs: 3\n  precision: 16-mixed\n  log_every_n_steps: 1\n", file="run.yaml"),
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\nmax_grad_norm: 0.0\n", file="run.yaml"),
        Bad(
            '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": true},\n'
            ' "optimizer": {"type": "AdamW", "params": {}}}',
            file="ds.json",
        ),
        (
            "from lightning.pytorch import Trainer as T\n"
            "trainer = T(precision='16-mixed', max_epochs=3)\ntrainer.fit(model)"
        ),
        Bad("[trainer]\nmax_epochs = 3\nprecision = 16\ngradient_clip_val = 0\n", file="run.toml"),
    )

    def visit_config(self, config: RunConfig) -> None:
        """What the tool does where nothing is said, and what was said."""
        mode, said = config.precision
        if mode != "fp16-mixed" or said is None:
            return
        if config.kind == "transformers":
            clip = config.get("max_grad_norm")
            if clip is not None and clip.number == 0:
                self.report_setting(clip, advice="max_grad_norm: 1.0")
        elif config.kind == "lightning" and self._trains(config):
            self._report_absent(config, config.get("gradient_clip_val"), said, "gradient_clip_val: 1.0")
        elif config.kind == "deepspeed" and config.first("gradient_clipping", "optimizer") is not None:
            # Without an optimizer of its own, DeepSpeed runs under a Trainer, and that may hand its clipping on.
            if config.document.mentions("lightning"):
                return
            clip = config.get("gradient_clipping") or config.get("optimizer", "params", "max_grad_norm")
            self._report_absent(config, clip, said, '"gradient_clipping": 1.0')

    def _report_absent(self, config: RunConfig, clip: Setting | None, said: Setting, advice: str) -> None:
        if clip is None and (config.is_open or config.document.mentions("clip")):
            return  # by another file, or under another name
        if clip is None or clip.is_empty:
            self.report_setting(said if clip is None else clip, advice=advice)

    def _trains(self, config: RunConfig) -> bool:
        document = config.document
        if document.mentions(*_DOES_IT_ITSELF) and document.is_python:
            return False
        limit = config.get("limit_train_batches")
        if config.is_on("fast_dev_run") or (limit is not None and limit.number == 0):
            return False
        return ".fit(" in document.text if document.is_python else config.first(*_TRAINS) is not None
