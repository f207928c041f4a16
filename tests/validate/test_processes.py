"""Jobs in other processes: what crashes is an error and no end, and nothing outlives the study."""

import os
import sys

import pytest

from floatline.errors import ComparisonError
from floatline.validate import processes
from floatline.validate.jobs import Job
from floatline.validate.pairs import ArmRun
from floatline.validate.processes import ProcessRunner, call_in_child

HERE = "tests.validate.test_processes"


def run_job(job: Job) -> ArmRun:
    """Called in the child: what its settings say."""
    what = job.settings.get("what", "")
    if what == "crash":
        os._exit(9)
    if what == "raise":
        raise ValueError("two\nlines")
    if what == "hang":
        import time

        time.sleep(60)
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


class FakeRay:
    """As much of Ray as the runner uses, in this process."""

    class exceptions:
        RayError = RuntimeError

    def __init__(self):
        self.options, self.cancelled = {}, []

    def is_initialized(self):
        return True

    def cluster_resources(self):
        return {"CPU": 8.0, "GPU": 2.0}

    def remote(self, **options):
        self.options = options

        class Task:
            def __init__(self, function):
                self.remote = lambda settings: (settings["seed"], function, settings)

        return lambda function: Task(lambda settings: function(settings))

    def wait(self, references, num_returns, timeout):
        return references[:1], references[1:]

    def get(self, reference):
        _, function, settings = reference
        if settings["settings"]["what"] == "raise":
            raise RuntimeError("task died\nfor a reason")
        return function(settings)

    def cancel(self, reference, force):
        self.cancelled.append(reference[0])


class Hashable(dict):
    def __hash__(self):
        return id(self)


def test_ray_takes_the_same_jobs(monkeypatch):
    from floatline.integrations import ray as integration

    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(integration.importlib.util, "find_spec", lambda name: True)
    runner = integration.RayRunner()
    monkeypatch.setattr(Job, "as_json", lambda self, plain=Job.as_json: Hashable(plain(self)))
    runs = {run.seed: run for run in runner.run([job(0), job(1, "raise"), job(2)])}
    assert runner.num_at_once == 2 and fake.options == {"num_cpus": 1, "num_gpus": 1, "max_retries": 0}
    assert runs[0].metric == runs[2].metric == float(os.getpid())
    assert runs[1].error == "its Ray task failed: for a reason"
    under_way = runner.run([job(3), job(4)])
    next(under_way)
    under_way.close()
    assert fake.cancelled == [4]


def test_without_ray_the_line_says_what_to_install():
    if "ray" in sys.modules:
        pytest.skip("Ray is here")
    from floatline.integrations.ray import RayRunner

    with pytest.raises(ComparisonError, match=r"pip install 'floatline\[ray\]'"):
        RayRunner()
