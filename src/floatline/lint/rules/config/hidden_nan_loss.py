"""FL306: a filter that takes NaN out of the log."""

from __future__ import annotations

from floatline.lint.configs import ConfigRule, RunConfig
from floatline.lint.rule import Bad


class HiddenNanLoss(ConfigRule):
    """Flags `logging_nan_inf_filter: true`.

    It is the default of TrainingArguments, too. Only where someone wrote it down is it flagged: every other run with
    transformers would be.

    ## Why is this bad?
    A step whose loss is NaN or inf counts as the average of those since the last line of the log. The curve looks
    healthy while the loss scaler skips step after step; where every step since that line is NaN, a loss of 0.0 is
    logged. The filter changes the log alone, never a gradient.
    """

    code = "FL306"
    name = "hidden-nan-loss"
    title = "The log hides NaN"
    message = "logging_nan_inf_filter replaces every NaN and inf in the logged loss by the average before it, or by 0"
    advice = "logging_nan_inf_filter: false, to see the first bad step"
    words = ("logging_nan_inf_filter",)
    good = (
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nlogging_nan_inf_filter: false\n", file="run.yaml"),
        Bad("per_device_train_batch_size: 8\nfp16: true\n# logging_nan_inf_filter: true\n", file="run.yaml"),
        "from transformers import TrainingArguments\nTrainingArguments('out', logging_nan_inf_filter=quiet)",
        "class Arguments:\n    logging_nan_inf_filter: bool = True  # torch",
    )
    bad = (
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nlogging_nan_inf_filter: true\n", file="run.yaml"),
        Bad('[train]\noutput_dir = "out"\nfp16 = true\nlogging_nan_inf_filter = true\n', file="run.toml"),
        "from transformers import TrainingArguments as A\nA('out', fp16=True, logging_nan_inf_filter=True)",
    )

    def visit_config(self, config: RunConfig) -> None:
        """The setting, where it is written down."""
        found = config.get("logging_nan_inf_filter") if config.kind == "transformers" else None
        if found is not None and found.is_on:
            self.report_setting(found)
