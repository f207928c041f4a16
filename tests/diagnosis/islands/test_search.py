"""The smallest FP32 island: the planted module and no more, within a budget, resumed, or a reason why not."""

import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.slow import mostly_slow, slow
from torch import nn

from floatline.diagnosis.islands.cost import measure_cost
from floatline.diagnosis.islands.judge import IslandJudge
from floatline.diagnosis.islands.log import SearchLog, key_of
from floatline.diagnosis.islands.module_sets import ModuleTree, covers, minimize
from floatline.diagnosis.islands.search import Tolerance, find_island
from floatline.errors import ReplayError
from floatline.plans import Plan
from floatline.plans.presets import resolve_plan
from floatline.probe.runs.target_points import capture_points
from floatline.probe.steps.capture import capture_step
from floatline.workload import Workload

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def planted():
    spec = importlib.util.spec_from_file_location("planted", BENCHMARKS / "planted.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["planted"] = module
    spec.loader.exec_module(module)
    return module


class Boosted(nn.Module):
    """A hidden layer that FP16 cannot hold with a large boost; what comes out is the same for any."""

    def __init__(self, width, boost):
        super().__init__()
        self.up, self.down, self.boost = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), boost

    def forward(self, x):
        return self.down(F.relu(self.up(x) * self.boost) / self.boost)


class Net(nn.Module):
    """Three layers, one of which may be fragile; and a fragile line outside of all modules, on request."""

    def __init__(self, boosts=(1.0, 1.0, 1.0), own=1.0):
        super().__init__()
        self.layers = nn.ModuleList(Boosted(16, boost) for boost in boosts)
        self.norm, self.head, self.own = nn.LayerNorm(16), nn.Linear(16, 4), own

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        x = self.head(self.norm(x))
        return x if self.own == 1.0 else (x * self.own) @ torch.eye(4) / self.own


def make_step(
    net=None, *, loss=F.cross_entropy, plan="fp16-mixed", scale=1024.0, lr=1e-3, make=torch.optim.AdamW, batch=None
):
    torch.manual_seed(0)
    net = net or Net()
    x = torch.randn(32, 16) if batch is None else batch
    y = x[:, :4].nan_to_num().argmax(1)
    if resolve_plan(plan).weights != "fp32":
        net.half()
        x = x.half()
    made = make(net.parameters(), lr=lr)
    options = {"plan": plan, "scale": scale, "half_on_cpu": True}
    return capture_step(net, made, lambda batch: loss(net(batch[0]), batch[1]), (x, y), **options)


HUGE = 2.0**20


@slow
@pytest.mark.parametrize("seed", mostly_slow([0, 1, 7, 9], every=4))
def test_the_island_is_the_planted_module_or_a_part_of_it(planted, seed):
    model, kind, where = planted.plant(seed, width=16)
    tokens = torch.randint(0, planted.SYMBOLS, (2, 9))
    loss = lambda batch: planted.loss_of(model, batch)  # noqa: E731
    step = capture_step(model, None, loss, tokens, plan="fp16-mixed", scale=1024.0, half_on_cpu=True)
    island = find_island([step], budget=600)
    assert island.complete
    assert 1 <= len(island.modules) <= 2, (kind, where, island.modules)
    assert all(covers((where,), name) for name in island.modules), (kind, where, island.modules)
    assert not island.before.passes
    assert island.after.passes


def test_two_fragile_layers_give_two_members_and_neither_can_be_dropped():
    step = make_step(Net((HUGE, 1.0, HUGE)))
    island = find_island([step])
    assert len(island.members) == 2
    for name, layer in zip(island.modules, ("layers.0", "layers.2"), strict=True):
        assert covers((layer,), name)
        rest = [other for other in island.modules if other != name]
        assert not step.replay(islands=rest).finite
    assert all("without it the loss is nan" in member.reason for member in island.members)


def test_bisection_alone_finds_the_same_island(monkeypatch):
    guided = find_island([make_step(Net((1.0, HUGE, 1.0)))])
    monkeypatch.setattr("floatline.diagnosis.islands.search.find_suspects", lambda _: [])
    blind = find_island([make_step(Net((1.0, HUGE, 1.0)))])
    assert blind.modules == guided.modules
    assert blind.num_tried > guided.num_tried


def test_a_healthy_step_needs_no_island():
    island = find_island([make_step()])
    assert not island.needed
    assert island.modules == ()
    assert "as it is" in island.reason
    assert island.update_error < 0.5


def test_a_loss_scale_that_is_too_large_is_no_reason_for_an_island():
    island = find_island([make_step(scale=2.0**24)])
    assert not island.needed
    assert "needs a loss scale of" in island.reason


def test_bf16_rounding_is_no_reason_for_an_island():
    assert not find_island([make_step(plan="bf16-mixed", scale=1.0)]).needed


