"""FL302: FP16 and BF16 at the same time."""

from __future__ import annotations

from floatline.lint.configs import ConfigRule, RunConfig, Setting
from floatline.lint.rule import Bad


class TwoSixteenBitFormats(ConfigRule):
    """Flags configurations that turn on FP16 and BF16 both.

    ## Why is this bad?
    The run does not start: TrainingArguments raises "At most one of fp16 and bf16 can be True", and DeepSpeed "bfloat16
    and fp16 modes cannot be simultaneously enabled". They are not two strengths of one thing: FP16 has 11 significant
    bits up to 65504 and needs a loss scale, BF16 has 8 bits up to 3.4e38 and needs none.
    """

    code = "FL302"
    name = "two-sixteen-bit-formats"
    title = "FP16 and BF16 are both on"
    message = "fp16 and bf16 are both on: the run stops before its first step"
    advice = "keep one: bf16 where the hardware has it, else fp16"
    words = ("fp16",)
    good = (
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nfp16: true\nbf16: false\n", file="run.yaml"),
        Bad("fp16: true\nbf16: true\nname: formats that we export\n", file="export.yaml"),
        Bad(
            '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}',
            file="ds.json",
        ),
        "from transformers import TrainingArguments\nargs = TrainingArguments('out', fp16=not wide, bf16=True)",
        Bad("python train.py --per_device_train_batch_size 8 --fp16 --bf16 false\n", file="run.sh"),
    )
    bad = (
        Bad(
            "training:\n  per_device_train_batch_size: 8\n  learning_rate: 1e-4\n  fp16: true\n  bf16: yes\n",
            file="run.yml",
        ),
        Bad(
            '{"train_batch_size": 8, "zero_optimization": {"stage": 2},\n "fp16": {"enabled": true},\n'
            ' "bf16": {"enabled": true}}',
            file="ds_config.json",
        ),
        "from transformers import TrainingArguments as Args\nargs = Args('out', fp16=True, bf16=True)",
        (
            'from transformers import TrainingArguments\nsettings = {"zero_optimization": {"stage": 2}, '
            '"bf16": {"enabled": True}}\nargs = TrainingArguments("out", fp16=True, deepspeed=settings)'
        ),
        Bad("torchrun --nproc_per_node 8 train.py --per_device_train_batch_size=8 --fp16 --bf16\n", file="run.sh"),
    )

    def visit_config(self, config: RunConfig) -> None:
        """Both in one group; or one in the arguments, and the other in DeepSpeed's part of the same call."""
        if config.kind == "deepspeed":
            self._compare(
                config.get("fp16", "enabled"), config.get("bf16", "enabled") or config.get("bfloat16", "enabled")
            )
        if config.kind != "transformers":
            return
        self._compare(config.get("fp16"), config.get("bf16"))
        self._compare(config.get("fp16_full_eval"), config.get("bf16_full_eval"))
        inner = config.get("deepspeed")
        parts = list(config.document.of_kind("deepspeed")) if inner is not None and config.document.is_python else []
        if len(parts) == 1:
            self._compare(config.get("fp16"), parts[0].get("bf16", "enabled"))
            self._compare(config.get("bf16"), parts[0].get("fp16", "enabled"))

    def _compare(self, one: Setting | None, other: Setting | None) -> None:
        if one is not None and other is not None and one.is_on and other.is_on:
            self.report_setting(max(one, other, key=lambda setting: (setting.line, setting.column)))
