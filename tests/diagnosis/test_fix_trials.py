"""Fixes on the user's own line: only one that was tried and holds is shown as the fix."""

import ast
import json
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from tests.slow import exhaustive, slow

from floatline.causes import find_cause
from floatline.diagnosis import fix_trials
from floatline.diagnosis.fix_trials import MOST_RUNS, FP32Run, keeps_fp32, try_fixes, write_fix
from floatline.diagnosis.result import Diagnosis
from floatline.findings import Finding

SOURCE = """\
import torch


def loss(margin, weight):
    total = (weight * weight).sum()
    return -torch.log(torch.sigmoid(margin)).mean() + total
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "losses.py"
    path.write_text(SOURCE)
    return path


def find(file, cause="rounded-onto-singularity", line=6, op="aten.log") -> Finding:
    cause = find_cause(cause)
    return Finding(cause, "seen", cause.advice, "", str(file), line, op)


def diagnosis_of(*findings: Finding) -> Diagnosis:
    return Diagnosis("train.py", "fp16-mixed", findings, 1.0)


HEALTHY = Diagnosis("train.py", "fp16-mixed", (), 1.0, notes=("40 steps without a finding",))


def attempt(file, run, *findings):
    said = []
    result = try_fixes(diagnosis_of(*(findings or (find(file),))), run, root=file.parent, say=said.append)
    return result, said


def test_a_change_that_holds_is_the_fix_in_the_users_own_names(file):
    texts = []
    result, said = attempt(file, lambda sources: texts.append(sources) or HEALTHY)
    assert result.primary.fix == "return -torch.nn.functional.logsigmoid(margin).mean() + total"
    assert result.primary.tried == "With this change train.py is healthy: 40 steps without a finding."
    assert result.primary.patch.startswith("--- a/losses.py\n+++ b/losses.py\n")
    assert said == [f"trying {result.primary.fix}"]
    (text,) = texts[0].values()
    assert "logsigmoid(margin)" in text and file.read_text() == SOURCE


def test_a_change_that_does_not_help_is_not_shown_as_the_fix(file):
    result, _ = attempt(file, lambda _: diagnosis_of(find(file)))
    assert result.primary.fix == find_cause("rounded-onto-singularity").advice
    assert "does not help: rounded-onto-singularity at losses.py:6" in result.primary.tried
    assert result.primary.patch == "" and result.fixes == ()
    assert write_fix(result) == "no file was changed: no change of the source is known that holds."


def test_a_change_that_moves_what_fp32_computes_is_not_the_fix(file):
    before = replace(diagnosis_of(find(file)), fp32_losses=(4.0, 1.0, 0.5))
    answers = iter([(4.0, 1.0, 0.9), (4.0, 1.01, 0.501)])
    result = try_fixes(
        before, lambda _: replace(HEALTHY, fp32_losses=next(answers)), root=file.parent, say=lambda _: None
    )
    assert "float()" in result.primary.fix
    assert result.primary.tried.startswith("With this change")


def test_where_fp32_fails_by_itself_its_loss_may_change(file):
    before, after = replace(diagnosis_of(find(file)), fp32_losses=(1.0, 9.0)), replace(HEALTHY, fp32_losses=(1.0, 0.1))
    assert not keeps_fp32(before, after)
    assert keeps_fp32(replace(before, fails_in_fp32=True), after)
    assert keeps_fp32(diagnosis_of(find(file, "clamp-kills-gradient")), after)


SOUND = FP32Run((4.0, 1.0, 0.5))


def compare(file, old, *new, before=None):
    """The primary finding after trials whose changes are healthy, and do this to FP32."""
    answers = iter(new)
    result = try_fixes(
        before or diagnosis_of(find(file)),
        lambda _: HEALTHY,
        root=file.parent,
        say=lambda _: None,
        in_fp32=lambda sources: next(answers) if sources else old,
    )
    return result.primary


@pytest.mark.parametrize("losses", [(4.0, 1.0, 0.9), (4.0, 1.0, float("nan")), (4.0, 1.0), ()])
def test_a_change_that_moves_a_run_in_fp32_is_not_the_fix(file, losses):
    kept = compare(file, SOUND, FP32Run(losses), FP32Run((4.0, 1.01, 0.501)))
    assert "float()" in kept.fix
    assert "not compared" not in kept.tried
    refused = compare(file, SOUND, *[FP32Run(losses)] * 4)
    assert refused.patch == ""
    assert refused.tried.count("changes what FP32 computes") == 4


def test_a_change_that_leaves_fp32_alone_is_the_fix(file):
    kept = compare(file, SOUND, FP32Run((4.0, 1.01, 0.501)))
    assert "logsigmoid(margin)" in kept.fix
    assert kept.tried == "With this change train.py is healthy: 40 steps without a finding."


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (FP32Run((4.0, float("nan"))), None, "FP32 itself fails"),
        (FP32Run(), None, "no optimizer of torch makes a step in FP32"),
        (FP32Run(problem="it took longer than 300 s"), None, "it took longer than 300 s"),
        (SOUND, FP32Run(problem="it took longer than 300 s"), "it took longer than 300 s"),
    ],
)
def test_where_fp32_was_not_compared_the_fix_says_so(file, old, new, why):
    kept = compare(file, old, new)
    assert kept.patch
    assert kept.tried.endswith(f" FP32's result was not compared: {why}.")


def test_fp32_is_not_run_where_it_shall_change(file):
    for before in (
        replace(diagnosis_of(find(file)), fails_in_fp32=True),
        diagnosis_of(find(file, "singular-gradient", op="aten.log")),
    ):
        compare(file, None, before=before)  # None has no losses to ask for


def test_the_next_change_is_tried_where_the_first_does_not_help(file):
    answers = iter([diagnosis_of(find(file)), HEALTHY])
    result, said = attempt(file, lambda _: next(answers))
    assert len(said) == 2 and "float()" in result.primary.fix and result.fixes


def test_what_fails_after_the_first_change_is_changed_as_well(file):
    other = find(file, "product-overflow", 5, "aten.mul")
    answers = iter([diagnosis_of(other), HEALTHY])
    result, _ = attempt(file, lambda _: next(answers))
    assert "logsigmoid(margin)" in result.primary.patch and "weight.float() * weight" in result.primary.patch
    assert result.primary.tried.startswith("With these 2 changes")
    assert result.primary.patch.count("--- a/losses.py") == 1


NORM = """\
import torch


