"""mmgcn on a user's own data: MMRec's overall.yaml and folders, MMGCN's own files, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from floatline.errors import TargetError
from floatline.systems import mmgcn
from floatline.systems.mmgcn.interactions import Interactions
from floatline.training.trainer import Trainer
from floatline.workload import load_target

QUICK = {
    "num_users": 120,
    "num_items": 60,
    "interactions": 12,
    "modalities": {"visual": 16, "textual": 12, "acoustic": 8},
}

# The keys that overall.yaml has in MMRec, those that a team added to it, and values as they stand there.
OVERALL = """
gpu_id: 0
use_gpu: True
seed: [999]
use_amp: True
keep_features_on_cpu: True
use_torch_compile: True
clip_grad_norm: {'max_norm': 5.0, 'norm_type': 2}
data_path: DATA
inter_splitting_label: 'x_label'
filter_out_cod_start_users: True
is_multimodal_model: True
checkpoint_dir: 'saved'
save_recommended_topk: True
recommend_topk: 'recommend_topk/'
embedding_size: 24
weight_decay: 0.0
req_training: True
epochs: 200
stopping_step: 20
train_batch_size: 256
learner: adam
learning_rate: 0.01
learning_rate_scheduler: [1.0, 50]
eval_step: 1
training_neg_sample_num: 1
use_neg_sampling: True
use_full_sampling: False
NEG_PREFIX: neg__
USER_ID_FIELD: user_id:token
ITEM_ID_FIELD: item_id:token
TIME_FIELD: timestamp:float
field_separator: "\\t"
metrics: ["Recall", "NDCG", "Precision", "MAP"]
topk: [5, 10, 20, 50]
valid_metric: Recall@20
eval_batch_size: 4096
use_raw_features: False
max_txt_len: 32
layer_norm_eps: 1e-12
end2end: False
hyper_parameters: ["seed"]
n_layers: 1
"""


@pytest.fixture(scope="module")
def planted() -> Interactions:
    return mmgcn.find_data(mmgcn.Config(**QUICK))


def save_mmrec(folder: Path, data: Interactions) -> None:
    """MMRec's folder: a table with ratings, times and a split, and features of pictures and texts."""
    folder.mkdir(parents=True)
    rows = ["userID\titemID\trating\ttimestamp\tx_label"]
    rows += [f"{u}\t{i}\t5.0\t1.39e9\t0" for u, i in data.train.T.tolist()]
    rows += [f"{u}\t{i}\t4.0\t1.40e9\t{1 + n % 2}" for n, (u, i) in enumerate(data.held_out.T.tolist())]
    (folder / f"{folder.name}.inter").write_text("\n".join(rows) + "\n")
    np.save(folder / "image_feat.npy", data.features["visual"].double().numpy())
    np.save(folder / "text_feat.npy", data.features["textual"].numpy())


def save_mmgcn(folder: Path, data: Interactions) -> None:
    """MMGCN's own folder: pairs whose items are numbered after the users, and three kinds of features."""
    folder.mkdir(parents=True)
    for name, pairs in (("train", data.train), ("test", data.held_out)):
        np.save(folder / f"{name}.npy", pairs.T.numpy() + np.array([0, data.num_users]))
    for name, modality in (("v", "visual"), ("a", "acoustic"), ("t", "textual")):
        np.save(folder / f"{name}_feat.npy", data.features[modality].numpy())
    # What the original has beside them is a pickle, and is not needed.
    np.save(folder / "user_item_dict.npy", np.array({0: [1]}, dtype=object), allow_pickle=True)


def write_overall(folder: Path, text: str = OVERALL) -> Path:
    path = folder / "overall.yaml"
    path.write_text(text.replace("DATA", str(folder / "data")))
    return path


def test_a_whole_overall_yaml_trains_on_a_folder_of_mmrec(tmp_path: Path, planted: Interactions, capsys) -> None:
    save_mmrec(tmp_path / "data" / "baby", planted)
    workload = load_target("mmgcn", config=write_overall(tmp_path), pairs=["dataset=baby"]).build()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "overall.yaml: ignored" in said
    named = said.partition("setting: ")[2].strip().split(", ")
    assert {"gpu_id", "epochs", "stopping_step", "keep_features_on_cpu", "use_torch_compile", "metrics"} <= set(named)
    used = {
        "use_amp",
        "clip_grad_norm",
        "learning_rate",
        "train_batch_size",
        "embedding_size",
        "valid_metric",
        "data_path",
    }
    assert not used & set(named)
    settings = workload.settings
    assert (settings["batch_size"], settings["dim_id"], settings["top_k"], settings["num_layers"]) == (256, 24, 20, 1)
    assert workload.metric == "recall@20" and workload.precision.compute == "fp16"
    assert list(workload.model.gcns) == ["visual", "textual"]
    assert torch.equal(workload.model.gcns["visual"].features, planted.features["visual"])
    result = Trainer(workload, folder=None, steps=8).run()
    assert result.applied >= 6 and result.metric is not None and result.metric > 0


