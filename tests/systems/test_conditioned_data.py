"""conditioned on a user's own tensors: .npz and .safetensors, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from floatline.errors import TargetError
from floatline.systems import conditioned
from floatline.systems.conditioned.data import IGNORED
from floatline.training.trainer import Trainer
from floatline.workload import load_target


def make_tensors(num: int = 96) -> dict[str, torch.Tensor]:
    """Tokens that count up by the category, mostly; the last rows are shorter."""
    generator = torch.Generator().manual_seed(0)
    categories = torch.randint(1, 3, (num,), generator=generator)
    tokens = (torch.arange(9) * categories[:, None] + torch.randint(5, (num, 1), generator=generator)) % 5
    tokens[-20:, 6:] = -1
    return {"tokens": tokens, "categories": categories, "accuracies": torch.ones(num)}


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


@pytest.mark.parametrize("name", ["own.npz", "own.safetensors"])
def test_a_file_of_tensors_trains_with_its_own_sizes(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name, make_tensors())
    pairs = [f"data_file={path}", "held_out=16", "batch_size=16", "layers=1", "vocabulary=99"]
    workload = load_target("conditioned", pairs=pairs).build()
    assert (workload.model.vocabulary, workload.model.length) == (5, 8) and len(workload.batches) == 5
    (tokens, accuracies, categories), (targets,) = workload.batches[0]
    assert tokens.shape == (16, 8) and accuracies.shape == (16, 1) and int(categories.max()) == 2
    told = targets != IGNORED
    assert torch.equal(told[:, :-1] & (tokens[:, 1:] < 5), told[:, :-1])
    assert torch.equal(targets[:, :-1][told[:, :-1]], tokens[:, 1:][told[:, :-1]])
    result = Trainer(workload, folder=None, steps=30).run()
    assert result.metric is not None and result.first_loss is not None and result.metric < 0.5 * result.first_loss


def test_held_out_rows_are_not_trained_on_and_the_same_for_every_seed(tmp_path: Path) -> None:
    tensors = make_tensors() | {"accuracies": torch.linspace(0, 1, 96)}  # a number for each row
    config = conditioned.Config(data_file=str(save(tmp_path / "own.npz", tensors)), held_out=16)
    _, train, held_out = conditioned.find_data(config)
    assert (len(train), len(held_out)) == (80, 16)
    assert not set(train.accuracies.flatten().tolist()) & set(held_out.accuracies.flatten().tolist())
    _, _, again = conditioned.find_data(config)
    assert torch.equal(again.accuracies, held_out.accuracies)


BAD = [
    ({"tokens": torch.zeros(96, 9)}, "whole numbers"),
    ({"tokens": torch.zeros(96, dtype=torch.long)}, "whole numbers"),
    ({"categories": torch.zeros(4, dtype=torch.long)}, "They must be as many"),
    ({"categories": torch.full((96,), -2)}, "has category -2"),
    ({"accuracies": torch.full((96,), 1.5)}, "has accuracy 1.5"),
    ({"accuracies": torch.full((96,), float("nan"))}, "has accuracy nan"),
    ({"tokens": torch.tensor([[1, -1, 2]]).repeat(96, 1)}, "row 0: a token follows padding"),
]


@pytest.mark.parametrize(("change", "said"), BAD)
@pytest.mark.parametrize("name", ["bad.npz", "bad.safetensors"])
def test_bad_tensors_are_one_line(tmp_path: Path, name: str, change: dict, said: str) -> None:
    path = save(tmp_path / name, make_tensors() | change)
    with pytest.raises(TargetError) as error:
        conditioned.build(conditioned.Config(data_file=str(path), held_out=8))
    assert said in str(error.value) and name in str(error.value) and "\n" not in str(error.value)


def write_pickled(path: Path) -> None:
    np.savez(path, tokens=np.array([{}], dtype=object), categories=[0], accuracies=[1.0])


@pytest.mark.parametrize(
    ("name", "write", "said"),
    [
        ("a.npz", lambda p: None, "No such file"),
        ("a.safetensors", lambda p: None, "cannot be read"),
        ("a.npz", lambda p: p.write_bytes(b"nothing"), "no plain tensors"),
        ("a.safetensors", lambda p: p.write_bytes(b"nothing"), "no plain tensors"),
        ("a.npz", write_pickled, "no plain tensors"),
        ("a.npz", lambda p: np.savez(p, tokens=np.zeros((3, 3), int)), "has no 'categories'"),
        ("a.npz", lambda p: save(p, make_tensors(6)), "held_out is 8"),
    ],
)
def test_bad_files_are_one_line_and_nothing_is_unpickled(tmp_path: Path, name: str, write, said: str) -> None:
    write(tmp_path / name)
    with pytest.raises(TargetError) as error:
        conditioned.build(conditioned.Config(data_file=str(tmp_path / name), held_out=8))
    assert said in str(error.value) and name in str(error.value) and "\n" not in str(error.value)