class Norm(torch.nn.Module):
    def forward(self, x):
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-8) * self.weight
        return self.out(y)
"""


@pytest.mark.parametrize("keeps", [True, False])
def test_a_change_after_which_formats_do_not_match_waits_until_the_others_were_tried(file, monkeypatch, keeps):
    monkeypatch.setattr(fix_trials, "MOST_RUNS", 100)
    file.write_text(NORM)

    def run(sources):
        if keeps and ".to(x.dtype)" in next(iter(sources.values())):
            return HEALTHY
        return diagnosis_of(find(file, "dtype-mismatch", 7, "aten.addmm"))

    result, said = attempt(file, run, find(file, "eps-underflow", 6, "aten.div"))
    together = [text for text in said if ": return self.out(" in text]
    if keeps:
        assert ".to(x.dtype)" in result.primary.fix
        assert together == []
    else:
        assert together and said[-len(together) :] == together and result.fixes == ()


IN_PARTS = """\
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        y = torch.cumsum(x, 1)  # in cycles
        far = (y.sum(1)
               - y @ x.t())
        return self.head(far)
"""


@pytest.fixture
def parts(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(IN_PARTS)
    return path


def test_a_change_of_several_lines_can_be_copied_and_is_told_by_its_first_one(parts):
    answers = iter([diagnosis_of(find(parts, "choice-flipped", 8, "aten.mm")), HEALTHY])
    result, said = attempt(parts, lambda _: next(answers), find(parts, "choice-flipped", 8, "aten.mm"))
    (region,) = ast.parse(result.primary.fix).body
    assert isinstance(region, ast.With) and "# in cycles" in result.primary.fix
    assert all(text.startswith("trying with torch.autocast(") and text.endswith(": …") for text in said)
    none, _ = attempt(parts, lambda _: diagnosis_of(find(parts)), find(parts, "choice-flipped", 8, "aten.mm"))
    assert "\n" not in none.primary.tried and "enabled=False): … does not help: " in none.primary.tried


def test_a_change_inside_another_one_is_not_listed(parts):
    failing = find(parts, "choice-flipped", 6, "aten.cumsum")
    answers = iter([diagnosis_of(find(parts, "changed-in-16-bits", 7, "aten.mm")), HEALTHY])
    result, said = attempt(parts, lambda _: next(answers), failing)
    assert [fix.line for fix in result.fixes] == [6, 7]  # an island beside the line is a change of its own
    assert result.primary.tried.startswith("With these 2 changes")
    assert result.primary.fix.startswith("# net.py:6\ny = torch.cumsum(x.float(), 1)  # in cycles\n# net.py:7\nwith ")
    ast.parse(result.primary.fix)
    assert said[-1].startswith("trying net.py:6: y = torch.cumsum(x.float(), 1)  # in cycles; net.py:7: with torch.")
    whole = parts.read_text().replace("- y @ x.t()", "- self.scale")  # only the whole function can be in FP32
    parts.write_text(whole)
    answers = iter([diagnosis_of(find(parts, "changed-in-16-bits", 7, "aten.other")), HEALTHY])
    result, said = attempt(parts, lambda _: next(answers), failing)
    assert [(fix.kind, fix.before) for fix in result.fixes] == [("fp32-function", whole)]
    assert result.primary.tried.startswith("With this change")
    assert "y = torch.cumsum(x.float(), 1)  # in cycles" in result.primary.fix
    assert said[-1] == "trying with torch.autocast(x.device.type, enabled=False): …"


def test_what_could_not_be_tried_says_so_and_is_not_written(file):
    result, _ = attempt(file, lambda _: "it took longer than 300 s")
    assert "logsigmoid" in result.primary.fix
    assert result.primary.tried == "This change was not tried: it took longer than 300 s."
    assert result.primary.patch == ""
    write_fix(result)
    assert file.read_text() == SOURCE


def test_no_more_than_a_few_runs_are_made(file):
    places = iter(range(100))
    runs = []

    def run(sources):
        runs.append(sources)
        return diagnosis_of(find(file, "product-overflow", 5 if next(places) % 2 else 6, "aten.mul"))

    attempt(file, run)
    assert 1 <= len(runs) <= MOST_RUNS


@pytest.mark.parametrize(("most", "left"), [(1, "3 more changes were"), (2, "2 more changes were")])
def test_changes_that_no_run_was_left_for_are_counted(file, monkeypatch, most, left):
    monkeypatch.setattr(fix_trials, "MOST_RUNS", most)
    result, said = attempt(file, lambda _: diagnosis_of(find(file)))
    assert len(said) == most and result.primary.tried.endswith(f"at losses.py:6. {left} not tried.")
    assert result.primary.tried.count("does not help") == most


def test_a_second_change_that_no_run_was_left_for_is_counted_too(file, monkeypatch):
    monkeypatch.setattr(fix_trials, "MOST_RUNS", 1)
    result, _ = attempt(file, lambda _: diagnosis_of(find(file, "product-overflow", 5, "aten.mul")))
    assert (
        "alone does not help: product-overflow at losses.py:5. 4 more changes were not tried." in result.primary.tried
    )


def test_nothing_is_said_of_untried_changes_where_all_were_tried(file, monkeypatch):
    monkeypatch.setattr(fix_trials, "MOST_RUNS", 100)
    result, _ = attempt(file, lambda _: diagnosis_of(find(file)))
    assert "not tried" not in result.primary.tried


@pytest.mark.parametrize(("module", "loads"), [("diagnosis.fix_trials", False), ("fixes", True)])
def test_what_parses_source_is_not_loaded_before_there_is_a_fix_to_try(module, loads):
    code = f"import sys, floatline.{module}; sys.exit('libcst' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == loads


def test_where_no_change_is_known_the_finding_stays_and_nothing_is_run(file):
    cause = find_cause("activation-overflow")
    found = Finding(cause, "seen", cause.advice, "blocks.1", str(file), 2, "aten.mm")
    result, said = attempt(file, lambda _: pytest.fail("there is nothing to try"), found)
    assert result.findings == (found,) and not said


def test_the_patch_is_taken_by_git_apply_and_makes_the_file_that_was_tried(file):
    result, _ = attempt(file, lambda _: HEALTHY)
    subprocess.run(["git", "init", "-q"], cwd=file.parent, check=True)
    subprocess.run(["git", "apply", "-"], input=result.primary.patch, text=True, cwd=file.parent, check=True)
    assert file.read_text() == result.fixes[-1].after


def test_a_file_that_was_edited_since_is_not_written(file):
    result, _ = attempt(file, lambda _: HEALTHY)
    file.write_text(SOURCE + "# edited\n")
    assert "is not what it was when the change was tried" in write_fix(result)
    assert file.read_text() == SOURCE + "# edited\n"


SCRIPT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("cuda")
nn.init.constant_(model[2].bias, -20.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
with open("runs.txt", "a") as log:
    log.write("began\\n")
for step in range(60):
    x = torch.randn(32, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        margin = model(x)
        loss = -torch.log(torch.sigmoid(margin)).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
torch.save(model.state_dict(), "last.pt")
print("done")
"""


