"""The mmgcn workload: it learns in every plan, fails as its team saw, and the true causes are named."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.slow import slow

from floatline.diagnosis.target_diagnosis import diagnose
from floatline.errors import TargetError
from floatline.guard.policy import Policy
from floatline.numerics.half_on_cpu import HalfOnCPU
from floatline.plans import Clip, Plan
from floatline.plans.presets import resolve_plan
from floatline.probe.runs.runs import run_target
from floatline.rescuing.rescue import find_plan
from floatline.systems import mmgcn
from floatline.systems.mmgcn.interactions import Interactions
from floatline.systems.mmgcn.losses import LOSSES
from floatline.systems.mmgcn.messages import Neighbours
from floatline.systems.mmgcn.ranking import Ranking
from floatline.systems.mmgcn.tables import load_interactions
from floatline.training.trainer import Trainer
from floatline.workload import load_target

# One layer and two modalities: what takes time on a CPU is the number of operations.
QUICK = {
    "num_users": 400,
    "num_items": 150,
    "num_layers": 1,
    "batch_size": 1024,
    "passes": 4,
    "learning_rate": 0.02,
    "dim_id": 16,
    "dim_latent": 16,
    "modalities": {"visual": 32, "textual": 24},
}
EXACT = resolve_plan("fp16-true").model_copy(update={"update": "exact"})


def measure_popularity(config: mmgcn.Config) -> tuple[float, float]:
    """Recall and NDCG of the list that is the same for all: the most taken items first."""
    data = mmgcn.find_data(config)
    counts = torch.bincount(data.train[1], minlength=data.num_items)[:, None]
    nodes = torch.cat([torch.ones(data.num_users, 1), counts])
    return Ranking(data, top_k=10).measure(SimpleNamespace(represent=lambda: nodes))


@pytest.mark.parametrize(
    "plan", ["fp32", None, "bf16-mixed", EXACT], ids=["fp32", "use_amp", "bf16-mixed", "fp16-true"]
)
def test_it_ranks_twice_as_well_as_popularity_does(plan: Plan | str | None) -> None:
    config = mmgcn.Config(**QUICK)
    result = Trainer(mmgcn.build(config), plan=plan, folder=None, steps=20).run()
    recall, _ = measure_popularity(config)
    assert recall > 0.05
    assert result.metric is not None and result.metric > 2 * recall


def test_before_training_it_ranks_worse_than_popularity() -> None:
    workload = mmgcn.build(mmgcn.Config(**QUICK))
    recall, _ = measure_popularity(mmgcn.Config(**QUICK))
    assert workload.evaluate is not None
    with torch.no_grad():
        assert workload.evaluate(workload.model) < recall


def test_a_seed_changes_weights_and_order_but_not_the_task() -> None:
    config = mmgcn.Config(**QUICK)
    first, second = mmgcn.build(config, seed=0), mmgcn.build(config, seed=1)
    assert not torch.equal(first.model.id_embedding, second.model.id_embedding)
    assert not torch.equal(first.batches[0][0][0], second.batches[0][0][0])
    assert torch.equal(first.model.neighbours.edges, second.model.neighbours.edges)
    assert torch.equal(mmgcn.build(config, seed=1).batches[3][0][2], second.batches[3][0][2])


def test_no_negative_was_taken_in_training() -> None:
    config = mmgcn.Config(**QUICK)
    taken = {(int(u), int(i)) for u, i in mmgcn.find_data(config).train.T}
    users, positives, negatives = mmgcn.build(config).batches[0][0]
    assert all((int(u), int(i)) in taken for u, i in zip(users, positives, strict=True))
    assert not any((int(u), int(i)) in taken for u, i in zip(users, negatives, strict=True))


def run_as_the_team(target: str, steps: int) -> list[float]:
    """The team's trainer: plain AMP, and their check of the loss."""
    losses = run_target(load_target(target), steps=steps).losses
    for step, loss in enumerate(losses):
        if math.isnan(loss):
            raise ValueError(f"Training loss is nan at step {step}")
    return losses


def test_the_broken_variant_ends_as_the_team_saw_it_before_the_first_update() -> None:
    with pytest.raises(ValueError, match="Training loss is nan at step 0"):
        run_as_the_team("mmgcn:broken", 2)


@pytest.mark.parametrize("variant", ["no-eps", "eps"])
def test_the_log_of_zero_is_infinite_and_never_nan(variant: str) -> None:
    assert run_as_the_team(f"mmgcn:{variant}", 6) == [math.inf] * 6


@pytest.mark.parametrize("variant", ["broken", "no-eps", "eps"])
def test_every_variant_of_their_loss_trains_in_fp32(variant: str) -> None:
    result = Trainer(load_target(f"mmgcn:{variant}").build(), plan="fp32", folder=None, steps=12).run(evaluate=False)
    assert result.applied == 12
    assert result.last_loss is not None and result.first_loss is not None
    assert result.last_loss < 0.5 * result.first_loss


