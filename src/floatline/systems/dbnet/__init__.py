"""dbnet: text detection by differentiable binarization (DBNet), whose FP16 run lost a tenth of its H-mean silently."""

from __future__ import annotations

from functools import cache, partial
from typing import Annotated

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from floatline.errors import TargetError
from floatline.plans import Clip, Plan
from floatline.plans.presets import resolve_plan
from floatline.systems.dbnet.boxes import Matches, find_by_brightness, find_words, match_words
from floatline.systems.dbnet.losses import LOSSES
from floatline.systems.dbnet.model import ArithmeticName, Binarization, DBNet, StepName
from floatline.systems.dbnet.scenes import Scene, draw_scenes, load_icdar
from floatline.systems.dbnet.targets import make_maps
from floatline.workload import Workload, WorkloadConfig

__all__ = ["VARIANTS", "Config", "build", "find_scenes", "measure_baseline", "measure_hmean"]

Count = Annotated[int, Field(ge=1)]
EVALUATED_AT_ONCE = 16


class Config(WorkloadConfig):
    """Settings of dbnet; the defaults learn in a minute on a GPU, and in some minutes on a CPU core.

    Args:
        precision: A plan's name, such as `fp16-mixed` or Lightning's `16-mixed`.
        gradient_clip_val: Bound of the norm of the gradients; null is that of the plan, or none.
        accumulate_grad_batches: Batches for one update.
        learning_rate: Of AdamW, at its highest.
        total_steps: Steps by which the learning rate has fallen to 0: those of the whole run.
        batch_size: Pictures in a batch.
        num_images: Training pictures.
        held_out: Pictures that H-mean is taken on.
        image_size: Height and width of a picture; a multiple of 32.
        words: The most words in a picture.
        text_height: Of the smallest and the largest font, in pixels.
        data_seed: Of the pictures: the task. `seed` of a run changes weights and order.
        icdar_folder: Pictures with ICDAR labels in its `train` and `test`; null draws pictures.
        widths: Channels of the backbone's stages.
        depth: Residual blocks of each stage.
        neck: Channels of the feature pyramid.
        head: Channels inside of the heads.
        channels_last: Keep the model's numbers in the order that convolutions of a GPU are fastest in.
        step: How the maps are made binary: `sigmoid`, or the paper's formula, `exponential`.
        arithmetic: Of the step and the loss: `fp32`, or `as-it-comes`, in the format of the predictions.
    """

    precision: str = "fp16-mixed"
    gradient_clip_val: Annotated[float, Field(gt=0)] | None = 5.0
    accumulate_grad_batches: Count = 1
    learning_rate: Annotated[float, Field(gt=0)] = 0.005
    total_steps: Count = 800
    batch_size: Count = 8
    num_images: Count = 384
    held_out: Count = 384
    image_size: Annotated[int, Field(ge=32)] = 128
    words: Count = 6
    text_height: tuple[Count, Count] = (10, 24)
    data_seed: int = 3
    icdar_folder: str | None = None
    widths: tuple[Count, ...] = (16, 32, 64, 128)
    depth: tuple[Count, ...] = (1, 1, 1, 1)
    neck: Annotated[int, Field(ge=4)] = 32
    head: Count = 16
    channels_last: bool = False
    step: StepName = "sigmoid"
    arithmetic: ArithmeticName = "fp32"

    @model_validator(mode="after")
    def _sizes_fit(self) -> Config:
        if self.image_size % 32:
            raise TargetError(f"image_size is {self.image_size}, no multiple of 32. Change it.")
        if len(self.depth) != len(self.widths):
            raise TargetError(
                f"depth has {len(self.depth)} stages, and widths has {len(self.widths)}. Make them equal."
            )
        if self.text_height[0] > self.text_height[1]:
            raise TargetError(f"text_height is {self.text_height}: smallest first. Change the order.")
        return self


# Pages with more text. In a batch the pixels where the threshold is learnt are more than 65,504, and those that the
# cross-entropy counts are nearly as many: beyond that in some batches.
_DENSE: dict[str, object] = {"batch_size": 16, "words": 12, "text_height": (9, 24)}

VARIANTS: dict[str, dict[str, object]] = {
    # Step and sums in FP16: terms of the loss vanish without a sound.
    "broken": {"arithmetic": "as-it-comes", **_DENSE},
    # The paper's formula in FP16: gradients are NaN, and every step is skipped, soon.
    "steep": {"arithmetic": "as-it-comes", "step": "exponential", "image_size": 64, "num_images": 64, "held_out": 64},
    # The team's safe settings; what must be in FP32 is in FP32.
    "fp16_safe": {"precision": "fp16-mixed", "gradient_clip_val": 5.0, "accumulate_grad_batches": 2},
    # Twice the pictures for nearly twice the steps: H-mean scatters half as much from seed to seed.
    "long": {"batch_size": 16, "num_images": 768, "held_out": 768, "total_steps": 1500},
    # 57 GiB in FP32.
    "h200": {
        "image_size": 640,
        "words": 40,
        "text_height": (12, 64),
        "batch_size": 80,
        "num_images": 160,
        "held_out": 16,
        "widths": (128, 256, 512, 1024),
        "depth": (3, 4, 6, 3),
        "neck": 256,
        "head": 64,
        "learning_rate": 0.001,
        "channels_last": True,
    },
}


