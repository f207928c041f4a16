"""Jobs in other processes: what crashes is an error and no end, and nothing outlives the study."""

import os

import pytest

from floatline.errors import ComparisonError
from floatline.validation.running import processes
from floatline.validation.running.jobs import Job
from floatline.validation.running.processes import ProcessRunner, call_in_child
from floatline.validation.verdict.pairs import ArmRun

HERE = "tests.validation.running.test_processes"


def run_job(job: Job) -> ArmRun:
    """Called in the child: what its settings say."""
    what = job.settings.get("what", "")
    if what == "crash":
        os._exit(9)
    if what == "raise":
        raise ValueError("two\nlines")
    if what == "hang":
        import time

        time.sleep(600)
    return ArmRun("whatever", -1, float(os.getpid()))


def job(seed, what="", arm="a"):
    return Job(arm, seed, f"{HERE}:run_job", {"what": what})


def test_what_takes_too_long_is_ended():
    (run,) = ProcessRunner(jobs=1, timeout=0.5).run([job(4, "hang")])
    assert run.error == "took longer than the 0.5 s that it was given"


def test_crashes_and_errors_are_runs_and_the_others_go_on():
    runs = {}
    jobs = [job(0, "crash"), job(1, "raise"), job(2), job(3)]
    for run in ProcessRunner(jobs=1).run(jobs):
        runs[run.seed] = run
        assert run.arm == "a"
    assert runs[0].error == "its process ended with exit code 9"
    assert runs[1].error == "ValueError: two"
    assert runs[2].metric == runs[3].metric != float(os.getpid())  # one process for short jobs, and not this one


def test_what_is_not_wanted_any_more_is_not_run():
    runs = ProcessRunner(jobs=1).run([job(0), job(1), job(2)], wanted=lambda job: job.seed != 1)
    assert [run.seed for run in runs] == [0, 2]


def test_closing_ends_what_is_under_way():
    runner = ProcessRunner(jobs=2).run([job(0), job(1, "hang")])
    first = next(runner)
    assert first.seed == 0
    runner.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first.metric), 0)


def test_a_call_gives_its_value_or_its_own_message():
    assert call_in_child("json:loads", "[1, 2]") == [1, 2]
    with pytest.raises(ComparisonError, match="ModuleNotFoundError"):
        call_in_child("no_such_module:f", {})


def test_every_job_has_a_gpu_of_its_own_where_there_are_several(monkeypatch):
    monkeypatch.setattr(processes, "visible_gpus", lambda: ("0", "3"))
    runner = ProcessRunner()
    assert runner.num_at_once == 2
    assert [runner._env(slot)["CUDA_VISIBLE_DEVICES"] for slot in range(3)] == ["0", "3", "0"]


def test_without_a_gpu_there_is_a_job_for_two_cores(monkeypatch):
    monkeypatch.setattr(processes, "visible_gpus", lambda: ())
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for cores, jobs, threads in ((1, 1, "1"), (8, 4, "2")):
        monkeypatch.setattr(processes, "num_cores", lambda cores=cores: cores)
        runner = ProcessRunner()
        assert (runner.num_at_once, runner._env(0)["OMP_NUM_THREADS"]) == (jobs, threads)
    assert "CUDA_VISIBLE_DEVICES" not in set(runner._env(0)) - set(os.environ)


def test_no_jobs_at_once_are_refused():
    with pytest.raises(ComparisonError, match="jobs is 0"):
        ProcessRunner(jobs=0)