def test_two_scores_beyond_fp16_make_nan_and_an_eps_does_not_help() -> None:
    scores = torch.tensor([[70_010.0, 70_000.0]])
    for name in ("log-of-sigmoid", "log-of-sigmoid-eps"):
        with torch.autocast("cpu", dtype=torch.float16):
            assert LOSSES[name](scores).isnan()
        assert float(LOSSES[name](scores)) == pytest.approx(4.54e-5, rel=1e-2)
    with torch.autocast("cpu", dtype=torch.float16):
        assert float(LOSSES["logsigmoid"](scores)) == pytest.approx(4.54e-5, rel=1e-2)


def test_the_run_stops_with_epoch_and_batch() -> None:
    workload = load_target("mmgcn:eps").build()
    result = Trainer(workload, folder=None, steps=40, policy=Policy(most_bad=10)).run()
    assert result.applied == 0
    assert result.stopped is not None and "(epoch 0, batch " in result.stopped


def test_logsigmoid_trains_where_the_teams_loss_does_not() -> None:
    workload = load_target("mmgcn:eps", pairs=["loss=logsigmoid"]).build()
    result = Trainer(workload, folder=None, steps=15).run(evaluate=False)
    assert result.last_loss is not None and result.first_loss is not None
    assert result.applied >= 12 and result.last_loss < 0.5 * result.first_loss


@slow
@pytest.mark.parametrize(
    ("variant", "cause", "code"),
    [
        ("broken", "activation-overflow", "torch.matmul(scores"),
        pytest.param("no-eps", "rounded-onto-singularity", "torch.log(torch.sigmoid(difference)))", marks=slow),
        pytest.param("eps", "eps-underflow", "1e-8", marks=slow),
    ],
)
def test_the_cause_of_each_variant_is_named_with_its_line(variant: str, cause: str, code: str) -> None:
    result = diagnose(f"mmgcn:{variant}", steps=4)
    assert result.verdict == "precision"
    assert result.primary is not None and result.primary.cause.id == cause
    source = Path(result.primary.file).read_text(encoding="utf-8").splitlines()
    assert Path(result.primary.file).name == "losses.py" and code in source[result.primary.line - 1]


@slow
def test_a_plan_that_trains_is_found_for_the_lost_eps() -> None:
    rescued = find_plan("mmgcn:eps", steps=6)
    primary = rescued.diagnosis.primary
    assert primary is not None and primary.cause.id == "eps-underflow"
    assert rescued.plan is not None and rescued.plan.compute == "fp16"


@slow
def test_bare_tensors_are_named_and_not_blamed_on_precision() -> None:
    result = diagnose("mmgcn:unregistered", steps=6)
    assert result.verdict == "not-precision"
    assert result.primary is not None and result.primary.cause.id == "params-not-trained"
    assert "id_embedding" in result.primary.seen and "preference" in result.primary.seen


def test_bare_tensors_are_no_parameters() -> None:
    names = [name for name, _ in load_target("mmgcn:unregistered").build().model.named_parameters()]
    assert not any("embedding" in name or "preference" in name for name in names)
    whole = [name for name, _ in load_target("mmgcn:eps").build().model.named_parameters()]
    assert "id_embedding" in whole and "gcns.visual.preference" in whole


def hub(aggregation: str, num_leaves: int) -> Neighbours:
    """A graph of one node and its many neighbours."""
    leaves, centre = torch.arange(1, num_leaves + 1), torch.zeros(num_leaves, dtype=torch.long)
    edges = torch.stack([torch.cat([leaves, centre]), torch.cat([centre, leaves])])
    return Neighbours(edges, num_leaves + 1, aggregation)


def test_a_scattered_sum_of_many_messages_stands_still_in_fp16() -> None:
    ones = torch.ones(10_001, 2).half()
    with HalfOnCPU():
        mean = float(hub("scatter", 10_000)(ones)[0, 0])
    assert mean == pytest.approx(0.2048, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_grouped_sum_of_many_messages_does_not(dtype: torch.dtype) -> None:
    ones = torch.ones(10_001, 2, dtype=dtype)
    with HalfOnCPU():
        assert float(hub("grouped", 10_000)(ones)[0, 0]) == pytest.approx(1.0, rel=4e-3)


def test_both_sums_have_the_same_values_and_gradients_in_fp32() -> None:
    found = []
    for aggregation in ("grouped", "scatter"):
        workload = mmgcn.build(mmgcn.Config(**QUICK, aggregation=aggregation))
        loss = workload.compute_loss(*workload.batches[0])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in workload.model.parameters())])
    for grouped, scattered in zip(*found, strict=True):
        torch.testing.assert_close(grouped, scattered, rtol=1e-4, atol=1e-7)


