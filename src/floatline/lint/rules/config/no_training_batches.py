"""FL305: a run that trains on nothing."""

from __future__ import annotations

from floatline.lint.configs import UNKNOWN, ConfigRule, RunConfig
from floatline.lint.rule import Bad

_TRAINS = ("accumulate_grad_batches", "gradient_clip_val", "min_epochs", "min_steps")


class NoTrainingBatches(ConfigRule):
    """Flags Lightning runs that are set up to train and are given no batch: `limit_train_batches: 0`, `max_steps: 0`.

    ## Why is this bad?
    `Trainer.fit` returns at once, without an error: no loss, no gradient and no weight is ever touched. A check that
    "training in 16 bits stays finite" then passes because nothing was trained.
    """

    code = "FL305"
    name = "no-training-batches"
    title = "The run trains on nothing"
    message = "the run is set up to train and is given no batch: fit returns at once, and nothing is checked"
    advice = "limit_train_batches: 20 for a short check; 1.0 is all"
    words = ("limit_train_batches", "max_steps")
    good = (
        Bad("trainer:\n  max_epochs: 3\n  precision: 16-mixed\n  limit_train_batches: 0.5\n", file="run.yaml"),
        Bad(
            "trainer:\n  precision: 16-mixed\n  limit_train_batches: 0\n  limit_val_batches: 10\n", file="validate.yaml"
        ),
        Bad("limit_train_batches: 0\nmax_epochs: 3\n", file="mine.yaml"),
        Bad("per_device_train_batch_size: 8\nlearning_rate: 1e-4\nmax_steps: 0\n", file="run.yaml"),
        "from lightning import Trainer\ntrainer = Trainer(limit_train_batches=0)\ntrainer.validate(model)",
        "from lightning import Trainer\nTrainer(limit_train_batches=0, limit_val_batches=0).fit(model)  # loads only",
        Bad("python train.py trainer.limit_train_batches=0 trainer.enable_checkpointing=false\n", file="start.sh"),
    )
    bad = (
        Bad("trainer:\n  max_epochs: 3\n  precision: 16-mixed\n  limit_train_batches: 0\n", file="run.yaml"),
        "import pytorch_lightning as pl\npl.Trainer(max_epochs=1, limit_train_batches=0.0).fit(model)",
        Bad('{"trainer": {"max_steps": 0, "precision": "16-mixed", "gradient_clip_val": 1.0}}', file="run.json"),
        Bad(
            "uv run python train.py \\\n  trainer.max_epochs=3 trainer.limit_train_batches=0 \\\n"
            '  trainer.limit_val_batches=50 trainer.precision="16-mixed"\n',
            file="check_fp16.sh",
        ),
        Bad(
            'python train.py trainer.max_epochs="$epochs" trainer.precision=16-mixed trainer.limit_train_batches=0\n',
            file="loop.sh",
        ),
    )

    def visit_config(self, config: RunConfig) -> None:
        """A limit of zero beside settings that only training needs."""
        if config.kind != "lightning" or not _should_train(config):
            return
        for key in ("limit_train_batches", "max_steps"):
            limit = config.get(key)
            if limit is not None and limit.number == 0:
                self.report_setting(
                    limit, seen=f"{limit}: fit returns at once, nothing is trained and nothing is checked"
                )


def _should_train(config: RunConfig) -> bool:
    """Whether training is meant: those who only test turn validation off as well, or call `test`."""
    validation = config.get("limit_val_batches")
    if validation is not None and validation.number == 0:
        return False
    if config.document.is_python:
        text = config.document.text
        return ".fit(" in text and not any(word in text for word in (".test(", ".validate(", ".predict("))
    if config.first("limit_test_batches", "limit_predict_batches") is not None:
        return False
    counts = [one for one in (config.get("max_epochs"), config.get("max_steps")) if one is not None]
    return config.first(*_TRAINS) is not None or any(one.value is UNKNOWN or (one.number or 0) > 0 for one in counts)
