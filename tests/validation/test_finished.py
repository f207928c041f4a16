"""Finished runs compared: found in folders, paired by seed where possible."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.preloaded import COMMAND, run_preloaded

from floatline.errors import ComparisonError
from floatline.ledger.ledger import Ledger
from floatline.validation.finished import compare
from floatline.validation.verdict.pairs import ArmRun, settle_direction


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def noise(seed: int) -> float:
    return 0.01 * ((seed * 37) % 11 - 5)


def runs(root: Path, *, worse: float = 0.0, seeds=range(5), name="seed_{seed}/metrics.jsonl") -> Path:
    for seed in seeds:
        end = 2.0 + noise(seed) + worse + 0.0001 * (seed % 3)
        rows = [{"step": step, "val/loss": end + 1 / step} for step in (10, 20, 40)]
        write(root / name.format(seed=seed), "".join(json.dumps(row) + "\n" for row in rows))
    return root


def test_runs_are_paired_by_the_seed_in_their_folders(tmp_path):
    a, b = runs(tmp_path / "fp32"), runs(tmp_path / "fp16", worse=0.001)
    result = compare(a, b, metric="val/loss")
    assert (result.verdict, result.paired, result.seeds) == ("PASS", True, (0, 1, 2, 3, 4))
    assert (result.terms.margins, result.terms.looks) == ((0.01, 0.02), (5,))
    assert result.band is not None


def test_the_same_runs_without_seeds_have_the_wider_interval(tmp_path):
    a, b = runs(tmp_path / "fp32"), runs(tmp_path / "fp16", worse=0.001)
    paired = compare(a, b, metric="val/loss")
    c = runs(tmp_path / "c", name="run{seed}/metrics.jsonl")
    d = runs(tmp_path / "d", worse=0.001, name="run{seed}/metrics.jsonl")
    unpaired = compare(c, d, metric="val/loss")
    assert not unpaired.paired
    assert "seeds in" in unpaired.notes[0] and "are not known" in unpaired.notes[0]

    def width(result):
        return result.interval[1] - result.interval[0]

    assert width(unpaired) > 3 * width(paired)


def test_a_candidate_that_is_three_percent_worse_fails(tmp_path):
    a, b = runs(tmp_path / "fp32"), runs(tmp_path / "fp16", worse=0.06)
    assert compare(a, b, metric="val/loss").verdict == "FAIL"
    assert compare(a, b, metric="val/loss", margins=(0.05, 0.1)).verdict == "PASS"


def test_two_seeds_are_refused(tmp_path):
    a, b = runs(tmp_path / "fp32", seeds=range(2)), runs(tmp_path / "fp16", seeds=range(2))
    result = compare(a, b, metric="val/loss", margins=(0.01, 0.02))
    assert result.verdict == "REFUSED"


def test_seeds_that_only_one_side_has_are_left_out_and_named(tmp_path):
    a, b = runs(tmp_path / "fp32", seeds=range(4)), runs(tmp_path / "fp16", worse=0.001, seeds=range(1, 6))
    result = compare(a, b, metric="val/loss")
    assert (result.paired, result.seeds) == (True, (1, 2, 3))
    assert any("seeds 0, 4, 5 are in one arm only" in note for note in result.notes)


def test_sides_that_share_too_few_seeds_are_not_paired(tmp_path):
    a, b = runs(tmp_path / "fp32", seeds=range(4)), runs(tmp_path / "fp16", seeds=range(3, 8))
    result = compare(a, b, metric="val/loss")
    assert not result.paired
    assert "only 1 seeds are on both sides" in result.notes[0]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "lr: 0.1\nseed: {seed}\n"),
        ("config.json", '{{"seed": {seed}}}'),
        ("hparams.yaml", "seed: {seed}\n"),
        (".hydra/config.yaml", "seed: {seed}\n"),
        ("config.yaml", "seed:\n  value: {seed}\n"),
    ],
)
def test_the_seed_is_read_from_a_settings_file(tmp_path, file, text):
    for side, worse in (("a", 0.0), ("b", 0.001)):
        root = runs(tmp_path / side, worse=worse, seeds=range(3), name="run{seed}/metrics.jsonl")
        for seed in range(3):
            write(root / f"run{seed}" / file, text.format(seed=seed + 10))
    assert compare(tmp_path / "a", tmp_path / "b", metric="val/loss").seeds == (10, 11, 12)


@pytest.mark.parametrize("name", ["seed_{seed}.jsonl", "deep/er/seed={seed}/m.jsonl", "SEED{seed}/x/y/m.jsonl"])
def test_seeds_in_names_of_files_and_folders_are_read(tmp_path, name):
    a, b = runs(tmp_path / "a", name=name), runs(tmp_path / "b", worse=0.001, name=name)
    assert compare(a, b, metric="val/loss").seeds == (0, 1, 2, 3, 4)


def test_several_files_of_one_run_are_one_run(tmp_path):
    for side, worse in (("a", 0.0), ("b", 0.001)):
        root = runs(tmp_path / side, worse=worse, seeds=range(3))
        for seed in range(3):
            last = json.loads((root / f"seed_{seed}" / "metrics.jsonl").read_text().splitlines()[-1])["val/loss"]
            write(root / f"seed_{seed}" / "logs" / "summary.json", json.dumps({"val/loss": last}))
    assert compare(tmp_path / "a", tmp_path / "b", metric="val/loss").seeds == (0, 1, 2)


def study(root: Path, *, worse: float = 0.001, verdict_of=None) -> Path:
    write(root / "study.json", "{}")
    for arm, shift in (("fp32", 0.0), ("fp16-mixed", worse)):
        for seed in range(3):
            run = ArmRun(arm, seed, 2.0 + noise(seed) + shift + 0.0001 * seed, start=6.0, steps=100, applied=100)
            write(root / "runs" / arm / f"{seed}.json", json.dumps(run.as_json()))
    return root


def test_a_study_is_compared_with_itself_or_arm_by_arm(tmp_path):
    root = study(tmp_path / "s")
    assert compare(root, root).verdict == "PASS"
    assert compare(root / "runs" / "fp32", root / "runs" / "fp16-mixed").verdict == "PASS"
    bad = study(tmp_path / "t", worse=0.1)
    assert compare(bad, bad).verdict == "FAIL"


def test_the_broken_arm_of_a_study_still_counts(tmp_path):
    root = study(tmp_path / "s")
    for seed in range(3):
        run = ArmRun("broken", seed, 2.0 + noise(seed) + 0.0001 * seed, start=6.0, steps=100, applied=100)
        write(root / "runs" / "broken" / f"{seed}.json", json.dumps(run.as_json()))
    result = compare(root, root)
    assert result.verdict == "REFUSED"
    assert "broken candidate passes" in result.reason


def test_a_study_with_several_candidates_asks_for_one(tmp_path):
    root = study(tmp_path / "s")
    write(root / "runs" / "bf16-mixed" / "0.json", json.dumps(ArmRun("bf16-mixed", 0, 2.0).as_json()))
    with pytest.raises(ComparisonError, match="has 2 such arms. Name the folder of one"):
        compare(root, root)


def ledger(folder: Path, losses) -> Path:
    with Ledger.create(folder) as book:
        for loss in losses:
            book.append(applied=True, loss=loss)
    return folder


def falling(seed: int, shift: float = 0.0) -> list[float]:
    return [1.0 + 5.0 / (step + 1) + noise(seed) + shift for step in range(60)]


def test_run_folders_with_ledgers_are_compared_by_their_training_loss(tmp_path):
    for seed in range(3):
        ledger(tmp_path / "fp32" / f"seed_{seed}", falling(seed))
        ledger(tmp_path / "fp16" / f"seed_{seed}", falling(seed, 1e-4 * (seed + 1)))
    result = compare(tmp_path / "fp32", tmp_path / "fp16")
    assert (result.verdict, result.terms.metric) == ("PASS", "loss")
    assert any(gate.name == "same-start" and gate.passed for gate in result.gates)
    with pytest.raises(ComparisonError, match="ledger, which has no metric 'val/hmean'"):
        compare(tmp_path / "fp32", tmp_path / "fp16", metric="val/hmean", higher_is_better=True)


def test_a_run_whose_ledger_lies_below_its_metrics_is_compared_by_either(tmp_path):
    for arm, h_mean in (("fp32", 0.8863), ("fp16", 0.7816)):
        ledger(tmp_path / arm / "seed_0" / "floatline", falling(0))
        write(tmp_path / arm / "seed_0" / "metrics.csv", f"step,val/hmean\n1,0.1\n2,{h_mean}\n")
    sides = tmp_path / "fp32" / "seed_0", tmp_path / "fp16" / "seed_0"
    assert compare(*sides, metric="val/hmean", higher_is_better=True).means == pytest.approx((0.8863, 0.7816))
    assert compare(*sides).terms.metric == "loss"
    with pytest.raises(ComparisonError, match="ledger, which has no metric 'val/recall'"):
        compare(*sides, metric="val/recall", higher_is_better=True)


def test_a_loss_that_is_not_finite_in_a_ledger_is_a_divergence(tmp_path):
    for seed in range(3):
        ledger(tmp_path / "fp32" / f"seed_{seed}", falling(seed))
        ledger(tmp_path / "fp16" / f"seed_{seed}", [*falling(seed, 1e-4), float("nan")])
    result = compare(tmp_path / "fp32", tmp_path / "fp16")
    assert (result.verdict, "diverged in 3 of 3" in result.reason) == ("FAIL", True)


def test_a_ledger_that_was_never_closed_is_no_finished_run(tmp_path):
    for seed in range(3):
        ledger(tmp_path / "fp32" / f"seed_{seed}", falling(seed))
        with Ledger.create(tmp_path / "under_way") as book:
            for loss in falling(seed, 1e-4):
                book.append(applied=True, loss=loss)
            book.flush()
            shutil.copytree(tmp_path / "under_way", tmp_path / "fp16" / f"seed_{seed}")
        shutil.rmtree(tmp_path / "under_way")
    result = compare(tmp_path / "fp32", tmp_path / "fp16")
    assert (result.verdict, "not closed" in result.reason) == ("REFUSED", True)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda p: None, {}, "is not there"),
        (lambda p: p.mkdir(), {"metric": "a"}, "no file with metrics"),
        (lambda p: runs(p), {}, "Say which one to compare: --metric"),
        (lambda p: runs(p), {"metric": "val/los"}, "Did you mean 'val/loss'"),
        (lambda p: runs(p), {"metric": "val/loss", "margins": (0.0, 0.0)}, "do not rise from above 0"),
    ],
)
def test_what_cannot_be_compared_says_why(tmp_path, make, options, message):
    make(tmp_path / "a")
    runs(tmp_path / "b")
    with pytest.raises(ComparisonError, match=message):
        compare(tmp_path / "a", tmp_path / "b", **options)


def test_a_folder_is_not_compared_with_itself(tmp_path):
    runs(tmp_path / "a")
    with pytest.raises(ComparisonError, match="Both sides are"):
        compare(tmp_path / "a", tmp_path / "a", metric="val/loss")


@pytest.mark.parametrize("metric", ["val/hmean", "test_acc", "eval/f1", "AUC", "mAP", "top5"])
def test_a_metric_that_reads_like_higher_is_better_is_not_guessed(metric):
    with pytest.raises(ComparisonError, match="--higher-is-better or --lower-is-better"):
        settle_direction(metric, None)
    assert settle_direction(metric, True)


@pytest.mark.parametrize("metric", ["val/loss", "precision_loss", "perplexity", "wer", "metric"])
def test_a_metric_that_reads_like_lower_is_better_is_taken_so(metric):
    assert settle_direction(metric, None) is False


def command(*words: str) -> subprocess.CompletedProcess:
    return run_preloaded(["-c", COMMAND, "compare", *words])


def test_the_command_says_the_thresholds_and_exits_with_the_verdict(tmp_path):
    a, b, c = runs(tmp_path / "a"), runs(tmp_path / "b", worse=0.001), runs(tmp_path / "c", worse=0.06)
    good = command(str(a), str(b), "--metric", "val/loss")
    assert (good.returncode, good.stderr) == (0, "")
    assert "PASS" in good.stdout and "1.00 % and 2.00 %" in good.stdout
    bad = command(str(a), str(c), "--metric", "val/loss", "--format", "json")
    assert bad.returncode == 1
    fields = json.loads(bad.stdout)
    assert (fields["verdict"], fields["margin"], fields["paired"]) == ("FAIL", 0.01, True)
    assert command(str(a), str(c), "--metric", "val/loss", "--margin", "0.05", "0.1").returncode == 0
    wrong = command(str(a), str(tmp_path / "none"), "--metric", "val/loss")
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def h_means(root: Path, *values: float, paired: bool = True) -> Path:
    for seed, value in enumerate(values):
        folder = root / (f"seed_{seed}" if paired else f"run{seed}")
        write(folder / "metrics.json", json.dumps({"val/hmean": value}))
    return root


def test_both_values_are_told_beside_the_difference(tmp_path):
    a, b = h_means(tmp_path / "fp32", 0.89, 0.9, 0.91), h_means(tmp_path / "fp16", 0.60, 0.61, 0.62)
    told = command(str(a), str(b), "--metric", "val/hmean", "--higher-is-better").stdout
    assert f"  values     0.9 in {a}, 0.61 in {b}: mean val/hmean\n" in told
    result = compare(a, b, metric="val/hmean", higher_is_better=True)
    assert result.means == pytest.approx((0.9, 0.61))
    assert result.means == pytest.approx(result.as_json()["means"])


def test_values_are_of_the_seeds_that_are_compared(tmp_path):
    a, b = h_means(tmp_path / "a", 0.89, 0.9, 0.91, 0.1), h_means(tmp_path / "b", 0.60, 0.61, 0.62)
    assert compare(a, b, metric="val/hmean", higher_is_better=True).means == pytest.approx((0.9, 0.61))
    c = h_means(tmp_path / "c", 0.89, 0.9, 0.91, 0.1, paired=False)
    assert compare(c, b, metric="val/hmean", higher_is_better=True).means == pytest.approx((0.7, 0.61))


def test_one_run_against_one_is_refused_with_both_values(tmp_path):
    a, b = h_means(tmp_path / "a", 0.8863, paired=False), h_means(tmp_path / "b", 0.7816, paired=False)
    told = command(str(a), str(b), "--metric", "val/hmean", "--higher-is-better").stdout
    assert "REFUSED" in told and f"0.8863 in {a}, 0.7816 in {b}" in told
    broken = h_means(tmp_path / "c", math.nan, 0.7, paired=False)
    assert f"NaN in {broken}" in str(compare(a, broken, metric="val/hmean", higher_is_better=True))


def test_the_direction_decides_what_is_worse(tmp_path):
    a, b = runs(tmp_path / "a"), runs(tmp_path / "b", worse=0.06)
    assert command(str(a), str(b), "--metric", "val/loss", "--higher-is-better").returncode == 0
    assert command(str(a), str(b), "--metric", "val/loss", "--lower-is-better").returncode == 1
