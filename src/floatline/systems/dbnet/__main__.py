"""The Lightning and Hydra way: python -m floatline.systems.dbnet trainer=fp16_safe seed=1 trainer.max_epochs=3."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

try:
    import hydra
    import lightning
    from hydra.core.config_store import ConfigStore
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger, WandbLogger
    from omegaconf import DictConfig, OmegaConf
except ModuleNotFoundError as error:
    sys.exit(f"floatline: dbnet needs {error.name}. Install it with: pip install 'floatline[workloads]'.")

import torch
from torch.utils.data import DataLoader

from floatline.errors import FloatlineError, TargetError
from floatline.guard.policy import resolve_policy
from floatline.integrations.lightning import FloatlineCallback, FloatlinePrecision
from floatline.systems import dbnet
from floatline.systems.dbnet.detector import TextDetector
from floatline.workload import OnDemand

# What the Trainer says itself, and what is said beside it.
_OUTSIDE = ("precision", "gradient_clip_val", "accumulate_grad_batches", "warn_norm_above")


def _settings(variant: str) -> dict[str, Any]:
    values = dbnet.Config(**cast("dict[str, Any]", dbnet.VARIANTS.get(variant, {}))).model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in _OUTSIDE}


for _name in ("default", *dbnet.VARIANTS):
    ConfigStore.instance().store(group="workload", name=_name, node=_settings(_name))


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(conf: DictConfig) -> None:
    """Train, and log `val/hmean` before, after each epoch, and at the end."""
    try:
        train(cast("dict[str, Any]", OmegaConf.to_container(conf, resolve=True)))
    except (FloatlineError, MisconfigurationException) as error:
        sys.exit(f"floatline: {error}")


def train(conf: dict[str, Any]) -> float:
    """One run; its H-mean at the end.

    Args:
        conf: As in conf/config.yaml.
    """
    folder, options = Path(conf["folder"]), dict(conf["trainer"])
    if conf["resume"] is None and any((folder / "floatline").glob("ledger-*")):
        last = folder / "checkpoints" / "last.ckpt"
        raise TargetError(f"{folder} holds a run. Name this one (exp_name=NAME), or go on with that: resume={last}.")
    config = dbnet.Config(**conf["workload"])
    workload = dbnet.build(config, seed=conf["seed"])
    _, held_out = dbnet.find_scenes(config)
    at_once = dbnet.num_at_once(config)
    parts = OnDemand(lambda i: dbnet.to_tensor(held_out[i : i + at_once]), range(0, len(held_out), at_once))
    # Batches are whole already. Lightning would take a bare list for several loaders.
    batches, images = (
        DataLoader(cast("Any", each), batch_size=None, num_workers=conf["num_workers"])
        for each in (workload.batches, parts)
    )
    precision = FloatlinePrecision(options.pop("precision"))
    policy = resolve_policy(None, plan_name=precision.steps.plan.name)
    if conf["warn_norm_above"] is not None:
        policy = replace(policy, warn_norm_above=float(conf["warn_norm_above"]))
    callback = FloatlineCallback(folder / "floatline", policy=policy)
    loggers: list[Any] = [CSVLogger(folder, name="", version="")]
    if conf["logger"]["wandb"]["enabled"]:
        loggers.append(make_wandb(conf["logger"]["wandb"], conf["exp_name"], folder))
    kept = make_checkpoints(conf["checkpoints"], folder) if conf["checkpoints"]["enabled"] else []
    trainer = lightning.Trainer(
        plugins=[precision],
        callbacks=[callback, *kept],
        logger=loggers,
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_checkpointing=bool(kept),
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    lightning.seed_everything(conf["seed"])
    detector = TextDetector(config, workload, held_out)
    trainer.validate(detector, images, verbose=False)
    trainer.fit(detector, batches, images, **resume_from(conf["resume"]))
    (last,) = trainer.validate(detector, images, verbose=False)
    for logger in loggers[1:]:
        logger.experiment.finish()
    sys.stdout.write(f"{callback.summary()}\nval/hmean {last['val/hmean']:.4f}\n")
    return last["val/hmean"]


def make_checkpoints(conf: dict[str, Any], folder: Path) -> list[ModelCheckpoint]:
    """Keep the last state and the best ones by H-mean, as Lightning writes them, each epoch.

    Lightning's `save_last` writes only when there is a new best one; a checkpoint that watches nothing is the last.
    """
    last = ModelCheckpoint(folder / "checkpoints", filename="last", enable_version_counter=False)
    best = ModelCheckpoint(
        folder / "checkpoints",
        filename="epoch_{epoch}_hmean_{val/hmean:.4f}",
        auto_insert_metric_name=False,
        monitor="val/hmean",
        mode="max",
        save_top_k=conf["keep"],
    )
    return [best, last]


def resume_from(path: str | None) -> dict[str, Any]:
    """What `Trainer.fit` is told of the checkpoint to go on from; of its pickle, tensors and plain values are read."""
    if path is None:
        return {}
    if not Path(path).is_file():
        raise TargetError(f"resume '{path}' is no checkpoint. Give a .ckpt file, such as FOLDER/checkpoints/last.ckpt.")
    if "weights_only" not in inspect.signature(lightning.Trainer.fit).parameters:
        raise TargetError(f"resume needs lightning 2.6, and this is {lightning.__version__}. Install a newer one.")
    return {"ckpt_path": path, "weights_only": True}


def make_wandb(conf: dict[str, Any], name: str, folder: Path) -> WandbLogger:
    """A W&B run: `offline` writes files that `wandb sync` sends later, `online` sends them while it runs."""
    if conf["mode"] not in ("offline", "online"):
        raise TargetError(f"logger.wandb.mode is '{conf['mode']}'. Use offline or online.")
    offline = conf["mode"] == "offline"
    try:
        logger = WandbLogger(
            name, save_dir=folder, project=conf["project"], entity=conf["entity"], offline=offline, mode=conf["mode"]
        )
        logger.log_metrics({})  # begins the run: a key that is missing is told now, not in the first step
    except ModuleNotFoundError:
        raise TargetError("logger.wandb needs wandb. Install it with: pip install wandb.") from None
    except Exception as error:
        if not type(error).__module__.startswith("wandb"):
            raise
        said = str(error).splitlines()[0]
        raise TargetError(f"W&B does not begin a run: {said} Log in, or use logger.wandb.mode=offline.") from None
    return logger


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("highest")
    main()
