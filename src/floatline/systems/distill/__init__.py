"""distill: a small language model learns from text and from a larger one that has another tokenizer."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import nn

from floatline.errors import TargetError
from floatline.plans import Clip
from floatline.plans.presets import resolve_plan
from floatline.systems.distill.alignment import align_positions, coarsen, share_vocabulary, token_bytes
from floatline.systems.distill.budget import fit_budget, split_windows
from floatline.systems.distill.config import VARIANTS, Config
from floatline.systems.distill.model import DistillationLoss, Distiller, TermLog, perplexity
from floatline.systems.distill.networks import build_student, build_teacher, num_layers, num_positions, outputs_of
from floatline.systems.distill.text import cut_windows, find_starts, load_tokenizer, read_text, split_text, tile_tokens
from floatline.workload import Workload

__all__ = ["VARIANTS", "Config", "align_positions", "build", "coarsen", "token_bytes"]


def build(config: Config, seed: int = 0) -> Workload:
    """Teacher, student, router, batches of aligned windows, and perplexity on the held-out chapter.

    Args:
        config: The settings.
        seed: Of the student's first weights, and of the windows and their order. Text, tokenizers and teacher are
            the same for every seed.
    """
    own, theirs = load_tokenizer(config.student_path, "student"), load_tokenizer(config.teacher_path, "teacher")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher = build_teacher(config, vocabulary=theirs.get_vocab_size())
    torch.manual_seed(seed)
    student = build_student(config, vocabulary=own.get_vocab_size())
    shared = share_vocabulary(own, theirs, own_size=outputs_of(student), theirs_size=outputs_of(teacher))
    if not shared.own:
        raise TargetError("Teacher and student share no token. Give a teacher of the same script.")
    model = Distiller(
        student,
        teacher,
        shared,
        exits=_find_exits(config, num_layers(teacher)),
        temperature=config.temperature,
        clamp_logits=config.clamp_logits,
    )
    train_text, held_out = split_text(read_text(config.text_path))
    plan = resolve_plan(config.precision)
    if config.clip_norm is not None:
        plan = plan.model_copy(update={"clip": Clip(max_norm=config.clip_norm)})
    loss_fn = DistillationLoss(
        config.ce_weight, config.kd_weight, config.router_weight, config.feature_weight, clamp=config.clamp_loss
    )
    held = tile_tokens(held_out, length=config.length, student=own)
    windows = cut_windows(
        train_text, _draw_starts(train_text, config, seed), length=config.length, student=own, teacher=theirs
    )
    _check_positions(student, config.length, "student")
    _check_positions(teacher, windows.teacher_ids.shape[1], "teacher")
    workload = Workload(
        model,
        split_windows(windows, config.batch_size),
        loss_fn,
        plan,
        lambda model: make_optimizer(model, config),
        evaluate=lambda model: perplexity(model, held),
        metric="validation perplexity",
        higher_is_better=False,
        policy=_make_policy(config),
        note=partial(_describe_terms, terms=loss_fn.terms),
    )
    if config.memory_budget_gib is None:
        return workload
    return fit_budget(workload, windows, batch_size=config.batch_size, gib=config.memory_budget_gib)


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """One group for the student, one for the router, one for the projection; the frozen teacher has none."""
    parts = {"student": config.student_lr, "router": config.router_lr, "projection": config.projection_lr}
    groups: list[dict[str, Any]] = [
        {"params": list(model.get_submodule(name).parameters()), "lr": lr, "name": name} for name, lr in parts.items()
    ]
    if config.progressive_steps:
        for group in groups:
            group |= {"made": 0, "full_lr": group["lr"], "lr": group["lr"] / config.progressive_steps}
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(groups)
    else:
        optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    if config.progressive_steps:
        optimizer.register_step_post_hook(partial(_raise_rates, over=config.progressive_steps))
    return optimizer


def _raise_rates(optimizer: torch.optim.Optimizer, *_: object, over: int) -> None:
    """The next share of the learning rates; a checkpoint holds how many updates were made."""
    for group in optimizer.param_groups:
        group["made"] += 1
        group["lr"] = group["full_lr"] * min((group["made"] + 1) / over, 1.0)


def _draw_starts(text: str, config: Config, seed: int) -> list[int]:
    places = find_starts(text, length=config.length)
    if not places:
        raise TargetError(f"The text is too short for windows of {config.length} tokens. Give a smaller length.")
    return random.Random(seed).choices(places, k=config.num_batches * config.batch_size)  # noqa: S311


def _make_policy(config: Config) -> dict[str, float]:
    """What the guard does otherwise; the outlier score stays."""
    asked = {name: getattr(config, name) for name in ("skip_norm_above", "warn_norm_above", "most_bad")}
    return {name: value for name, value in asked.items() if value is not None}


def _describe_terms(model: nn.Module, terms: TermLog) -> str:
    """The parts of the loss since the last time, and how many batches went without the teacher so far."""
    failures = int(model.get_buffer("kd_failures"))
    alone = f"{failures:,} batches were trained on the text alone: the distillation was not finite" if failures else ""
    return "; ".join(said for said in (terms.describe(), alone) if said)


def _check_positions(model: nn.Module, length: int, name: str) -> None:
    known = num_positions(model)
    if length > known:
        raise TargetError(f"Windows have {length} {name} tokens, and the {name} takes {known}. Give a smaller length.")


def _find_exits(config: Config, layers: int) -> tuple[int, ...]:
    """The layers that are read. A teacher of others has learnt to speak at its last one alone."""
    exits = config.exits if config.exits is not None else (2, 3) if config.teacher_path is None else ()
    if any(not 1 <= layer <= layers for layer in exits):
        raise TargetError(f"exits {list(exits)} are not layers of the teacher, which has {layers}. Use 1 to {layers}.")
    return tuple(sorted(set(exits))) or (layers,)