@slow
def test_a_sum_that_stands_still_is_named(tmp_path: Path) -> None:
    target = tmp_path / "crowd.py"
    target.write_text(CROWD, encoding="utf-8")
    result = diagnose(str(target), steps=4)
    assert result.primary is not None and result.primary.cause.id == "accumulator-stagnation"
    assert result.primary.op == "aten.scatter_add_" and "off by" in result.primary.seen
    assert diagnose(f"{target}:few", steps=4).primary is None


# One hub: all messages go to a single node.
CROWD = """
import torch
from torch import nn


class Crowd(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.lin = nn.Linear(1, 1)
        self.register_buffer("index", torch.zeros(count, dtype=torch.long))

    def forward(self, x):
        h = self.lin(x)
        total = h.new_zeros(1, 1).scatter_add_(0, self.index[:, None], h)
        return total.float() / len(h)


def make(count):
    torch.manual_seed(0)
    model = Crowd(count)
    nn.init.constant_(model.lin.weight, 1.0)
    batches = [((torch.rand(count, 1) * 0.02 + 1.0,), (torch.full((1, 1), 1.5),)) for _ in range(2)]
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.01)
    return model, batches, nn.functional.mse_loss, "fp16-mixed", sgd


def build():
    return make(12_000)


def few():
    return make(100)
"""