def test_the_data_path_of_mmrec_is_right_from_its_src_and_from_nowhere_else(
    tmp_path: Path, planted: Interactions, monkeypatch
) -> None:
    save_mmrec(tmp_path / "data" / "baby", planted)
    (tmp_path / "src" / "configs").mkdir(parents=True)
    (tmp_path / "src" / "configs" / "overall.yaml").write_text(OVERALL.replace("DATA", "'../data/'"))
    monkeypatch.chdir(tmp_path / "src")
    load_target("mmgcn", config=Path("configs/overall.yaml"), pairs=["dataset=baby"]).build()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TargetError, match=r"dataset '\.\./data/baby' is no folder"):
        load_target("mmgcn", config=Path("src/configs/overall.yaml"), pairs=["dataset=baby"]).build()


def test_a_file_of_mmgcns_own_keys_is_taken_as_it_is(tmp_path: Path, capsys) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("learning_rate: 0.01\nsteps_of_mine: 3\n")
    with pytest.raises(TargetError, match="'steps_of_mine' is not known"):
        load_target("mmgcn", config=path)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("learning_rate: 0.01", "learning_rte: 0.01", "'learning_rte' is not known. Did you mean 'learning_rate'"),
        ("learning_rate: 0.01", "learning_rate: [0.01, 0.001]", "which MMRec searches through"),
        ("learner: adam", "learner: sgd", "learner is 'sgd'"),
        ("learner: adam", "reg_weight: 0.1", "reg_weight is 0.1"),
        ("learner: adam", "reg_weight: [0, 0.1]", "reg_weight is [0, 0.1]"),
        ("scheduler: [1.0, 50]", "scheduler: [0.96, 50]", "the first of learning_rate_scheduler is 0.96"),
        ("sample_num: 1", "sample_num: 4", "training_neg_sample_num is 4, and mmgcn has 1 alone"),
        ("valid_metric: Recall@20", "valid_metric: Recall", "Write such as Recall@20"),
        ("use_amp: True", "use_amp: perhaps", "use_amp"),
    ],
)
def test_what_would_change_the_training_is_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in OVERALL
    with pytest.raises(TargetError) as error:
        load_target("mmgcn", config=write_overall(tmp_path, OVERALL.replace(old, new)))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_key_of_a_dataset_file_names_the_files_in_the_folder(tmp_path: Path, planted: Interactions) -> None:
    save_mmrec(tmp_path / "data" / "baby", planted)
    (tmp_path / "data" / "baby" / "baby.inter").rename(tmp_path / "data" / "baby" / "taken.inter")
    text = OVERALL + "dataset: baby\ninter_file_name: taken.inter\nvision_feature_file: image_feat.npy\n"
    workload = load_target("mmgcn", config=write_overall(tmp_path, text)).build()
    assert list(workload.model.gcns) == ["visual"]


def test_mmgcns_own_files_are_read_with_items_after_users(tmp_path: Path, planted: Interactions) -> None:
    save_mmgcn(tmp_path / "movielens", planted)
    data = mmgcn.find_data(mmgcn.Config(dataset=str(tmp_path / "movielens")))
    assert (data.num_users, data.num_items) == (planted.num_users, planted.num_items)
    assert sorted(data.train.T.tolist()) == sorted(planted.train.T.tolist())
    assert sorted(data.held_out.T.tolist()) == sorted(planted.held_out.T.tolist())
    assert set(data.features) == {"visual", "acoustic", "textual"}
    assert torch.equal(data.features["acoustic"], planted.features["acoustic"])
    trainer = Trainer(
        load_target("mmgcn", pairs=[f"dataset={tmp_path}/movielens", "num_layers=1"]).build(), folder=None, steps=4
    )
    assert trainer.run(evaluate=False).applied == 4


def test_items_that_begin_at_0_are_known_too_and_without_a_test_file_a_share_is_held_out(
    tmp_path: Path, planted
) -> None:
    save_mmgcn(tmp_path / "d", planted)
    (tmp_path / "d" / "test.npy").unlink()
    np.save(tmp_path / "d" / "train.npy", planted.train.T.numpy().astype(np.int32))
    data = mmgcn.find_data(mmgcn.Config(dataset=str(tmp_path / "d"), holdout=0.3))
    assert data.train.shape[1] + data.held_out.shape[1] == planted.train.shape[1]
    assert data.held_out.shape[1] > 0.2 * planted.train.shape[1]


