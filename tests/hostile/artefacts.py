"""Readers of untrusted files: how to make a valid artefact of each, how to put it together, and how it is read."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import sqlite3
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
from tests.hostile.mutations import CODE_TOKENS, TOKENS, YAML_TOKENS
from tests.report.rescues import make_rescue
from tests.report.run.runs import make_run
from tests.validation.studies import arms
from torch import nn

import floatline as fl
from floatline.base.plain_records import to_plain
from floatline.cli.explain import _answer
from floatline.errors import FloatlineError
from floatline.guard.checkpoints.run_files import load_checkpoint, newest_checkpoint
from floatline.guard.policy import resolve_policy
from floatline.ledger.history import read_history
from floatline.lint import lint_text
from floatline.lint.baseline import read_baseline
from floatline.lint.rules import choose_rules
from floatline.lint.settings import read_settings
from floatline.plans import Plan
from floatline.plans.presets import PLANS, resolve_plan
from floatline.probe.bundles.bundle import read_bundle, restore_step, write_bundle
from floatline.probe.trace.trace import Op, Operand, Trace, Values
from floatline.report.run.folders import open_runs
from floatline.report.run.page import write_run_page
from floatline.report.run.terminal import draw_runs
from floatline.report.validation.report import write_report
from floatline.rescuing.finished_stages import (
    Kept,
    plain_diagnosis,
    plain_patch,
    read_diagnosis,
    read_island,
    read_patch,
    read_trial,
)
from floatline.rescuing.short_run import Trial
from floatline.training.settings import check_config, load_settings, save_settings
from floatline.validation.finished import compare
from floatline.validation.metrics.tensorboard import _masked_crc
from floatline.validation.result import Validation
from floatline.validation.signoff import status
from floatline.validation.signoff.approval import approve
from floatline.validation.signoff.records import APPROVALS, Record, append_record, read_records
from floatline.validation.study.store import Store
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide
from floatline.workload import WorkloadConfig, load_target
from floatline.workload.config import parse_pairs, read_config

DATA = Path(__file__).parent.parent / "data" / "metrics"
Parts = dict[str, bytes]
ASKED = {"target": "t.py", "seed": 0, "limits": {"steps": 5}}
RESCUE = {"target": "t.py", "code": "x", "steps": 6, "seed": 0, "environment": {"torch": "2"}}
TARGET = """import torch
def build(seed=0):
    net = torch.nn.Linear(4, 2)
    batches = [((torch.ones(3, 4),), (torch.zeros(3, 2),))] * 3
    loss = lambda y, t: (y.float() - t).square().mean()
    return net, batches, loss, "fp16-mixed", lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)
"""


class Config(WorkloadConfig):
    """Settings as a workload has them."""

    student_lr: float = 1e-3
    exits: tuple[int, ...] = ()
    precision: Literal["fp32", "fp16-mixed"] = "fp32"


@dataclass(frozen=True)
class Reader:
    """One class of untrusted input.

    Args:
        name: What it is.
        make: The parts of a valid artefact; the folder is empty and may be used.
        read: Reads the artefact in a folder as floatline does.
        modules: Whose lines a search counts as reached.
        pack: Puts the parts into a folder.
        tokens: What is put into its bytes.
    """

    name: str
    make: Callable[[Path], Parts]
    read: Callable[[Path], object]
    modules: tuple[str, ...]
    pack: Callable[[Parts, Path], None] = lambda parts, folder: put(parts, folder)
    tokens: tuple[bytes, ...] = TOKENS


def put(parts: Parts, folder: Path) -> None:
    """The parts as files."""
    for name, data in parts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def take(folder: Path) -> Parts:
    """The files of a folder as parts."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


