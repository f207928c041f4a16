"""dbnet: text detection by differentiable binarization (DBNet), whose FP16 run lost a tenth of its H-mean silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from floatline.errors import TargetError
from floatline.plans import Clip, Plan
from floatline.plans.presets import resolve_plan
from floatline.systems.dbnet.boxes import Matches, find_by_brightness, find_words, match_words
from floatline.systems.dbnet.icdar import load_icdar
from floatline.systems.dbnet.losses import LOSSES
from floatline.systems.dbnet.model import ArithmeticName, Binarization, DBNet, SmallBackbone, StepName
from floatline.systems.dbnet.resnet import ResNet, load_weights
from floatline.systems.dbnet.scenes import Scene, draw_scenes
from floatline.systems.dbnet.targets import make_maps
from floatline.systems.dbnet.views import augment, fit_height, fit_square
from floatline.workload import OnDemand, Workload, WorkloadConfig

__all__ = ["VARIANTS", "Config", "build", "find_scenes", "measure_baseline", "measure_hmean"]

Count = Annotated[int, Field(ge=1)]
EVALUATED_AT_ONCE = 16


class Config(WorkloadConfig):
    """Settings of dbnet; the defaults learn in a minute on a GPU, and in some minutes on a CPU core.

    Args:
        precision: A plan's name, such as `fp16-mixed` or Lightning's `16-mixed`.
        gradient_clip_val: Bound of the norm of the gradients; null is that of the plan, or none.
        accumulate_grad_batches: Batches for one update.
        warn_norm_above: A gradient norm above this is told, and trained on; null tells none.
        learning_rate: Of AdamW, at its highest.
        total_steps: Steps by which the learning rate has fallen to 0: those of the whole run.
        batch_size: Pictures in a batch.
        num_images: Training pictures.
        held_out: Pictures that H-mean is taken on.
        image_size: Height and width of a picture; a multiple of 32.
        words: The most words in a picture.
        text_height: Of the smallest and the largest font, in pixels.
        data_seed: Of the pictures: the task. `seed` of a run changes weights and order.
        icdar_folder: Where ICDAR 2015 was unpacked, or pictures with such labels in `train` and `test`; null draws.
        test_height: Height that held-out pictures of a folder are scaled to; null scales them as those of training.
        augment: Turn, flip and crop the training pictures, as the paper does.
        passes: Times that each training picture is in an epoch; with `augment`, each time otherwise.
        colour: Pictures in colour, not grey.
        backbone: `small`, of the sizes below, or `resnet18` or `resnet50`, which want colour.
        backbone_weights: File with a ResNet's weights by torchvision's names; null begins with random ones.
        widths: Channels of the small backbone's stages.
        depth: Residual blocks of each of its stages.
        neck: Channels of the feature pyramid.
        head: Channels inside of the heads.
        channels_last: Keep the model's numbers in the order that convolutions of a GPU are fastest in.
        step: How the maps are made binary: `sigmoid`, or the paper's formula, `exponential`.
        arithmetic: Of the step and the loss: `fp32`, or `as-it-comes`, in the format of the predictions.
    """

    precision: str = "fp16-mixed"
    gradient_clip_val: Annotated[float, Field(gt=0)] | None = 5.0
    accumulate_grad_batches: Count = 1
    warn_norm_above: Annotated[float, Field(gt=0)] | None = None
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
    test_height: Annotated[int, Field(ge=32)] | None = None
    augment: bool = False
    passes: Count = 1
    colour: bool = False
    backbone: Literal["small", "resnet18", "resnet50"] = "small"
    backbone_weights: str | None = None
    widths: tuple[Count, ...] = (16, 32, 64, 128)
    depth: tuple[Count, ...] = (1, 1, 1, 1)
    neck: Annotated[int, Field(ge=4)] = 32
    head: Count = 16
    channels_last: bool = False
    step: StepName = "sigmoid"
    arithmetic: ArithmeticName = "fp32"

    @model_validator(mode="after")
    def _sizes_fit(self) -> Config:
        for name in ("image_size", "test_height"):
            if (getattr(self, name) or 0) % 32:
                raise TargetError(f"{name} is {getattr(self, name)}, no multiple of 32. Change it.")
        if self.backbone != "small" and not self.colour:
            raise TargetError(f"backbone {self.backbone} takes pictures in colour. Set colour=true.")
        if self.backbone == "small" and self.backbone_weights is not None:
            raise TargetError("backbone_weights are given for the small backbone. Set backbone=resnet18 or resnet50.")
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
    # As in the paper: a ResNet, pictures in colour, cropped to 640 pixels, tested at a height of 736. Wants a folder.
    "icdar2015": {
        "backbone": "resnet18",
        "colour": True,
        "augment": True,
        "passes": 4,
        "image_size": 640,
        "test_height": 736,
        "batch_size": 16,
        "total_steps": 10_000,
        "neck": 256,
        "head": 64,
        "learning_rate": 0.001,
        "channels_last": True,
    },
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
    backbone, widths = make_backbone(config)
    model = DBNet(
        backbone,
        widths=widths,
        neck=config.neck,
        head=config.head,
        binarization=Binarization(config.step, config.arithmetic),
    )
    return Workload(
        model=model.to(memory_format=torch.channels_last) if config.channels_last else model,  # pyright: ignore
        batches=make_batches(train, config, seed=seed),
        loss_fn=LOSSES[config.arithmetic],
        precision=make_plan(config),
        make_optimizer=partial(make_optimizer, config=config),
        evaluate=partial(measure_hmean, scenes=held_out, at_once=num_at_once(config)),
        metric="hmean",
        higher_is_better=True,
        policy={} if config.warn_norm_above is None else {"warn_norm_above": config.warn_norm_above},
    )


def make_backbone(config: Config) -> tuple[nn.Module, tuple[int, ...]]:
    """The backbone, with its weights where there are some, and the channels of its stages."""
    if config.backbone == "small":
        return SmallBackbone(3 if config.colour else 1, config.widths, config.depth), config.widths
    network = ResNet(config.backbone)
    if config.backbone_weights is not None:
        load_weights(network, config.backbone_weights, config.backbone)
    return network, network.widths


Batch = tuple[tuple[Tensor], tuple[Tensor, ...]]


def make_batches(scenes: Sequence[Scene], config: Config, *, seed: int) -> Sequence[Batch]:
    """Batches of pictures and their maps, in the seed's order; a rest that fills no batch is left out.

    Those of drawn pictures are made now, those of files when they are asked for: a data set may not fit in memory.
    """
    generator, size = torch.Generator().manual_seed(seed), config.batch_size
    orders: list[list[int]] = [torch.randperm(len(scenes), generator=generator).tolist() for _ in range(config.passes)]
    rows = [order[i : i + size] for order in orders for i in range(0, len(order), size)]
    rows = [row for row in rows if len(row) == size] or rows

    def make(number: int) -> Batch:
        chosen = [scenes[i] for i in rows[number]]
        if config.augment:
            draws = (np.random.default_rng([seed % 2**32, number, place]) for place in range(len(chosen)))
            chosen = [augment(scene, rng, config.image_size) for scene, rng in zip(chosen, draws, strict=True)]
        maps = [make_maps(scene) for scene in chosen]
        names = ("text", "text_mask", "threshold", "threshold_mask")
        targets = tuple(torch.from_numpy(np.stack([getattr(each, name) for each in maps])) for name in names)
        return (to_tensor(chosen),), targets

    batches = OnDemand(make, len(rows))
    return batches if isinstance(scenes, OnDemand) else list(batches)


def to_tensor(scenes: Sequence[Scene]) -> Tensor:
    """Pictures from -1 to 1, of shape (number, channels, height, width)."""
    images = torch.from_numpy(np.stack([scene.image for scene in scenes])).float()
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return images / 127.5 - 1


def num_at_once(config: Config) -> int:
    """Pictures that are evaluated together: with a height of their own they may differ in width."""
    return EVALUATED_AT_ONCE if config.test_height is None else 1


def find_scenes(config: Config) -> tuple[Sequence[Scene], Sequence[Scene]]:
    """Training and held-out pictures: of a folder, or drawn."""
    if config.icdar_folder is not None:
        square: Callable[[Scene], Scene] = partial(fit_square, size=config.image_size)
        tested = square if config.test_height is None else partial(fit_height, height=config.test_height)
        load = partial(load_icdar, config.icdar_folder, colour=config.colour)
        return load("train", fit=_as_it_is if config.augment else square), load("test", fit=tested)
    drawn = _draw(
        config.num_images, config.held_out, config.image_size, config.words, config.text_height, config.data_seed
    )
    if not config.colour:
        return drawn
    train, held_out = ([replace(s, image=np.repeat(s.image[..., None], 3, -1)) for s in part] for part in drawn)
    return train, held_out


def _as_it_is(scene: Scene) -> Scene:
    return scene


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


def measure_hmean(model: nn.Module, *, scenes: Sequence[Scene], at_once: int = EVALUATED_AT_ONCE) -> float:
    """H-mean of the words that a model finds in the pictures."""
    device = next(model.parameters()).device
    total = Matches()
    for start in range(0, len(scenes), at_once):
        part = list(scenes[start : start + at_once])
        maps = model(to_tensor(part).to(device)).probability.float().cpu().numpy()
        for scene, probability in zip(part, maps, strict=True):
            total += match_words(find_words(probability), scene.polygons, scene.ignored)
    return total.hmean


def measure_baseline(scenes: Sequence[Scene]) -> float:
    """H-mean of the detector that looks at brightness alone."""
    found = (match_words(find_by_brightness(scene.image), scene.polygons, scene.ignored) for scene in scenes)
    return sum(found, Matches()).hmean
