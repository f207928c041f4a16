"""Commands from outside: run untouched, without a shell, each seed in a folder of its own."""

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from floatline.errors import ComparisonError
from floatline.validation.running.processes import ProcessRunner
from floatline.validation.study.commands import CommandArm, check_command, command_arms, fill_in, run_job
from floatline.validation.verdict.terms import Terms
from floatline.validation.verdict.verdict import decide

PYTHON = shlex.quote(sys.executable)
SCRIPT = """
import json, sys
args = dict(word.split("=", 1) for word in sys.argv[1:])
seed, precision = int(args["seed"]), args["precision"]
worse = {"32": 0.0, "16": float(args.get("worse", "0.0001"))}[precision]
rows = [{"step": s, "val/hmean": 0.5 + 0.01 * s + 0.001 * seed - worse} for s in range(10)]
print("training")
if "out" in args:
    with open(args["out"], "w") as file:
        file.writelines(json.dumps(row) + "\\n" for row in rows)
else:
    print(json.dumps(rows[-1]))
print("done")
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def arm(place: Path, command: str, **options) -> CommandArm:
    words = f"{PYTHON} {command}"
    check_command(words, place)
    return CommandArm("own", words, options.pop("metric", "val/hmean"), place / "study", place, **options)


def test_the_metric_is_read_from_the_last_json_line_of_stdout(place):
    run = run_job(arm(place, "train.py precision=32 seed={seed}").job(4))
    assert (run.arm, run.seed, run.error) == ("own", 4, "")
    assert run.metric == pytest.approx(0.594)
    assert run.seconds is not None
    kept = place / "study" / "commands" / "own" / "4"
    assert (kept / "stdout.txt").read_text().startswith("training\n")
    assert (kept / "stderr.txt").read_text() == ""


def test_the_curve_is_read_from_a_file_in_the_runs_folder(place):
    run = run_job(arm(place, "train.py precision=32 seed={seed} out={folder}/m.jsonl").job(0))
    assert run.curve[0] == (0, 0.5)
    assert len(run.curve) == 10
    assert run.metric == run.curve[-1][1]
    assert run.start is None


def test_the_curve_is_read_from_a_file_in_the_working_folder(place):
    run = run_job(arm(place, "train.py precision=32 seed={seed} out=m.jsonl").job(0))
    assert len(run.curve) == 10


def test_a_file_of_an_earlier_run_is_not_this_runs_result(place):
    (place / "old.jsonl").write_text('{"val/hmean": 99}\n')
    assert run_job(arm(place, "train.py precision=32 seed={seed}").job(0)).metric < 1
    with pytest.raises(ComparisonError, match="'old.jsonl' is there, but was not written by this run"):
        run_job(arm(place, "train.py precision=32 seed={seed}", metric_file="old.jsonl").job(0))
    with pytest.raises(ComparisonError, match="'none.jsonl' matches no file"):
        run_job(arm(place, "train.py precision=32 seed={seed}", metric_file="none.jsonl").job(0))


def test_a_pattern_says_which_file_and_takes_the_seed(place):
    command = "train.py precision=32 seed={seed} out=out_{seed}.jsonl"
    run = run_job(arm(place, command, metric_file="out_{seed}.jsonl").job(7))
    assert run.metric == pytest.approx(0.597)


def test_a_second_try_of_a_seed_leaves_the_first_alone(place):
    job = arm(place, "train.py precision=32 seed={seed}").job(4)
    run_job(job)
    run_job(job)
    assert sorted(p.name for p in (place / "study" / "commands" / "own").iterdir()) == ["4", "4-2"]


def test_a_flat_curve_starts_where_it_ends(place):
    code = "import json; [print(json.dumps(dict(step=s, a=0.5))) for s in range(3)] # {seed}"
    run = run_job(arm(place, f"-c {shlex.quote(code)}", metric="a").job(0))
    assert (run.start, run.metric) == (0.5, 0.5)


def test_words_go_to_the_program_as_they_are_without_a_shell(place):
    code = "import sys, json; print(json.dumps(dict(a=len(sys.argv)))); open('argv', 'w').write(repr(sys.argv[1:]))"
    command = f"-c {shlex.quote(code)} 'a b' '$HOME;rm -rf x' '{{other}}' x={{seed}}y ';' '|' '&&'"
    assert run_job(arm(place, command, metric="a").job(3)).metric == 8
    expected = ["a b", "$HOME;rm -rf x", "{other}", "x=3y", ";", "|", "&&"]
    assert (place / "argv").read_text() == repr(expected)


def test_what_is_filled_in_is_not_filled_in_again():
    assert fill_in("{folder}-{seed}-{{seed}}-{x}", seed=3, folder=Path("/a/{seed}")) == "/a/{seed}-3-{3}-{x}"


def test_a_command_that_fails_gives_a_run_with_its_last_error_line(place):
    run = run_job(arm(place, "-c 'raise SystemExit(\"no GPU {seed}\")'").job(1))
    assert math.isnan(run.metric)
    assert "exit code 1: no GPU 1; see" in run.error


def test_a_command_that_is_killed_says_so(place):
    run = run_job(arm(place, f"-c 'import os; os.kill(os.getpid(), {int(signal.SIGKILL)}) # {{seed}}'").job(1))
    assert "ended by signal 9" in run.error


def test_a_metric_that_is_not_there_names_the_nearest(place):
    with pytest.raises(ComparisonError, match="'val/hmaen' was not found .* Did you mean 'val/hmean'"):
        run_job(arm(place, "train.py precision=32 seed={seed}", metric="val/hmaen").job(0))


def test_a_command_that_writes_nothing_is_told_what_to_write(place):
    with pytest.raises(ComparisonError, match="No metric was found in what .* TensorBoard"):
        run_job(arm(place, "-c 'print({seed})'").job(0))


def test_a_damaged_file_is_named_where_the_metric_is_not_found_elsewhere(place):
    code = "open('m.jsonl', 'w').write('oops\\n') # {seed}"
    with pytest.raises(ComparisonError, match="No metric was found .* Also: .*m.jsonl' line 1 is not a JSON object"):
        run_job(arm(place, f"-c {shlex.quote(code)}").job(0))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "is empty"),
        ("python 'train.py {seed}", "cannot be split: No closing quotation"),
        ("python train.py seed=3", r"has no \{seed\}, so that all its runs would be the same"),
        ("no-such-program {seed}", "'no-such-program' is not found"),
        ("./no-such-script {seed}", "'./no-such-script' is not found"),
    ],
)
def test_a_command_that_cannot_be_run_is_refused_before_anything_runs(command, message, tmp_path):
    with pytest.raises(ComparisonError, match=message):
        check_command(command, tmp_path)


def test_a_program_is_looked_for_from_where_the_command_runs(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\necho '{\"a\": 1}'\n")
    script.chmod(0o755)
    assert check_command("./run.sh {seed}", tmp_path) == ["./run.sh", "{seed}"]
    assert run_job(CommandArm("own", "./run.sh {seed}", "a", tmp_path / "s", tmp_path).job(0)).metric == 1


def arms_of(place, *candidates, baseline=None):
    first = baseline or f"{PYTHON} train.py precision=32 seed={{seed}}"
    return command_arms(first, candidates, metric="val/hmean", folder=place / "study", cwd=place)


def test_candidates_are_named_by_what_is_theirs(place):
    names = [
        own.name
        for own in arms_of(
            place,
            f"{PYTHON} train.py precision=16 seed={{seed}}",
            f"{PYTHON} train.py precision=16 seed={{seed}} --amp a/b",
            f"{PYTHON} train.py seed={{seed}}",
        )
    ]
    assert names == ["fp32", "precision=16", "precision=16---amp-a-b", "candidate-3"]


def test_arms_that_cannot_be_compared_are_refused(place):
    same = f"{PYTHON}  train.py precision=32 'seed={{seed}}'"
    with pytest.raises(ComparisonError, match="Two commands are the same"):
        arms_of(place, same)
    with pytest.raises(ComparisonError, match="no candidate"):
        arms_of(place)
    with pytest.raises(ComparisonError, match="need a metric"):
        command_arms(same, [same], metric="", folder=place)
    with pytest.raises(ComparisonError, match="is not there. Check --cwd"):
        command_arms(same, [same], metric="a", folder=place, cwd=place / "no")


def test_commands_that_share_a_folder_run_one_at_a_time_and_others_side_by_side(place):
    shared, apart = arms_of(
        place,
        f"{PYTHON} train.py precision=16 seed={{seed}} out={{folder}}/m.jsonl",
    )
    assert shared.job(0).function is not None
    assert apart.job(0).function is None


@pytest.mark.parametrize(("worse", "verdict"), [("0.0001", "PASS"), ("0.1", "FAIL")])
def test_a_study_of_commands_ends_in_a_verdict(place, worse, verdict):
    output = "out={folder}/m.jsonl"
    reference, candidate = arms_of(
        place,
        f"{PYTHON} train.py precision=16 worse={worse} seed={{seed}} {output}",
        baseline=f"{PYTHON} train.py precision=32 seed={{seed}} {output}",
    )
    jobs = [own.job(seed) for seed in range(3) for own in (reference, candidate)]
    runs = sorted(ProcessRunner(jobs=2).run(jobs), key=lambda run: run.seed)
    assert not any(run.error for run in runs)
    terms = Terms(metric="val/hmean", higher_is_better=True)
    assert decide(runs, candidate=candidate.name, terms=terms).verdict == verdict


SLEEPER = """
import sys
from pathlib import Path
from floatline.validation.study.commands import CommandArm
place = Path(sys.argv[1])
code = 'import os, time; open("pid", "w").write(str(os.getpid())); time.sleep(600) # {seed}'
words = f"{sys.executable} -c '{code}'"
CommandArm("own", words, "a", place / "study", place).job(0).run()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_ends_with_the_study_however_that_ends(place, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPER, str(place)], stderr=subprocess.DEVNULL, start_new_session=True
    )
    pid = wait_for(place / "pid")
    process.send_signal(number)
    process.wait(250)
    assert has_ended(pid)


