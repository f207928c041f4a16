"""dbnet under Lightning and Hydra: the configs compose, runs learn, and a run that trains on nothing proves nothing."""

from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tests.slow import slow
from tests.systems.test_dbnet_data import save_icdar

import floatline as fl
from floatline.errors import FloatlineError, TargetError
from floatline.systems import dbnet
from floatline.systems.dbnet.__main__ import train
from floatline.validation.metrics.text import read_csv
from floatline.validation.study.commands import as_run
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide

ROOT = Path(__file__).parents[2]
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


@slow
def test_the_safe_trainer_is_the_teams_and_can_be_overridden() -> None:
    safe = settings("trainer=fp16_safe", "trainer.max_epochs=7")["trainer"]
    assert safe["precision"] == "16-mixed" and safe["max_epochs"] == 7
    assert (safe["gradient_clip_val"], safe["gradient_clip_algorithm"]) == (5.0, "norm")
    assert safe["accumulate_grad_batches"] == 2
    assert settings()["trainer"]["precision"] == "32-true"
    assert settings("workload=broken")["workload"]["arithmetic"] == "as-it-comes"


@slow
def test_fp16_safe_trains_in_fp16_with_a_ledger(tmp_path: Path) -> None:
    recorded = run(tmp_path, "trainer=fp16_safe", "seed=1")
    assert len(recorded.curve("val/hmean")) >= 3
    ledger = fl.Ledger.read(tmp_path / "floatline")
    assert sum(ledger.applied) >= 1
    losses = [value for _, value in recorded.curve("train/loss")]
    assert losses[-1] < losses[0]


@slow
def test_bf16_trains_without_a_loss_scale(tmp_path: Path) -> None:
    recorded = run(tmp_path, "trainer=bf16", "seed=1")
    ledger = fl.Ledger.read(tmp_path / "floatline")
    assert all(ledger.applied) and set(ledger.scale) == {1.0}
    losses = [value for _, value in recorded.curve("train/loss")]
    assert losses[-1] < losses[0]


@slow
@pytest.mark.parametrize(("limit", "told"), [("1e-6", True), ("1e9", False)])
def test_a_large_gradient_norm_is_told_and_trained_on(tmp_path: Path, limit: str, told: bool) -> None:
    run(tmp_path, "trainer=fp16_safe", "trainer.max_epochs=1", f"warn_norm_above={limit}")
    ledger = fl.Ledger.read(tmp_path / "floatline")
    assert sum(ledger.applied) >= 1
    assert any("large gradient norm" in event.message for event in ledger.events) is told


@slow
def test_a_run_is_logged_to_wandb_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    run(tmp_path, "trainer=fp16_safe", "trainer.max_epochs=1", "logger.wandb.enabled=true", "exp_name=offline")
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    assert next(kept.glob("*.wandb")).stat().st_size > 0