def test_users_at_the_end_without_a_pair_need_the_first_items_number(tmp_path: Path, planted: Interactions) -> None:
    folder = tmp_path / "d"
    save_mmgcn(folder, planted)
    for name in ("train", "test"):
        pairs = np.load(folder / f"{name}.npy")
        # Five users more, who took nothing; and nobody took the last items.
        pairs = pairs[pairs[:, 1] < planted.num_users + planted.num_items - 8] + [0, 5]
        np.save(folder / f"{name}.npy", pairs)
    told = mmgcn.find_data(mmgcn.Config(dataset=str(folder), first_item=planted.num_users + 5))
    assert told.num_users == planted.num_users + 5 and int(told.train[1].min()) == int(planted.train[1].min())
    guessed = mmgcn.find_data(mmgcn.Config(dataset=str(folder)))
    assert not torch.equal(guessed.train, told.train)
    with pytest.raises(TargetError, match="the first item cannot be 3"):
        mmgcn.find_data(mmgcn.Config(dataset=str(folder), first_item=3))


def test_users_without_training_are_not_ranked(tmp_path: Path, planted: Interactions) -> None:
    save_mmrec(tmp_path / "baby", planted)
    with (tmp_path / "baby" / "baby.inter").open("a") as file:
        file.write(f"{planted.num_users}\t3\t1.0\t1\t2\n")
    data = mmgcn.find_data(mmgcn.Config(dataset=str(tmp_path / "baby")))
    assert data.num_users == planted.num_users + 1
    assert planted.num_users not in data.held_out[0] and data.held_out.shape[1] > 0


def save_pickled(folder: Path, name: str) -> None:
    np.save(folder / name, np.array([[0, 1], [0, 1, 2]], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: save_pickled(f, "train.npy"), "np.save('train.npy', np.load('train.npy', allow_pickle=True)"),
        (
            lambda f: (f / "test.npy").rename(f / "x") and save_pickled(f, "test_full.npy"),
            "np.save('test.npy', [(r[0], i)",
        ),
        (lambda f: save_pickled(f, "v_feat.npy"), "v_feat.npy' hold Python objects"),
        (lambda f: np.save(f / "train.npy", np.zeros((4, 3), int)), "rows (user, item)"),
        (lambda f: np.save(f / "train.npy", np.zeros((4, 2))), "of float64"),
        (lambda f: np.save(f / "train.npy", [[0, 10_000], [1, 3]]), "cannot be"),
        (lambda f: (f / "train.npy").write_bytes(b"nothing"), "train.npy' are something else"),
        (lambda f: (f / "train.npy").unlink(), "no .inter file and no train.npy"),
        (lambda f: [path.unlink() for path in f.glob("*_feat.npy")], "has no features"),
        (lambda f: [path.unlink() for path in f.iterdir()] and f.rmdir(), "is no folder"),
    ],
)
def test_a_bad_folder_is_one_line_with_its_path(tmp_path: Path, planted: Interactions, damage, said: str) -> None:
    save_mmgcn(tmp_path / "data", planted)
    damage(tmp_path / "data")
    with pytest.raises(TargetError) as error:
        mmgcn.find_data(mmgcn.Config(dataset=str(tmp_path / "data")))
    assert said in str(error.value) and str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_the_line_that_converts_a_pickle_makes_a_file_that_is_read(
    tmp_path: Path, planted: Interactions, monkeypatch
) -> None:
    tmp_path /= "movielens"
    save_mmgcn(tmp_path, planted)
    rows = [[0, 3 + planted.num_users], [1, 4 + planted.num_users, 5 + planted.num_users]]
    ragged = np.empty(2, dtype=object)
    ragged[:] = rows
    (tmp_path / "test.npy").unlink()
    np.save(tmp_path / "test_full.npy", ragged, allow_pickle=True)
    config = mmgcn.Config(dataset=str(tmp_path))
    with pytest.raises(TargetError) as error:
        mmgcn.find_data(config)
    monkeypatch.chdir(tmp_path)
    exec(str(error.value).partition('python -c "')[2].partition('"')[0])
    assert np.load("test.npy").tolist() == [[0, 3 + planted.num_users], *[[1, n + planted.num_users] for n in (4, 5)]]
    # What is in both is training.
    assert set(map(tuple, mmgcn.find_data(config).held_out.T.tolist())) <= {(0, 3), (1, 4), (1, 5)}


def test_the_yaml_above_is_read_as_mmrec_reads_it() -> None:
    assert yaml.safe_load(OVERALL)["field_separator"] == "\t"