@contextlib.contextmanager
def inside(folder: Path):
    """Work in a folder."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# Replay bundles.


def make_bundle(folder: Path) -> Parts:
    (folder / "netfile.py").write_text(TARGET)
    write_bundle(load_target(str(folder / "netfile.py")), folder / "bundle", step=1, with_data=True)
    parts = {f"bundle/{name}": data for name, data in take(folder / "bundle").items()}
    _TARGETS.append(load_target(str(folder / "netfile.py")))
    return parts


_TARGETS = []


def pack_bundle(parts: Parts, folder: Path) -> None:
    """Checksums and sizes are put right: whoever changes a file can do that too."""
    put(parts, folder)
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):
        tree = json.loads(parts["bundle/bundle.json"])
        for name, facts in tree["files"].items():
            data = parts[f"bundle/{name}"]
            facts.update(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))
        (folder / "bundle" / "bundle.json").write_text(json.dumps(tree))


def read_any_bundle(folder: Path) -> object:
    bundle = read_bundle(folder / "bundle")
    return restore_step(bundle, _TARGETS[-1]) if bundle.kind == "build" else bundle


# Traces.


def make_trace(folder: Path) -> Parts:
    values = Values("float16", (2, 3), 6, largest=3.5, smallest=0.5, twin_largest=3.5, twin_nonfinite=0)
    ops = [
        Op(0, "aten.mm", "forward", inputs=[Operand(values, None, "weight", False)], outputs=[values], scalars=(1.0,)),
        Op(1, "aten.mul", "backward", inputs=[Operand(values, 0, "", True)], outputs=[values], scalars=(1.0, 2.0)),
    ]
    Trace(ops, {"w": Operand(values, 1, "gradient", False)}, {"step": 3}).save(folder / "step.npz")
    with zipfile.ZipFile(folder / "step.npz") as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["json.npy"] = parts["json.npy"].partition(b"\n")[2]  # the text alone, so that it is changed as JSON
    return parts


def pack_trace(parts: Parts, folder: Path) -> None:
    with zipfile.ZipFile(folder / "step.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            if name == "json.npy":
                data = npy(data)
            archive.writestr(name, data)


def npy(data: bytes, descr: str = "|u1", shape: str = "") -> bytes:
    """Bytes as numpy writes an array of them; the header may say something else."""
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape or f'({len(data)},)'}, }}"
    head = head.ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + data


# Checkpoints and what a rescue keeps.


def _guard() -> fl.Guard:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return fl.Guard(model, torch.optim.AdamW(model.parameters(), lr=0.01), plan="fp16-mixed")


def make_checkpoint(folder: Path) -> Parts:
    guard = _guard()
    guard.step(lambda x: guard.model(x).float().square().mean(), torch.ones(3, 4))
    guard.save(folder, extra={"epoch": 3, "best": (1.5, float("inf"))})
    guard.close()
    return {name: data for name, data in take(folder).items() if ".saving" not in name}


def pack_checkpoint(parts: Parts, folder: Path) -> None:
    put(parts, folder)
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):
        (name,) = (name for name in parts if name.endswith("state.json"))
        (tensors,) = (data for name, data in parts.items() if name.endswith(".safetensors"))
        fields = json.loads(parts[name])
        fields.pop("state_sha256")
        fields["tensors_sha256"] = hashlib.sha256(tensors).hexdigest()
        digest = hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode("ascii")).hexdigest()
        (folder / name).write_text(json.dumps({"state_sha256": digest, **fields}))


def read_checkpoint(folder: Path) -> object:
    newest = newest_checkpoint(folder)
    found = load_checkpoint(newest or folder)
    guard = _guard()
    try:
        guard.load(folder)
    finally:
        guard.close()
    return found


def make_kept(folder: Path) -> Parts:
    rescue = make_rescue()
    with Kept(folder, asked=RESCUE, prove=False) as kept:
        kept.put("diagnose", {"seconds": 1.0, "diagnosis": plain_diagnosis(rescue.diagnosis)})
        kept.put("patch", {"seconds": 1.0, "patch": plain_patch(rescue.diagnosis)})
        kept.put("island", {"seconds": 1.0, "text": "x", "island": to_plain(rescue.island)})
        kept.put("trials", {"a": to_plain(Trial((1.0, 0.5), (1,), "", 0.5, 2.0))})
    return {name: data for name, data in take(folder).items() if not name.endswith(".lock")}


def read_kept(folder: Path) -> object:
    with Kept(folder, asked=RESCUE, prove=True) as kept:
        found = kept.get("diagnose", seconds=float, diagnosis=dict)
        if found is not None:
            str(read_diagnosis(found["diagnosis"]))
        patch = kept.get("patch", seconds=float, patch=dict)
        if patch is not None:
            str(read_patch(make_rescue().diagnosis, patch["patch"]))
        island = kept.get("island", seconds=float, text=str, island=dict)
        if island is not None:
            json.dumps(read_island(island["island"]).as_json())
        for trial in (kept.get("trials") or {}).values():
            read_trial(trial)
    return found


# Ledgers, as history, in the terminal, as a page, and to go on with.


def make_ledger(folder: Path) -> Parts:
    make_run(folder, steps=12, planned=20, part_bytes=4096)
    return {name: data for name, data in take(folder).items() if name.endswith(".jsonl")}


def read_ledger(folder: Path) -> object:
    history = read_history(folder)
    history.summary(), history.array("loss"), history.array("epoch")
    facts = [run.look() for run in open_runs([folder])]
    from rich.console import Console

    Console(file=io.StringIO(), width=100).print(draw_runs(facts, width=100, height=40))
    json.dumps([run.as_json() for run in facts])
    write_run_page(facts, folder / "run.html")
    fl.Ledger.resume(folder).close()
    return history


# Plans, settings, workload configurations.


def make_settings(folder: Path) -> Parts:
    plan = resolve_plan("fp16-mixed")
    save_settings(folder, plan, resolve_policy(None, plan_name=plan.name), {"student_lr": 0.001, "exits": [1, 2]})
    return take(folder)


def read_all_settings(folder: Path) -> object:
    with contextlib.suppress(FloatlineError):
        Plan.load(folder / "plan.yaml").check_modules(nn.Linear(1, 1))
    with contextlib.suppress(FloatlineError):
        check_config(folder, {"student_lr": 0.001, "exits": [1, 2]})
    with contextlib.suppress(FloatlineError):
        Config(**read_config(folder / "config.yaml"))
    if (folder / "config.yaml").is_file():
        first = (folder / "config.yaml").read_text(errors="replace").split("\n")[0]
        with contextlib.suppress(FloatlineError):
            parse_pairs([first.replace(": ", "=")])
    return load_settings(folder, None, None)


# Sign-offs.


def make_approvals(folder: Path) -> Parts:
    plan = PLANS["fp16-mixed"].model_dump(mode="json")
    for action in ("approve", "rollback"):
        code = {"train.py": "0" * 64}
        append_record(folder, Record(action, "train.py", "2026-01-01T00:00:00Z", "Ada", plan, "0" * 64, code=code))
    return {APPROVALS: (folder / APPROVALS).read_bytes()}


def read_approvals(folder: Path) -> object:
    (folder / ".git").mkdir(exist_ok=True)
    found = read_records(folder)
    # It asks git and the hardware; what they say is no part of the file.
    with inside(folder), mock.patch.object(status, "describe_environment", lambda target: {"torch": "2"}):
        for standing in status.check_all():
            str(standing), json.dumps(standing.as_json())
    return found


# Studies and their reports.


def make_study(folder: Path) -> Parts:
    runs = arms([0.001, 0.0011, 0.0012])
    with Store(folder, asked=ASKED) as store:
        store.settle({"metric": "loss"})
        for run in runs:
            store.add(run)
    comparison = decide(runs, candidate="fp16-mixed", terms=Terms())
    plans = {"fp16-mixed": PLANS["fp16-mixed"].model_dump(mode="json")}
    validation = Validation("train.py", (comparison,), tuple(runs), plans=plans, environment={"torch": "2.13"})
    (folder / "validation.json").write_text(json.dumps(validation.as_json()))
    return {name: data for name, data in take(folder).items() if not name.endswith(".lock")}


def read_study(folder: Path) -> object:
    (folder / ".git").mkdir(exist_ok=True)
    with contextlib.suppress(FloatlineError), Store(folder, asked=ASKED, resume=True) as store:
        store.runs(), dict(store.found)
    with contextlib.suppress(FloatlineError):
        result = compare(folder, folder)
        str(result), json.dumps(result.as_json())
    with inside(folder):
        record = approve(folder, by="Ada", override="for the test")
    # What can be signed can be shown; a page takes longer than all else, and one in four is enough.
    data = (folder / "validation.json").read_bytes()
    if len(data) % 4 == 0:
        write_report(Validation.from_json(json.loads(data)), folder)
    return record


# Metric files.


def make_texts(_: Path) -> Parts:
    rows = [
        json.dumps({"step": step, "val/hmean": 0.5 + step / 10, "more": {"loss": 1.5}, "seed": 3}) for step in range(4)
    ]
    return {
        "jsonl/a.jsonl": "\n".join(rows).encode(),
        "json/b.json": f"[{','.join(rows)}]".encode(),
        "csv/c.csv": b"step,val/hmean\n0,0.5\n1,0.6\n2,nan\n",
        "csv/config.yaml": b"seed: 3\nmodel: {name: x}\n",
    }


def make_events(_: Path) -> Parts:
    records = _event_records((DATA / "events.out.tfevents.0.torch").read_bytes())
    return {f"{number:03d}": payload for number, payload in enumerate(records[:12])}


def pack_events(parts: Parts, folder: Path) -> None:
    """Every record gets the checksum of what it holds."""
    (folder / "events.out.tfevents.0").write_bytes(b"".join(event_record(data) for _, data in sorted(parts.items())))


def make_wandb(_: Path) -> Parts:
    records = _wandb_records(gzip.decompress((DATA / "run.wandb.gz").read_bytes()))
    return {f"{number:03d}": payload for number, payload in enumerate(records[:25])}


def pack_wandb(parts: Parts, folder: Path) -> None:
    (folder / "run.wandb").write_bytes(wandb_file([data for _, data in sorted(parts.items())]))


def make_mlflow(_: Path) -> Parts:
    parts = {f"mlruns/{name}": data for name, data in take(DATA / "mlruns").items()}
    return {**parts, "mlflow.sql": (DATA / "mlflow.sql").read_bytes()}


def pack_mlflow(parts: Parts, folder: Path) -> None:
    """The database is made by its SQL."""
    put({name: data for name, data in parts.items() if name != "mlflow.sql"}, folder)
    connection = sqlite3.connect(folder / "mlflow.db")
    with contextlib.suppress(sqlite3.Error, ValueError), connection:
        connection.execute("PRAGMA synchronous = OFF")
        connection.executescript(parts["mlflow.sql"].decode(errors="replace"))
    connection.close()


def compared(*names: str) -> Callable[[Path], object]:
    """Every place compared with another run; the first error last, so that all are read."""

    def read(folder: Path) -> object:
        errors: list[FloatlineError] = []
        (folder / "other").mkdir()
        (folder / "other" / "metrics.csv").write_text("step,val/hmean\n0,0.5\n1,0.6\n2,0.8\n")
        for name in names:
            try:
                result = compare(folder / name, folder / "other", metric="val/hmean", higher_is_better=True)
                str(result), json.dumps(result.as_json())
            except FloatlineError as error:  # noqa: PERF203
                errors.append(error)
        if errors:
            raise errors[0]
        return None

    return read


def event_record(payload: bytes) -> bytes:
    """One record of an event file."""
    head = struct.pack("<Q", len(payload))
    return head + struct.pack("<I", _masked_crc(head)) + payload + struct.pack("<I", _masked_crc(payload))


def _event_records(data: bytes) -> list[bytes]:
    found, place = [], 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        found.append(data[place + 12 : place + 12 + length])
        place += length + 16
    return found


def wandb_file(records: list[bytes], kind: int = 1) -> bytes:
    """A .wandb file of records that fit into one block each."""
    data = bytearray(b":W&B\xe1\xbe\x00")
    for record in records:
        record = record[: 32768 - 7]
        left = 32768 - len(data) % 32768
        if left < len(record) + 7:
            data += bytes(left)
        head = struct.pack("<HB", len(record), kind)
        data += struct.pack("<I", zlib.crc32(record, zlib.crc32(head[2:]))) + head + record
    return bytes(data)


def _wandb_records(data: bytes) -> list[bytes]:
    found, place = [], 7
    while place + 7 <= len(data):
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if kind == 1:  # whole: the others are pieces of what is no metric
            found.append(data[place + 7 : place + 7 + length])
        place += 7 + length
    return found


# Logs given to explain, and what lint reads.


def make_log(_: Path) -> Parts:
    lines = (
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "RuntimeError: value cannot be converted to type at::Half without overflow",
        "step 10 loss nan scale 65536.0 Gradient overflow. Skipping step, loss scaler 0 reducing loss scale to 32768",
        "RuntimeError: Function 'LogBackward0' returned nan values in its 0th output.",
    )
    return {"log.txt": "\n".join(lines).encode()}


def read_log(folder: Path) -> object:
    return _answer((folder / "log.txt").read_bytes().decode(errors="replace") or "x")


def make_sources(_: Path) -> Parts:
    code = """import torch
