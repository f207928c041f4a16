"""Whose settings these are, by their keys. A file that only looks a little like a configuration is none."""

from __future__ import annotations

from collections.abc import Mapping

from floatline.lint.configs.view import NESTED, Key, Kind, Path, RunConfig, Setting, SettingsDocument

# `own`: keys that nobody else uses; one must be there, and with `shared` keys as many as said.
_LIGHTNING_OWN = frozenset(
    """limit_train_batches limit_val_batches limit_test_batches limit_predict_batches accumulate_grad_batches
    gradient_clip_val gradient_clip_algorithm check_val_every_n_epoch num_sanity_val_steps overfit_batches fast_dev_run
    use_distributed_sampler replace_sampler_ddp reload_dataloaders_every_n_epochs enable_progress_bar
    enable_model_summary enable_checkpointing log_every_n_steps val_check_interval default_root_dir
    auto_lr_find enable_autolog_hparams model_registry""".split()  # noqa: SIM905
)
_LIGHTNING_SHARED = frozenset(
    """accelerator strategy devices num_nodes precision max_epochs min_epochs max_steps min_steps max_time deterministic
    benchmark inference_mode profiler detect_anomaly sync_batchnorm logger callbacks plugins gpus barebones
    amp_backend amp_level""".split()  # noqa: SIM905
)
_TRANSFORMERS_OWN = frozenset(
    """per_device_train_batch_size per_device_eval_batch_size logging_nan_inf_filter fp16_full_eval bf16_full_eval
    half_precision_backend fp16_opt_level load_best_model_at_end save_total_limit eval_accumulation_steps
    gradient_checkpointing_kwargs dataloader_num_workers num_train_epochs""".split()  # noqa: SIM905
)
_TRANSFORMERS_SHARED = frozenset(
    """output_dir learning_rate max_grad_norm fp16 bf16 max_steps warmup_ratio warmup_steps lr_scheduler_type optim
    gradient_accumulation_steps gradient_checkpointing weight_decay adam_epsilon logging_steps save_steps eval_steps
    eval_strategy evaluation_strategy save_strategy report_to seed push_to_hub remove_unused_columns deepspeed
    fsdp""".split()  # noqa: SIM905
)
_ACCELERATE_OWN = frozenset(("compute_environment", "downcast_bf16", "distributed_type", "dynamo_config"))
_ACCELERATE_SHARED = frozenset(
    "mixed_precision machine_rank num_machines num_processes use_cpu main_training_function rdzv_backend".split()  # noqa: SIM905
)
_DEEPSPEED_OWN = frozenset(
    """zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer wall_clock_breakdown
    steps_per_print prescale_gradients gradient_predivide_factor""".split()  # noqa: SIM905
)
_DEEPSPEED_SHARED = frozenset(
    """fp16 bf16 bfloat16 amp optimizer scheduler train_batch_size gradient_accumulation_steps gradient_clipping
    activation_checkpointing flops_profiler communication_data_type""".split()  # noqa: SIM905
)
_BY_KEYS: tuple[tuple[Kind, frozenset[str], frozenset[str], int], ...] = (
    ("lightning", _LIGHTNING_OWN, _LIGHTNING_SHARED, 3),
    ("transformers", _TRANSFORMERS_OWN, _TRANSFORMERS_SHARED, 3),
    ("accelerate", _ACCELERATE_OWN, _ACCELERATE_SHARED, 3),
    ("deepspeed", _DEEPSPEED_OWN, _DEEPSPEED_SHARED, 2),
)
_LIGHTNING_HOMES = ("lightning.", "pytorch_lightning.", "lightning_fabric.")
_ADDS_TO_IT = frozenset(("defaults", "__base__", "_base_", "extends", "include"))


def find_configs(document: SettingsDocument) -> None:
    """Fill in the document's known parts."""
    children: dict[Path, dict[Key, Setting]] = {(): {}}
    for path, setting in document.settings.items():
        if setting.value is NESTED:
            children.setdefault(path, {})
        if path:
            children.setdefault(path[:-1], {})[path[-1]] = setting
    document.is_open |= any(key in _ADDS_TO_IT for key in children[()])
    found: list[RunConfig] = []
    for path, below in children.items():
        if not below or any(config.kind == "deepspeed" and path[: len(config.root)] == config.root for config in found):
            continue
        kind, name = recognise(path, below)
        if kind is None:
            continue
        place = document.settings.get(path) or next(iter(below.values()))
        # Keys that the Trainer does not have: a project's own code reads them, and may add others.
        is_own = kind == "lightning" and not name and not below.keys() <= _LIGHTNING_OWN | _LIGHTNING_SHARED
        found.append(RunConfig(kind, path, document, place, name, is_open=document.is_open or is_own))
    document.configs = (*document.configs, *found)


def recognise(path: Path, below: Mapping[Key, Setting]) -> tuple[Kind | None, str]:
    """The kind of one group of settings, and the class that it names."""
    target = next((below[key].value for key in ("_target_", "class_path", "type") if key in below), None)
    if isinstance(target, str):
        last = target.rpartition(".")[2]
        if target.startswith(_LIGHTNING_HOMES) and last in ("Trainer", "Fabric"):
            return ("fabric" if last == "Fabric" else "lightning"), target
        if target.startswith("torch.optim.") or (path and path[-1] in ("optimizer", "optim") and last in OPTIMIZERS):
            return "optimizer", target
        if target.startswith("transformers.") and last.endswith("TrainingArguments"):
            return "transformers", target
        if "_target_" in below or "class_path" in below:
            return None, ""
    keys = {str(key) for key in below}
    for kind, own, shared, least in _BY_KEYS:
        num_own = len(keys & own)
        if not num_own or num_own + len(keys & shared) < least:
            continue
        if kind == "deepspeed" and not _is_deepspeed(below):
            continue
        return kind, ""
    # Lightning's own command line writes everything of the Trainer below this key, and so do those who use Hydra.
    is_known = "precision" in keys or keys & _LIGHTNING_OWN
    if path and path[-1] == "trainer" and is_known and len(keys & (_LIGHTNING_OWN | _LIGHTNING_SHARED)) >= 2:
        return "lightning", ""
    return None, ""


OPTIMIZERS = frozenset(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "LBFGS", "SGD", "Adadelta"))


def _is_deepspeed(below: Mapping[Key, Setting]) -> bool:
    """Whether the parts that have parts of their own in DeepSpeed do so here."""
    parts = [below[key] for key in ("zero_optimization", "fp16", "bf16", "bfloat16") if key in below]
    return bool(parts) and all(part.value is NESTED for part in parts)