def has_ended(pid: int) -> bool:
    for _ in range(5000):
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text()
        except (ProcessLookupError, FileNotFoundError):
            return True
        if f"{pid} (python) Z" in state:
            return True  # ended, and nobody has asked how
        time.sleep(0.05)
    return False


def wait_for(path: Path) -> int:
    for _ in range(5000):
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.05)
    raise AssertionError(f"{path} did not appear")


def test_a_program_that_the_system_cannot_run_is_an_error_of_the_run(tmp_path):
    script = tmp_path / "run"
    script.write_bytes(b"\x7fELF no program")
    script.chmod(0o755)
    run = run_job(CommandArm("own", "./run {seed}", "a", tmp_path / "s", tmp_path).job(0))
    assert "run cannot be run: Exec format error" in run.error


def test_a_command_has_the_signals_that_it_would_have_alone(place):
    code = "import signal as s, json; print(json.dumps({'a': s.getsignal(s.SIGINT) is not s.SIG_IGN and 1}))"
    assert run_job(arm(place, f"-c {shlex.quote(code)} {{seed}}", metric="a").job(0)).metric == 1


def test_a_job_of_a_command_goes_to_another_process_as_json(place):
    job = arm(place, "train.py precision=32 seed={seed} out={folder}/m.jsonl").job(2)
    assert json.loads(json.dumps(job.as_json()))["settings"]["metric"] == "val/hmean"
