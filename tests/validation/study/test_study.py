"""Study: looks after 3, 5, 8 … seeds in their order, an end as soon as all is decided, nothing trained in vain."""

import math
import random
from dataclasses import dataclass, field

import pytest
from tests.slow import slow
from tests.validation.studies import run

from floatline.plans.presets import resolve_plan
from floatline.validation.running.processes import ProcessRunner, always
from floatline.validation.study.arms import FunctionArm
from floatline.validation.study.limits import Limits
from floatline.validation.study.preparation import Subject, reproduce
from floatline.validation.study.store import Store
from floatline.validation.study.study import Silence, Study
from floatline.validation.verdict.terms import Terms

ASKED = {"target": "t.py"}


@dataclass
class Shuffled:
    """Runs jobs here, in any order, and remembers them."""

    num_at_once: int = 1
    done: list = field(default_factory=list)
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    most: float = math.inf

    def run(self, jobs, *, wanted=always):
        jobs = list(jobs)
        self.dice.shuffle(jobs)
        for job in jobs:
            if not wanted(job):
                continue
            if len(self.done) >= self.most:
                raise KeyboardInterrupt
            self.done.append((job.arm, job.seed))
            yield job.run()


class Notes(Silence):
    def __init__(self):
        self.plans, self.looks = [], []

    def plan(self, text):
        self.plans.append(text)

    def looked(self, comparison):
        self.looks.append((comparison.candidate, len(comparison.seeds), comparison.verdict))


def arm(name, excess):
    """An arm whose end is worse than FP32's by excess(seed)."""
    return FunctionArm(name, lambda seed: run(name, seed, (2.0 + 0.01 * seed) * math.exp(excess(seed)), seconds=1.0))


def noise(sd):
    return lambda seed: sd * random.Random(seed).gauss(0, 1)


ARMS = {
    "fp32": arm("fp32", lambda seed: 0.0),
    "fp32-nudged": arm("fp32-nudged", noise(1e-4)),
    "good": arm("good", noise(1e-4)),
    "bad": arm("bad", lambda seed: 0.05 + noise(1e-4)(seed)),
    "noisy": arm("noisy", noise(0.008)),
    "broken": arm("broken", lambda seed: 0.3 + noise(1e-3)(seed)),
}


def make(tmp_path, *names, runner=None, watcher=None, resume=False, arms=ARMS):
    store = Store(tmp_path, asked=ASKED, resume=resume)
    store.settle({})
    chosen = [arms[name] for name in ("fp32", "fp32-nudged", *names, "broken")]
    return Study(chosen, names, Terms(), range(20), runner or Shuffled(), store, watcher or Silence())


@slow
def test_three_seeds_decide_and_then_it_ends(tmp_path):
    runner, notes = Shuffled(), Notes()
    good, bad = make(tmp_path, "good", "bad", runner=runner, watcher=notes).run()
    assert (good.verdict, bad.verdict) == ("PASS", "FAIL")
    assert good.seeds == bad.seeds == (0, 1, 2)
    assert len(runner.done) == 3 * 5
    assert sorted(notes.looks) == [("bad", 3, "FAIL"), ("good", 3, "PASS")]


@slow
def test_only_what_is_open_goes_on_and_the_broken_arm_ends_at_the_first_look(tmp_path):
    runner = Shuffled()
    good, noisy = make(tmp_path, "good", "noisy", runner=runner).run()
    assert good.seeds == (0, 1, 2) and len(noisy.seeds) > 3
    last = {name: max(seed for arm, seed in runner.done if arm == name) for name in ("good", "broken", "fp32-nudged")}
    assert last == {"good": 2, "broken": 2, "fp32-nudged": len(noisy.seeds) - 1}
    assert [look.num_seeds for look in noisy.looks] == [n for n in (3, 5, 8, 12, 20) if n <= len(noisy.seeds)]


@slow
def test_the_order_of_the_results_changes_nothing(tmp_path):
    found = [
        make(tmp_path / str(seed), "noisy", runner=Shuffled(dice=random.Random(seed))).run()[0] for seed in range(4)
    ]
    assert len({(one.verdict, one.seeds, one.difference) for one in found}) == 1


@slow
def test_nudged_fp32_as_a_candidate_goes_on_as_noise(tmp_path):
    runner = Shuffled()
    store = Store(tmp_path, asked=ASKED)
    arms = [ARMS[name] for name in ("fp32", "fp32-nudged", "noisy")]
    same, noisy = Study(arms, ["fp32-nudged", "noisy"], Terms(), range(20), runner, store).run()
    assert same.verdict == "PASS" and noisy.noise.num_seeds == len(noisy.seeds) > 3