@slow
def test_wandb_online_without_a_key_is_one_line(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where a key would be kept
    with pytest.raises(TargetError, match=r"No API key.*logger\.wandb\.mode=offline") as error:
        run(tmp_path, "logger.wandb.enabled=true", "logger.wandb.mode=online")
    assert "\n" not in str(error.value)
    with pytest.raises(TargetError, match="Use offline or online"):
        run(tmp_path, "logger.wandb.enabled=true", "logger.wandb.mode=sometimes")


@slow
def test_a_run_goes_on_from_its_checkpoint_with_the_same_weights(tmp_path: Path) -> None:
    run(tmp_path / "whole", "trainer=fp16_safe", "checkpoints.keep=-1")
    kept = sorted((tmp_path / "whole" / "checkpoints").glob("epoch_*.ckpt"))
    assert len(kept) == 3 and "epoch_0_hmean_0." in kept[0].name
    run(tmp_path / "again", "trainer=fp16_safe", f"resume='{kept[0]}'")
    whole, again, early = (
        torch.load(path, weights_only=True)["state_dict"]
        for path in (tmp_path / "whole/checkpoints/last.ckpt", tmp_path / "again/checkpoints/last.ckpt", kept[0])
    )
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not all(torch.equal(whole[name], early[name]) for name in whole)


def test_a_folder_that_holds_a_run_is_refused_in_words_of_the_command(tmp_path: Path) -> None:
    said = r"holds a run\. Name this one \(exp_name=NAME\), or go on with that: resume=.*last\.ckpt"
    for made, error in ((False, "nonsense"), (True, said)):
        if made:
            (tmp_path / "floatline").mkdir()
            (tmp_path / "floatline" / "ledger-00000.jsonl").touch()
        with pytest.raises(FloatlineError, match=error):
            run(tmp_path, "trainer.precision=nonsense")


@slow
def test_checkpoints_can_be_left_out_and_one_that_is_not_there_is_refused(tmp_path: Path) -> None:
    run(tmp_path, "trainer.max_epochs=1", "checkpoints.enabled=false")
    assert not list(tmp_path.rglob("*.ckpt"))
    with pytest.raises(TargetError, match=r"gone\.ckpt' is no checkpoint"):
        run(tmp_path, "resume=gone.ckpt")


# Every override in the team's guide.
GUIDE = [
    "trainer=fp16_safe",
    "trainer=default",
    'trainer.precision="16-mixed"',
    'trainer.precision="32-true"',
    "trainer.max_epochs=3",
    "trainer.limit_val_batches=50",
    "trainer.limit_train_batches=0",
    "exp_name=fp32_baseline",
    "logger.wandb.enabled=true",
]


@pytest.mark.parametrize("override", GUIDE)
def test_every_override_of_the_guide_is_taken(override: str) -> None:
    name, _, value = override.partition("=")
    found = settings(override)
    if name != "trainer":
        for part in name.split("."):
            found = found[part]
        assert str(found).lower() == value.strip('"')


@slow
def test_a_folder_of_pictures_trains_as_the_guide_runs_it(tmp_path: Path) -> None:
    save_icdar(tmp_path / "icdar", num=4)
    own = [f"workload.icdar_folder={tmp_path / 'icdar'}", "workload=icdar2015", "workload.image_size=64"]
    own += ["workload.test_height=64", "workload.batch_size=2", "workload.neck=8", "workload.head=8", "num_workers=1"]
    guide = ["trainer=fp16_safe", "trainer.max_epochs=2", "trainer.limit_val_batches=50", "exp_name=fp16_test"]
    train(settings(*own, *guide, f"folder={tmp_path / 'run'}", "logger.wandb.enabled=true"))
    recorded = read_csv(tmp_path / "run" / "metrics.csv")
    assert len(recorded.curve("val/hmean")) >= 3
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").is_file()
    losses = [value for _, value in recorded.curve("train/loss")]
    assert losses[-1] < losses[0]


@slow
def test_a_comparison_of_runs_that_trained_on_nothing_is_refused(tmp_path: Path) -> None:
    nothing = "trainer.limit_train_batches=0"
    plans = {"fp32": "trainer=fp32", "fp16": "trainer=fp16_safe"}
    recorded = {name: run(tmp_path / name, trainer, nothing) for name, trainer in plans.items()}
    runs = [as_run(each, "val/hmean", arm=name, seed=seed) for name, each in recorded.items() for seed in range(3)]
    verdict = decide(runs, candidate="fp16", terms=Terms(metric="val/hmean", higher_is_better=True))
    assert verdict.verdict == "REFUSED"
    page = " ".join((ROOT / "docs/workloads/dbnet.md").read_text(encoding="utf-8").split())
    assert page.count(f"{verdict.reason}.") == 2  # of validate, and of approve
    older = verdict.reason.removesuffix(", and nothing shows that any of them was trained")
    assert older != verdict.reason and f"{older}." not in page


@pytest.mark.parametrize("override", ["trainer=fp8", "workload=brokn"])
def test_a_config_that_is_not_there_is_refused(override: str) -> None:
    with pytest.raises(Exception, match=override.partition("=")[2]):
        settings(override)