def test_a_gradient_that_is_nothing_but_rounding_is_no_witness():
    class BiasBeforeNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

        def forward(self, x):
            return self.last(self.norm(self.first(x)))

    step = make_step(BiasBeforeNorm(), plan="bf16-mixed", scale=1.0)
    judge = IslandJudge([step], tolerance=Tolerance(), log=SearchLog(None), budget=math.inf, on_replay=lambda: None)
    noise = judge.noise(0)
    assert noise["first.bias"] > 0.5
    assert noise["last.weight"] < 0.1
    assert judge.outcome(0).passes
    judge._noise[0] = dict.fromkeys(noise, 0.0)
    assert not judge._try(0, 1.0, (), ()).passes  # without the noise, the bias would be taken for damage


@pytest.mark.parametrize("plan", ["fp16-mixed", "bf16-mixed"])
def test_the_noise_foretells_the_error_of_a_healthy_step(plan):
    judge = IslandJudge(
        [make_step(plan=plan)], tolerance=Tolerance(), log=SearchLog(None), budget=math.inf, on_replay=list
    )
    assert judge.noise(0)[""] / 4 < judge.outcome(0).error < 4 * judge.noise(0)[""]


def test_the_noise_leaves_the_step_as_it_was():
    step = make_step()
    before = {name: tensor.clone() for name, tensor in step.state.captured.items()}
    judge = IslandJudge([step], tolerance=Tolerance(), log=SearchLog(None), budget=math.inf, on_replay=lambda: None)
    assert 0 < judge.noise(0)[""] < 0.05
    assert all(torch.equal(step.state.captured[name], tensor) for name, tensor in before.items())


def test_a_fragile_loss_is_outside_of_all_modules_and_its_line_is_named():
    def fragile(logits, target):
        return F.cross_entropy(logits.half() * 1e6 / 1e6, target)

    island = find_island([make_step(loss=fragile)])
    assert island.modules == ()
    assert "outside of all modules" in island.reason
    assert [Path(file).name for file, _ in island.lines.lines] == ["test_search.py"]


def test_a_fragile_line_of_the_model_itself_is_no_module_either():
    island = find_island([make_step(Net(own=1e6))])
    assert island.modules == ()
    assert "its own forward" in island.reason
    assert len(island.lines.lines) == 1


def test_code_that_raises_in_16_bits_is_a_failing_step():
    class Masked(Net):
        def forward(self, x):
            x = super().forward(x)
            return x.masked_fill(x > 1e3, -1e9)

    island = find_island([make_step(Masked())])
    assert island.modules == ("head",)  # its outputs are FP32 then
    assert "RuntimeError" in island.before.why
    assert len(island.lines.lines) == 1


def test_what_fails_in_fp32_is_not_precision():
    island = find_island([make_step(batch=torch.full((32, 16), math.nan))])
    assert "fails in FP32 too" in island.reason
    assert island.modules == ()


def test_updates_that_round_to_nothing_are_the_optimizers():
    island = find_island([make_step(plan="fp16-true", lr=1e-6, make=torch.optim.SGD)])
    assert not island.needed
    assert "of the weights with a gradient round to nothing" in island.reason
    sound = find_island([make_step(plan="fp16-true", lr=1.0, make=torch.optim.SGD)])
    assert "round to nothing" not in sound.reason


def test_an_update_that_is_not_finite_is_the_optimizers():
    island = find_island([make_step(plan="fp16-true")])  # Adam's eps of 1e-8 is 0 in FP16
    assert not island.needed
    assert "the update is not finite" in island.reason


def test_a_step_whose_weights_are_lost_already_is_left_out():
    lost = Net()
    with torch.no_grad():
        lost.head.weight.fill_(math.nan)
    island = find_island([make_step(Net((1.0, HUGE, 1.0))), make_step(lost)])
    assert len(island.modules) == 1
    assert "was left out" in island.notes[0]
    with pytest.raises(ReplayError, match="Capture steps from before"):
        find_island([make_step(lost)])


def test_without_time_it_says_so():
    island = find_island([make_step(Net((1.0, HUGE, 1.0)))], budget=0.0)
    assert not island.complete
    assert island.modules == ()
    assert "budget" in island.reason


def test_a_budget_that_ends_half_way_gives_the_best_set_so_far(monkeypatch):
    step = make_step(Net((1.0, HUGE, 1.0)))
    monkeypatch.setattr("floatline.diagnosis.islands.search.find_suspects", lambda _: [])
    real, made = IslandJudge.replay, []

    def replay(self, *args, **options):
        made.append(options.get("islands", ()))
        if made.count(()) < 99 and len([m for m in made if m]) > 2:
            self._budget = 0.0
        return real(self, *args, **options)

    monkeypatch.setattr(IslandJudge, "replay", replay)
    island = find_island([step])
    assert not island.complete
    assert island.modules
    assert step.replay(islands=island.modules).finite


def fragile_step():
    """The same step each time: a model has random weights."""
    torch.manual_seed(3)
    return make_step(Net((1.0, HUGE, 1.0)))