def run_floatline(folder, *words: str, on: tuple[str, ...] = ("--as", "cuda"), **env) -> subprocess.CompletedProcess:
    whole = [sys.executable, "-m", "floatline", "diagnose", *on, *words, "--", sys.executable, "train.py"]
    return subprocess.run(whole, cwd=folder, capture_output=True, text=True, env=os.environ | env)


def find_in(folder, script: str, **options) -> dict:
    (folder / "train.py").write_text(script)
    run = run_floatline(folder, "--format", "json", **options)
    assert run.stdout, run.stderr
    return json.loads(run.stdout)["findings"][0]


@slow
def test_a_scripts_own_line_is_changed_after_the_change_was_tried_beside_its_files(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = run_floatline(tmp_path, "--format", "json", "--fix")
    found = json.loads(run.stdout)["findings"][0]
    assert found["fix"] == "loss = -nn.functional.logsigmoid(margin).mean()"
    assert found["tried"].startswith("With this change the script is healthy: 60 steps without a finding")
    assert script.read_text() == SCRIPT.replace("torch.log(torch.sigmoid(margin))", "nn.functional.logsigmoid(margin)")
    assert (tmp_path / "runs.txt").read_text() == "began\n"  # the trial wrote elsewhere
    assert "floatline: changed " in run.stderr
    again = run_floatline(tmp_path, "--format", "json")
    assert json.loads(again.stdout)["verdict"] == "healthy" and again.returncode == 0


USES_TEMPORARY_FILES = """\
import subprocess, sys, tempfile
from pathlib import Path

with tempfile.TemporaryDirectory() as folder:
    (Path(folder) / "settings.txt").write_text("lr: 0.1")
    show = "import pathlib, sys; print(pathlib.Path(sys.argv[1]).read_text())"
    said = subprocess.run([sys.executable, "-c", show, folder + "/settings.txt"], capture_output=True, text=True)
    assert said.stdout == "lr: 0.1\\n"
"""


@slow
def test_a_script_is_tried_that_uses_temporary_files_and_cleans_up(tmp_path):
    found = find_in(tmp_path, USES_TEMPORARY_FILES + SCRIPT)
    assert found["tried"].startswith("With this change the script is healthy")


@exhaustive
def test_a_script_is_tried_that_compiles_its_model_with_a_cold_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    compiled = SCRIPT.replace("cuda", "cpu").replace("optimizer =", "compiled = torch.compile(model)\noptimizer =")
    compiled = compiled.replace("margin = model(x)", "margin = compiled(x)")
    (tmp_path / "tmp").mkdir()
    found = find_in(tmp_path, compiled, on=(), TMPDIR=str(tmp_path / "tmp"))
    assert found["tried"].startswith("With this change the script is healthy")
    assert any((tmp_path / "tmp").rglob("*.cpp"))  # the first run has compiled


@exhaustive
def test_a_script_is_not_tried_that_starts_a_process_which_writes_by_itself(tmp_path):
    start = 'import multiprocessing\nmultiprocessing.get_context("spawn").Process(target=print).start()\n'
    found = find_in(tmp_path, f'if __name__ == "__main__":\n{textwrap.indent(start + SCRIPT, "    ")}')
    assert found["patch"] == "" and found["tried"] == (
        "This change was not tried: the script cannot run beside its own files, what a process started by spawn writes "
        "cannot be kept apart."
    )


CLIPS_LATE = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cuda")
for step in range(120):
    x = torch.randn(32, 8, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        loss = (model(x) - x[:, :1]).square().mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@slow
def test_a_fault_of_the_loop_is_tried_for_as_many_steps_as_the_script_has(tmp_path):
    found = find_in(tmp_path, CLIPS_LATE)
    assert found["cause"] == "clip-before-unscale"
    assert found["tried"].startswith("With this change the script is healthy: 120 steps without a finding")


@exhaustive
def test_diff_prints_the_patch_alone_and_changes_nothing(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = run_floatline(tmp_path, "--diff")
    assert run.stdout.startswith("--- a/train.py\n+++ b/train.py\n") and run.returncode == 1
    assert "+        loss = -nn.functional.logsigmoid(margin).mean()" in run.stdout
    assert script.read_text() == SCRIPT


@pytest.mark.slow
def test_a_target_is_tried_with_its_line_changed():
    case = Path(__file__).parents[1] / "cases" / "012_steep_step_function.py"
    words = [sys.executable, "-m", "floatline", "diagnose", case.name, "--format", "json"]
    run = subprocess.run(words, cwd=case.parent, capture_output=True, text=True)
    found = json.loads(run.stdout)["findings"][0]
    assert found["fix"] == "b = torch.sigmoid(self.k * (p - t))"
    assert found["tried"] == "With this change it is healthy: 40 steps without a finding, compared with FP32."


OWN_LOOP = """\
import torch
from torch import nn


def train():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu")
    for step in range(12):
        x = torch.randn(32, 8)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x) - x[:, :1]).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


@exhaustive
def test_a_target_with_its_own_number_of_steps_is_said_to_have_run_for_these(tmp_path):
    (tmp_path / "loop.py").write_text(OWN_LOOP)
    words = [sys.executable, "-m", "floatline", "diagnose", "loop.py", "--format", "json"]
    run = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(run.stdout)["findings"][0]
    assert found["tried"] == "With this change it is healthy: 12 steps without a finding, compared with FP32."


@slow
def test_without_a_trial_no_change_is_offered():
    case = Path(__file__).parents[1] / "cases" / "012_steep_step_function.py"
    words = [sys.executable, "-m", "floatline", "diagnose", case.name, "--format", "json", "--no-try"]
    run = subprocess.run(words, cwd=case.parent, capture_output=True, text=True)
    found = json.loads(run.stdout)["findings"][0]
    assert (found["patch"], found["tried"]) == ("", "")
