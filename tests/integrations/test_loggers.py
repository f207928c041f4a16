"""Loggers: what the guard recorded comes back from each tool's own files, and training waits for none of them."""

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import floatline as fl
from floatline.errors import GuardError
from floatline.formats import find_format
from floatline.integrations.loggers import CSVLogger, JSONLLogger, Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from floatline.integrations.loggers import logger as logger_module
from floatline.integrations.loggers.logger import values_of
from floatline.integrations.loggers.mlflow import clean_name
from floatline.ledger.account import Account
from floatline.ledger.lines import Step
from floatline.validation.metrics.metric_files import list_files, read_metrics

NUMBERS = ("loss", "scale", "grad_norm", "lr", "loss_score", "norm_score")


class Heard(Logger):
    """Keeps what a tool would get."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.rows, self.metadata, self.finished = [], None, False

    def _send(self, rows):
        self.rows += rows

    def _describe(self, metadata):
        self.metadata = metadata

    def _finish(self):
        self.finished = True

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows if row.values]


def make_guard(**options) -> fl.Guard:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return fl.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def train(guard: fl.Guard, *, steps: int = 57, before: int = 0) -> None:
    """Step 8 has a NaN loss, step 21 an overflow; the search for the scale skips the first steps, too."""
    data = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=data)
    targets = inputs.sum(1, keepdim=True)
    for i in range(before, before + steps):
        factor = math.nan if i == 7 else 1e30 if i == 20 else 1.0
        guard.step(lambda batch, f=factor: ((guard.model(batch[0]) - batch[1]) ** 2).mean() * f, (inputs, targets))


def run_alone(function, folder) -> None:
    """A function of this file in a process and a folder of its own, since W&B keeps both for as long as it lives.

    It writes to the folder in which a process first called it, and its service cannot be begun twice in one process.
    """
    for name in ("wandb", "mlflow", "tensorboard"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    names = ("WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
    settings = dict.fromkeys(names, str(folder)) | {"WANDB_SILENT": "true", "MLFLOW_ALLOW_FILE_STORE": "true"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    run = subprocess.run(
        [sys.executable, __file__, function.__name__],
        cwd=folder, env=kept | settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def find_wandb_file(folder):
    """The one W&B file below a folder, once its process has written it: `finish` waits for neither name nor rows."""
    for _ in range(2500):
        found = list(folder.glob("wandb/offline-run-*/*.wandb"))
        if found and found[0].stat().st_size > 1000:
            return found[0]
        time.sleep(0.1)
    written = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    raise AssertionError(f"W&B wrote no run of more than 1,000 bytes; there are {written}")


def log_to_every_tool() -> None:
    """A guarded run in this folder that every tool has heard of."""
    folder = Path.cwd()
    guard = make_guard(folder=folder / "run", record_layers_every=10)
    guard.attach(TensorBoardLogger(folder / "board"))
    guard.attach(WandbLogger(mode="offline"))
    guard.attach(MLflowLogger(tracking_uri=(folder / "mlruns").as_uri()))
    guard.attach(CSVLogger(folder / "files" / "run.csv"))
    guard.attach(JSONLLogger(folder / "files" / "run.jsonl"))
    train(guard)
    guard.run.diary.note("note", "half way <b>")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        guard.close()


def log_to_a_shared_run() -> None:
    """Five steps in a W&B run of this folder that the user began, with rows of their own before and after."""
    import wandb

    run = wandb.init(mode="offline", project="mine", config={"seed": 3})
    guard = make_guard()
    logger = guard.attach(WandbLogger(run, every=1))
    for i in range(5):
        train(guard, steps=1, before=30 + i)
        run.log({"val/loss": 10.0 + i})
    guard.close()
    run.log({"val/loss": 99.0})
    run.finish()
    assert logger.num_left_out == 0


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The folder and the history of a run that every tool has heard of."""
    folder = tmp_path_factory.mktemp("logged")
    run_alone(log_to_every_tool, folder)
    find_wandb_file(folder)
    return folder, fl.Ledger.read(folder / "run")


