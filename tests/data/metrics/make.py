"""Writes the files of this folder with the real packages: TensorBoard 2.21 by torch, W&B 0.31, MLflow 3.17.

Run it where torch, tensorboard, wandb, mlflow-skinny, sqlalchemy and alembic are installed: python make.py
"""

import gzip
import os
import sqlite3
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent.resolve()
VALUES = [0.5, 0.6, 0.7, 0.8]


def make_tensorboard(folder: Path) -> None:
    import torch
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step, value in enumerate(VALUES):
            writer.add_scalar("val/hmean", value, step)
            writer.add_scalar("as_tensor", value, step, new_style=True)
        writer.add_scalar("as_double", 0.1, 0, new_style=True, double_precision=True)
        writer.add_scalar("lost", float("nan"), 0)
        writer.add_histogram("weights", torch.arange(100.0), 0)
        writer.add_text("note", "a text is no number", 0)
        writer.add_image("picture", torch.zeros(3, 8, 8), 0)
    (path,) = folder.glob("*tfevents*")
    # The name that the package gives has a host in it.
    (HERE / "events.out.tfevents.0.torch").write_bytes(path.read_bytes())


def make_wandb(folder: Path) -> None:
    import wandb

    os.chdir(folder)
    settings = wandb.Settings(
        console="off", disable_git=True, save_code=False, silent=True,
        x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, host="host", program="train.py",
    )  # fmt: skip
    # A long setting makes a record that goes over the end of a block.
    run = wandb.init(mode="offline", project="p", config={"seed": 3, "long": "x" * 80_000}, settings=settings)
    for step, value in enumerate(VALUES):
        run.log({"val/hmean": value, "nested": {"loss": 1.0 / (step + 1)}, "note": "a text"})
    run.log({"val/hmean": 0.9, "lost": float("nan")}, step=10)
    run.summary["best"] = 0.9
    run.finish()
    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    (HERE / "run.wandb.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))


def make_mlflow(folder: Path) -> None:
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    import mlflow

    for uri in (f"file://{folder}/mlruns", f"sqlite:///{folder}/mlflow.db"):
        mlflow.set_tracking_uri(uri)
        with mlflow.start_run():
            mlflow.log_param("seed", 3)
            for step, value in enumerate(VALUES):
                mlflow.log_metric("val/hmean", value, step=step)
            mlflow.log_metric("lost", float("nan"), step=0)
            mlflow.log_metric("endless", float("-inf"), step=0)
    (run,) = (folder / "mlruns").glob("0/*/metrics")
    for path in [*run.rglob("*"), run.parent / "params" / "seed"]:
        if path.is_file():
            target = HERE / "mlruns" / "0" / "run" / path.relative_to(run.parent)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (HERE / "mlruns" / "0" / "run" / "meta.yaml").write_text("lifecycle_stage: active\n")
    # The whole database has 1 MB of empty tables: these three are what is read.
    source = sqlite3.connect(folder / "mlflow.db")
    source.execute("UPDATE runs SET user_id = 'user', source_name = 'train.py', artifact_uri = ''")
    keep = ("metrics", "params", "runs")
    lines = [line for line in source.iterdump() if any(f'"{name}"' in line for name in keep) and "INDEX" not in line]
    (HERE / "mlflow.sql").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    for make in (make_tensorboard, make_wandb, make_mlflow):
        with tempfile.TemporaryDirectory() as place:
            make(Path(place))
            os.chdir(HERE)
    subprocess.run(["ls", "-l", str(HERE)], check=True)
