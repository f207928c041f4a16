"""dbnet under Lightning and Hydra: the configs compose, runs learn, and a run that trains on nothing proves nothing."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import floatline as fl
from floatline.systems import dbnet
from floatline.systems.dbnet.__main__ import train
from floatline.validation.metrics.text import read_csv
from floatline.validation.study.commands import as_run
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide

CONF = str(Path(dbnet.__file__).parent / "conf")
TINY = [
    "workload.image_size=64",
    "workload.words=3",
    "workload.text_height=[12,18]",
    "workload.num_images=8",
    "workload.held_out=4",
    "workload.batch_size=4",
    "workload.widths=[8,8,8]",
    "workload.depth=[1,1,1]",
    "workload.neck=8",
    "workload.head=8",
    "trainer.max_epochs=3",
]


def settings(*overrides: str) -> dict:
    with initialize_config_dir(CONF, version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


def run(folder: Path, *overrides: str):
    """Train, and give back what the run recorded."""
    train(settings(*TINY, f"folder={folder}", *overrides))
    return read_csv(folder / "metrics.csv")


def test_the_safe_trainer_is_the_teams_and_can_be_overridden() -> None:
    safe = settings("trainer=fp16_safe", "trainer.max_epochs=7")["trainer"]
    assert safe["precision"] == "16-mixed" and safe["max_epochs"] == 7
    assert (safe["gradient_clip_val"], safe["gradient_clip_algorithm"]) == (5.0, "norm")
    assert safe["accumulate_grad_batches"] == 2
    assert settings()["trainer"]["precision"] == "32-true"
    assert settings("workload=broken")["workload"]["arithmetic"] == "as-it-comes"


def test_fp16_safe_trains_in_fp16_with_a_ledger(tmp_path: Path) -> None:
    recorded = run(tmp_path, "trainer=fp16_safe", "seed=1")
    assert len(recorded.curve("val/hmean")) >= 3
    ledger = fl.Ledger.read(tmp_path / "floatline")
    assert sum(ledger.applied) >= 1
    losses = [value for _, value in recorded.curve("train/loss")]
    assert losses[-1] < losses[0]


def test_a_run_is_logged_to_wandb_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run(tmp_path, "trainer=fp16_safe", "trainer.max_epochs=1", "logger.wandb.enabled=true", "exp_name=offline")
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    assert next(kept.glob("*.wandb")).stat().st_size > 0


def test_a_comparison_of_runs_that_trained_on_nothing_is_refused(tmp_path: Path) -> None:
    nothing = "trainer.limit_train_batches=0"
    plans = {"fp32": "trainer=fp32", "fp16": "trainer=fp16_safe"}
    recorded = {name: run(tmp_path / name, trainer, nothing) for name, trainer in plans.items()}
    runs = [as_run(each, "val/hmean", arm=name, seed=seed) for name, each in recorded.items() for seed in range(3)]
    verdict = decide(runs, candidate="fp16", terms=Terms(metric="val/hmean", higher_is_better=True))
    assert verdict.verdict == "REFUSED"


@pytest.mark.parametrize("override", ["trainer=fp8", "workload=brokn"])
def test_a_config_that_is_not_there_is_refused(override: str) -> None:
    with pytest.raises(Exception, match=override.partition("=")[2]):
        settings(override)
