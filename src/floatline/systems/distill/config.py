"""Settings of the distillation, and those that have a name."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from floatline.workload import WorkloadConfig


class Config(WorkloadConfig):
    """Settings of the distillation.

    Args:
        precision: Plan that it is trained in.
        optimizer: 'adamw', or 'adam' as torch has it.
        student_lr: Learning rate of the student.
        router_lr: Of the router.
        projection_lr: Of the projection of states.
        weight_decay: For AdamW.
        progressive_steps: Updates over which all learning rates rise from their first share, evenly; 0 begins in full.
        clip_norm: Largest gradient norm; null leaves the plan's.
        temperature: Softens both distributions; the distillation is multiplied by its square.
        kd_weight: Weight of the distillation.
        ce_weight: Weight of the cross-entropy.
        router_weight: Weight of the router's loss, which reaches only the router.
        feature_weight: Weight of the difference of states.
        exits: Layers of the teacher that the router chooses from, counted from 1; [] is the last one alone. null is
            that of a loaded teacher, and [2, 3] of the shipped one, which has learnt to speak at every layer.
        batch_size: Windows for each update.
        length: Student tokens in a window.
        num_batches: Batches of a pass.
        memory_budget_gib: GPU memory for a step, by estimate; batches are cut and accumulated to fit. null: no limit.
        dropout: Of models that are made here.
        text_path: A text file; null is the shipped text.
        student_path: Folder of a transformers model with tokenizer.json; null makes a student.
        student_family: 'gpt2' or 'llama'.
        student_width: Width of a student that is made.
        student_layers: Its layers.
        student_heads: Its attention heads.
        teacher_path: Folder of a transformers model with tokenizer.json; null takes `teacher`.
        teacher: 'shipped', a small one that learnt the text; 'random', one of the sizes below that knows nothing, to
            measure time and memory.
        teacher_weights: Format that the frozen teacher is held in: 'fp32', 'fp16' or 'bf16'.
        teacher_width: Width of a random teacher.
        teacher_layers: Its layers.
        teacher_heads: Its attention heads.
        clamp_loss: Folk remedy: clamp the cross-entropy and the loss to this; null does not.
        clamp_logits: Folk remedy: clamp the student's logits to plus and minus this; null does not.
        skip_norm_above: Folk remedy: skip steps whose gradient norm is above this; null does not.
        warn_norm_above: A gradient norm above this is told, and trained on; null tells none.
        most_bad: Bad batches in a row that stop the run; null leaves it to the guard's policy.
    """

    precision: str = "fp16-mixed"
    optimizer: Literal["adamw", "adam"] = "adamw"
    student_lr: float = Field(default=7e-3, gt=0)
    router_lr: float = Field(default=3e-3, gt=0)
    projection_lr: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    progressive_steps: int = Field(default=0, ge=0)
    clip_norm: float | None = Field(default=1.0, gt=0)
    temperature: float = Field(default=1.5, gt=0)
    kd_weight: float = Field(default=0.6, ge=0)
    ce_weight: float = Field(default=0.4, ge=0)
    router_weight: float = Field(default=0.1, ge=0)
    feature_weight: float = Field(default=0.1, ge=0)
    exits: tuple[int, ...] | None = None
    batch_size: int = Field(default=16, ge=1)
    length: int = Field(default=32, ge=2)
    num_batches: int = Field(default=60, ge=1)
    memory_budget_gib: float | None = Field(default=None, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    text_path: str | None = None
    student_path: str | None = None
    student_family: Literal["gpt2", "llama"] = "gpt2"
    student_width: int = Field(default=32, ge=1)
    student_layers: int = Field(default=1, ge=1)
    student_heads: int = Field(default=2, ge=1)
    teacher_path: str | None = None
    teacher: Literal["shipped", "random"] = "shipped"
    teacher_weights: Literal["fp32", "fp16", "bf16"] = "fp32"
    teacher_width: int = Field(default=96, ge=1)
    teacher_layers: int = Field(default=3, ge=1)
    teacher_heads: int = Field(default=4, ge=1)
    clamp_loss: float | None = Field(default=None, gt=0)
    clamp_logits: float | None = Field(default=None, gt=0)
    skip_norm_above: float | None = Field(default=None, gt=0)
    warn_norm_above: float | None = Field(default=None, gt=0)
    most_bad: int | None = Field(default=None, ge=1)


_ULTRA = {"temperature": 1.5, "kd_weight": 0.05, "ce_weight": 0.95, "student_lr": 5e-6, "router_lr": 1e-5}
_BALANCED = {"temperature": 2.0, "kd_weight": 0.1, "ce_weight": 0.9, "student_lr": 1e-5, "router_lr": 1e-5}
VARIANTS: dict[str, dict[str, object]] = {
    "broken": {"precision": "fp16-true", "optimizer": "adam"},
    "clamped-loss": {"clamp_loss": 6.0},
    "clamped-logits": {"clamp_logits": 5.0},
    "norm-skip": {"skip_norm_above": 2.0},
    # All of their fix at once, on FP16 weights: NaN from the second step on (team_loop.py is their loop).
    "team-fix": {
        "precision": "fp16-true",
        "clip_norm": 0.5,
        "most_bad": 10,
        "clamp_loss": 6.0,
        "clamp_logits": 5.0,
        "skip_norm_above": 2.0,
        "projection_lr": 1e-5,
        **_ULTRA,
    },
    "balanced": {"precision": "balanced", "clip_norm": 0.5, **_BALANCED},
    "ultra-conservative": {"precision": "ultra-conservative", "clip_norm": 0.5, "most_bad": 10, **_ULTRA},
    # A teacher that knows nothing costs the same: this size is for time and memory.
    "h200": {
        "batch_size": 80,
        "length": 1024,
        "num_batches": 4,
        "student_width": 2048,
        "student_layers": 8,
        "student_heads": 16,
        "student_lr": 1e-4,
        "teacher": "random",
        "teacher_width": 2048,
        "teacher_layers": 12,
        "teacher_heads": 16,
        "exits": (6, 12),
    },
}