def read_back(folder, part: str) -> dict[str, dict[int, float]]:
    """Every metric that the files below a folder hold, by step; W&B's rows have their own axis."""
    found: dict[str, dict[int, float]] = {}
    for path in list_files(folder / part):
        for recorded in read_metrics(path):
            axis = dict(recorded.curve("floatline/step"))
            for name in recorded.values:
                curve = {int(axis.get(step, step)): value for step, value in recorded.curve(name)}
                found.setdefault(name, {}).update(curve)
    found.pop("floatline/step", None)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("part", ["board", "wandb", "mlruns", "files/run.csv", "files/run.jsonl"])
def test_what_was_recorded_comes_back(logged, part):
    folder, history = logged
    if part.startswith("files"):
        (recorded,) = read_metrics(folder / part)
        found = {name: dict(recorded.curve(name)) for name in recorded.values}
    else:
        found = read_back(folder, part)
    rounded = part == "board"  # TensorBoard keeps float32
    expected_steps = {1, 57, *range(10, 57, 10)} | {
        a for a, ok in zip(history.attempt, history.applied, strict=True) if not ok
    }
    for name in NUMBERS:
        column = dict(zip(history.attempt, getattr(history, name), strict=True))
        for step in sorted(expected_steps):
            if column[step] is None:
                assert step not in found.get(f"floatline/{name}", {})
                continue
            value = float(torch.tensor(column[step], dtype=torch.float32)) if rounded else column[step]
            assert found[f"floatline/{name}"][step] == pytest.approx(value, nan_ok=True, rel=1e-12), (name, step)
    assert set(found["floatline/loss"]) == expected_steps
    assert math.isnan(found["floatline/loss"][8])  # never masked
    assert {8, 21} < {a for a, ok in zip(history.attempt, history.applied, strict=True) if not ok}
    assert found["floatline/skipped"][57] == history.accounts.run.num_skipped
    assert found["floatline/skipped_forward_nonfinite"][57] == 1
    norms = history.layer_norms[49]
    assert found["floatline/layer_norm/2.weight"][50] == pytest.approx(norms["2.weight"], rel=1e-6)
    expected = math.log2(65504 / (max(norms.values()) * history.scale[49]))
    assert found["floatline/headroom"][50] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_events_and_the_plan_are_where_the_tools_show_them(logged, monkeypatch):
    from mlflow import MlflowClient
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder, _ = logged
    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    (event,) = board.Tensors("floatline/events/text_summary")
    assert (event.step, event.tensor_proto.string_val[0]) == (57, b"note: half way <b>")
    (plan,) = board.Tensors("floatline/plan/text_summary")[0].tensor_proto.string_val
    assert b'"compute": "fp16"' in plan and b'"manifest": "weights FP32; ' in plan
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (run,) = MlflowClient((folder / "mlruns").as_uri()).search_runs(["0"])
    assert run.data.tags["floatline.plans"] == "fp16-mixed"
    assert run.data.tags["floatline.manifest"].startswith("weights FP32; ")
    assert run.data.tags["floatline.event.0001"] == "step 57: note: half way <b>"
    assert run.info.status == "FINISHED"
    path = find_wandb_file(folder)
    assert b"note: half way <b>" in path.read_bytes()
    (recorded,) = read_metrics(path)
    assert recorded.settings["floatline"]["plan"]["name"] == "fp16-mixed"
    assert recorded.settings["floatline"]["manifest"].startswith("weights FP32; ")
    lines = [json.loads(line) for line in (folder / "files" / "run.jsonl").read_text().splitlines()]
    assert {"step": 57, "event": "note: half way <b>"} in lines


@pytest.mark.slow
def test_a_shared_wandb_run_keeps_the_users_own_rows_and_stays_open(tmp_path):
    run_alone(log_to_a_shared_run, tmp_path)
    (recorded,) = read_metrics(find_wandb_file(tmp_path))
    assert [value for _, value in recorded.values["val/loss"]] == [10.0, 11.0, 12.0, 13.0, 14.0, 99.0]
    assert sorted(value for _, value in recorded.values["floatline/step"]) == [1, 2, 3, 4, 5]
    assert recorded.settings["seed"] == 3