@slow
def test_an_interrupted_study_goes_on_and_repeats_nothing(tmp_path):
    first, second = Shuffled(most=7), Shuffled()
    study = make(tmp_path, "good", runner=first)
    with pytest.raises(KeyboardInterrupt):
        study.run()
    study.store.close()
    (resumed,) = make(tmp_path, "good", runner=second, resume=True).run()
    (whole,) = make(tmp_path / "whole", "good").run()
    assert not set(first.done) & set(second.done)
    assert len(first.done) + len(second.done) == 3 * 4
    assert (resumed.verdict, resumed.excesses) == (whole.verdict, whole.excesses)


@slow
def test_an_arm_that_raises_ends_the_study_at_once(tmp_path):
    runner = Shuffled()
    arms = ARMS | {"good": FunctionArm("good", lambda seed: 1 / 0)}
    (one,) = make(tmp_path, "good", runner=runner, arms=arms).run()
    assert one.verdict == "REFUSED" and "ZeroDivisionError" in one.reason
    assert len(runner.done) < 3 * 4


@slow
def test_the_plan_is_told_before_and_its_time_after_the_first_seed(tmp_path):
    notes = Notes()
    make(tmp_path, "good", watcher=notes).run()
    assert notes.plans[0].startswith("PASS up to 1.00 % worse") and len(notes.plans) == 2
    assert " s (at most " in notes.plans[1]


@slow
def test_the_time_to_go_is_that_of_the_runs_and_not_of_what_is_done_once(tmp_path):
    told = []

    class Clock(Silence):
        def ran(self, run, *, left, seconds):
            told.append((left, seconds))

    make(tmp_path / "one", "good", watcher=Clock()).run()
    # Each run says that it took a second; the study itself took next to nothing.
    assert told == [(left, float(left)) for left in range(11, -1, -1)]
    told.clear()
    make(tmp_path / "five", "good", watcher=Clock(), runner=Shuffled(num_at_once=5)).run()
    assert told[0] == (11, 11.0)  # functions run one after another all the same


def test_runs_side_by_side_share_the_time_to_go(tmp_path):
    study = make(tmp_path, "good", runner=Shuffled(num_at_once=5))
    assert study._time_to_go(10, 5) is None  # nothing is known yet
    study._runs = {("fp32", 0): run("fp32", 0, 2.0, seconds=3.0), ("good", 0): run("good", 0, 2.0, seconds=5.0)}
    assert [study._time_to_go(left, 5) for left in (10, 11, 1, 0)] == [8.0, 12.0, 4.0, 0.0]


def test_a_function_that_tells_no_time_is_timed():
    done = FunctionArm("good", lambda seed: run("good", seed, 2.0)).job(0).run()
    assert done.seconds is not None


@slow
def test_functions_run_in_this_process(tmp_path):
    (one,) = make(tmp_path, "good", runner=ProcessRunner(jobs=2)).run()
    assert one.verdict == "PASS"


def test_the_command_that_does_it_again_names_a_preset_or_the_file_of_a_plan():
    usual, own = resolve_plan("fp16-mixed"), resolve_plan("fp16-mixed").model_copy(update={"accumulate": 2})
    for plan, word in ((usual, "fp16-mixed"), (own, "fp16-mixed.yaml")):
        subject = Subject("net.py", [plan], resolve_plan("fp32"), Limits(steps=3), seed=4)
        assert reproduce(subject, Terms("loss")).startswith(f"floatline validate net.py --plan {word} --steps 3")


def test_the_command_that_does_it_again_names_the_curve_that_was_asked_for():
    subject = Subject("net.py", [resolve_plan("fp16-mixed")], resolve_plan("fp32"), Limits(steps=3), seed=4)
    assert "--curve metric" in reproduce(subject, Terms("loss"), "metric")
    assert "--curve" not in reproduce(subject, Terms("loss"))


def test_the_arms_of_a_seed_come_in_an_order_drawn_at_random_and_the_same_again(tmp_path):
    orders = []
    for again in range(2):
        study = make(tmp_path / str(again), "good", "bad")
        orders.append([(job.seed, job.arm) for job in study._jobs()])
    assert orders[0] == orders[1]
    seeds = sorted({seed for seed, _ in orders[0]})
    assert [seed for seed, _ in orders[0]] == sorted(seed for seed, _ in orders[0])
    assert len({tuple(arm for s, arm in orders[0] if s == seed) for seed in seeds}) > 1