class Fixed:
    """A model that gives scores by hand: users are the rows of an identity."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores

    def represent(self) -> torch.Tensor:
        return torch.cat([torch.eye(len(self.scores)), self.scores.T])


def test_recall_and_ndcg_are_those_of_the_textbook() -> None:
    train = torch.tensor([[0, 1], [0, 3]])
    held_out = torch.tensor([[0, 0, 1], [1, 3, 0]])
    data = Interactions(2, 4, train, held_out, {})
    # User 0: item 0 is masked, so the list is 2, 1; of {1, 3} it has one, in place 2.
    # User 1: item 3 is masked, so the list is 0, 1; it has {0}, in place 1.
    model = Fixed(torch.tensor([[9.0, 2.0, 3.0, 1.0], [5.0, 4.0, 0.0, 9.0]]))
    recall, ndcg = Ranking(data, top_k=2).measure(model)
    assert recall == pytest.approx((0.5 + 1.0) / 2)
    best = 1 + 1 / np.log2(3)
    assert ndcg == pytest.approx(((1 / np.log2(3)) / best + 1.0) / 2, rel=1e-6)


def test_the_config_becomes_the_plan() -> None:
    config = mmgcn.Config(clip_grad_norm={"max_norm": 1.5, "norm_type": "inf"}, growth_interval=5000)
    plan = mmgcn.build(config.model_copy(update=QUICK)).precision
    assert isinstance(plan, Plan) and plan.clip == Clip(max_norm=1.5, norm_type=float("inf"))
    assert plan.compute == "fp16" and plan.scaling is not None and plan.scaling.growth_interval == 5000
    off = mmgcn.make_plan(mmgcn.Config(use_amp=False, clip_grad_norm=None))
    assert off.compute == "fp32" and off.scaling is None
    assert off.clip is not None and off.clip.max_norm is not None and off.clip.max_norm > 1e9


@pytest.mark.parametrize(
    "setting", ["learning_rat=0.1", "learning_rate=fast", "clip_grad_norm.max_norm=-1", "loss=hinge", "dim_latent=0"]
)
def test_a_wrong_setting_is_one_line(setting: str) -> None:
    with pytest.raises(TargetError) as error:
        load_target("mmgcn", pairs=[setting])
    assert "\n" not in str(error.value) and setting.partition("=")[0].split(".")[0] in str(error.value)


def test_without_a_latent_width_features_are_taken_as_they_are() -> None:
    model = mmgcn.build(mmgcn.Config(**{**QUICK, "dim_latent": None})).model
    assert model.gcns["visual"].preference.shape == (400, 32)
    assert model.gcns["textual"].preference.shape == (400, 24)


@pytest.fixture
def features(tmp_path: Path) -> dict[str, str]:
    path = tmp_path / "visual.npy"
    np.save(path, np.arange(12, dtype=np.float64).reshape(4, 3))
    return {"visual": str(path)}


def test_a_table_with_a_split_is_read(tmp_path: Path, features: dict[str, str]) -> None:
    table = tmp_path / "baby.inter"
    table.write_text("userID\titemID\trating\tx_label\n0\t1\t5.0\t0\n0\t2\t4.0\t2\n1\t3\t1.0\t0\n1\t0\t2.0\t1\n")
    data = load_interactions(str(table), features, holdout=0.5, seed=0)
    assert (data.num_users, data.num_items) == (2, 4)
    assert data.train.tolist() == [[0, 1], [1, 3]] and data.held_out.tolist() == [[0], [2]]
    assert data.features["visual"].dtype == torch.float32


@pytest.mark.parametrize(("name", "mark"), [("clean.csv", ""), ("baby.inter", ""), ("taken.tsv", "\ufeff")])
@pytest.mark.parametrize("separator", ["\t", ","])
def test_the_first_line_says_what_stands_between_columns(
    tmp_path: Path, features: dict[str, str], name: str, mark: str, separator: str
) -> None:
    rows = [("userID", "itemID", "x_label"), ("0", "1", "0"), ("0", "2", "2"), ("1", "3", "0")]
    (tmp_path / name).write_text(mark + "".join(f"{separator.join(row)}\n" for row in rows), encoding="utf-8")
    data = load_interactions(str(tmp_path / name), features, holdout=0.5, seed=0)
    assert data.train.tolist() == [[0, 1], [1, 3]] and data.held_out.tolist() == [[0], [2]]


@pytest.mark.parametrize("head", ["", "user_id:token,item_id:token\n"])
def test_a_table_without_a_split_is_split_by_chance(tmp_path: Path, features: dict[str, str], head: str) -> None:
    table = tmp_path / "taken.csv"
    table.write_text(head + "".join(f"{u},{i}\n" for u in range(20) for i in range(4)))
    data = load_interactions(str(table), features, holdout=0.3, seed=0)
    assert data.train.shape[1] + data.held_out.shape[1] == 80
    assert 10 <= data.held_out.shape[1] <= 40
    assert set(data.train[0].tolist()) == set(range(20))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("user,item\n", "no interactions"),
        ("user,thing\n0,1\n", "no item column"),
        ("user,item\n0,1\n0,one\n", "line 3: 'one'"),
        ("user,item\n0\n", "line 2: ''"),
        ("user,item\n-1,2\n", "line 2: '-1'"),
        ("user,item\n0,4\n", "item 4, but features have 4 rows"),
        ("user,item,x_label\n0,1,0\n", "for test"),
    ],
)
def test_a_bad_table_is_one_line(tmp_path: Path, features: dict[str, str], text: str, said: str) -> None:
    table = tmp_path / "bad.csv"
    table.write_text(text)
    with pytest.raises(TargetError) as error:
        load_interactions(str(table), features, holdout=0.3, seed=0)
    assert said in str(error.value) and "bad.csv" in str(error.value) and "\n" not in str(error.value)


def save_pickled(path: Path) -> None:
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)


def save_nan(path: Path) -> None:
    np.save(path, np.full((4, 2), np.nan))


def save_flat(path: Path) -> None:
    np.save(path, np.zeros(4))


def save_text(path: Path) -> None:
    path.write_text("not numbers")


@pytest.mark.parametrize("save", [save_pickled, save_nan, save_flat, save_text, lambda path: None])
def test_bad_features_are_one_line_and_nothing_is_unpickled(tmp_path: Path, save) -> None:
    table, path = tmp_path / "taken.csv", tmp_path / "bad.npy"
    table.write_text("user,item\n0,1\n0,2\n")
    save(path)
    with pytest.raises(TargetError) as error:
        load_interactions(str(table), {"visual": str(path)}, holdout=0.5, seed=0)
    assert "bad.npy" in str(error.value) and "\n" not in str(error.value)


def test_features_of_different_length_are_refused(tmp_path: Path, features: dict[str, str]) -> None:
    table, path = tmp_path / "taken.csv", tmp_path / "short.npy"
    table.write_text("user,item\n0,1\n")
    np.save(path, np.zeros((3, 2)))
    with pytest.raises(TargetError, match="differ in their rows"):
        load_interactions(str(table), {**features, "textual": str(path)}, holdout=0.5, seed=0)


def test_files_train_too(tmp_path: Path) -> None:
    planted = mmgcn.find_data(mmgcn.Config(**QUICK))
    pairs = torch.cat([planted.train, planted.held_out], dim=1).T
    table = tmp_path / "taken.tsv"
    table.write_text("user\titem\n" + "".join(f"{u}\t{i}\n" for u, i in pairs.tolist()))
    np.save(tmp_path / "visual.npy", planted.features["visual"].numpy())
    config = tmp_path / "overall.yaml"
    config.write_text(
        f"use_amp: False\nlearning_rate: 0.01\nclip_grad_norm: {{'max_norm': 5.0, 'norm_type': 2}}\nnum_layers: 1\n"
        f"passes: 1\ninteraction_file: {table}\nfeature_files: {{visual: {tmp_path / 'visual.npy'}}}\n"
    )
    workload = load_target("mmgcn", config=config).build()
    result = Trainer(workload, folder=None, steps=15).run()
    assert result.metric is not None and result.metric > 0.15