def test_a_killed_search_goes_on_where_it_was(tmp_path):
    whole = find_island([fragile_step()], folder=tmp_path)
    file = tmp_path / "search.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2]) + lines[-1][:20])  # a kill cuts a line
    again = find_island([fragile_step()], folder=tmp_path)
    assert again.modules == whole.modules
    assert again.num_replays < whole.num_replays
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_answers_of_another_step_are_not_used(tmp_path):
    find_island([make_step(Net((1.0, HUGE, 1.0)))], folder=tmp_path)
    island = find_island([make_step(Net((HUGE, 1.0, 1.0)))], folder=tmp_path)
    assert covers(("layers.0",), island.modules[0])


def test_the_key_knows_weights_batch_and_settings():
    keys = {key_of(make_step(), {"whole": 0.1}), key_of(make_step(), {"whole": 0.2})}
    keys |= {key_of(make_step(batch=torch.ones(32, 16)), {"whole": 0.1}), key_of(make_step(scale=2.0), {"whole": 0.1})}
    assert len(keys) == 4
    assert key_of(make_step(), {"whole": 0.1}) in keys


def test_all_steps_must_pass():
    torch.manual_seed(0)
    first, second = make_step(Net((HUGE, 1.0, 1.0))), make_step(Net((1.0, 1.0, HUGE)))
    island = find_island([first, second])
    assert len(island.modules) == 2


def test_steps_of_different_models_are_refused():
    with pytest.raises(ReplayError, match="different models"):
        find_island([make_step(), make_step(nn.Linear(16, 4))])
    with pytest.raises(ReplayError, match="no step"):
        find_island([])


def test_the_kept_modules_make_a_plan_that_trains():
    step = make_step(Net((1.0, HUGE, 1.0)))
    island = find_island([step], on_progress=(said := []).append)
    plan = Plan(weights="fp32", compute="fp16", fp32_modules=island.kept)
    assert plan.check_modules(step.model) == list(island.modules)
    assert plan.fp32_modules[0].reason
    assert any("sets tried" in text for text in said)


def test_minimize_gives_a_part_of_which_nothing_can_be_left_out():
    tests = []

    def needs(*wanted):
        return lambda some: tests.append(some) or set(wanted) <= set(some)

    assert minimize(list(range(64)), needs(37)) == [37]
    assert len(tests) < 30
    assert sorted(minimize(list(range(20)), needs(3, 4, 17))) == [3, 4, 17]
    assert minimize([1, 2], needs(1, 2)) == [1, 2]


def test_the_tree_knows_what_lies_in_what():
    tree = ModuleTree({"": 9, "a": 6, "a.b": 4, "a.c": 2, "ab": 3})
    assert tree.children("") == ("a", "ab")
    assert tree.children("a") == ("a.b", "a.c")
    assert tree.normalize(["ab", "a.b", "a"]) == ("a", "ab")
    assert tree.cost(["a.b", "ab"]) == (7, 2)
    assert not covers(("a",), "ab")


def make_workload(boost):
    torch.manual_seed(0)
    net = Net((1.0, boost, 1.0))
    dice = torch.Generator().manual_seed(1)
    inputs = [torch.randn(16, 16, generator=dice) for _ in range(4)]
    batches = [((x,), (x[:, :4].argmax(1),)) for x in inputs]
    return Workload(net, batches, F.cross_entropy, "fp16-mixed", lambda m: torch.optim.AdamW(m.parameters(), 1e-2))


def test_points_are_shares_of_the_way_and_leave_the_workload_as_it_was():
    workload = make_workload(1.0)
    before = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
    steps = capture_points(workload, steps=9)
    assert [step.origin.step for step in steps] == [0, 2, 4, 8]
    assert not torch.equal(steps[0].state.captured["head.weight"], steps[-1].state.captured["head.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in workload.model.state_dict().items())
    assert all(step.replay().finite for step in steps[1:])


def test_points_end_at_the_step_that_fails():
    workload = make_workload(1.0)
    layer = workload.model.layers[1]
    real, calls = layer.forward, []

    def grow(x):
        layer.boost = HUGE if len(calls) % 4 == 3 else 1.0  # the fourth batch
        calls.append(1)
        return real(x)

    layer.forward = grow
    steps = capture_points(workload, steps=12, points=(0.0, 1.0))
    assert [step.origin.step for step in steps] == [0, 3]


def test_points_in_another_plan():
    steps = capture_points(make_workload(1.0), "bf16-mixed", points=(1.0,), steps=2)
    assert [step.plan.name for step in steps] == ["bf16-mixed"]
    with pytest.raises(ReplayError, match="shares from 0 to 1"):
        capture_points(make_workload(1.0), points=(2.0,))


def test_the_cost_of_an_island_is_measured():
    cost = measure_cost(make_step(), ["layers"], rounds=2)
    assert cost.memory_kind == "saved"
    assert cost.memory > cost.memory_without > 0
    assert cost.time_ratio > 0
    assert "1." in str(cost)
    same = measure_cost(make_step(), [], rounds=1)
    assert same.memory == same.memory_without