from torch.cuda.amp import GradScaler
scaler = GradScaler()
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-8)
for x, y in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        p = torch.softmax(model(x), 1)
        loss = -(torch.log(p + 1e-8) * y).sum() / x.half().sum()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
"""
    deepspeed = {"fp16": {"enabled": True, "loss_scale": 1.0, "initial_scale_power": 32}, "bf16": {"enabled": True}}
    trainer = "trainer:\n  precision: 16-mixed\n  gradient_clip_val: 0\nfp16: true\nbf16: true\nadam_epsilon: 1e-8\n"
    toml = '[training]\nfp16 = true\nbf16 = true\n[optimizer]\nname = "adamw"\neps = 1e-8\n'
    entry = {"file": "a.py", "code": "FL101", "text": "x = 1", "count": 1}
    return {
        "train.py": code.encode(),
        "ds_config.json": json.dumps(deepspeed, indent=1).encode(),
        "trainer.yaml": trainer.encode(),
        "settings.toml": toml.encode(),
        "pyproject.toml": b'[tool.floatline.lint]\nselect = ["FL1"]\nexclude = ["a/*"]\n',
        "baseline.json": json.dumps({"floatline_baseline": 1, "findings": [entry]}).encode(),
    }


_RULES = choose_rules((), ())


def read_sources(folder: Path) -> object:
    with contextlib.suppress(FloatlineError):
        read_settings(folder)
    with contextlib.suppress(FloatlineError):
        read_baseline(folder / "baseline.json")
    valid = make_sources(folder)
    for path in (folder / name for name in ("train.py", "ds_config.json", "trainer.yaml", "settings.toml")):
        if path.read_bytes() == valid[path.name]:
            continue  # a rule takes longer than a reader, and these were looked at
        for one in lint_text(path.read_bytes().decode(errors="replace"), path.name, rules=_RULES):
            str(one), one.text
    return None


METRICS = ("validate/metric", "validate/found", "validate/finished")
READERS = {
    reader.name: reader
    for reader in (
        Reader("bundle", make_bundle, read_any_bundle, ("probe/bundle", "guard/plain_values"), pack_bundle),
        Reader("trace", make_trace, lambda folder: Trace.load(folder / "step.npz"), ("probe/trace",), pack_trace),
        Reader(
            "checkpoint", make_checkpoint, read_checkpoint, ("guard/run_files", "guard/plain_values"), pack_checkpoint
        ),
        Reader("kept", make_kept, read_kept, ("salvage/kept", "salvage/stage_data", "validate/plain")),
        Reader("ledger", make_ledger, read_ledger, ("ledger/", "report/run_")),
        Reader(
            "settings",
            make_settings,
            read_all_settings,
            ("plan/", "workload/", "training/"),
            tokens=TOKENS + YAML_TOKENS,
        ),
        Reader(
            "approvals", make_approvals, read_approvals, ("validate/approval", "plan/"), tokens=TOKENS + YAML_TOKENS
        ),
        Reader("study", make_study, read_study, ("validate/", "report/validation")),
        Reader("texts", make_texts, compared("jsonl", "json", "csv"), METRICS, tokens=TOKENS + YAML_TOKENS),
        Reader("events", make_events, compared("events.out.tfevents.0"), METRICS, pack_events),
        Reader("wandb", make_wandb, compared("run.wandb"), METRICS, pack_wandb),
        Reader("mlflow", make_mlflow, compared("mlflow.db", "mlruns"), METRICS, pack_mlflow),
        Reader("log", make_log, read_log, ("causes/", "cli/explain"), tokens=TOKENS + CODE_TOKENS),
        Reader("sources", make_sources, read_sources, ("lint/",), tokens=TOKENS + YAML_TOKENS + CODE_TOKENS),
    )
}

if sys.platform == "win32":  # pragma: no cover - links and limits on memory are those of POSIX
    raise ImportError("these tests need POSIX")
