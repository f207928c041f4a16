"""measure_script: a script runs as it is until one of its steps is measured, and gives its manifest. Without torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from floatline.errors import ManifestError
from floatline.manifests.difference import compare_ranks
from floatline.manifests.facts import ManifestFacts
from floatline.manifests.judge import DIGEST, LOSS, NOT_MEASURED, SEED
from floatline.manifests.manifest import Manifest, read_manifest
from floatline.manifests.rows import RankRow
from floatline.running.command import ENDED_BY, parse_launched, pass_on_ending, run_to_end
from floatline.running.ranks import find_ranks

_MAIN = "floatline.manifests.script_main"


def measure_script(
    words: Sequence[str],
    *,
    steps: int = 1,
    keep_stdout: bool = False,
    as_device: Literal["cuda"] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Manifest, ...]:
    """Run a command until one of its steps is measured, and end it there; gives the manifest of each process.

    Args:
        words: The command: 'python', 'train.py' and so on, or 'torchrun' and what it starts.
        steps: Number of the applied step that is measured. One in which every learning rate is 0 is passed over.
        keep_stdout: Whether what the script prints goes to stderr.
        as_device: 'cuda' runs a script that is written for a GPU on the CPU, as a GPU would, where there is none.
        on_progress: Told what is done next.

    Raises:
        TargetError: The command runs no Python code, or its interpreter lacks what floatline needs.
        ManifestError: The script ended before that step, or one of its processes did.
    """
    command = parse_launched(list(words))
    command.check_interpreter()
    if on_progress is not None:
        on_progress(f"running the script until its step {steps} is applied and measured")
    job = json.dumps({"steps": steps, "device": as_device or ""}, allow_nan=False)
    with tempfile.TemporaryDirectory(prefix="floatline-") as folder:
        report = Path(folder) / "report.json"
        code = run_to_end(command.inside(_MAIN, str(report), job), keep_stdout=keep_stdout)
        written = sorted(find_ranks(report).items(), key=lambda item: item[1].stat().st_mtime_ns)
        seen = {rank: _read(path) for rank, path in written}
    missing = seen.get(0, {}).get("missing")
    if missing:
        raise command.lacks(missing)
    found = {rank: read_manifest(one["manifest"]) for rank, one in sorted(seen.items()) if one["manifest"]}
    if not found:
        pass_on_ending(code)
    if not found or len(found) < len(seen):
        raise ManifestError(_explain(seen, code, steps, launched=bool(command.launcher)))
    num = max(one.num_ranks for one in found.values())
    if code:  # a process is missing, or did something else than train
        lost = ", ".join(str(rank) for rank in range(num) if rank not in found)
        which = f"Rank {lost}" if lost else "A process"
        raise ManifestError(f"{which} ended with an error before its step was measured. Its own words are above.")
    return combine_ranks(found)


def combine_ranks(found: Mapping[int, Manifest]) -> tuple[Manifest, ...]:
    """The manifests by rank; the first has what the others do not have as it does."""
    first, *others = (found[rank] for rank in sorted(found))
    rows = tuple(row for other in others for row in _tell_apart(first, other))
    own = {(one.loss, one.digest, one.num_collectives) for one in found.values()}
    alone = len(found) > 1 and own == {(first.loss, first.digest, 0)} and first.loss is not None
    return replace(first, apart=rows, alone=alone), *others


def _tell_apart(first: ManifestFacts, other: ManifestFacts) -> Iterator[RankRow]:
    for row in compare_ranks(first, other):
        yield RankRow(other.rank, row.what, row.a, row.b)
    if first.num_ranks != other.num_ranks:
        yield RankRow(other.rank, "processes", str(first.num_ranks), str(other.num_ranks))
    if first.seed != other.seed:
        yield RankRow(other.rank, SEED, str(first.seed), str(other.seed))
    names, values = zip(*(one.digest.split("-") for one in (first, other)), strict=True)
    if names[0] == names[1] and values[0] != values[1]:
        yield RankRow(other.rank, DIGEST, first.digest, other.digest)
    if first.bad_loss != other.bad_loss:
        yield RankRow(other.rank, LOSS, _say_bad_loss(first.bad_loss), _say_bad_loss(other.bad_loss))


def _say_bad_loss(step: int | None) -> str:
    """Where a loss was not finite first."""
    return "finite" if step is None else f"not finite at step {step}"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _explain(seen: dict[int, dict[str, Any]], code: int, steps: int, *, launched: bool) -> str:
    """Why there is no manifest, and what to do."""
    without = {rank: one for rank, one in seen.items() if not one["manifest"]}  # who ended first comes first
    if not without:
        again = "The same command begins again." if code in ENDED_BY else "Run it without floatline first."
        return f"{_say_end('The script', code)} before floatline could sum it up. {again}"
    rank, one = max(without.items(), key=lambda item: bool(item[1]["exit_code"]))  # what failed tells why
    ended = _say_end(f"Rank {rank}" if launched else "The script", one["exit_code"])
    silent = [str(number) for number in range(one["num_beside"]) if number not in seen]
    bad = {rank: one["bad_loss"] for rank, one in without.items() if one["bad_loss"] is not None}
    if bad and not one["num_steps"]:
        first = min(bad, key=lambda rank: bad[rank])
        whose = f"that of rank {first}" if len(seen) > 1 else "it"
        finite = [str(rank) for rank in seen if rank not in bad]
        others = f", those of rank {', '.join(finite)} were finite, so that it came before the reduction" * bool(finite)
        skipped = f"all {one['num_skipped']} steps were left out by the scaler, and " if one["num_skipped"] else ""
        return (
            f"No step was applied: {skipped}the loss is not finite, {whose} from step {bad[first]} on{others}. Run "
            "floatline diagnose."
        )
    failed = [note for note in one["notes"] if note.startswith(NOT_MEASURED)]
    if failed:
        why = failed[0].removeprefix(NOT_MEASURED)
        return f"{ended}, and its step could not be measured: {why}. Try another with --steps."
    num = one["num_steps"]
    if not num:
        check = "Its own words are above." if one["exit_code"] else "Check that it trains."
        others = f"Rank {', '.join(silent)} left no word: killed, or ended by os._exit. " * bool(silent)
        return f"{ended} before an optimizer of torch made a step. {others}{check}"
    what = "The same command begins again." if one["exit_code"] in ENDED_BY else "Lower --steps."
    return f"{ended} after {num} applied step{'s' * (num > 1)}, before step {steps} could be measured. {what}"


def _say_end(who: str, code: int) -> str:
    if code in ENDED_BY:
        return f"{who} was ended by {ENDED_BY[code]}"
    return f"{who} ended with exit code {code}" if code else f"{who} came to its end"
