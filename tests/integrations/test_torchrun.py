"""torchrun with two processes and a NaN on the second: the examples, Accelerate and the Trainer."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.marks import needs_fsdp2, needs_gloo
from tests.shared import folder_of, once
from tests.slow import slow

import floatline as fl

ROOT = Path(__file__).parents[2]

pytestmark = needs_gloo


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def launch(script, folder, *, words=TORCHRUN):
    command = [sys.executable, *words]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [*command, str(ROOT / script), str(folder)], capture_output=True, text=True, cwd=ROOT, timeout=600, env=env
    )
    assert run.returncode == 0, run.stderr[-6000:]
    return run.stdout.replace("process ", "\nprocess ")  # the end of a line may come after the other's next words


def both(pattern, text):
    """What the two processes printed, which must be the same."""
    found = [match.group(1) for rank in (0, 1) for match in re.finditer(pattern.format(rank=rank), text)]
    assert len(found) == 2
    assert found[0] == found[1]
    return found[0]


def check_example(script, folder):
    text = launch(script, folder)
    assert "loss nan  skipped (forward-nonfinite)  scale 65536" in both(r"process {rank}, step 12: (.*)", text)
    history = fl.Ledger.read(folder)
    assert [step for step, applied in enumerate(history.applied) if not applied] == [12]
    assert math.isnan(history.loss[12])
    assert history.loss[-1] < history.loss[0]
    assert history.ended
    assert both(r"process {rank}: \d+ steps.*weights (\w+)", text)
    return text


@slow
def test_the_ddp_example_skips_on_all_processes_and_goes_on_from_its_checkpoint(tmp_path):
    text = check_example("examples/torchrun_ddp.py", tmp_path)
    assert both(r"process {rank}: 20 steps, (\d+) of 40", text) == "19"
    again = launch("examples/torchrun_ddp.py", tmp_path)
    assert both(r"process {rank}: 40 steps, (\d+) of 40", again) == "39"
    assert both(r"process {rank}: 40 steps.*weights (\w+)", again)
    assert fl.Ledger.read(tmp_path).num_resumes == 1


@needs_fsdp2
@slow
def test_the_fsdp2_example_skips_on_all_processes_and_keeps_equal_shards(tmp_path):
    check_example("examples/torchrun_fsdp2.py", tmp_path)


def train_on_ranks(folder):
    launch("tests/integrations/trainers_on_ranks.py", folder, words=())
    return [json.loads((folder / f"{rank}.json").read_text("utf-8")) for rank in (0, 1)]


def found_by_all():
    pytest.importorskip("transformers", reason="transformers is not installed")
    found = once("trainers on ranks", train_on_ranks)
    return found, fl.Ledger.read(folder_of("trainers on ranks") / "trainer")


@pytest.mark.slow
def test_an_accelerate_loop_skips_on_all_processes():
    found, _ = found_by_all()
    for rank in found:
        assert rank["guarded"]["skipped"] == [False] * 3 + [True] + [False] * 2
        assert rank["guarded"]["weights"] == found[0]["guarded"]["weights"]
        assert all(map(math.isfinite, rank["guarded"]["weights"]))
        assert rank["guarded"]["scale"] == 65536.0


@slow
def test_accelerate_by_itself_spreads_the_nan_to_all_processes():
    for rank in found_by_all()[0]:
        assert rank["plain"]["skipped"] == [False] * 6
        assert all(map(math.isnan, rank["plain"]["weights"]))


@slow
def test_the_trainer_skips_on_all_processes_and_one_writes_the_ledger():
    found, history = found_by_all()
    for rank in found:
        assert rank["trainer"]["summary"].startswith("6 attempted, 5 applied, 1 skipped (1 forward-nonfinite)")
        assert rank["trainer"]["weights"] == found[0]["trainer"]["weights"]
        assert all(map(math.isfinite, rank["trainer"]["weights"]))
        assert [math.isnan(loss) for loss in rank["trainer"]["losses"]] == [False] * 3 + [True] + [False] * 2
        assert rank["trainer"]["advances"] == 5
    assert history.reason == [None, None, None, "forward-nonfinite", None, None]


@slow
def test_a_process_that_leaves_out_a_batch_alone_mixes_steps_and_is_missing_at_the_end():
    first, second = (rank["alone"] for rank in found_by_all()[0])
    # The second's gradients of step 4 were averaged with the first's of step 3, and so on.
    assert first["made"] == [0, 1, 2, 3, 4]
    assert second["made"] == [0, 1, 2, 4, 5]
    assert first["message"]  # it waited for the second until that had ended
    assert not second["message"]