def test_nothing_is_imported_unless_it_is_used(tmp_path):
    code = (
        "import sys; from floatline.integrations.loggers import CSVLogger, MLflowLogger, TensorBoardLogger\n"
        f"CSVLogger({str(tmp_path / 'a.csv')!r}).close()\n"
        "print([name for name in ('mlflow', 'tensorboard', 'wandb', 'torch') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_importing_one_would_be_seen(tmp_path):
    code = "import sys; import tensorboard; print('tensorboard' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"


def test_rows_are_the_first_every_nth_the_skipped_and_the_last():
    guard = make_guard(policy="safe")
    heard = guard.attach(Heard(every=20))
    train(guard, steps=45)
    assert heard.finished is False
    guard.close()
    skipped = [step for step in heard.steps if step not in (1, 20, 40, 45)]
    assert heard.steps == sorted({1, 20, 40, 45, *skipped})
    assert {8, 21} <= set(heard.steps)
    assert heard.rows[-1].values["floatline/skipped"] == guard.accounts.run.num_skipped
    assert heard.finished and heard.metadata["plan"]["name"] == "fp16-mixed"
    assert heard.metadata["manifest"] == guard.manifest


def test_every_step_has_a_row_where_that_is_asked_for():
    guard = make_guard()
    heard = guard.attach(Heard(every=1))
    train(guard, steps=12)
    guard.close()
    assert heard.steps == list(range(1, 13))


def test_a_logger_hears_only_what_the_guard_has_read():
    guard = make_guard()
    guard._late = 3  # as on a GPU, where outcomes are read some steps later
    heard = guard.attach(Heard(every=1))
    train(guard, steps=10)
    heard.flush()
    assert heard.steps == list(range(1, 8))
    guard.close()
    assert heard.steps == list(range(1, 11))


def test_a_tool_that_fails_is_warned_of_once_and_costs_no_step():
    class Broken(Heard):
        def _send(self, rows):
            raise ConnectionError("no route to\nhost")

    guard = make_guard()
    broken, heard = guard.attach(Broken(every=1)), guard.attach(Heard(every=1))
    with pytest.warns(RuntimeWarning) as said:
        train(guard, steps=12)
        broken.flush()
        guard.close()
    texts = [str(warning.message) for warning in said if warning.category is RuntimeWarning]
    assert texts == [
        "Broken cannot log: ConnectionError: no route to host. The run and its ledger go on.",
        "Broken left out 12 rows. The ledger has them all.",
    ]
    assert broken.num_left_out == 12 and heard.steps == list(range(1, 13))


def test_a_tool_that_is_too_slow_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(logger_module, "_MOST_WAITING", 4)
    gate = threading.Event()

    class Slow(Heard):
        def _send(self, rows):
            gate.wait(250)
            super()._send(rows)

    guard = make_guard()
    slow = guard.attach(Slow(every=1))
    train(guard, steps=40)  # would hang here
    assert slow.num_left_out > 20
    gate.set()
    with pytest.warns(RuntimeWarning, match=r"Slow left out \d+ rows"):
        guard.close()
    assert len(slow.rows) + slow.num_left_out == 40


def test_other_processes_than_the_first_say_nothing(monkeypatch):
    monkeypatch.setattr("floatline.guard.diary.is_first_process", lambda group: False)
    guard = make_guard()
    heard = guard.attach(Heard(every=1))
    train(guard, steps=3)
    guard.close()
    assert heard.rows == [] and heard.metadata is None


def test_a_run_that_goes_on_counts_on(tmp_path):
    guard = make_guard(folder=tmp_path / "run")
    train(guard, steps=10)
    guard.save(tmp_path / "saved")
    guard.close()
    before = guard.accounts.run.num_skipped
    assert before > 0
    again = make_guard(folder=tmp_path / "run", resume=True)
    again.load(tmp_path / "saved")
    heard = again.attach(Heard(every=1))
    train(again, steps=1, before=30)
    again.close()
    assert heard.steps == [11]
    assert heard.rows[0].values["floatline/skipped"] == before


def test_own_numbers_and_notes_can_be_logged(tmp_path):
    with JSONLLogger(tmp_path / "own.jsonl") as logger:
        logger.log(3, {"val/loss": math.inf})
        logger.note(4, "started again")
    with JSONLLogger(tmp_path / "own.jsonl") as logger:
        logger.log(5, {"val/loss": 1})
    assert (tmp_path / "own.jsonl").read_text().splitlines() == [
        '{"step": 3, "val/loss": "Infinity"}',
        '{"step": 4, "event": "started again"}',
        '{"step": 5, "val/loss": 1.0}',
    ]
    with pytest.raises(GuardError, match="closed"):
        logger.log(6, {"val/loss": 1.0})


def test_a_table_gains_columns_and_keeps_its_rows(tmp_path):
    path = tmp_path / "own.csv"
    with CSVLogger(path) as logger:
        logger.log(1, {"a": 1.0})
        logger.flush()
        logger.log(2, {"b,c": math.nan})
    with CSVLogger(path) as logger:
        logger.log(3, {"a": -0.0, "d": 2.5})
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "1", "a": "1.0", "b,c": "", "d": ""},
        {"step": "2", "a": "", "b,c": "nan", "d": ""},
        {"step": "3", "a": "-0.0", "b,c": "", "d": "2.5"},
    ]


