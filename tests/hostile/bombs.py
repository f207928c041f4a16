"""Small files that claim or become much, each read in a process that may take little memory more than it has.

Prints one JSON object: for each bomb what came of it, and how many bytes more the process held at its worst.
"""

import contextlib
import io
import json
import os
import resource
import sqlite3
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import save_file
from tests.hostile.artefacts import READERS, npy, put, wandb_file
from tests.hostile.trying import lay_out

from floatline.cli.explain import _read_end
from floatline.errors import FloatlineError
from floatline.guard.checkpoints.run_files import load_checkpoint
from floatline.lint import lint_text
from floatline.lint.rules import choose_rules
from floatline.plans import Plan
from floatline.probe.trace.trace import Trace
from floatline.validation.metrics import mlflow
from floatline.validation.signoff.records import APPROVALS, read_records
from floatline.workload.config import parse_pairs

ROOM = 600 << 20  # bytes beyond what the imports took
LAUGHS = "".join(
    [f"a0: &a0 [{', '.join(['x'] * 9)}]\n", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))]
)
MERGES = "".join(
    ["a0: &a0 {k: 1}\n", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12))]
)


def bombs(folder: Path):
    """Name and what to call."""
    yield (
        "plan of aliases",
        lambda: Plan.load(_text(folder / "laughs.yaml", f"{LAUGHS}name: *a11\nweights: fp32\ncompute: fp32\n")),
    )
    yield "plan of merges", lambda: Plan.load(_text(folder / "merges.yaml", f"{MERGES}weights: fp32\n"))
    yield "setting of aliases", lambda: parse_pairs(["x={" + ", ".join(LAUGHS.strip().split("\n")) + "}"])
    _text(
        folder / "signed" / APPROVALS,
        "- &a0 [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
    )
    yield "sign-offs of aliases", lambda: read_records(folder / "signed")
    yield "plan that is too large", lambda: Plan.load(_text(folder / "large.yaml", "x: 1\n" * 2_000_000))
    yield "lint of aliases", lambda: lint_text(f"fp16: true\n{LAUGHS}", "a.yaml", rules=choose_rules((), ()))
    yield "lint of merges", lambda: lint_text(f"fp16: true\n{MERGES}", "a.yaml", rules=choose_rules((), ()))

    archive = zipfile.ZipFile(folder / "zeros.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("json.npy", "w", force_zip64=True) as member:
        member.write(npy(b"", shape=f"({400 << 20},)"))
        for _ in range(400):
            member.write(bytes(1 << 20))
    yield "trace that unpacks to 400 MiB", lambda: Trace.load(folder / "zeros.npz")
    with zipfile.ZipFile(folder / "claims.npz", "w") as archive:
        archive.writestr("json.npy", npy(b"{}", shape="(1099511627776,)"))
    yield "trace that claims 1 TiB", lambda: Trace.load(folder / "claims.npz")

    yield (
        "checkpoint of 400 copies",
        lambda: _checkpoint(
            folder / "copies",
            {f"n{i}": {"key": "w", "strides": [1, 2048]} for i in range(400)},
            torch.zeros(2048, 2048),
        ),
    )
    yield (
        "checkpoint of huge strides",
        lambda: _checkpoint(folder / "strides", {"w": {"key": "w", "strides": [1 << 40, 1]}}, torch.zeros(8, 8)),
    )
    yield (
        "checkpoint of a huge shape",
        lambda: _checkpoint(
            folder / "shape",
            {"w": {"key": "w", "dtype": "float8_e4m3fn", "shape": [1 << 40]}},
            torch.zeros(8, dtype=torch.uint8),
        ),
    )
    head = struct.pack("<Q", 1 << 62) + b"{}"
    yield "checkpoint with a head of 4 EiB", lambda: _checkpoint(folder / "head", {}, torch.zeros(1), raw=head)

    (folder / "chunks").mkdir()
    (folder / "chunks" / "run.wandb").write_bytes(wandb_file([b""] * 100_000, kind=3))
    yield "W&B run of 100,000 empty pieces", lambda: READERS["wandb"].read(folder / "chunks")
    for name, view in {
        "that never ends": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
        "SELECT i AS run_uuid, i AS start_time, 'active' AS lifecycle_stage FROM n",
        "of huge texts": "SELECT hex(zeroblob(400000000)) AS run_uuid, 1 AS start_time, 'active' AS lifecycle_stage",
    }.items():
        path = folder / name.replace(" ", "-") / "mlflow.db"
        path.parent.mkdir()
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"CREATE VIEW runs AS {view}")
        yield f"database {name}", lambda path=path: mlflow.read_database(path)

    for name in ("bundle", "checkpoint", "kept", "ledger", "study", "texts"):
        reader = READERS[name]
        (folder / name / "made").mkdir(parents=True)
        parts = reader.make(folder / name / "made")
        deep = b"[" * 1_000_000
        nested = {part: deep if part.endswith((".json", ".jsonl")) else data for part, data in parts.items()}
        lay_out(reader, parts, folder / name / "try")
        put(nested, folder / name / "try")
        yield f"{name} of a million brackets", lambda reader=reader, name=name: reader.read(folder / name / "try")

    yield "log of 1 GiB", lambda: len(_read_end(_Endless(1 << 30)))


class _Endless(io.RawIOBase):
    def __init__(self, size: int) -> None:
        self._left = size

    def read(self, size: int = -1) -> bytes:
        if size < 0:
            return bytes(self._left)
        size = min(size, self._left)
        self._left -= size
        return b"x" * size


def _text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def _checkpoint(folder: Path, forms: dict, tensor: torch.Tensor, raw: bytes = b"") -> object:
    import hashlib

    folder.mkdir()
    save_file({"w": tensor}, folder / "tensors.safetensors")
    if raw:
        (folder / "tensors.safetensors").write_bytes(raw)
    digest = hashlib.sha256((folder / "tensors.safetensors").read_bytes()).hexdigest()
    fields = {"schema": 1, "floatline": "0", "number": 1, "tensors_sha256": digest, "forms": forms, "state": {}}
    own = hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).hexdigest()
    (folder / "state.json").write_text(json.dumps({"state_sha256": own, **fields}))
    return load_checkpoint(folder)


def main() -> None:
    mlflow.MOST_STEPS = 20_000_000  # a hundredth, for the test
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        made = bombs(Path(name))
        size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
        for what, read in made:
            try:
                found[what] = f"read: {read()!r:.60}"
            except FloatlineError as error:  # noqa: PERF203
                found[what] = f"refused: {error}"
            except BaseException as error:
                found[what] = f"{type(error).__name__}: {error!s:.200}"
        try:
            bytearray(2 * ROOM)
        except MemoryError:
            found["the limit"] = "is there"
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
