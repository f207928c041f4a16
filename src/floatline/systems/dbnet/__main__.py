"""The Lightning and Hydra way: python -m floatline.systems.dbnet trainer=fp16_safe seed=1 trainer.max_epochs=3."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any, cast

try:
    import hydra
    import lightning
    from hydra.core.config_store import ConfigStore
    from lightning.pytorch.loggers import CSVLogger, WandbLogger
    from omegaconf import DictConfig, OmegaConf
except ModuleNotFoundError as error:
    sys.exit(f"floatline: dbnet needs {error.name}. Install it with: pip install 'floatline[workloads]'.")

import torch
from torch.utils.data import DataLoader

from floatline.errors import FloatlineError
from floatline.integrations.lightning import FloatlineCallback, FloatlinePrecision
from floatline.systems import dbnet
from floatline.systems.dbnet.detector import TextDetector

# What the Trainer says itself.
_TRAINERS = ("precision", "gradient_clip_val", "accumulate_grad_batches")


def _settings(variant: str) -> dict[str, Any]:
    values = dbnet.Config(**cast("dict[str, Any]", dbnet.VARIANTS.get(variant, {}))).model_dump(mode="json")
    return {name: value for name, value in values.items() if name not in _TRAINERS}


for _name in ("default", *dbnet.VARIANTS):
    ConfigStore.instance().store(group="workload", name=_name, node=_settings(_name))


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(conf: DictConfig) -> None:
    """Train, and log `val/hmean` before, after each epoch, and at the end."""
    try:
        train(cast("dict[str, Any]", OmegaConf.to_container(conf, resolve=True)))
    except FloatlineError as error:
        sys.exit(f"floatline: {error}")


def train(conf: dict[str, Any]) -> float:
    """One run; its H-mean at the end.

    Args:
        conf: As in conf/config.yaml.
    """
    folder, options = Path(conf["folder"]), dict(conf["trainer"])
    config = dbnet.Config(**conf["workload"])
    workload = dbnet.build(config, seed=conf["seed"])
    _, held_out = dbnet.find_scenes(config)
    parts = cast("list[Any]", dbnet.to_tensor(held_out).split(dbnet.EVALUATED_AT_ONCE))
    # Batches are made already. Lightning would take a bare list for several loaders.
    batches = DataLoader(cast("Any", list(workload.batches)), batch_size=None)
    images = DataLoader(cast("Any", list(parts)), batch_size=None)
    callback = FloatlineCallback(folder / "floatline")
    loggers: list[Any] = [CSVLogger(folder, name="", version="")]
    if conf["logger"]["wandb"]["enabled"]:
        project = conf["logger"]["wandb"]["project"]
        loggers.append(WandbLogger(conf["exp_name"], save_dir=folder, project=project, offline=True, mode="offline"))
    trainer = lightning.Trainer(
        plugins=[FloatlinePrecision(options.pop("precision"))],
        callbacks=[callback],
        logger=loggers,
        log_every_n_steps=1,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        **options,
    )
    lightning.seed_everything(conf["seed"])
    detector = TextDetector(config, workload, held_out)
    trainer.validate(detector, images, verbose=False)
    trainer.fit(detector, batches, images)
    (last,) = trainer.validate(detector, images, verbose=False)
    sys.stdout.write(f"{callback.summary()}\nval/hmean {last['val/hmean']:.4f}\n")
    return last["val/hmean"]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_float32_matmul_precision("highest")
    main()