def test_the_headroom_is_that_of_the_layer_nearest_to_the_ceiling():
    def headroom(norms, **counts):
        step = Step(1, 0.0, True, counts=counts, numbers={"scale": 1024.0}, layer_norms=norms)
        return values_of(step, Account(), find_format("fp16")).get("floatline/headroom")

    assert headroom({"a": 1.0, "b": 8.0}) == pytest.approx(math.log2(65504 / 8192))
    assert headroom({"a": 1.0, "b": 8.0}, micro_batches=4) == pytest.approx(math.log2(65504 / 32768))
    assert headroom({"a": math.nan, "b": 1.0}) == -math.inf
    assert headroom({"a": 0.0}) is None and headroom({}) is None


def test_mlflow_takes_every_name_that_is_made():
    assert clean_name("floatline/layer_norm/a.b-1 (x)[0]") == "floatline/layer_norm/a.b-1 _x__0_"
    assert clean_name("floatline//../x") == "floatline/_/_/x"
    mlflow = pytest.importorskip("mlflow.utils.validation", reason="mlflow is not installed")
    for name in ("floatline/layer_norm/(a)//..", "x" * 400, "ümlaut/é", "a\nb"):
        mlflow._validate_metric_name(clean_name(name))
        with pytest.raises(Exception, match=r"(?i)invalid|exceed"):
            mlflow._validate_metric_name(f"{name}\t/..")


@pytest.mark.parametrize(
    ("make", "package"),
    [
        (lambda folder: TensorBoardLogger(folder), "tensorboard"),
        (lambda folder: WandbLogger(mode="offline"), "wandb"),
        (lambda folder: MLflowLogger(), "mlflow"),
    ],
)
def test_a_tool_that_is_not_installed_is_named(make, package, tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == package else found(name))
    with pytest.raises(GuardError, match=f"needs {package}. Install it with: pip install {package}."):
        make(tmp_path)


@pytest.mark.parametrize("every", [0, -1, True, 2.5])
def test_a_wrong_interval_is_refused(every, tmp_path):
    with pytest.raises(GuardError, match="every is"):
        JSONLLogger(tmp_path / "a.jsonl", every=every)


def test_a_board_needs_exactly_one_place(tmp_path):
    with pytest.raises(GuardError, match="folder or a writer"):
        TensorBoardLogger()
    with pytest.raises(GuardError, match="folder or a writer"):
        TensorBoardLogger(tmp_path, writer=object())


if __name__ == "__main__":
    {"log_to_every_tool": log_to_every_tool, "log_to_a_shared_run": log_to_a_shared_run}[sys.argv[1]]()
