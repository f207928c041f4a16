"""The same model and data in transformers' Trainer, its steps taken by a guard."""
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from floatline.errors import TargetError
from floatline.integrations.transformers import prepare_trainer
from floatline.systems.audio_lora import make_data
from floatline.systems.audio_lora.batches import AudioCollator
from floatline.systems.audio_lora.config import Config
from floatline.systems.audio_lora.model import add_adapters, build_base, is_exact


def make_trainer(
    config: Config,
    output: str | Path,
    *,
    epochs: float = 1.0,
    max_steps: int = -1,
    seed: int = 0,
    save_steps: int = 0,
    kind: type[Trainer] = Trainer,
) -> Trainer:
    """A Trainer for the settings, not guarded yet; a base that was not loaded is saved in `output/base`.

    Args:
        config: The settings. Their plan, and optimizers other than the Trainer's own, are for `prepare_trainer`.
        output: Folder for adapters, base and logs.
        epochs: Passes over the examples.
        max_steps: Ends it sooner; -1 does not.
        seed: Of adapters, noise and order.
        save_steps: Steps from one checkpoint to the next; 0 makes one after each epoch. The last two are kept.
        kind: The Trainer or a class of yours.
    """
    base, tokens = build_base(config)
    audio = base.config.audio_config
    collate = AudioCollator(tokens, positions=audio.max_source_positions)
    train, held = make_data(config, collate, bins=audio.num_mel_bins, seed=seed)
    place = config.base_path or str(Path(output) / "base")
    if config.base_path is None:
        base.save_pretrained(place)
    base.config.name_or_path = base.name_or_path = place  # PEFT writes it beside the adapters
    torch.manual_seed(seed)
    arguments = TrainingArguments(
        output_dir=str(output),
        num_train_epochs=epochs,
        max_steps=max_steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=48,
        gradient_accumulation_steps=config.accumulate,
        optim="adamw_torch_fused" if config.optimizer == "adamw-fused" else "adamw_torch",  # the guard makes it exact
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=config.weight_decay,
        max_grad_norm=config.clip_norm or 0.0,
        gradient_checkpointing=config.checkpointing,
        fp16=config.precision.startswith("fp16") and torch.cuda.is_available(),  # on a CPU the guard alone does it
        bf16=config.precision.startswith("bf16"),
        use_cpu=not torch.cuda.is_available(),
        save_strategy="steps" if save_steps else "epoch",
        save_steps=save_steps or 500,
        save_total_limit=2,
        report_to=[],
        logging_steps=10,
        remove_unused_columns=False,
        label_names=["labels"],
        seed=seed,
    )
    trainer = kind(
        cast("Any", add_adapters(base, config)),
        arguments,
        data_collator=cast("Any", collate),
        train_dataset=cast("Any", train),
        eval_dataset=cast("Any", held),
        compute_metrics=_measure,
        preprocess_logits_for_metrics=_likeliest,
    )
    # The model takes any keyword, and its loss is still a mean over the batch: without this the Trainer adds up
    # accumulated losses instead of their mean.
    trainer.model_accepts_loss_kwargs = False
    return trainer


def train(
    config: Config,
    output: str | Path,
    *,
    epochs: float = 1.0,
    max_steps: int = -1,
    seed: int = 0,
    save_steps: int = 0,
    resume: bool = False,
) -> dict[str, Any]:
    """Train guarded in the plan of the settings, evaluate, and save the adapters as PEFT does.

    Args:
        config: The settings.
        output: Folder for adapters, base, checkpoints and logs.
        epochs: Passes over the examples.
        max_steps: Ends it sooner; -1 does not.
        seed: Of adapters, noise and order.
        save_steps: Steps from one checkpoint to the next; 0 makes one after each epoch.
        resume: Go on from the last checkpoint in the folder.

    Returns:
        What the evaluation measured, `eval_accuracy` among it, and what the guard saw as `summary`.
    """
    if resume and not list(Path(output).glob("checkpoint-*")):
        raise TargetError(f"'{output}' has no checkpoint to go on from. Leave --resume out.")
    trainer = make_trainer(config, output, epochs=epochs, max_steps=max_steps, seed=seed, save_steps=save_steps)
    guard = prepare_trainer(trainer, config.precision)
    trainer.train(resume_from_checkpoint=resume or None)
    found = trainer.evaluate()
    trainer.save_model(str(output))
    return {**found, "summary": guard.summary()}


def _likeliest(logits: Any, _labels: Tensor) -> Tensor:
    """Keep the likeliest token alone: the logits of a whole evaluation are large."""
    first = cast("tuple[Tensor, ...]", logits)[0] if isinstance(logits, tuple) else cast("Tensor", logits)
    return first.argmax(-1)


def _measure(prediction: Any) -> dict[str, float]:
    likeliest, labels = torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids)
    return {"accuracy": is_exact(likeliest, labels).double().mean().item()}