def build(config: Config, seed: int = 0) -> Workload:
    """The workload; the pictures follow from the config, weights and order of batches from the seed."""
    train, held_out = find_scenes(config)
    torch.manual_seed(seed)
    model = DBNet(
        widths=config.widths,
        depth=config.depth,
        neck=config.neck,
        head=config.head,
        binarization=Binarization(config.step, config.arithmetic),
    )
    return Workload(
        model=model.to(memory_format=torch.channels_last) if config.channels_last else model,  # pyright: ignore
        batches=make_batches(train, batch_size=config.batch_size, seed=seed),
        loss_fn=LOSSES[config.arithmetic],
        precision=make_plan(config),
        make_optimizer=partial(make_optimizer, config=config),
        evaluate=partial(measure_hmean, scenes=held_out),
        metric="hmean",
        higher_is_better=True,
    )


def make_batches(scenes: list[Scene], *, batch_size: int, seed: int) -> list[tuple[tuple[Tensor], tuple[Tensor, ...]]]:
    """Batches of pictures and their maps, in the seed's order; a rest that fills no batch is left out."""
    images, maps = to_tensor(scenes), [make_maps(scene) for scene in scenes]
    names = ("text", "text_mask", "threshold", "threshold_mask")
    targets = [torch.from_numpy(np.stack([getattr(each, name) for each in maps])) for name in names]
    order = torch.randperm(len(scenes), generator=torch.Generator().manual_seed(seed))
    rows = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    whole = [row for row in rows if len(row) == batch_size] or rows
    return [((images[row],), tuple(target[row] for target in targets)) for row in whole]


def to_tensor(scenes: list[Scene]) -> Tensor:
    """Pictures from -1 to 1, of shape (number, 1, height, width)."""
    return torch.from_numpy(np.stack([scene.image for scene in scenes])[:, None] / 127.5 - 1).float()


def find_scenes(config: Config) -> tuple[list[Scene], list[Scene]]:
    """Training and held-out pictures: of a folder, or drawn."""
    if config.icdar_folder is not None:
        parts = [load_icdar(f"{config.icdar_folder}/{part}", size=config.image_size) for part in ("train", "test")]
        return parts[0], parts[1]
    return _draw(
        config.num_images, config.held_out, config.image_size, config.words, config.text_height, config.data_seed
    )


@cache
def _draw(
    num_images: int, held_out: int, size: int, words: int, text_height: tuple[int, int], seed: int
) -> tuple[list[Scene], list[Scene]]:
    train = draw_scenes(num_images, size=size, words=words, text_height=text_height, seed=2 * seed)
    return train, draw_scenes(held_out, size=size, words=words, text_height=text_height, seed=2 * seed + 1)


def make_plan(config: Config) -> Plan:
    """The plan that `precision`, `gradient_clip_val` and `accumulate_grad_batches` say."""
    plan = resolve_plan(config.precision)
    changes: dict[str, object] = {"accumulate": config.accumulate_grad_batches}
    if config.gradient_clip_val is not None:
        changes["clip"] = Clip(max_norm=config.gradient_clip_val)
    reasons = {**plan.reasons, "clip": "The config's gradient_clip_val."}
    return plan.model_copy(update={**changes, "reasons": reasons})


def make_optimizer(model: nn.Module, *, config: Config) -> torch.optim.Optimizer:
    """AdamW whose learning rate follows the steps that it makes; a checkpoint holds their number."""
    rate, total = config.learning_rate, config.total_steps
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "made": 0}], lr=rate * share_of_rate(0, total))

    def go_on(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            group["made"] += 1
            group["lr"] = rate * share_of_rate(group["made"], total)

    optimizer.register_step_post_hook(go_on)
    return optimizer


def share_of_rate(step: int, total: int) -> float:
    """What a step has of the learning rate: it rises for a tenth of all steps, and falls to 0 by their end, evenly."""
    rise = max(total // 10, 1)
    return max(min((step + 1) / rise, (total - step) / (total - rise + 1)), 0.0)


def measure_hmean(model: nn.Module, *, scenes: list[Scene]) -> float:
    """H-mean of the words that a model finds in the pictures."""
    device = next(model.parameters()).device
    total = Matches()
    for start in range(0, len(scenes), EVALUATED_AT_ONCE):
        part = scenes[start : start + EVALUATED_AT_ONCE]
        maps = model(to_tensor(part).to(device)).probability.float().cpu().numpy()
        for scene, probability in zip(part, maps, strict=True):
            total += match_words(find_words(probability), scene.polygons, scene.ignored)
    return total.hmean


def measure_baseline(scenes: list[Scene]) -> float:
    """H-mean of the detector that looks at brightness alone."""
    found = (match_words(find_by_brightness(scene.image), scene.polygons, scene.ignored) for scene in scenes)
    return sum(found, Matches()).hmean
